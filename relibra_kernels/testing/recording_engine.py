"""An engine of replica synchronisation that writes its calls down instead of running them.

With it the product's own protocol gives `happens_before` its log: addresses become spans, signal
words become publications and waits. All ranks of a domain live in one process and share the log;
nothing blocks, so they can be driven one after the other.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from relibra_kernels.testing.recording_streams import RecordingStreams, memory
from relibra_kernels.transport.sync_engine import SyncEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from relibra_kernels.testing.recording_streams import Entry
    from relibra_kernels.transport.sync_engine import PendingWait
    from relibra_kernels.transport.sync_types import ErrorCode, SyncOp

_HOME_BYTES, _GRAD_BYTES = (4, 4, 8), (4, 2, 8)  # of an element, by `sync_types.ReduceKind`


class RecordingEngine(SyncEngine):
    """The calls of one rank; see `relibra_kernels.transport.sync_engine.SyncEngine`.

    Args:
        log: shared by all ranks.
        rank: in the domain.

    Attributes:
        streams: for work that is not the engine's, such as grouped GEMMs on stream ``compute``.
    """

    def __init__(self, log: list[Entry], rank: int) -> None:
        self.streams = RecordingStreams(log, rank)
        self._keep: list[Any] = []  # addresses in the log stay those of one tensor each

    def wait(self, stream: str, items: np.ndarray, use: int, op: SyncOp) -> None:
        """Waits for all words."""
        for item in items:
            self.streams.wait_word(stream, int(item["word"]), int(item["at_least"]))

    def push(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """Copies, each followed by its word."""
        self._keep.append(keep)
        for item in items:
            source, target = (memory(int(item[n]), int(item["bytes"])) for n in ("src", "dst"))
            self.streams.submit(stream, "push", reads=[source], writes=[target])
            if item["full"]:
                self.streams.publish(stream, int(item["full"]), int(item["word"]))

    def publish(self, stream: str, items: np.ndarray) -> None:
        """Words."""
        for item in items:
            self.streams.publish(stream, int(item["word"]), int(item["value"]))

    def reduce(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """Sums: one operation a home slot and field."""
        self._keep.append(keep)
        for item in items:
            kind, count = int(item["kind"]), int(item["count"])
            replicas = int(item["num_replicas"])
            grads = (ctypes.c_uint64 * replicas).from_address(int(item["grads"]))
            self.streams.submit(
                stream,
                "home_reduce",
                reads=[memory(address, count * _GRAD_BYTES[kind]) for address in grads],
                writes=[memory(int(item["home"]), count * _HOME_BYTES[kind])],
            )

    def record(self, stream: str) -> int:
        """An event."""
        return self.streams.record(stream)

    def wait_event(self, stream: str, event: int | None) -> None:
        """The stream goes on after the event."""
        self.streams.wait(stream, event)

    def failure(self) -> None:
        """Nothing runs, so nothing fails."""
        return

    def report(self, code: ErrorCode, op: SyncOp, use: int, peer: int) -> None:
        """An error of the caller.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"recording: use {use} reported {code!r} in {op!r} of peer {peer}")

    def pending(self) -> list[PendingWait]:
        """None: nothing runs."""
        return []

    def load_words(self, addresses: Sequence[int]) -> list[int]:
        """Words, none of which was ever written."""
        return [0] * len(addresses)

    def close(self) -> None:
        """Nothing to end."""


if TYPE_CHECKING:
    _is_an_engine: SyncEngine = RecordingEngine([], 0)
