"""Strategies to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.plan import PassPlan
from relibra.planner.outcome import Outcome
from relibra.planner.reorder import home_capacities
from relibra_kernels import native

if TYPE_CHECKING:
    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem

# Bits of a value in the matching of experts and slots, so that no slot in another node is taken:
# 1,024 values below 2^34 sum up to less than 2^44, the limit of a single one.
_VALUE_BITS = 33


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


def plan_locality_only(problem: Problem) -> Outcome:
    """Experts where most of their rows come from: the node first, then the rank; no replicas.

    Source: the variant ReLibra-Data of ReLibra, section 6. The exact assignment, whatever its
    balance; equal choices keep the base layout.
    """
    shape = (problem.shape.num_layers, problem.topology.num_ranks, problem.shape.num_experts)
    sent_LGE = np.zeros(shape, np.int64)
    for name, loads in problem.loads.items():
        sent_LGE += problem.config.weight_of(name) * loads.rows_MLGE.sum(0, dtype=np.int64)
    node_G = problem.topology.rank_to_node_G
    nodes = range(problem.topology.num_nodes)
    sent_LNE = np.stack([sent_LGE[:, node_G == node].sum(1) for node in nodes], axis=1)
    layouts = tuple(
        _most_local(sent_NE, sent_GE, node_G, base)
        for sent_NE, sent_GE, base in zip(sent_LNE, sent_LGE, problem.base_layouts, strict=True)
    )
    return Outcome(layouts, _home_only_passes(problem, layouts))


def _most_local(
    sent_NE: Int64Array, sent_GE: Int64Array, node_G: Int32Array, base: ExpertLayout
) -> ExpertLayout:
    """First the best nodes, then the best ranks in them; fillers are experts that nobody sends to.

    Letter: Q home slots, those of a rank contiguous.
    """
    slots = base.home_slot_expert_GH.reshape(-1)
    num_experts = sent_GE.shape[1]
    filled = np.where(slots >= 0, slots, num_experts + np.cumsum(slots < 0) - 1)
    node_Q = np.repeat(node_G, base.slots_per_rank)
    stay_QQ = np.zeros((len(slots), len(slots)), np.int64)
    stay_QQ[np.arange(len(slots)), filled] = 1  # decides between equal choices
    pad = [(0, 0), (0, len(slots) - num_experts)]

    def values(sent: Int64Array) -> Int64Array:
        scaled = sent >> max(0, int(sent.max()).bit_length() - _VALUE_BITS)
        return 2 * np.pad(np.repeat(scaled, base.slots_per_rank, axis=0), pad) + stay_QQ

    by_node = native.planner().match(values(sent_NE[node_G]))
    node_of = np.empty_like(node_Q)
    node_of[by_node] = node_Q
    elsewhere = node_Q[:, None] != node_of
    chosen = native.planner().match(np.where(elsewhere, -(1 << 44), values(sent_GE)))
    home = np.where(chosen < num_experts, chosen, -1)
    return ExpertLayout(home.reshape(base.home_slot_expert_GH.shape))


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
