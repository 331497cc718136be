"""The EPLB baseline, experts with redundant copies, and an exact split over its copies.

Source: the README of github.com/deepseek-ai/EPLB (hierarchical policy), re-implemented from its
description. Groups of experts are packed onto nodes, hot experts are copied inside their node, and
the copies are packed onto ranks; every copy then gets the same share of its expert's rows. A rank
may get two copies of one expert, so the result is for reports only.

Letters: L layers, E experts, N nodes, G ranks, Q slots (E and the redundant ones).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.pass_plan import ReportSlots
from relibra.planner.bounds import rank_rows_outcome
from relibra_kernels import native
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.layout import Int64Array
    from relibra.planner.outcome import Outcome
    from relibra.planner.problem import Problem


def plan_eplb(problem: Problem, *, loads: str, flat: bool = False) -> Outcome:
    """EPLB, one group an expert.

    Args:
        problem: the input.
        loads: what the copies are placed for: the `"previous"` batch, as EPLB is used; the very
            `"batch"` that it serves; or each `"micro_batch"` for itself.
        flat: one pool of ranks instead of nodes first. Nodes of different size, or a number of
            experts that is no multiple of them, are always flat.

    Raises:
        PlanError: there is no previous batch.
    """
    slots_CLGn = _slot_tables(problem, loads, flat=flat)
    if len(slots_CLGn) == 1:
        slots_LQ = slots_CLGn.reshape(slots_CLGn.shape[1], -1)
        rows = even_slot_rows(slots_LQ, problem.totals_CLE)
    else:
        slots_UQ = slots_CLGn.reshape(slots_CLGn.shape[0] * slots_CLGn.shape[1], -1)
        totals_UE = problem.totals_CLE.reshape(1, len(slots_UQ), -1)
        rows = even_slot_rows(slots_UQ, totals_UE)
    shape = (len(problem.totals_CLE), *slots_CLGn.shape[1:])
    return _slots_outcome(problem, slots_CLGn, rows.reshape(shape))


def plan_lplb_like(problem: Problem) -> Outcome:
    """Copies placed by EPLB for the batch that it serves, rows of every micro-batch split exactly.

    Source: the README of github.com/deepseek-ai/LPLB (a linear program over EPLB's copies); here a
    maximum flow over all copies finds the optimum of that program in whole rows.
    """
    slots = _slot_tables(problem, "batch", flat=False)
    everywhere = np.broadcast_to(slots, (len(problem.totals_CLE), *slots.shape[1:]))
    rows, _ = native.planner().split_sites(
        problem.totals_CLE,
        np.ascontiguousarray(everywhere, np.int32),
        problem.config.num_threads,
    )
    return _slots_outcome(problem, slots, rows)


def _slots_outcome(problem: Problem, slots_CLGn: Int64Array, rows_CLGn: Int64Array) -> Outcome:
    """Rows of ranks, and the slots behind them; C of the slots may be 1 for all columns."""
    outcome = rank_rows_outcome(problem, rows_CLGn.sum(3))
    everywhere = np.broadcast_to(slots_CLGn.astype(np.int32), rows_CLGn.shape)
    slots, first = {}, 0
    for name in problem.distinct_passes:
        columns = slice(first, first + problem.loads[name].num_micro_batches)
        slots[name] = ReportSlots(everywhere[columns], rows_CLGn[columns])
        first = columns.stop
    return replace(outcome, report_slots=slots)


def _slot_tables(problem: Problem, loads: str, *, flat: bool) -> Int64Array:
    """Expert of every slot, int64 `[C, L, G, n]`; C is 1 when all columns have the same."""
    weighted = problem.totals_CLE * problem.weight_C[:, None, None]
    if loads == "previous":
        if not problem.previous:
            raise PlanError(
                "previous: need the loads of the batch before for EPLB on history, got none"
            )
        load_CLE = np.zeros_like(weighted[:1])
        for name, matrix in problem.previous.items():
            load_CLE += problem.config.weight_of(name) * matrix.totals_MLE.sum(0)
    elif loads == "batch":
        load_CLE = weighted.sum(0, keepdims=True)
    else:
        load_CLE = problem.totals_CLE
    sizes = problem.topology.node_sizes
    num_ranks, num_experts = problem.topology.num_ranks, problem.shape.num_experts
    by_node = not flat and len(set(sizes)) == 1 and num_experts % len(sizes) == 0
    slots_UQ = place_copies(
        load_CLE.reshape(-1, num_experts),
        num_slots=num_ranks * (problem.home_slots + problem.config.replica_slots),
        num_groups=num_experts if by_node else 1,
        num_nodes=len(sizes) if by_node else 1,
        num_ranks=num_ranks,
    )
    slots = slots_UQ.reshape(*load_CLE.shape[:2], num_ranks, -1)
    if by_node:  # EPLB numbers ranks node by node
        order = np.argsort(problem.topology.rank_to_node_G, kind="stable")
        slots = slots[:, :, np.argsort(order)]
    return slots


def place_copies(
    load_LE: npt.NDArray[np.number],
    *,
    num_slots: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
) -> Int64Array:
    """Expert of every slot.

    Args:
        load_LE: `[L, E]`, rows of each expert.
        num_slots: Q, a multiple of G and at least E.
        num_groups: expert groups that stay on a node, a multiple of N and a divisor of E.
        num_nodes: N.
        num_ranks: G, a multiple of N.

    Returns:
        int64 `[L, Q]`, slots of a rank contiguous, every expert at least once.

    Raises:
        PlanError: sizes that do not divide.

    Example:
        >>> place_copies(np.array([[90, 10, 40, 60]]), num_slots=6, num_groups=2, num_nodes=1,
        ...              num_ranks=2).tolist()
        [[0, 2, 1, 0, 3, 3]]
    """
    num_layers, num_experts = load_LE.shape
    for name, value, divisor in (
        ("num_slots", num_slots, num_ranks),
        ("num_groups", num_groups, num_nodes),
        ("num_ranks", num_ranks, num_nodes),
        ("num_experts", num_experts, num_groups),
    ):
        if value % divisor:
            raise PlanError(f"{name}: need a multiple of {divisor}, got {value}")
    if num_slots < num_experts:
        raise PlanError(f"num_slots: need at least {num_experts} experts, got {num_slots}")
    group_size = num_experts // num_groups
    group_LA = load_LE.reshape(num_layers, num_groups, group_size).sum(2)
    group_at = _pack(group_LA, num_nodes)  # place of each group, node by node
    expert_at = (group_at[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, -1)
    expert_of = np.argsort(expert_at, axis=1)  # experts in the order of their nodes
    node_load = np.take_along_axis(load_LE, expert_of, 1).reshape(num_layers * num_nodes, -1)
    copied = _copy_hottest(node_load, num_slots // num_nodes)
    count = np.stack([np.bincount(row, minlength=node_load.shape[1]) for row in copied])
    copy_load = np.take_along_axis(node_load / count, copied, 1)
    copy_at = _pack(copy_load, num_ranks // num_nodes)
    in_order = np.take_along_axis(copied, np.argsort(copy_at, axis=1), 1)
    first = np.tile(np.arange(num_nodes) * node_load.shape[1], num_layers)[:, None]
    slots = (in_order + first).reshape(num_layers, -1)
    return np.take_along_axis(expert_of, slots, 1)


def even_rank_rows(
    slot_expert_LQ: Int64Array, totals_MLE: Int64Array, num_ranks: int
) -> Int64Array:
    """Rows of each rank when every copy serves the same number, the first copies one more.

    Returns:
        int64 `[M, L, G]`.
    """
    rows_MLQ = even_slot_rows(slot_expert_LQ, totals_MLE)
    rows: Int64Array = rows_MLQ.reshape(*rows_MLQ.shape[:2], num_ranks, -1).sum(3)
    return rows


def even_slot_rows(slot_expert_LQ: Int64Array, totals_MLE: Int64Array) -> Int64Array:
    """Rows of each slot, as in `even_rank_rows`.

    Returns:
        int64 `[M, L, Q]`.
    """
    num_slots = slot_expert_LQ.shape[1]
    count_LE = np.stack([np.bincount(row, minlength=totals_MLE.shape[2]) for row in slot_expert_LQ])
    order = np.argsort(slot_expert_LQ, axis=1, kind="stable")
    sorted_LQ = np.take_along_axis(slot_expert_LQ, order, 1)
    first_LE = np.cumsum(count_LE, axis=1) - count_LE
    number_LQ = np.empty_like(order)  # which copy of its expert a slot is
    place = np.arange(num_slots) - np.take_along_axis(first_LE, sorted_LQ, 1)
    np.put_along_axis(number_LQ, order, place, 1)
    copies_LQ = np.take_along_axis(count_LE, slot_expert_LQ, 1)
    total_MLQ = np.take_along_axis(totals_MLE, slot_expert_LQ[None], 2)
    rows: Int64Array = total_MLQ // copies_LQ + (number_LQ < total_MLQ % copies_LQ)
    return rows


def _pack(load: npt.NDArray[np.number], num_packs: int) -> Int64Array:
    """Heaviest first into the lightest pack with room; equal numbers in all packs.

    Args:
        load: `[rows, items]`, each row packed for itself.
        num_packs: a divisor of the items.

    Returns:
        int64 `[rows, items]`, pack * size + place inside it.
    """
    num_rows, num_items = load.shape
    size = num_items // num_packs
    if size == 1:
        return np.tile(np.arange(num_items), (num_rows, 1))
    row = np.arange(num_rows)
    at = np.empty((num_rows, num_items), np.int64)
    pack_load = np.zeros((num_rows, num_packs))
    held = np.zeros((num_rows, num_packs), np.int64)
    for item in np.argsort(-load, axis=1, kind="stable").T:
        pack = np.argmin(np.where(held < size, pack_load, np.inf), axis=1)
        at[row, item] = pack * size + held[row, pack]
        held[row, pack] += 1
        pack_load[row, pack] += load[row, item]
    return at


def _copy_hottest(load: npt.NDArray[np.number], num_slots: int) -> Int64Array:
    """One copy of everything, then again and again one of what has most rows a copy."""
    num_rows, num_items = load.shape
    row = np.arange(num_rows)
    copied = np.tile(np.arange(num_slots) % num_items, (num_rows, 1))
    count = np.ones((num_rows, num_items), np.int64)
    for slot in range(num_items, num_slots):
        hottest = np.argmax(load / count, axis=1)
        copied[:, slot] = hottest
        count[row, hottest] += 1
    return copied
