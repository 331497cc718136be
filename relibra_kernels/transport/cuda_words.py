"""Signal words of one rank as the host reads and stores them: small copies on a side stream."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from relibra_kernels.transport.cuda_streams import SIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra_kernels.transport.cuda_streams import DeviceStreams
    from relibra_kernels.transport.symmetric_heap import Arena

WORD_BYTES = 8
_MAX_WORDS = 4096  # of a look
_NAP_S = 2e-5


class HostWords:
    """Words in this rank's part of an arena.

    Args:
        streams: of the device.
        arena: of the domain.
    """

    def __init__(self, streams: DeviceStreams, arena: Arena) -> None:
        self._streams, self._base = streams, arena.base
        self._start = arena.peers[arena.rank]
        self._lock = threading.Lock()
        self._pinned = streams.pinned(WORD_BYTES * _MAX_WORDS)
        self._stores, self._num_stored = streams.pinned(WORD_BYTES * _MAX_WORDS), 0
        self._known: dict[int, int] = {}  # as they were last seen
        self._reading: Any = None  # event after the last copy, whose target may not change before

    def look(self, addresses: Sequence[int], patience_s: float) -> None:
        """Notes words as they are now, for `known`, unless the GPU does not answer in time.

        Args:
            addresses: in this rank's part.
            patience_s: to wait at most.
        """
        words = self._pinned.numpy().view(np.uint64)
        deadline = time.monotonic() + patience_s
        with self._lock, self._streams.current():
            is_stuck = self._reading is not None and not self._reading.query()
            for first in range(0, 0 if is_stuck else len(addresses), _MAX_WORDS):
                some = addresses[first : first + _MAX_WORDS]
                if not self._has_read(deadline):
                    break
                for place, address in enumerate(some):
                    target = self._pinned[WORD_BYTES * place : WORD_BYTES * (place + 1)]
                    self._streams.copy(SIDE, target, self._word(address))
                self._reading = self._streams.record(SIDE)
                if self._has_read(deadline):
                    self._known.update(zip(some, words[: len(some)].tolist(), strict=True))

    def known(self, addresses: Sequence[int]) -> list[int]:
        """Words as they were last seen, 0 for others."""
        return [self._known.get(address, 0) for address in addresses]

    def store(self, addresses: Sequence[int], values: np.ndarray) -> None:
        """Stores words, in the order of the side stream; 4096 of an arena at most.

        Args:
            addresses: in this rank's part.
            values: uint64 ``[n]``.
        """
        first, size = self._num_stored, len(self._stores) // WORD_BYTES
        self._num_stored += len(addresses)
        with self._streams.current():
            for place, (address, value) in enumerate(zip(addresses, values, strict=True), first):
                source = self._stores[place % size * WORD_BYTES :][:WORD_BYTES]
                source.numpy().view(np.uint64)[0] = value
                self._streams.copy(SIDE, self._word(address), source)

    def _word(self, address: int) -> Any:
        offset = address - self._start
        if not 0 <= offset <= len(self._base) - WORD_BYTES:
            raise ValueError(f"addresses: need words of this rank, got {address:#x}")
        return self._base[offset : offset + WORD_BYTES]

    def _has_read(self, deadline: float) -> bool:
        while self._reading is not None and not self._reading.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_NAP_S)
        self._reading = None
        return True
