"""The source's tables of one use of one layer."""

from __future__ import annotations

import numpy as np
import torch

from relibra_kernels.reference.count_sends import sent_to
from relibra_kernels.reference.route_to_slots import assign


def build_route(
    ids_TK: torch.Tensor,
    expert_first: torch.Tensor,
    slot_id: torch.Tensor,
    slot_quota: torch.Tensor,
    slot_first_row: torch.Tensor,
    slots_per_rank: int,
    num_ranks: int,
    num_sent: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each choice is computed, and which tokens travel where, once per rank.

    ``row = slot_first_row[slot] + ordinal inside the slot``; ordinals as in ``route_to_slots``.

    Args:
        ids_TK: int32 or int64 ``[T, K]``, expert ids; -1 takes no part.
        expert_first: int32 ``[E+1]``, see `relibra_kernels.tables.SlotQuota`.
        slot_id: int32 ``[nnz]``.
        slot_quota: int32 ``[nnz]``.
        slot_first_row: int32 ``[nnz]``, row of this source's first row in each slot.
        slots_per_rank: n.
        num_ranks: G.
        num_sent: V, the sum of ``count_sends``.

    Returns:
        ``choice_to_dest_row`` int32 ``[T, K]`` (-1 = none); ``send_token`` int32 ``[V]``, by
        destination rank, then token; ``send_rows`` int32 ``[V, K]``, row of each choice at that
        destination (-1 where the choice goes elsewhere); ``token_to_return`` int32
        ``[T, min(K, G)]``, entries of ``send_token`` by ascending rank (-1 = none).

    Raises:
        ValueError: as for ``route_to_slots``, or ``num_sent`` is not the number of sent tokens.

    Example:
        Slots 0, 1 are on rank 0 and slots 2, 3 on rank 1; expert 0 has slots 0 and 3, expert 1
        slot 1, whose first four rows belong to another source.

        >>> import relibra_kernels
        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> route = torch.ops.relibra.build_route(
        ...     int32([[0, 1], [1, 0], [-1, -1]]), int32([0, 2, 3]), int32([0, 3, 1]),
        ...     int32([1, 1, 2]), int32([0, 8, 4]), 2, 2, 3)
        >>> for table in route: print(table.tolist())
        [[0, 4], [5, 8], [-1, -1]]
        [0, 1, 1]
        [[0, 4], [5, -1], [-1, 8]]
        [[0, -1], [1, 2], [-1, -1]]
    """
    num_tokens, num_choices = ids_TK.shape
    place, ordinal = assign(ids_TK, expert_first, slot_quota)
    taking_part = np.flatnonzero(place >= 0)
    token, choice = np.divmod(taking_part, num_choices)
    entry = place[taking_part]
    row = slot_first_row.numpy()[entry] + ordinal[taking_part]
    rank = slot_id.numpy()[entry] // slots_per_rank

    sent = sent_to(place, slot_id, slots_per_rank, num_ranks, (num_tokens, num_choices))
    send_rank, send_token = np.nonzero(sent.T)
    if send_token.size != num_sent:
        raise ValueError(
            f"num_sent: need {send_token.size}, the distinct (token, rank) pairs of these ids, "
            f"got {num_sent}"
        )
    sent_index = np.full((num_ranks, num_tokens), -1, np.int32)
    sent_index[send_rank, send_token] = np.arange(send_token.size)

    choice_to_dest_row = np.full((num_tokens, num_choices), -1, np.int32)
    choice_to_dest_row[token, choice] = row
    send_rows = np.full((num_sent, num_choices), -1, np.int32)
    send_rows[sent_index[rank, token], choice] = row
    token_to_return = np.full((num_tokens, min(num_choices, num_ranks)), -1, np.int32)
    before = np.cumsum(sent, axis=1) - 1  # ranks of the token before this one
    token_to_return[send_token, before[send_token, send_rank]] = np.arange(send_token.size)
    return (
        torch.from_numpy(choice_to_dest_row),
        torch.from_numpy(send_token.astype(np.int32)),
        torch.from_numpy(send_rows),
        torch.from_numpy(token_to_return),
    )
