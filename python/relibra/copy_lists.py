"""Which rank copies which weights into which replica slots of which rank, for one layer.

Letters: G ranks, N nodes, E experts, H home, X static and S replica slots a rank, J = H + X.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def copy_lists(
    home_slot_expert_GH: np.ndarray,
    replica_slot_expert_GS: np.ndarray,
    replica_rows_GS: np.ndarray,
    rank: int,
    static_slot_expert_GX: np.ndarray | None = None,
    rank_to_node_G: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which weights this rank sends to replica slots, and which it receives.

    Replica slots without rows are left out on both sides: nothing reads them. A replica in another
    node than its home is copied from the static copy in its node, so that nothing crosses nodes.

    Args:
        home_slot_expert_GH: int32 ``[G, H]``.
        replica_slot_expert_GS: int32 ``[G, S]``, -1 for a free slot.
        replica_rows_GS: int64 ``[G, S]``, rows planned for each replica slot.
        rank: this rank.
        static_slot_expert_GX: int32 ``[G, X]``, -1 for a free slot; None without.
        rank_to_node_G: int32 ``[G]``, needed with static slots.

    Returns:
        ``push_list`` int32 ``[p, 3]`` = (home slot, destination rank, replica slot) and
        ``pull_list`` int32 ``[q, 3]`` = (replica slot, home rank, home slot), both by ascending
        (rank, slot) of the replica. A "home slot" H + x is static slot x of that rank.

    Example:
        >>> push, pull = copy_lists(
        ...     np.array([[0, 1], [2, 3]]), np.array([[3], [0]]), np.array([[5], [0]]), 1)
        >>> push.tolist(), pull.tolist()
        ([[1, 0, 0]], [])
    """
    held_GJ = home_slot_expert_GH
    if static_slot_expert_GX is not None:
        held_GJ = np.concatenate([home_slot_expert_GH, static_slot_expert_GX], 1)
    if rank_to_node_G is None:
        rank_to_node_G = np.zeros(len(held_GJ), np.int32)
    ranks, slots = np.nonzero((replica_slot_expert_GS >= 0) & (replica_rows_GS > 0))
    holder_NE = _holders(home_slot_expert_GH, held_GJ, rank_to_node_G)
    held = holder_NE[rank_to_node_G[ranks], replica_slot_expert_GS[ranks, slots]]
    home_rank, home_slot = held // held_GJ.shape[1], held % held_GJ.shape[1]
    push = np.stack([home_slot, ranks, slots], 1)[home_rank == rank]
    pull = np.stack([slots, home_rank, home_slot], 1)[ranks == rank]
    return torch.from_numpy(push.astype(np.int32)), torch.from_numpy(pull.astype(np.int32))


def expert_of(
    home_slot_expert_GH: np.ndarray, static_slot_expert_GX: np.ndarray
) -> Callable[[int, int], int]:
    """(Rank, "home slot" of `copy_lists`) -> logical id of what lies there.

    Args:
        home_slot_expert_GH: int32 ``[G, H]``.
        static_slot_expert_GX: int32 ``[G, X]``.

    Example:
        >>> expert_of(np.array([[0, 1], [2, 3]]), np.array([[3], [0]]))(1, 2)
        0
    """
    num_home = home_slot_expert_GH.shape[1]

    def expert(rank: int, slot: int) -> int:
        if slot < num_home:
            return int(home_slot_expert_GH[rank, slot])
        return int(static_slot_expert_GX[rank, slot - num_home])

    return expert


def _holders(
    home_slot_expert_GH: np.ndarray, held_GJ: np.ndarray, rank_to_node_G: np.ndarray
) -> np.ndarray:
    """Slot ``rank * (H + X) + j`` that replicas of an expert in a node are copied from.

    Args:
        home_slot_expert_GH: int32 ``[G, H]``.
        held_GJ: int32 ``[G, H + X]``, home and static slots.
        rank_to_node_G: int32 ``[G]``.

    Returns:
        int64 ``[N, E]``: the home; where that is in another node, the static copy of the lowest
        rank of this node, if there is one.
    """
    num_experts = max(int(home_slot_expert_GH.max(initial=-1)) + 1, 1)
    num_nodes = int(rank_to_node_G.max(initial=0)) + 1
    holder_NE = np.full((num_nodes, num_experts), -1, np.int64)
    num_home = home_slot_expert_GH.shape[1]
    ranks, slots = np.nonzero(held_GJ >= 0)
    flat, experts = ranks * held_GJ.shape[1] + slots, held_GJ[ranks, slots]
    is_home = slots < num_home
    holder_NE[:, experts[is_home]] = flat[is_home]
    home_node_E = rank_to_node_G[holder_NE[0] // held_GJ.shape[1]]
    for place in np.flatnonzero(~is_home)[::-1]:  # the lowest rank is written last
        node, expert = rank_to_node_G[ranks[place]], experts[place]
        if node != home_node_E[expert]:
            holder_NE[node, expert] = flat[place]
    return holder_NE
