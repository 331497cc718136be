"""What was given to one stream of a GPU and has not run yet: items, kept tensors, waits.

Items are read by kernels long after a call has returned, so they lie in a ring of pinned memory
whose parts are given back in order, when an event after their use has passed. Nothing grows: a full
ring waits for its oldest part, which happens only to a host that is many uses ahead.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import numpy as np

    from relibra_kernels.transport.cuda_streams import DeviceStreams
    from relibra_kernels.transport.sync_types import SyncOp

_ALIGN = 64
_NAP_S = 2e-5


@dataclasses.dataclass(eq=False, slots=True)
class LaneWait:
    """A wait that was given to a stream.

    Attributes:
        op, use, items: see `relibra_kernels.transport.sync_engine.PendingWait`.
        began: event before it.
        is_open_ended: whether the stream itself waits, which only a store of the words ends.
        since: `time.monotonic` when it was first seen to wait, None before.
    """

    op: SyncOp
    use: int
    items: np.ndarray
    began: Any
    is_open_ended: bool
    since: float | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Flight:
    """One call in a stream.

    Attributes:
        ended: event after it.
        stop: end of its part of the ring.
        keep: what it reads.
        wait: None for other calls.
    """

    ended: Any
    stop: int
    keep: Any
    wait: LaneWait | None


class Lane:
    """One stream.

    Args:
        streams: of the device.
        name: of the stream.
        ring_bytes: of pinned memory.
        lock: of those who look while others submit; never held while this stream is given
            something, since a full queue of the driver makes that wait for the GPU.
        when_full: called again and again while a full ring is waited for.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        name: str,
        ring_bytes: int,
        lock: threading.RLock,
        when_full: Callable[[], None],
    ) -> None:
        self.name = name
        self._streams, self._lock, self._when_full = streams, lock, when_full
        self._memory = streams.pinned(ring_bytes)
        self._first, self._bytes = self._memory.data_ptr(), self._memory.numpy().data
        self._head = self._tail = 0  # bytes ever given out and given back
        self._flights: deque[_Flight] = deque()
        self._events: list[Any] = []  # to be used again

    def place(self, items: np.ndarray) -> int:
        """Address of a copy in pinned memory, good until the next `submitted` has passed.

        Args:
            items: any dtype.

        Raises:
            ValueError: more than the ring can hold.
        """
        address = self.room(items.nbytes)
        self.fill(address, items.tobytes())
        return address

    def room(self, num_bytes: int) -> int:
        """Address of pinned memory; called once, by itself or by `place`, before a `submitted`.

        Args:
            num_bytes: of it.

        Raises:
            ValueError: more than the ring can hold.
        """
        start = self._take(-(-num_bytes // _ALIGN) * _ALIGN)
        return self._first + start % len(self._bytes)

    def fill(self, address: int, content: bytes) -> None:
        """Writes to memory of `room`.

        Args:
            address: in it.
            content: goes there.
        """
        start = address - self._first
        self._bytes[start : start + len(content)] = content

    def event(self) -> Any:
        """An event after all that the stream was given, to be handed back with a `LaneWait`."""
        return self._streams.record(self.name, self._events.pop() if self._events else None)

    def submitted(self, keep: Any = None, wait: LaneWait | None = None) -> None:
        """The stream was given a call.

        Args:
            keep: what must stay alive until it has run.
            wait: what it waits for.
        """
        ended = self.event()
        with self._lock:
            self._flights.append(_Flight(ended, self._head, keep, wait))

    def waits(self) -> list[LaneWait]:
        """Waits that have not ended, oldest first; notes when they are first seen to go on."""
        found = []
        with self._lock:
            self.collect()
            for flight in self._flights:
                wait = flight.wait
                if wait is None or flight.ended.query():
                    continue
                found.append(wait)
                if wait.since is None and wait.began.query():
                    wait.since = time.monotonic()
        return found

    def collect(self) -> bool:
        """Lets go of what has run; whether that is all."""
        with self._lock:
            while self._flights and self._flights[0].ended.query():
                flight = self._flights.popleft()
                self._tail = flight.stop
                self._events.append(flight.ended)
                if flight.wait is not None:
                    self._events.append(flight.wait.began)
            return not self._flights

    def close(self) -> None:
        """Forgets who is called; otherwise it would live until the next garbage collection."""
        self._when_full = _nothing

    def _take(self, size: int) -> int:
        """Position of ``size`` free bytes that do not wrap."""
        total = len(self._bytes)
        if size > total // 2:
            raise ValueError(f"items: need at most {total // 2} bytes a call, got {size}")
        start = self._head
        if start % total + size > total:
            start += total - start % total
        while not self._is_free(start, start + size):
            self._when_full()
            time.sleep(_NAP_S)
        self._head = start + size
        return start

    def _is_free(self, start: int, stop: int) -> bool:
        """Whether a part of the ring was given back; all of it where nothing is left to run."""
        with self._lock:
            if self.collect():
                self._tail = start
            return stop - self._tail <= len(self._bytes)


def _nothing() -> None:
    """Nobody waits any more."""
