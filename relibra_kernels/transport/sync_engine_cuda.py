"""Replica synchronisation on a GPU: the calls of the protocol become work of its streams.

Stream contract: `COMPUTE` is the stream that is current at the call; `PUSH`, `REDUCE` and a side
stream are ours. Results are ready on the current stream, in its order. Memory that crosses streams
is the arena's, or is held until an event after its use has passed.

Waits of the compute stream are a kernel of one block, with a time-out and a look at the abort word.
Waits of the other streams hold no SM until their words have come: the stream itself waits, and the
kernel behind it checks what came. Such a wait has no end of its own, so the host ends it, by
storing the words, after an error or its time-out; `Watchdog` sees to that. Where all streams share
a hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) it would block the compute stream too, so the
kernel form is used everywhere.

Errors: kernels and the host write a record each; the first that is seen stays. Then calls submit
nothing more. Copies that were in a stream already still run where copy engines do them: they write
replica slots of a step that has failed on all ranks, and no more than the pushes ahead.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from relibra_kernels.checks import check_process
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.cuda_faults import FaultMemory
from relibra_kernels.transport.cuda_lanes import Lane, LaneWait
from relibra_kernels.transport.cuda_library_load import load_library
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.cuda_self_test import SelfTest
from relibra_kernels.transport.cuda_streams import SIDE, TorchStreams
from relibra_kernels.transport.cuda_words import WORD_BYTES, HostWords
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE, PendingWait, SyncEngine
from relibra_kernels.transport.sync_types import ErrorCode, SyncOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.cuda_library import CudaLibrary
    from relibra_kernels.transport.cuda_streams import DeviceStreams
    from relibra_kernels.transport.symmetric_heap import Arena

log = logging.getLogger(__name__)

MAX_ITEMS = 4096  # of a call
_THREADS = 512  # of a block
_RING_BYTES = 2**20  # of a stream
_NAP_S = 2e-5
_LOOK_S = 1.0  # longest that a look at words waits
_SETTLE_S = 60.0  # longest that closing waits beyond the time-out

_abandoned: list[CudaEngine] = []  # their memory is still in use


class CudaEngine(SyncEngine):
    """Runs everything on one GPU.

    Args:
        arena: open memory of the domain, on the GPU.
        layout: of the arena.
        timeout_s: seconds that one wait lasts at most, more than 0.
        options: how the GPU does it.
        library: of the kernels, None for the one that is there.
        streams: of the device, None for those of PyTorch.

    Attributes:
        push_form, waits_form: what is used, where an option is not to be had.

    Raises:
        RuntimeError: no library can be had, or a kernel does not do what it should.
    """

    def __init__(
        self,
        arena: Arena,
        layout: AnyLayout,
        *,
        timeout_s: float,
        options: CudaOptions | None = None,
        library: CudaLibrary | None = None,
        streams: DeviceStreams | None = None,
    ) -> None:
        self._arena, self._timeout_s = arena, float(timeout_s)
        self._options = options or CudaOptions()
        self._streams = streams or TorchStreams(arena.base.device)
        self._lock, self._submit_lock = threading.RLock(), threading.Lock()  # first the second
        self._found: np.ndarray | None = None
        self._broken: Exception | None = None
        self._closed, self._process = False, os.getpid()  # whose threads and context are used
        with self._streams.current():
            self._library = library or load_library(self._streams.device)
            self._lanes = {
                name: Lane(self._streams, name, _RING_BYTES, self._lock, self._look)
                for name in (PUSH, REDUCE, COMPUTE)
            }
            self._words = HostWords(self._streams, arena)
            self._faults = FaultMemory(self._streams, arena, layout.abort)
            self._fault_address = self._faults.address
            self._counters = self._streams.zeros(4 * MAX_ITEMS * len(self._lanes))
            first = self._counters.data_ptr()
            self._arrivals = {name: first + 4 * MAX_ITEMS * i for i, name in enumerate(self._lanes)}
            call = (self._library, self._streams, self._faults, self._options)
            self.push_form, self.waits_form = SelfTest(*call, arena.generation).run()

    # -- calls of the protocol ---------------------------------------------------------------

    def wait(self, stream: str, items: np.ndarray, use: int, op: SyncOp) -> None:
        """See `SyncEngine`."""

        def give(lane: Lane) -> None:
            n, handle, began = len(items), self._streams.handle(stream), lane.event()
            if stream != COMPUTE and self.waits_form == "stream":
                self._library.wait_values(items.ctypes.data, n, handle)
                lane.submitted(wait=LaneWait(op, use, items, began, is_open_ended=True))
                began = lane.event()
            address, timeout = lane.place(items), int(self._timeout_s * 1e9)
            self._library.wait(address, n, use, int(op), timeout, self._fault_address, handle)
            lane.submitted(wait=LaneWait(op, use, items, began, is_open_ended=False))

        self._submit(stream, items, give)

    def push(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """See `SyncEngine`."""

        def give(lane: Lane) -> None:
            n, handle, fault = len(items), self._streams.handle(stream), self._fault_address
            if self.push_form == "copy_engine":
                self._library.push_copy_engine(items.ctypes.data, n, fault, handle)
            else:
                counters = self._arrivals[stream] + 4 * np.arange(n, dtype=np.uint64)
                counted = items.copy()
                counted["arrivals"] = np.where(items["full"] != 0, counters, 0)
                address, blocks = lane.place(counted), self._options.push_blocks
                if self.push_form == "tma":
                    self._library.push_tma(address, n, fault, blocks, handle)
                else:
                    self._library.push(address, n, fault, blocks, _THREADS, handle)
            lane.submitted(keep)

        self._submit(stream, items, give)

    def publish(self, stream: str, items: np.ndarray) -> None:
        """See `SyncEngine`."""

        def give(lane: Lane) -> None:
            address, handle = lane.place(items), self._streams.handle(stream)
            self._library.publish(address, len(items), self._fault_address, handle)
            lane.submitted()

        self._submit(stream, items, give)

    def reduce(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """See `SyncEngine`; the lists of replicas are copied where the kernel can read them."""

        def give(lane: Lane) -> None:
            sizes = [WORD_BYTES * count for count in items["num_replicas"].tolist()]
            lists = map(ctypes.string_at, items["grads"].tolist(), sizes)
            address = lane.room(items.nbytes + sum(sizes))
            placed = items.copy()
            placed["grads"] = list(itertools.accumulate(sizes[:-1], initial=address + items.nbytes))
            lane.fill(address, placed.tobytes() + b"".join(lists))
            grid = (self._options.reduce_blocks, _THREADS)
            handle, fault = self._streams.handle(stream), self._fault_address
            self._library.reduce(address, len(items), fault, *grid, handle)
            lane.submitted(keep)

        self._submit(stream, items, give)

    def record(self, stream: str) -> Any:
        """See `SyncEngine`."""
        self._check_process()
        return self._streams.record(stream)

    def wait_event(self, stream: str, event: Any) -> None:
        """See `SyncEngine`."""
        self._check_process()
        if event is not None:
            self._streams.wait(stream, event)

    def clock(self, stream: str) -> Any:
        """See `SyncEngine`."""
        return self._streams.clock(stream)

    def seconds(self, since: Any, until: Any) -> float:
        """See `SyncEngine`; waits for the later point in time."""
        until.synchronize()
        return float(since.elapsed_time(until)) / 1e3

    # -- errors ------------------------------------------------------------------------------

    def failure(self) -> np.ndarray | None:
        """See `SyncEngine`; reads pinned memory, and does not wait for the GPU.

        Raises:
            ReplicaSyncError: a call could not be submitted; that is the cause.
        """
        with self._lock:
            if self._broken is not None:
                raise ReplicaSyncError(f"a call failed: {self._broken}") from self._broken
            if self._found is None and (found := self._faults.found()) is not None:
                self._found = found
                self._end_open_waits()
            return None if self._found is None else self._found.copy()

    def report(self, code: ErrorCode, op: SyncOp, use: int, peer: int) -> None:
        """See `SyncEngine`; a forked child has no part in the protocol and tells nobody."""
        if self._process == os.getpid():
            self._report(code, op, use, peer)

    def _report(
        self,
        code: ErrorCode,
        op: SyncOp,
        use: int,
        peer: int,
        slot: int = -1,
        expected: int = 0,
        observed: int = 0,
    ) -> None:
        with self._lock:
            if self._found is not None or self._broken is None and self.failure() is not None:
                return
            facts = (int(op), peer, slot, use, expected, observed)
            self._found = self._faults.write(code, facts)
            if not self._closed:
                self._tell(code)
            self._end_open_waits()

    def _tell(self, code: ErrorCode) -> None:
        """Stores the abort words of all ranks; of this one alone where the error is a peer's."""
        try:
            with self._streams.current():
                items, handle = self._faults.abort_items(code), self._streams.handle(SIDE)
                self._library.publish(*items, self._fault_address, handle)
        except RuntimeError:
            log.exception("rank %d cannot store that it failed", self._arena.rank)

    def _end_open_waits(self) -> None:
        """Stores the words that streams wait for: the run has failed, and they must come to rest.

        The abort word is there before: kernels behind these waits do nothing.
        """
        with self._lock, self._noting_errors():
            for lane in self._lanes.values():
                for wait in lane.waits():
                    if wait.is_open_ended:
                        wait.is_open_ended = False
                        items = wait.items
                        values = np.where(items["exact"] != 0, items["exact"], items["at_least"])
                        self._words.store(items["word"].tolist(), values)

    # -- looks -------------------------------------------------------------------------------

    def pending(self) -> list[PendingWait]:
        """See `SyncEngine`; ends waits that have lasted too long and have no end of their own."""
        found: list[PendingWait] = []
        with self._lock, self._streams.current(), self._noting_errors():
            self._look()
            found += [
                PendingWait(name, wait.op, wait.use, wait.items, wait.since)
                for name, lane in self._lanes.items()
                for wait in lane.waits()
                if wait.since is not None
            ]
        return found

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """An error of the device itself, after which nothing of it answers: `failure` tells it."""
        try:
            yield
        except ReplicaSyncError:
            raise
        except RuntimeError as error:
            self._broken = self._broken or error

    def _look(self) -> None:
        """Sees to errors, and to waits without an end of their own."""
        with self._lock, self._noting_errors(), contextlib.suppress(ReplicaSyncError):
            if self.failure() is not None:
                return
            now = time.monotonic()
            for lane in self._lanes.values():
                for wait in lane.waits():
                    if wait.is_open_ended and wait.since and now - wait.since > self._timeout_s:
                        self._time_out(wait)
                        return

    def _time_out(self, wait: LaneWait) -> None:
        words = self.load_words(wait.items["word"].tolist())
        missing = [
            (item, word)
            for item, word in zip(wait.items, words, strict=True)
            if word >> 48 != int(item["at_least"]) >> 48 or word < int(item["at_least"])
        ]
        item, word = missing[0] if missing else (wait.items[0], words[0])
        expected = int(item["exact"] or item["at_least"])
        where = (int(item["peer"]), int(item["slot"]), expected, word)
        self._report(ErrorCode.TIMEOUT, wait.op, wait.use, *where)

    def load_words(self, addresses: Sequence[int]) -> list[int]:
        """Words of this rank as they are now, or as last seen where the GPU does not answer.

        Args:
            addresses: in this rank's part of the arena.
        """
        with self._noting_errors():
            self._words.look(addresses, min(self._timeout_s / 4, _LOOK_S))
        return self._words.known(addresses)

    # -- ends --------------------------------------------------------------------------------

    def settle(self) -> None:
        """See `SyncEngine`: the one place of a step where the host waits for the GPU.

        After a failure it does not wait for ever: the failure is known, and that is enough.
        """
        self._check_process()
        patience = 2 * self._timeout_s + _SETTLE_S
        failed_at: float | None = None
        with self._streams.current(), self._noting_errors():
            events = [self._streams.record(name) for name in (PUSH, REDUCE, COMPUTE)]
            while not all(event.query() for event in events):
                self._look()
                if failed_at is None and self._found is not None:
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > patience:
                    break
                time.sleep(_NAP_S)

    def close(self) -> None:
        """Ends after all that the streams were given; nothing in a second call or a fork."""
        if self._closed or self._process != os.getpid():
            return
        deadline = time.monotonic() + 2 * self._timeout_s + _SETTLE_S
        with self._streams.current(), self._noting_errors():
            side = self._streams.record(SIDE)
            while not (self._is_idle() and side.query()):
                if time.monotonic() > deadline:
                    log.error("rank %d: streams do not end; memory stays", self._arena.rank)
                    _abandoned.append(self)
                    break
                self._look()
                time.sleep(_NAP_S)
        for lane in self._lanes.values():
            lane.close()
        self._closed = True

    def _is_idle(self) -> bool:
        with self._lock:
            idle = [lane.collect() for lane in self._lanes.values()]
        return all(idle)

    def _check_process(self) -> None:
        check_process("the engine of replica synchronisation", self._process)

    def _submit(self, stream: str, items: np.ndarray, give: Callable[[Lane], None]) -> None:
        """Gives a call to the lane of its stream, unless there are no items or after an error.

        Raises:
            RuntimeError: in a forked child, or after `close`.
            ReplicaSyncError: the call could not be submitted; peers are told.
        """
        self._check_process()
        if self._closed:
            raise RuntimeError("the engine is closed")
        if len(items) > MAX_ITEMS:
            raise ValueError(f"items: need at most {MAX_ITEMS} a call, got {len(items)}")
        if stream not in self._lanes:
            raise ValueError(f"stream: need one of {list(self._lanes)}, got {stream!r}")
        if not len(items):
            return
        with self._submit_lock, self._streams.current():
            try:
                if self.failure() is None:
                    give(self._lanes[stream])
            except ReplicaSyncError:
                raise
            except RuntimeError as error:
                self._broken = error
                self._report(ErrorCode.TIMEOUT, SyncOp.ROWS, 0, -1)
                raise ReplicaSyncError(f"stream {stream!r}: {error}") from error
            if self._found is not None:  # maybe while the stream was given a wait
                self._end_open_waits()
