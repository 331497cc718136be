"""What an engine and its kernels share about errors, in pinned memory that both reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra_kernels import native
from relibra_kernels.transport.sync_types import (
    ERROR_RECORD,
    FAULT,
    PUBLISH_ITEM,
    ErrorCode,
    pack_word,
)

if TYPE_CHECKING:
    from relibra_kernels.transport.cuda_streams import DeviceStreams
    from relibra_kernels.transport.symmetric_heap import Arena

_ALIGN = 64
_NOT_FOUND = int(ErrorCode.OK), int(ErrorCode.BEING_WRITTEN)


class FaultMemory:
    """Error records, the fault that kernels are given, and the words that tell all ranks.

    Kernels and the host have a record each: atomics between CPU and GPU need not exist.

    Args:
        streams: of the device.
        arena: of the domain.
        abort: offset of the abort word.

    Attributes:
        address: of the fault.
    """

    def __init__(self, streams: DeviceStreams, arena: Arena, abort: int) -> None:
        peers = [p for p in range(len(arena.peers)) if p != arena.rank]
        aborts = [arena.peers[p] + abort for p in peers]
        mine = arena.peers[arena.rank] + abort
        sizes = (2 * ERROR_RECORD.itemsize, FAULT.itemsize, 8 * len(peers), 16 * len(arena.peers))
        starts = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
        self._pinned = streams.pinned(starts[-1])
        memory, first = self._pinned.numpy(), self._pinned.data_ptr()
        parts = [memory[a : a + s] for a, s in zip(starts, sizes, strict=False)]
        self._records = parts[0].view(ERROR_RECORD)  # of kernels, of the host
        parts[2].view(np.uint64)[:] = aborts
        facts = (len(peers), arena.rank, arena.generation)
        parts[1].view(FAULT)[0] = (first, mine, first + starts[2], *facts)
        self._aborts = parts[3].view(PUBLISH_ITEM)
        self._aborts["word"] = [*aborts, mine]
        self._rank, self._generation = arena.rank, arena.generation
        self._load_code = native.replica_sync().load_code
        self._codes = [first, first + ERROR_RECORD.itemsize]
        self.address = first + starts[1]
        self._first_abort = first + starts[3]

    def found(self) -> np.ndarray | None:
        """The record that is written, ``[1]``, None while there is none; does not wait."""
        for index, address in enumerate(self._codes):  # asked for before every call
            if self._load_code(address) not in _NOT_FOUND:
                return self._records[index : index + 1].copy()
        return None

    def abort_items(self, code: ErrorCode) -> tuple[int, int]:
        """Address and number of the items that tell of an error, after `write`.

        Args:
            code: of the error. What is a peer's ends only waits of this rank.
        """
        num = 1 if code == ErrorCode.PEER_ABORTED else len(self._aborts)  # this rank is the last
        return self._first_abort + PUBLISH_ITEM.itemsize * (len(self._aborts) - num), num

    def write(self, code: ErrorCode, facts: tuple[int, int, int, int, int, int]) -> np.ndarray:
        """Writes the host's record, and the word of `abort_items`.

        Args:
            code: of the error.
            facts: operation, peer, slot, use, expected and observed word.

        Returns:
            The record, ``[1]``.
        """
        op, peer, slot, use, expected, observed = facts
        self._records[1] = (int(code), self._rank, op, peer, slot, 0, use, expected, observed)
        origin = peer if code == ErrorCode.PEER_ABORTED else self._rank
        self._aborts["value"] = pack_word(self._generation, origin, int(code))
        return self._records[1:].copy()
