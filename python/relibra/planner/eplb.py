"""The EPLB baseline: experts with redundant copies by the loads of the whole batch.

Source: the README of github.com/deepseek-ai/EPLB (hierarchical policy), re-implemented from its
description. Groups of experts are packed onto nodes, hot experts are copied inside their node, and
the copies are packed onto ranks; every copy then gets the same share of its expert's rows. A rank
may get two copies of one expert, so the result is for reports only.

Letters: L layers, E experts, N nodes, G ranks, Q slots (E and the redundant ones).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.planner.baselines import rank_rows_only
from relibra.planner.outcome import Outcome
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.layout import Int64Array
    from relibra.planner.problem import Problem


def plan_eplb_oracle(problem: Problem) -> Outcome:
    """EPLB with the loads of the very batch that it serves, one group an expert.

    Nodes of different size, or a number of experts that is no multiple of them, count as one node.
    """
    sizes = problem.topology.node_sizes
    num_ranks, num_experts = problem.topology.num_ranks, problem.shape.num_experts
    even = len(set(sizes)) == 1 and num_experts % len(sizes) == 0
    total_LE = (problem.totals_CLE * problem.weight_C[:, None, None]).sum(0)
    num_slots = num_ranks * (problem.home_slots + problem.config.replica_slots)
    slot_expert_LQ = place_copies(
        total_LE,
        num_slots=num_slots,
        num_groups=num_experts,
        num_nodes=len(sizes) if even else 1,
        num_ranks=num_ranks,
    )
    if even:  # EPLB numbers ranks node by node
        order = np.argsort(problem.topology.rank_to_node_G, kind="stable")
        slots_LGn = slot_expert_LQ.reshape(len(slot_expert_LQ), num_ranks, -1)
        slot_expert_LQ = slots_LGn[:, np.argsort(order)].reshape(slot_expert_LQ.shape)
    passes = {
        name: rank_rows_only(
            problem, even_rank_rows(slot_expert_LQ, problem.loads[name].totals_MLE, num_ranks)
        )
        for name in problem.distinct_passes
    }
    return Outcome(problem.base_layouts, passes, is_executable=False)


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
    num_layers, num_slots = slot_expert_LQ.shape
    count_LE = np.stack([np.bincount(row, minlength=totals_MLE.shape[2]) for row in slot_expert_LQ])
    order = np.argsort(slot_expert_LQ, axis=1, kind="stable")
    sorted_LQ = np.take_along_axis(slot_expert_LQ, order, 1)
    first_LE = np.cumsum(count_LE, axis=1) - count_LE
    number_LQ = np.empty_like(order)  # which copy of its expert a slot is
    place = np.arange(num_slots) - np.take_along_axis(first_LE, sorted_LQ, 1)
    np.put_along_axis(number_LQ, order, place, 1)
    copies_LQ = np.take_along_axis(count_LE, slot_expert_LQ, 1)
    total_MLQ = np.take_along_axis(totals_MLE, slot_expert_LQ[None], 2)
    rows_MLQ = total_MLQ // copies_LQ + (number_LQ < total_MLQ % copies_LQ)
    rows: Int64Array = rows_MLQ.reshape(len(totals_MLE), num_layers, num_ranks, -1).sum(3)
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
