"""How many distinct tokens go to each rank."""

from __future__ import annotations

import numpy as np
import torch

from relibra_kernels.reference.route_to_slots import assign


def count_sends(
    ids_TK: torch.Tensor,
    expert_first: torch.Tensor,
    slot_id: torch.Tensor,
    slot_quota: torch.Tensor,
    slots_per_rank: int,
    num_ranks: int,
) -> torch.Tensor:
    """Distinct tokens that this source sends to each rank: the split sizes of a dispatch.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, expert ids; -1 takes no part.
        expert_first: int32 ``[E+1]``, see `relibra_kernels.tables.SlotQuota`.
        slot_id: int32 ``[nnz]``.
        slot_quota: int32 ``[nnz]``.
        slots_per_rank: n.
        num_ranks: G.

    Returns:
        int64 ``[G]``; a token with several choices on a rank counts once there.

    Raises:
        ValueError: as for ``route_to_slots``.

    Example:
        Slots 0, 1 are on rank 0 and slots 2, 3 on rank 1. Token 0 has both choices on rank 0.

        >>> import relibra_kernels
        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> torch.ops.relibra.count_sends(
        ...     int32([[0, 1], [1, 0], [-1, -1]]), int32([0, 2, 3]), int32([0, 3, 1]),
        ...     int32([1, 1, 2]), 2, 2).tolist()
        [2, 1]
    """
    place, _ = assign(ids_TK, expert_first, slot_quota)
    sent = sent_to(place, slot_id, slots_per_rank, num_ranks, tuple(ids_TK.shape))
    return torch.from_numpy(sent.sum(0, dtype=np.int64))


def sent_to(
    place: np.ndarray,
    slot_id: torch.Tensor,
    slots_per_rank: int,
    num_ranks: int,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Whether a token has a choice on a rank, bool ``[T, G]``."""
    token = np.repeat(np.arange(shape[0]), shape[1])
    taking_part = place >= 0
    rank = slot_id.numpy()[place[taking_part]] // slots_per_rank
    sent = np.zeros((shape[0], num_ranks), bool)
    sent[token[taking_part], rank] = True
    return sent
