"""Ops that build index tables from expert ids and quotas; contracts: reference/<op>.py."""

from __future__ import annotations

import torch
from torch import Tensor

from relibra_kernels.checks import check_int, check_tensor
from relibra_kernels.ops.argument_checks import IDS
from relibra_kernels.reference import build_route as _build_route
from relibra_kernels.reference import build_rows as _build_rows
from relibra_kernels.reference import count_sends as _count_sends
from relibra_kernels.reference import route_to_slots as _route_to_slots
from relibra_kernels.tables import check_offsets


def check_routing(
    ids_TK: Tensor, expert_first: Tensor, slot_id: Tensor, slot_quota: Tensor
) -> None:
    """Dtypes, shapes and offsets that keep every access inside its list."""
    check_tensor("ids_TK", ids_TK, dtype=IDS, ndim=2)
    check_tensor("expert_first", expert_first, dtype=torch.int32, ndim=1)
    check_tensor("slot_id", slot_id, dtype=torch.int32, ndim=1)
    check_tensor("slot_quota", slot_quota, dtype=torch.int32, shape=tuple(slot_id.shape))
    check_offsets(expert_first, len(slot_id))
    if len(slot_quota) and int(slot_quota.min()) < 0:
        raise ValueError(f"slot_quota: need counts of at least 0, got {int(slot_quota.min())}")


def check_ranks(slot_id: Tensor, slots_per_rank: int, num_ranks: int) -> None:
    """Slot ids that name a slot of one of the ranks."""
    check_int("slots_per_rank", slots_per_rank, minimum=1)
    check_int("num_ranks", num_ranks, minimum=1)
    limit = slots_per_rank * num_ranks
    if len(slot_id) and (int(slot_id.min()) < 0 or int(slot_id.max()) >= limit):
        raise ValueError(
            f"slot_id: need 0 <= id < {limit} (num_ranks * slots_per_rank), "
            f"got {int(slot_id.min())} to {int(slot_id.max())}"
        )


@torch.library.custom_op("relibra::route_to_slots", mutates_args=(), device_types="cpu")
def route_to_slots(
    ids_TK: Tensor, expert_first: Tensor, slot_id: Tensor, slot_quota: Tensor
) -> Tensor:
    """Replaces expert ids by slot ids."""
    check_routing(ids_TK, expert_first, slot_id, slot_quota)
    return _route_to_slots.route_to_slots(ids_TK, expert_first, slot_id, slot_quota)


@route_to_slots.register_fake
def _(ids_TK: Tensor, expert_first: Tensor, slot_id: Tensor, slot_quota: Tensor) -> Tensor:
    return ids_TK.new_empty(ids_TK.shape, dtype=torch.int32)


@torch.library.custom_op("relibra::count_sends", mutates_args=(), device_types="cpu")
def count_sends(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slots_per_rank: int,
    num_ranks: int,
) -> Tensor:
    """Distinct tokens to each rank."""
    check_routing(ids_TK, expert_first, slot_id, slot_quota)
    check_ranks(slot_id, slots_per_rank, num_ranks)
    return _count_sends.count_sends(
        ids_TK, expert_first, slot_id, slot_quota, slots_per_rank, num_ranks
    )


@count_sends.register_fake
def _(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slots_per_rank: int,
    num_ranks: int,
) -> Tensor:
    return ids_TK.new_empty(num_ranks, dtype=torch.int64)


@torch.library.custom_op("relibra::build_route", mutates_args=(), device_types="cpu")
def build_route(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slot_first_row: Tensor,
    slots_per_rank: int,
    num_ranks: int,
    num_sent: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source's tables of one use."""
    check_routing(ids_TK, expert_first, slot_id, slot_quota)
    check_ranks(slot_id, slots_per_rank, num_ranks)
    check_tensor("slot_first_row", slot_first_row, dtype=torch.int32, shape=tuple(slot_id.shape))
    return _build_route.build_route(
        ids_TK,
        expert_first,
        slot_id,
        slot_quota,
        slot_first_row,
        slots_per_rank,
        num_ranks,
        num_sent,
    )


@build_route.register_fake
def _(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slot_first_row: Tensor,
    slots_per_rank: int,
    num_ranks: int,
    num_sent: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_choices = ids_TK.shape
    return (
        ids_TK.new_empty(num_tokens, num_choices, dtype=torch.int32),
        ids_TK.new_empty(num_sent, dtype=torch.int32),
        ids_TK.new_empty(num_sent, num_choices, dtype=torch.int32),
        ids_TK.new_empty(num_tokens, min(num_choices, num_ranks), dtype=torch.int32),
    )


@torch.library.custom_op("relibra::build_rows", mutates_args=(), device_types="cpu")
def build_rows(token_choice_to_row_UK: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The destination's row tables."""
    check_tensor("token_choice_to_row_UK", token_choice_to_row_UK, dtype=torch.int32, ndim=2)
    check_int("num_rows", num_rows, minimum=0)
    return _build_rows.build_rows(token_choice_to_row_UK, num_rows)


@build_rows.register_fake
def _(token_choice_to_row_UK: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    table = token_choice_to_row_UK
    return table.new_empty(num_rows), table.new_empty(num_rows)
