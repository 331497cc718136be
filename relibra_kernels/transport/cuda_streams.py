"""Streams, events and memory of one GPU as the CUDA engine of replica synchronisation needs them.

Stream contract: work for the stream `COMPUTE` goes to the stream that is current when it is given;
the others come from PyTorch's pool, at high priority. Nothing but `zeros`, at set-up, waits for the
GPU on the host, and no tensor is tied to a stream: who hands memory to a stream keeps it until an
event after its use has passed.

A watchdog asks for events and copies words on a thread of its own while a runtime is open. A CUDA
graph that other code captures in that time needs ``capture_error_mode="thread_local"``.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE

if TYPE_CHECKING:
    from collections.abc import Iterator

SIDE = "side"  # small copies and words that may not wait behind anything
_HIGH_PRIORITY = -1


class DeviceStreams(Protocol):
    """Streams by name: `COMPUTE`, `PUSH`, `REDUCE` and `SIDE`.

    Attributes:
        device: they run on.
    """

    device: torch.device

    def current(self) -> contextlib.AbstractContextManager[object]:
        """The device is that of the calling thread within the block."""
        ...

    def handle(self, stream: str) -> int:
        """For calls of the C ABI."""
        ...

    def record(self, stream: str, event: Any = None) -> Any:
        """An event after all that the stream was given; ``event`` is used again."""
        ...

    def wait(self, stream: str, event: Any) -> None:
        """The stream goes on after the event."""
        ...

    def clock(self, stream: str) -> Any:
        """A point in time of the stream."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Zeroed uint8 memory of the host that the device can reach."""
        ...

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Zeroed uint8 memory of the device."""
        ...

    def copy(self, stream: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between pinned memory and the device, in the order of the stream."""
        ...


class TorchStreams:
    """`DeviceStreams` of PyTorch.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make: Any = torch.cuda.Stream
        names = (PUSH, REDUCE, SIDE)
        self._streams: dict[str, torch.cuda.Stream] = {
            name: make(device, priority=_HIGH_PRIORITY) for name in names
        }

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See `DeviceStreams`."""
        with torch.cuda.device(self.device):
            yield

    def handle(self, stream: str) -> int:
        """See `DeviceStreams`."""
        return int(self._stream(stream).cuda_stream)

    def record(self, stream: str, event: Any = None) -> torch.cuda.Event:
        """See `DeviceStreams`."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(stream))
        return event  # type: ignore[no-any-return]

    def wait(self, stream: str, event: torch.cuda.Event) -> None:
        """See `DeviceStreams`."""
        self._stream(stream).wait_event(event)

    def clock(self, stream: str) -> torch.cuda.Event:
        """See `DeviceStreams`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return self.record(stream, event)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `DeviceStreams`."""
        with torch.inference_mode(False):  # every mode writes there
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """See `DeviceStreams`; zeroed when this returns."""
        with torch.inference_mode(False):
            made = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return made

    def copy(self, stream: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceStreams`."""
        with torch.cuda.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name == COMPUTE:
            return torch.cuda.current_stream(self.device)
        if name not in self._streams:
            known = [COMPUTE, *self._streams]
            raise ValueError(f"stream: need one of {known}, got {name!r}")
        return self._streams[name]
