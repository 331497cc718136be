"""One use of a provider before it is chosen: what it promises is seen to work, on every rank.

Peer access that the driver reports may still fail, and kernels may not be for this GPU. So each
rank sends a pattern to the next one, by the same protocol and engine as later, and looks at what
came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.arena_layout import ArenaLayout
from relibra_kernels.transport.rank_messages import RefusedError, step
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_report import UseKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.group import Ranks
    from relibra_kernels.transport.symmetric_heap import Arena, Heap
    from relibra_kernels.transport.sync_engine import SyncEngine

_COUNT = 1000  # floats of the pattern: whole vectors of 16 bytes
_KEY = UseKey("trial", 0, "trial", 0, 0, "forward")
_LONGEST_S = 60.0


def try_provider(
    heap: Heap,
    make_engine: Callable[[float, Arena, AnyLayout], SyncEngine],
    ranks: Ranks,
    timeout_s: float,
) -> None:
    """Allocates, sends, looks and frees; collective.

    Args:
        heap: of the provider, over the ranks.
        make_engine: (seconds of a wait, arena, layout) -> engine.
        ranks: of the domain.
        timeout_s: seconds to wait for the slowest rank.

    Raises:
        RefusedError: a rank could not do it; on every rank, with the reason.
        ReplicaSyncError: a rank is missing.

    Example:
        >>> from relibra_kernels.transport.group import Ranks
        >>> from relibra_kernels.transport.heap_local import LocalHeap
        >>> from relibra_kernels.transport.sync_engine import HostEngine
        >>> (heap,) = LocalHeap.ranks(1)
        >>> engine = lambda seconds, arena, layout: HostEngine(arena, layout, timeout_s=seconds)
        >>> try_provider(heap, engine, Ranks.of(None), 1.0)
    """
    slot = SlotLayout.of({"pattern": (torch.float32, (_COUNT,))})
    layout = ArenaLayout(slot, slot, ranks.size, 1)
    wait_s = min(timeout_s, _LONGEST_S)
    what = f"trying {heap.name}"
    made: list[ReplicaSync] = []

    def prepare() -> None:
        engine = make_engine(wait_s, arena, layout)
        domain = range(ranks.size)
        made.append(ReplicaSync(arena, layout, domain, ranks.rank, engine, timeout_s=wait_s))

    arena = heap.alloc(layout.nbytes, 1)
    all_are_here = False
    try:
        step(ranks, prepare, what=what, timeout_s=timeout_s)
        step(ranks, lambda: _send(made[0]), what=what, timeout_s=timeout_s + 2 * wait_s)
        all_are_here = True
    except RefusedError:
        all_are_here = True
        raise
    finally:
        for sync in made:
            sync.close()
        heap.close(peers_alive=all_are_here)


def _send(sync: ReplicaSync) -> None:
    """The pattern of this rank goes to the next one; that of the one before comes."""
    size, rank, device = len(sync.domain), sync.rank, sync.arena.base.device
    before, after = (rank - 1) % size, (rank + 1) % size
    home = {"pattern": torch.arange(_COUNT, dtype=torch.float32, device=device)[None] + rank}
    lists = [torch.tensor([[0, peer, 0]], dtype=torch.int32) for peer in (after, before)]
    use = sync.submit_push(_KEY, home, *lists)
    found = sync.weights(use)["pattern"][0].clone()
    sync.retire(use)
    sync.join()
    if not torch.equal(found.cpu(), torch.arange(_COUNT, dtype=torch.float32) + before):
        raise RuntimeError(f"rank {rank} did not find what rank {before} sent")
