"""Every kernel once, on memory of its own, before anything depends on it.

A kernel that is loaded at its first use may have to wait for all streams, among them one that
waits for its peers; and what a driver or GPU does not have shows here, not in a training step.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from relibra_kernels.transport.cuda_library import CudaCallError
from relibra_kernels.transport.sync_engine import PUSH
from relibra_kernels.transport.sync_types import (
    PUBLISH_ITEM,
    PUSH_ITEM,
    REDUCE_ITEM,
    WAIT_ITEM,
    ReduceKind,
    SyncOp,
    pack_word,
)

if TYPE_CHECKING:
    from relibra_kernels.transport.cuda_faults import FaultMemory
    from relibra_kernels.transport.cuda_library import CudaLibrary
    from relibra_kernels.transport.cuda_options import CudaOptions
    from relibra_kernels.transport.cuda_streams import DeviceStreams

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_COUNT = 19  # floats of a copy and a sum: vectors of 16 bytes and a rest
_PART = 128  # bytes of each piece of the memory
_in_use: list[SelfTest] = []  # whose calls did not end: their memory stays
_FIRST, _FULL, _SOURCE, _TARGET, _HOME, _ARRIVALS = range(0, 6 * _PART, _PART)


class SelfTest:
    """One run.

    Args:
        library: of the kernels.
        streams: of the device.
        faults: of this rank.
        options: which forms are wanted.
        generation: of the fault.
    """

    def __init__(
        self,
        library: CudaLibrary,
        streams: DeviceStreams,
        faults: FaultMemory,
        options: CudaOptions,
        generation: int,
    ) -> None:
        self._library, self._streams, self._fault = library, streams, faults.address
        self._options, self._word = options, pack_word(generation, 0, 1)
        self._device = streams.zeros(6 * _PART)
        self._pinned = streams.pinned(6 * _PART)
        self._back = streams.pinned(6 * _PART)
        self._base, self._handle = self._device.data_ptr(), streams.handle(PUSH)
        self._end: float | None = None  # when patience ends
        self._items: list[Any] = [faults]  # what calls read, until the end

    def run(self) -> tuple[str, str]:
        """All calls that the engine makes.

        Returns:
            How weights are pushed and how streams wait, where a wanted form is not to be had.

        Raises:
            RuntimeError: a call failed, did not end, or did something else.
        """
        _in_use.append(self)
        try:
            found = self._run()
        except BaseException:
            self._come_to_rest()
            raise
        _in_use.remove(self)
        return found

    def _come_to_rest(self) -> None:
        """Calls that were given before an error still run: their memory is given back after them.

        It stays where they do not end.
        """
        try:
            self._finish()
        except RuntimeError as error:  # maybe as before
            log.error("memory of the self-test stays: %s", error)
        else:
            _in_use.remove(self)

    def _run(self) -> tuple[str, str]:
        values = np.arange(1, _COUNT + 1, dtype=np.float32)
        self._floats(self._pinned, _SOURCE)[:] = values
        self._floats(self._pinned, _HOME)[:] = 2 * values
        self._streams.copy(PUSH, self._device, self._pinned)
        base, handle, fault = self._base, self._handle, self._fault
        publish = self._place(PUBLISH_ITEM, (base + _FIRST, self._word))
        self._library.publish(publish, 1, fault, handle)
        waits = self._wait(_FIRST)
        push = self._push(
            self._place(
                PUSH_ITEM,
                (
                    base + _SOURCE,
                    base + _TARGET,
                    4 * _COUNT,
                    base + _FULL,
                    self._word,
                    base + _ARRIVALS,
                ),
            )
        )
        self._wait(_FULL)
        lists = self._place(np.dtype(np.uint64), base + _TARGET, base + _SOURCE)
        kind = int(ReduceKind.FP32_FROM_FP32)
        reduce = self._place(REDUCE_ITEM, (base + _HOME, lists, 2, kind, _COUNT))
        grid = (self._options.reduce_blocks, 32)
        self._library.reduce(reduce, 1, fault, *grid, handle)
        self._streams.copy(PUSH, self._back, self._device)
        self._finish()
        for name, part, need in (("push", _TARGET, values), ("reduce", _HOME, 4 * values)):
            got = self._floats(self._back, part)
            if not np.array_equal(got, need):
                raise RuntimeError(
                    f"{name} of {self._library.name} on {self._streams.device}: need "
                    f"{need[:3].tolist()} ..., got {got[:3].tolist()} ..."
                )
        return push, waits

    def _wait(self, word: int) -> str:
        """A wait for a word that is there, or comes before it; how streams can wait."""
        items = self._place(WAIT_ITEM, (self._base + word, self._word, self._word, 0, -1))
        form = self._options.waits_form()
        if form == "stream":
            try:
                self._library.wait_values(items, 1, self._handle)
            except CudaCallError as error:
                log.info("waits of streams take a kernel: %s", error)
                form = "kernel"
        timeout = int(_PATIENCE_S * 1e9)
        self._library.wait(items, 1, 0, int(SyncOp.WEIGHTS), timeout, self._fault, self._handle)
        return form

    def _push(self, items: int) -> str:
        """By the wanted form, or by SMs where it is not to be had."""
        library, fault, handle, form = self._library, self._fault, self._handle, self._options.push
        blocks = self._options.push_blocks
        try:
            if form == "copy_engine":
                library.push_copy_engine(items, 1, fault, handle)
                return form
            if form == "tma":
                library.push_tma(items, 1, fault, blocks, handle)
                return form
        except CudaCallError as error:
            log.info("weights are pushed by SMs: %s", error)
        library.push(items, 1, fault, blocks, 32, handle)
        return "sm"

    def _finish(self) -> None:
        self._end = self._end or time.monotonic() + 2 * _PATIENCE_S
        event = self._streams.record(PUSH)
        while not event.query():
            if time.monotonic() > self._end:
                raise RuntimeError(
                    f"kernels of {self._library.name} do not end on {self._streams.device}"
                )
            time.sleep(1e-4)

    def _place(self, dtype: np.dtype[Any], *rows: Any) -> int:
        """Address of pinned items."""
        memory = self._streams.pinned(dtype.itemsize * len(rows))
        memory.numpy().view(dtype)[:] = np.array(list(rows), dtype)
        self._items.append(memory)
        return int(memory.data_ptr())

    @staticmethod
    def _floats(memory: Any, part: int) -> np.ndarray:
        found: np.ndarray = memory.numpy()[part : part + 4 * _COUNT].view(np.float32)
        return found
