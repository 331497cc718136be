"""Layouts that keep groups of experts on one node, for routers that limit the groups of a token.

Group-limited routing (DeepSeek-V2 and V3: "device-limited", "node-limited" routing) lets a token
choose experts of few groups. While a group is on one node, a token visits no more nodes than it has
groups. So groups are what moves between nodes; inside a node experts and replicas are free.

Letters as in `relibra.planner.reorder`; Q groups of expert numbers that follow each other.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relibra.planner import balance
from relibra.planner.coactivation import node_of_experts
from relibra.planner.objective import MovePrice
from relibra.planner.reject import take_none_where_faster
from relibra.planner.reorder import Reorder, home_capacities
from relibra.planner.replicate import replicate
from relibra_kernels import native
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.outcome import Outcome
    from relibra.planner.problem import Problem
    from relibra.planner.replicate import Replicated


def plan_relibra(problem: Problem) -> Outcome:
    """Reordering and replication, of whole groups where `config.expert_groups` asks for it."""
    if problem.config.expert_groups == 0:
        return balance.plan_relibra(problem)
    return _plan_whole_groups(problem, problem.config.replica_slots)


def plan_reorder_only(problem: Problem) -> Outcome:
    """Reordering, of whole groups where `config.expert_groups` asks for it; no replicas."""
    if problem.config.expert_groups == 0:
        return balance.plan_reorder_only(problem)
    return _plan_whole_groups(problem, 0)


def are_whole(problem: Problem, home_LGH: Int32Array) -> npt.NDArray[np.bool_]:
    """Layers in which no group lies on two nodes, bool `[L]`.

    Args:
        problem: the input, with `config.expert_groups`.
        home_LGH: int32 `[L, G, H]`.
    """
    node_LQe = node_of_experts(problem, home_LGH).reshape(
        len(home_LGH), problem.config.expert_groups, -1
    )
    whole: npt.NDArray[np.bool_] = (node_LQe == node_LQe[:, :, :1]).all((1, 2))
    return whole


def _plan_whole_groups(problem: Problem, replica_slots: int) -> Outcome:
    """The best of four layouts for each layer, compared after replication.

    The base layout, which wins ties, so nothing moves without a gain; improving exchanges of groups
    from it; a search from scratch; experts in order, where the others are worse than `none`. Those
    that split a group do not count.
    """
    everywhere = np.arange(problem.shape.num_layers)
    search = _GroupSearch(problem, replica_slots)
    price = MovePrice(problem)
    is_priced = problem.has_base and not price.is_free

    def planned(home_LGH: Int32Array, layers: npt.NDArray[np.int64]) -> Replicated:
        return replicate(problem, home_LGH[layers], layers, replica_slots=replica_slots)

    def cost(one: Replicated, layers: npt.NDArray[np.int64]) -> Int64Array:
        moves_L = price.of_moves(problem.base_LGH[layers], one.home_LGH) if is_priced else 0
        total_L: Int64Array = one.objective_L + moves_L
        return total_L

    best = planned(search.cold(), everywhere)
    is_base_whole_L = are_whole(problem, problem.base_LGH)
    warm_LGH, changed_L = search.warm(is_base_whole_L)
    for home_LGH, allowed_L in ((warm_LGH, changed_L), (problem.base_LGH, is_base_whole_L)):
        layers = np.flatnonzero(allowed_L)
        if len(layers):
            other = planned(home_LGH, layers)
            taken = cost(other, layers) <= cost(best, everywhere)[layers]
            best = best.replace(layers[taken], other.select(taken))
    in_order_GH = problem.identity.home_slot_expert_GH
    in_order_LGH = np.broadcast_to(in_order_GH, problem.base_LGH.shape)
    if are_whole(problem, in_order_LGH).all():
        none = replicate(problem, in_order_LGH, replica_slots=0)
        layers = np.flatnonzero(best.objective_L > none.objective_L)
        if len(layers):
            best = best.replace(layers, planned(in_order_LGH, layers))
        best = take_none_where_faster(problem, best, in_order_LGH)
    return balance.outcome_of(problem, best)


class _GroupSearch:
    """Candidate layouts, each int32 `[L, G, H]`, found by moving groups as if they were experts."""

    def __init__(self, problem: Problem, replica_slots: int) -> None:
        config, sizes = problem.config, np.asarray(problem.topology.node_sizes)
        self.problem = problem
        self._capacity_N = groups_of_nodes(problem)
        self.inside = Reorder(
            problem.with_config(replace(config, replica_slots=replica_slots)), by_rank=False
        )
        load_LEC = self.inside.load_LEC
        by_group = (len(load_LEC), config.expert_groups, -1, load_LEC.shape[2])
        self._load_LQC = np.ascontiguousarray(load_LEC.reshape(by_group).sum(2))
        self._scale_N = (math.lcm(*sizes.tolist()) // sizes).astype(np.int32)

    def cold(self) -> Int32Array:
        """A search that knows nothing of the base layouts, relabelled to move few experts."""
        return self.inside.layouts_of(self._spread(self._assign(self._load_LQC, None)))

    def warm(self, is_whole_L: npt.NDArray[np.bool_]) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """Improving exchanges of groups from the base layouts of some layers.

        Returns:
            The layouts, and bool `[L]`, layers that changed.
        """
        home_LGH = self.problem.base_LGH.copy()
        before_LE = node_of_experts(self.problem, home_LGH)
        after_LE = before_LE.copy()
        if is_whole_L.any():
            size = before_LE.shape[1] // self.problem.config.expert_groups
            start_LQ = np.ascontiguousarray(before_LE[is_whole_L, ::size])
            after_LE[is_whole_L] = self._spread(self._assign(self._load_LQC[is_whole_L], start_LQ))
        changed_L = (before_LE != after_LE).any(1)
        for layer in np.flatnonzero(changed_L):
            _exchange(home_LGH[layer], before_LE[layer], after_LE[layer])
        return home_LGH, changed_L

    def _assign(self, load_LQC: Int64Array, start_LQ: Int32Array | None) -> Int32Array:
        """Node of every group, int32 `[L', Q]`."""
        config = self.problem.config
        node_LQ: Int32Array = native.planner().assign_bins(
            np.ascontiguousarray(load_LQC),
            self._capacity_N,
            self._scale_N,
            start_LQ,
            config.proposals,
            config.seed,
            False,
            config.num_threads,
        )[0]
        return node_LQ

    def _spread(self, node_LQ: Int32Array) -> Int32Array:
        """Node of every expert from that of its group, int32 `[L', E]`."""
        experts = self.problem.shape.num_experts
        return np.repeat(node_LQ, experts // self.problem.config.expert_groups, axis=1)


def groups_of_nodes(problem: Problem) -> Int32Array:
    """Groups that each node has home slots for, int32 `[N]`.

    Raises:
        PlanError: groups that do not divide the experts, or do not fill whole nodes.
    """
    experts, groups = problem.shape.num_experts, problem.config.expert_groups
    if experts % groups:
        raise PlanError(f"expert_groups: need a divisor of {experts} experts, got {groups}")
    size = experts // groups
    slots_N = np.bincount(problem.topology.rank_to_node_G, home_capacities(problem))
    slots_N = slots_N.astype(np.int32)
    if (slots_N % size).any():
        raise PlanError(
            f"expert_groups: need groups that fill whole nodes, got {groups} groups of {size} "
            f"experts and nodes for {slots_N.tolist()} experts ({problem.topology})"
        )
    filled: Int32Array = slots_N // np.int32(size)
    return filled


def _exchange(home_GH: Int32Array, before_E: Int32Array, after_E: Int32Array) -> None:
    """Experts that arrive in a node take the slots of those that leave it, in ascending order."""
    slots = home_GH.reshape(-1)
    used = np.flatnonzero(slots >= 0)
    experts = slots[used]
    moved = before_E[experts] != after_E[experts]
    used, experts = used[moved], experts[moved]
    leaving = np.lexsort((used, before_E[experts]))
    arriving = np.lexsort((experts, after_E[experts]))
    slots[used[leaving]] = experts[arriving]
