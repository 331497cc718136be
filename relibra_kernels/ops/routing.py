"""Ops that build index tables from expert ids and quotas; contracts: reference/<op>.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from relibra_kernels.checks import check_int, check_tensor
from relibra_kernels.ops.argument_checks import IDS
from relibra_kernels.ops.backend import checks_values, on_cpu, use_triton, with_error_word
from relibra_kernels.reference import build_route as _build_route
from relibra_kernels.reference import build_rows as _build_rows
from relibra_kernels.reference import count_sends as _count_sends
from relibra_kernels.reference import route_to_slots as _route_to_slots
from relibra_kernels.tables import check_offsets

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICES = ("cpu", "cuda")
Result = TypeVar("Result")


def _run(
    name: str, reference: Callable[..., Result], backend: str, *arguments: Tensor | int
) -> Result:
    """The body that the backend names; both take the same arguments."""
    ids = arguments[0]
    assert isinstance(ids, Tensor)
    if not use_triton(backend, ids):
        return on_cpu(reference, *arguments)
    from relibra_kernels.triton_ops import build_rows, dispatch

    kernel: Callable[..., Result] = getattr(build_rows if name == "build_rows" else dispatch, name)
    return with_error_word(kernel, reference, *arguments)


def check_routing(
    ids_TK: Tensor, expert_first: Tensor, slot_id: Tensor, slot_quota: Tensor
) -> None:
    """Dtypes and shapes, and (`checks_values` permitting) offsets that stay inside the lists."""
    check_tensor("ids_TK", ids_TK, dtype=IDS, ndim=2)
    check_tensor("expert_first", expert_first, dtype=torch.int32, ndim=1)
    check_tensor("slot_id", slot_id, dtype=torch.int32, ndim=1)
    check_tensor("slot_quota", slot_quota, dtype=torch.int32, shape=tuple(slot_id.shape))
    if not checks_values(ids_TK):
        return
    check_offsets(expert_first.cpu(), len(slot_id))
    if len(slot_quota) and int(slot_quota.min()) < 0:
        raise ValueError(f"slot_quota: need counts of at least 0, got {int(slot_quota.min())}")


def check_ranks(slot_id: Tensor, slots_per_rank: int, num_ranks: int) -> None:
    """Slot ids that name a slot of one of the ranks."""
    check_int("slots_per_rank", slots_per_rank, minimum=1)
    check_int("num_ranks", num_ranks, minimum=1)
    limit = slots_per_rank * num_ranks
    if not checks_values(slot_id):
        return
    if len(slot_id) and (int(slot_id.min()) < 0 or int(slot_id.max()) >= limit):
        raise ValueError(
            f"slot_id: need 0 <= id < {limit} (num_ranks * slots_per_rank), "
            f"got {int(slot_id.min())} to {int(slot_id.max())}"
        )


@torch.library.custom_op("relibra::route_to_slots", mutates_args=(), device_types=DEVICES)
def route_to_slots(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    backend: str = "auto",
) -> Tensor:
    """Replaces expert ids by slot ids."""
    check_routing(ids_TK, expert_first, slot_id, slot_quota)
    lists = expert_first, slot_id, slot_quota
    return _run("route_to_slots", _route_to_slots.route_to_slots, backend, ids_TK, *lists)


@route_to_slots.register_fake
def _(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    backend: str = "auto",
) -> Tensor:
    return ids_TK.new_empty(ids_TK.shape, dtype=torch.int32)


@torch.library.custom_op("relibra::count_sends", mutates_args=(), device_types=DEVICES)
def count_sends(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slots_per_rank: int,
    num_ranks: int,
    backend: str = "auto",
) -> Tensor:
    """Distinct tokens to each rank."""
    check_routing(ids_TK, expert_first, slot_id, slot_quota)
    check_ranks(slot_id, slots_per_rank, num_ranks)
    lists = expert_first, slot_id, slot_quota
    reference = _count_sends.count_sends
    return _run("count_sends", reference, backend, ids_TK, *lists, slots_per_rank, num_ranks)


@count_sends.register_fake
def _(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slots_per_rank: int,
    num_ranks: int,
    backend: str = "auto",
) -> Tensor:
    return ids_TK.new_empty(num_ranks, dtype=torch.int64)


@torch.library.custom_op("relibra::build_route", mutates_args=(), device_types=DEVICES)
def build_route(
    ids_TK: Tensor,
    expert_first: Tensor,
    slot_id: Tensor,
    slot_quota: Tensor,
    slot_first_row: Tensor,
    slots_per_rank: int,
    num_ranks: int,
    num_sent: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source's tables of one use."""
    check_routing(ids_TK, expert_first, slot_id, slot_quota)
    check_ranks(slot_id, slots_per_rank, num_ranks)
    check_tensor("slot_first_row", slot_first_row, dtype=torch.int32, shape=tuple(slot_id.shape))
    check_int("num_sent", num_sent, minimum=0)
    lists = expert_first, slot_id, slot_quota, slot_first_row
    sizes = slots_per_rank, num_ranks, num_sent
    return _run("build_route", _build_route.build_route, backend, ids_TK, *lists, *sizes)


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_choices = ids_TK.shape
    return (
        ids_TK.new_empty(num_tokens, num_choices, dtype=torch.int32),
        ids_TK.new_empty(num_sent, dtype=torch.int32),
        ids_TK.new_empty(num_sent, num_choices, dtype=torch.int32),
        ids_TK.new_empty(num_tokens, min(num_choices, num_ranks), dtype=torch.int32),
    )


@torch.library.custom_op("relibra::build_rows", mutates_args=(), device_types=DEVICES)
def build_rows(
    token_choice_to_row_UK: Tensor, num_rows: int, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The destination's row tables."""
    check_tensor("token_choice_to_row_UK", token_choice_to_row_UK, dtype=torch.int32, ndim=2)
    check_int("num_rows", num_rows, minimum=0)
    return _run("build_rows", _build_rows.build_rows, backend, token_choice_to_row_UK, num_rows)


@build_rows.register_fake
def _(
    token_choice_to_row_UK: Tensor, num_rows: int, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    table = token_choice_to_row_UK
    return table.new_empty(num_rows), table.new_empty(num_rows)
