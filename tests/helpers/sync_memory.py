"""Memory of one rank of replica synchronisation, for tests: words, abort word, error record."""

from __future__ import annotations

import numpy as np

from relibra_kernels.transport import sync_types as st


def address(array: np.ndarray) -> int:
    """Address of the first element."""
    return array.ctypes.data


class Fault(np.ndarray):
    """One fault; `reached` keeps alive what its addresses point to, for as long as it lives."""

    reached: tuple[object, ...] = ()


class Memory:
    """What calls of the native library point to; `peers` are other ranks' memories."""

    def __init__(self, rank: int = 0, generation: int = 1) -> None:
        self.rank, self.generation = rank, generation
        self.words = np.zeros(64, np.uint64)
        self.arrivals = np.zeros(64, np.uint32)
        self.abort = np.zeros(1, np.uint64)
        self.record = np.zeros(1, st.ERROR_RECORD)
        self.fault = np.zeros(1, st.FAULT).view(Fault)
        self.connect([])

    def connect(self, peers: list[Memory]) -> None:
        """Tells this rank where the others' abort words are."""
        aborts = [peer.abort for peer in peers]
        self.peer_aborts = np.array([address(abort) for abort in aborts], np.uint64)
        self.fault.reached = (self.record, self.abort, self.peer_aborts, *aborts)
        self.fault[0] = (
            address(self.record),
            address(self.abort),
            address(self.peer_aborts) if peers else 0,
            len(peers),
            self.rank,
            self.generation,
        )

    def word(self, index: int) -> int:
        """Address of a word."""
        return address(self.words) + 8 * index

    def arrival(self, index: int) -> int:
        """Address of an arrival counter."""
        return address(self.arrivals) + 4 * index


def ring(count: int, generation: int = 1) -> list[Memory]:
    """Memories of `count` ranks that know each other."""
    ranks = [Memory(rank, generation) for rank in range(count)]
    for memory in ranks:
        memory.connect([peer for peer in ranks if peer is not memory])
    return ranks


def items(dtype: np.dtype, *rows: tuple[int, ...]) -> np.ndarray:
    """Array `[n]` of C structs."""
    return np.array(list(rows), dtype)
