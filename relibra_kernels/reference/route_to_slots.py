"""Which slot computes each (token, choice): the core that all routing ops share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[np.integer]


def route_to_slots(
    ids_TK: torch.Tensor,
    expert_first: torch.Tensor,
    slot_id: torch.Tensor,
    slot_quota: torch.Tensor,
) -> torch.Tensor:
    """Replaces expert ids by slot ids, so that any dispatcher can serve ``G * n`` "experts".

    The ordinal of a choice is the number of earlier choices of the same expert in (token, choice)
    order. An expert's slots, in ascending id, take as many consecutive ordinals as their quota.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, expert ids; -1 takes no part.
        expert_first: int32 ``[E+1]``, see `relibra_kernels.tables.SlotQuota`.
        slot_id: int32 ``[nnz]``.
        slot_quota: int32 ``[nnz]``, rows of this source for each slot.

    Returns:
        int32 ``[T, K]``, global slot ids; -1 stays -1.

    Raises:
        ValueError: an id outside [-1, E), or more choices of an expert than its slots have quota.

    Example:
        Expert 0 may fill one row of slot 0, then two of slot 5; expert 1 two rows of slot 2.

        >>> import relibra_kernels
        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> torch.ops.relibra.route_to_slots(
        ...     int32([[0, 1], [1, 0], [0, -1]]), int32([0, 2, 3]), int32([0, 5, 2]),
        ...     int32([1, 2, 2])).tolist()
        [[0, 2], [2, 5], [5, -1]]
    """
    place, _ = assign(ids_TK, expert_first, slot_quota)
    slots = np.append(slot_id.numpy(), -1)[place]
    return torch.from_numpy(slots.astype(np.int32).reshape(ids_TK.shape))


def assign(
    ids_TK: torch.Tensor, expert_first: torch.Tensor, slot_quota: torch.Tensor
) -> tuple[Array, Array]:
    """Entry of the slot list, and ordinal inside that slot, of each choice.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, -1 = none.
        expert_first: int32 ``[E+1]``.
        slot_quota: int32 ``[nnz]``.

    Returns:
        Two int64 arrays ``[T*K]``: entry in the slot list (-1 = none), ordinal (0 where none).

    Raises:
        ValueError: as for `route_to_slots`.
    """
    flat = ids_TK.numpy().reshape(-1)
    num_experts = expert_first.numel() - 1
    check_ids(flat, num_experts, ids_TK.shape[1])
    count_E = np.bincount(flat[flat >= 0], minlength=num_experts)
    quota_end = np.cumsum(slot_quota.numpy(), dtype=np.int64)
    before = np.concatenate([[0], quota_end])
    expert_begin = before[expert_first.numpy()]
    check_room(count_E, np.diff(expert_begin))

    narrow = flat.astype(np.int16) if num_experts < 2**15 else flat  # radix sort for 16 bits
    taking_part = np.argsort(narrow, kind="stable")[flat.size - int(count_E.sum()) :]
    expert = flat[taking_part]
    ordinal = np.arange(expert.size) - (np.cumsum(count_E) - count_E)[expert]
    position = expert_begin[expert] + ordinal
    place = np.full(flat.size, -1, np.int64)
    inside = np.zeros(flat.size, np.int64)
    entry = np.searchsorted(quota_end, position, side="right")
    place[taking_part] = entry
    inside[taking_part] = position - before[entry]
    return place, inside


def check_ids(flat: Array, num_experts: int, num_choices: int) -> None:
    """Refuses the first id outside [-1, E) by its place."""
    wrong = np.flatnonzero((flat < -1) | (flat >= num_experts))
    if wrong.size:
        token, choice = divmod(int(wrong[0]), max(num_choices, 1))
        raise ValueError(
            f"ids_TK: need -1 <= id < {num_experts}, got {int(flat[wrong[0]])} "
            f"at token {token}, choice {choice}"
        )


def check_room(count_E: Array, room_E: Array) -> None:
    """Refuses the first expert with more choices than its slots have quota."""
    over = np.flatnonzero(count_E > room_E)
    if over.size:
        expert = int(over[0])
        raise ValueError(
            f"slot_quota: need at least {int(count_E[expert])} rows for expert {expert}, "
            f"which has that many choices here, got a quota of {int(room_E[expert])}"
        )
