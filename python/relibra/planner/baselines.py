"""Strategies to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.plan import PassPlan
from relibra.planner.outcome import Outcome
from relibra.planner.reorder import home_capacities

if TYPE_CHECKING:
    from relibra.layout import Int64Array
    from relibra.planner.problem import Problem


def plan_none(problem: Problem) -> Outcome:
    """Experts in order over the ranks, no replicas."""
    layouts = (problem.identity,) * problem.shape.num_layers
    return Outcome(layouts, _home_only_passes(problem, layouts))


def plan_lpt(problem: Problem) -> Outcome:
    """Largest expert of the batch first onto the lightest rank with room; no replicas.

    Source: Graham's longest-processing-time rule with a fixed number of jobs a machine.
    """
    total_LE = (problem.totals_CLE * problem.weight_C[:, None, None]).sum(0)
    num_layers, num_experts = total_LE.shape
    layer = np.arange(num_layers)
    room_LG = np.tile(home_capacities(problem).astype(np.int64), (num_layers, 1))
    load_LG = np.zeros_like(room_LG)
    slots_LGH = np.full((*room_LG.shape, problem.home_slots), -1, np.int32)
    order_LE = np.argsort(-total_LE, axis=1, kind="stable")
    for expert_L in order_LE.T:
        load = np.where(room_LG > 0, load_LG, np.iinfo(np.int64).max)
        rank_L = np.argmin(load, axis=1)
        room_LG[layer, rank_L] -= 1
        slots_LGH[layer, rank_L, room_LG[layer, rank_L]] = expert_L
        load_LG[layer, rank_L] += total_LE[layer, expert_L]
    layouts = tuple(ExpertLayout(slots_GH) for slots_GH in slots_LGH)
    return Outcome(layouts, _home_only_passes(problem, layouts))


def plan_ideal(problem: Problem) -> Outcome:
    """ceil(total / G) rows on every rank: the bound of every plan, for reports only."""
    passes = {}
    for name in problem.distinct_passes:
        total_ML = problem.loads[name].totals_MLE.sum(2)
        share_ML = -(-total_ML // problem.topology.num_ranks)
        shape = (*share_ML.shape, problem.topology.num_ranks)
        passes[name] = rank_rows_only(problem, np.broadcast_to(share_ML[..., None], shape))
    return Outcome(problem.base_layouts, passes, is_executable=False)


def rank_rows_only(problem: Problem, rank_rows_MLG: Int64Array) -> PassPlan:
    """A pass that is for reports: rows of ranks, no experts."""
    replica_slots = problem.config.replica_slots
    slots = problem.home_slots + replica_slots
    rows = np.zeros((*rank_rows_MLG.shape, slots), np.int64)
    rows[..., 0] = rank_rows_MLG
    return PassPlan(np.full((*rank_rows_MLG.shape, replica_slots), -1, np.int32), rows)


def _home_only_passes(problem: Problem, layouts: tuple[ExpertLayout, ...]) -> dict[str, PassPlan]:
    """Every row at the home of its expert."""
    home_LGH = np.stack([layout.home_slot_expert_GH for layout in layouts])
    rows_CLGH = problem.slot_rows(home_LGH)
    spare = np.zeros((*rows_CLGH.shape[:3], problem.config.replica_slots), np.int64)
    rows_CLGn = np.concatenate([rows_CLGH, spare], axis=3)
    passes, first = {}, 0
    for name in problem.distinct_passes:
        rows = rows_CLGn[first : first + problem.loads[name].num_micro_batches]
        first += len(rows)
        free = np.full((*rows.shape[:3], problem.config.replica_slots), -1, np.int32)
        passes[name] = PassPlan(free, rows)
    return passes
