"""What runs the steps of replica synchronisation: streams of waits, copies, words and sums.

`ReplicaSync` says what happens in which order; an engine says where it runs. On the CPU a stream is
a thread that runs its calls first in, first out, and the compute stream is the caller's own thread.
"""

from __future__ import annotations

import dataclasses
import math
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from relibra_kernels.checks import check_process
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.native import load
from relibra_kernels.transport.sync_types import (
    ERROR_RECORD,
    FAULT,
    PUBLISH_ITEM,
    ErrorCode,
    SyncOp,
    pack_word,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.symmetric_heap import Arena

PUSH, REDUCE, COMPUTE = "push", "reduce", "compute"  # the streams

_PAUSE_S = 0.05  # between two looks at whether a host's event is still worth waiting for


@dataclasses.dataclass(frozen=True)
class PendingWait:
    """A wait that is going on.

    Attributes:
        stream: that waits.
        op: `SyncOp`.
        use: its number.
        items: `sync_types.WAIT_ITEM` ``[n]``.
        since: `time.monotonic` of its start.
    """

    stream: str
    op: SyncOp
    use: int
    items: np.ndarray
    since: float


class SyncEngine(Protocol):
    """Runs calls in the order of each stream; items are arrays of the dtypes in `sync_types`.

    Every call keeps what its addresses name alive until it has run (``keep``). After an error of
    this rank or of a peer calls do nothing.
    """

    def wait(self, stream: str, items: np.ndarray, use: int, op: SyncOp) -> None:
        """The stream goes on when all words are there."""
        ...

    def push(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """Copies, then words."""
        ...

    def publish(self, stream: str, items: np.ndarray) -> None:
        """Words, after all earlier work of the stream."""
        ...

    def reduce(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """Sums in the order of each item's list."""
        ...

    def record(self, stream: str) -> Any:
        """An event after all that the stream was given so far."""
        ...

    def wait_event(self, stream: str, event: Any) -> None:
        """The stream goes on after the event."""
        ...

    def failure(self) -> np.ndarray | None:
        """The error record, ``[1]``, None while all is well."""
        ...

    def report(self, code: ErrorCode, op: SyncOp, use: int, peer: int) -> None:
        """Writes the error record unless there is one, and ends the waits of this rank.

        Tells all ranks of what is no peer's.
        """
        ...

    def pending(self) -> list[PendingWait]:
        """Waits that go on now."""
        ...

    def load_words(self, addresses: Sequence[int]) -> list[int]:
        """Words as they are now."""
        ...

    def close(self) -> None:
        """Ends after all that it was given."""
        ...

    def settle(self) -> None:
        """Returns when all streams have run what they were given: `failure` is final then.

        Nothing to do where the compute stream is the caller, which has waited for the others.
        """
        return

    def clock(self, stream: str) -> Any:
        """The time when the stream gets here; None where nobody keeps it."""
        return None

    def seconds(self, since: Any, until: Any) -> float:
        """Between two times of `clock`, when both have come; NaN where nobody keeps them."""
        return math.nan


class HostEngine(SyncEngine):
    """Runs everything on the CPU, by the native bodies that the kernels share.

    Args:
        arena: open memory of the domain.
        layout: of the arena.
        timeout_s: seconds that one wait lasts at most, more than 0.
        blocks: threads that copy or add together.

    Raises:
        RuntimeError: the native part does not load; names the reason.
    """

    def __init__(
        self, arena: Arena, layout: AnyLayout, *, timeout_s: float, blocks: int = 1
    ) -> None:
        module, reason = load("relibra_kernels._replica_sync")
        if module is None:
            raise RuntimeError(
                f"relibra_kernels._replica_sync does not load: {reason}. "
                "Remedy: pip install -e . --no-build-isolation"
            )
        self._native, self._timeout_ns, self._blocks = module, int(timeout_s * 1e9), blocks
        self._arena = arena
        peers = [p for p in range(len(arena.peers)) if p != arena.rank]
        self._peer_aborts = np.array([arena.peers[p] + layout.abort for p in peers], np.uint64)
        self._record = np.zeros(1, ERROR_RECORD)
        self._fault = np.zeros(1, FAULT)
        self._fault[0] = (
            self._record.ctypes.data,
            arena.peers[arena.rank] + layout.abort,
            self._peer_aborts.ctypes.data,
            len(peers),
            arena.rank,
            arena.generation,
        )
        self._waits: dict[str, PendingWait] = {}
        self._threads: dict[str, _Stream] = {}
        self._closed = False
        self._process = os.getpid()  # whose threads the streams are

    def wait(self, stream: str, items: np.ndarray, use: int, op: SyncOp) -> None:
        """See `SyncEngine`; on the compute stream it returns when all is there, or on an error."""
        if not len(items):
            return

        def run() -> None:
            self._waits[stream] = PendingWait(stream, op, use, items, time.monotonic())
            self._native.wait(items, use, int(op), self._timeout_ns, self._fault)
            del self._waits[stream]

        self._run(stream, run)

    def push(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """See `SyncEngine`."""
        self._run(stream, lambda: (self._native.push(items, self._fault, self._blocks), keep))

    def publish(self, stream: str, items: np.ndarray) -> None:
        """See `SyncEngine`."""
        self._run(stream, lambda: self._native.publish(items, self._fault))

    def reduce(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """See `SyncEngine`."""
        self._run(stream, lambda: (self._native.reduce(items, self._fault, self._blocks), keep))

    def record(self, stream: str) -> threading.Event:
        """See `SyncEngine`."""
        event = _StreamEvent()
        self._run(stream, event.set)
        return event

    def wait_event(self, stream: str, event: threading.Event | None) -> None:
        """See `SyncEngine`; ends: its own events come, and those of a host have a time-out."""
        if isinstance(event, _StreamEvent):
            self._run(stream, event.wait)
        elif event is not None:
            self._run(stream, lambda: self._wait_for_host(event))

    def failure(self) -> np.ndarray | None:
        """See `SyncEngine`.

        Raises:
            ReplicaSyncError: a call on a thread raised; that is the cause.
        """
        for name, thread in list(self._threads.items()):  # others may start one meanwhile
            if thread.error is not None:
                raise ReplicaSyncError(
                    f"a call of stream {name!r} failed: {thread.error!r}"
                ) from thread.error
        code = self._native.load_code(self._record.ctypes.data)
        while code == ErrorCode.BEING_WRITTEN:
            time.sleep(1e-5)
            code = self._native.load_code(self._record.ctypes.data)
        return None if code == ErrorCode.OK else self._record.copy()

    def report(self, code: ErrorCode, op: SyncOp, use: int, peer: int) -> None:
        """See `SyncEngine`; a forked child has no part in the protocol and tells nobody."""
        if self._process != os.getpid():
            return
        if code == ErrorCode.PEER_ABORTED:  # waits look at this rank's word, not at its record
            word = pack_word(self._arena.generation, peer, int(code))
            own = [(int(self._fault["abort"][0]), word)]
            self._native.publish(np.array(own, PUBLISH_ITEM), self._fault)
        self._native.report(self._fault, int(code), int(op), use, peer)

    def pending(self) -> list[PendingWait]:
        """See `SyncEngine`."""
        return list(self._waits.values())

    def load_words(self, addresses: Sequence[int]) -> list[int]:
        """See `SyncEngine`."""
        found: list[int] = self._native.load_words(np.array(addresses, np.uint64)).tolist()
        return found

    def close(self) -> None:
        """Ends the threads after all that they were given; a second call does nothing."""
        self._closed = True
        for thread in self._threads.values() if self._process == os.getpid() else ():
            thread.close()

    def clock(self, stream: str) -> float:
        """See `SyncEngine`; of this thread."""
        return time.perf_counter()

    def seconds(self, since: float, until: float) -> float:
        """See `SyncEngine`."""
        return until - since

    def _wait_for_host(self, event: threading.Event) -> None:
        limit_s = self._timeout_ns / 1e9
        deadline = time.monotonic() + limit_s
        while not event.wait(_PAUSE_S):
            if self.failure() is not None:
                return
            if self._closed or time.monotonic() > deadline:
                raise ReplicaSyncError(
                    f"weights_ready: need its event to be set within {limit_s:g} s, it was not"
                )

    def _tell_peers(self) -> None:
        """A call of a stream raised: no peer shall wait for what does not come."""
        self.report(ErrorCode.TIMEOUT, SyncOp.ROWS, 0, -1)

    def _run(self, stream: str, call: Callable[[], Any]) -> None:
        check_process("the engine of replica synchronisation", self._process)
        if stream == COMPUTE:
            call()
            return
        if stream not in self._threads:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._threads[stream] = _Stream(f"relibra-{stream}", self._tell_peers)
        self._threads[stream].submit(call)


class _StreamEvent(threading.Event):
    """Made by `HostEngine.record`: it comes, since every wait of a stream ends."""


class _Stream:
    """A thread that runs calls in order.

    Attributes:
        error: first exception of a call, None while all is well; later calls still run, so that
            nobody waits for an event in vain.
    """

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self.error: BaseException | None = None
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                if self.error is None:
                    self.error = error
                    self._on_error()
            del call  # lets go of the tensors it keeps
