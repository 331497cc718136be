"""Provider ``local``: all ranks of a domain in one process, on the CPU or on one device.

Lets one GPU, or none, run a whole domain. It is lockstep: the caller goes through the ranks one
after the other, so nothing here waits. The first rank that allocates makes the memory of all; the
others must ask for the same.
"""

from __future__ import annotations

import dataclasses

import torch

from relibra_kernels.checks import check_int
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.slot_layout import ALIGN_BYTES
from relibra_kernels.transport.rank_messages import check_equal
from relibra_kernels.transport.symmetric_heap import Arena, Heap


@dataclasses.dataclass
class _Shared:
    """What the heaps of one process share.

    Attributes:
        device: of the memory.
        num_ranks: P.
        facts: what the first rank asked for, None while nothing is allocated.
        parts: memory of each rank.
        words: of the arena, see `LocalArena`.
        holders: ranks whose arena is open.
    """

    device: torch.device
    num_ranks: int
    facts: dict[str, int] | None = None
    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)
    words: dict[int, int] = dataclasses.field(default_factory=dict)
    holders: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class LocalArena(Arena):
    """The arena of one virtual rank.

    Attributes:
        words: address -> largest value whose store was submitted; one for all ranks, and empty in
            every new arena, whose memory may lie where that of an earlier one lay.
    """

    words: dict[int, int] = dataclasses.field(default_factory=dict, compare=False)


class LocalHeap(Heap):
    """One virtual rank's heap; made by `LocalHeap.ranks`.

    Example:
        >>> heaps = LocalHeap.ranks(2)
        >>> arenas = [heap.alloc(1024, generation=1) for heap in heaps]
        >>> arenas[0].peers == arenas[1].peers, arenas[1].rank
        (True, 1)
        >>> for heap in heaps:
        ...     heap.close()
    """

    name = "local"
    granule_bytes = 1

    def __init__(self, shared: _Shared, rank: int) -> None:
        super().__init__(shared.device)
        self._shared, self._rank = shared, rank

    @classmethod
    def ranks(cls, num_ranks: int, device: torch.device | str = "cpu") -> list[LocalHeap]:
        """Heaps of P virtual ranks.

        Args:
            num_ranks: P, at least 1.
            device: where all of them live.
        """
        check_int("num_ranks", num_ranks, minimum=1)
        shared = _Shared(torch.device(device), num_ranks)
        return [cls(shared, rank) for rank in range(num_ranks)]

    def alloc(self, nbytes: int, generation: int) -> LocalArena:
        """As `Heap.alloc`."""
        arena = super().alloc(nbytes, generation)
        assert isinstance(arena, LocalArena)
        return arena

    def _alloc(self, nbytes: int, generation: int) -> LocalArena:
        shared, facts = self._shared, {"nbytes": nbytes, "generation": generation}
        if shared.facts is None:
            shared.parts = _make_parts(shared, nbytes)
            shared.facts = facts
        first = min(shared.holders, default=self._rank)
        check_equal({first: shared.facts, self._rank: facts}, "alloc of a local arena")
        shared.holders.add(self._rank)
        peers = tuple(part.data_ptr() for part in shared.parts)
        base, words = shared.parts[self._rank], shared.words
        return LocalArena(base, peers, None, nbytes, generation, self._rank, words=words)

    def _free(self, peers_alive: bool) -> None:
        self._shared.holders.discard(self._rank)
        if not self._shared.holders:  # the last one: the next alloc starts afresh
            self._shared.facts, self._shared.parts, self._shared.words = None, [], {}


def _make_parts(shared: _Shared, nbytes: int) -> list[torch.Tensor]:
    """Zeroed memory of every rank, aligned as slots are."""
    parts = []
    try:
        for _ in range(shared.num_ranks):
            raw = torch.zeros(nbytes + ALIGN_BYTES, dtype=torch.uint8, device=shared.device)
            skip = -raw.data_ptr() % ALIGN_BYTES
            parts.append(raw[skip : skip + nbytes])
    except RuntimeError as error:
        raise ReplicaSyncError(
            f"alloc of a local arena: no memory for {shared.num_ranks} parts of {nbytes} bytes on "
            f"{shared.device} ({str(error).splitlines()[0]})"
        ) from error
    if shared.device.type == "cuda":  # words are read on other streams
        torch.cuda.synchronize(shared.device)
    return parts
