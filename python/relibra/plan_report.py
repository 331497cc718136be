"""Figures of a plan: balance, gaps to the bounds, replicas, traffic, buffers and moves.

Letters as in `relibra.plan`. An instance is one (pass, micro-batch, layer) that has rows; imbalance
is max / mean of rows. Instances without rows are left out of every mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relibra.plan_check import pass_slot_experts
from relibra_kernels import native
from relibra_kernels.checks import describe
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.layout import Int64Array
    from relibra.plan import PassPlan, StepPlan

# Figures that only the loads give; a plan file stores them, but no array of it bears them out.
FROM_LOADS = (
    "imbalance_routed_mean",
    "imbalance_routed_p99",
    "imbalance_routed_max",
    "local_rows",
    "nvlink_rows",
    "rdma_rows",
    "static_refreshes",
)
# Rows of a GEMM tile for which worst_rank_rows_padded is given.
BLOCK_ROWS = 128
# Optimizer bytes a parameter that move with an expert: fp32 master weight and two moments.
OPTIMIZER_BYTES = 12


_KINDS = {"str": str, "int": int, "float": float, "None": type(None)}


@dataclass(frozen=True)
class PlanReport:
    """What a plan achieves.

    Args:
        strategy: name of the strategy.
        cost: what plans were compared by, `"rows"` or `"time"`; imbalances and gaps are of rows.
        num_instances: instances with rows.
        imbalance_mean: over ranks, (sum of the maxima) / (sum of the means).
        imbalance_p99: over ranks, of single instances.
        imbalance_max: over ranks, worst instance.
        imbalance_node_mean: over nodes, rows a rank of the node; as `imbalance_mean`.
        imbalance_node_p99: over nodes.
        imbalance_node_max: over nodes.
        imbalance_routed_mean: over ranks without padding rows; the padding rows of an expert are
            taken to be spread over its copies like its other rows.
        imbalance_routed_p99: over ranks without padding rows.
        imbalance_routed_max: over ranks without padding rows.
        gap_replication: sum of the largest rank / sum of ceil(fullest node / its ranks).
        gap_layout: sum of the fullest node / sum of the least that any layout allows.
        gap_total: sum of the largest rank / sum of ceil(total / G); 1 is optimal.
        replicas: replica slots in use, over all instances.
        push_bytes: bytes of weights copied to replicas in one forward of all instances; None when
            the model's sizes are unknown.
        fan_out_mean: replicas of an expert that has any.
        fan_out_max: most replicas of one expert in one instance.
        local_rows: rows whose source rank executes them; None without loads.
        nvlink_rows: rows that stay in the node of their source.
        rdma_rows: rows that leave the node of their source.
        worst_rank_rows: most rows of a rank in an instance.
        worst_rank_rows_padded: the same with every slot rounded up to `block_rows`.
        block_rows: rows of a tile.
        moved_experts: experts whose home rank changes.
        moved_experts_across_nodes: those that leave their node.
        migration_bytes: weights, master weights and moments that move; None as for `push_bytes`.
        planner_ms: time that planning took.
        hash: of the plan.
        static_copies: static slots in use, over all layers.
        static_refreshes: times that all static copies get their weights, once an optimizer step of
            each pass; None without loads.
        static_push_bytes: bytes of weights copied to static slots in one optimizer step of a pass;
            None as for `push_bytes`.
        static_return_bytes: bytes of fp32 gradients that go home from static slots in one optimizer
            step; None as for `push_bytes`.
        static_memory_bytes: that static slots take on a rank: weights and fp32 sums of gradients of
            every layer, fp32 gradients of one; None as for `push_bytes`.

    Example:
        >>> names = [field.name for field in fields(PlanReport)]
        >>> names[3:6]
        ['imbalance_mean', 'imbalance_p99', 'imbalance_max']
    """

    strategy: str
    cost: str
    num_instances: int
    imbalance_mean: float
    imbalance_p99: float
    imbalance_max: float
    imbalance_node_mean: float
    imbalance_node_p99: float
    imbalance_node_max: float
    imbalance_routed_mean: float
    imbalance_routed_p99: float
    imbalance_routed_max: float
    gap_replication: float
    gap_layout: float
    gap_total: float
    replicas: int
    push_bytes: int | None
    fan_out_mean: float
    fan_out_max: int
    local_rows: int | None
    nvlink_rows: int | None
    rdma_rows: int | None
    worst_rank_rows: int
    worst_rank_rows_padded: int
    block_rows: int
    moved_experts: int
    moved_experts_across_nodes: int
    migration_bytes: int | None
    planner_ms: float
    hash: str
    static_copies: int = 0
    static_refreshes: int | None = 0
    static_push_bytes: int | None = 0
    static_return_bytes: int | None = 0
    static_memory_bytes: int | None = 0

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON and loggers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanReport:
        """The inverse of `as_dict`, for values of untrusted origin.

        Raises:
            TypeError: a figure is missing or unknown.
            PlanError: a figure of another type, or one that is not finite.
        """
        report = cls(**values)
        for each in fields(cls):
            value = getattr(report, each.name)
            kinds = [_KINDS[kind] for kind in str(each.type).split(" | ")]
            if type(value) not in kinds and not (float in kinds and type(value) is int):
                raise PlanError(f"report.{each.name}: need {each.type}, got {describe(value)}")
            if isinstance(value, float) and not math.isfinite(value):
                raise PlanError(f"report.{each.name}: need a finite number, got {value}")
        return report


def build_report(plan: StepPlan) -> PlanReport:
    """Computes all figures of a plan, except those that it has from its file.

    Args:
        plan: a `StepPlan`; `plan.stored_figures` are taken from `plan.stored_report`.
    """
    made = _compute(plan)
    stored = {name: getattr(plan.stored_report, name) for name in plan.stored_figures}
    return replace(made, **stored)


def _compute(plan: StepPlan) -> PlanReport:
    uses = [PassFigures(plan, name, one) for name, one in plan.passes.items()]
    rank_rows = np.concatenate([use.rank_rows_QG for use in uses])
    routed = np.concatenate([use.routed_rank_rows_QG for use in uses])
    totals = np.concatenate([use.totals_QE for use in uses])
    fan_out = np.concatenate([use.fan_out_QE.reshape(-1) for use in uses])
    keep = rank_rows.sum(1) > 0
    rank_rows, routed, totals = rank_rows[keep], routed[keep], totals[keep]
    sizes = np.asarray(plan.topology.node_sizes)
    node_rows = np.zeros((len(rank_rows), len(sizes)), np.int64)
    np.add.at(node_rows.T, plan.topology.rank_to_node_G, rank_rows.T)
    replicas = int(fan_out.sum())
    traffic = _traffic(plan)
    moved, across, moved_bytes = _moves(plan)
    static = _static(plan)
    return PlanReport(
        plan.strategy,
        plan.config.cost,
        int(keep.sum()),
        *imbalance_figures(rank_rows),
        *imbalance_figures(node_rows / sizes, sizes),
        *imbalance_figures(routed),
        *_gaps(plan, rank_rows, node_rows, totals),
        replicas=replicas,
        push_bytes=_times(replicas, plan.shape.expert_bytes),
        fan_out_mean=float(fan_out[fan_out > 0].mean()) if replicas else 0.0,
        fan_out_max=int(fan_out.max(initial=0)),
        local_rows=traffic[0],
        nvlink_rows=traffic[1],
        rdma_rows=traffic[2],
        worst_rank_rows=int(rank_rows.max(initial=0)),
        worst_rank_rows_padded=max(use.worst_padded for use in uses),
        block_rows=BLOCK_ROWS,
        moved_experts=moved,
        moved_experts_across_nodes=across,
        migration_bytes=moved_bytes,
        planner_ms=plan.planner_ms,
        hash=plan.hash,
        static_copies=static[0],
        static_refreshes=static[1],
        static_push_bytes=static[2],
        static_return_bytes=static[3],
        static_memory_bytes=static[4],
    )


def _static(plan: StepPlan) -> tuple[int, int | None, int | None, int | None, int | None]:
    """Static copies, what keeping them equal to their homes costs, and their memory on a rank."""
    copies = int((plan.static_slot_expert_LGX >= 0).sum())
    layers, _, slots = plan.static_slot_expert_LGX.shape
    weight_bytes = plan.shape.expert_bytes
    refreshes = None
    if copies == 0:
        refreshes = 0
    elif set(plan.loads) == set(plan.passes):
        refreshes = sum(int(plan.static_refresh_M(name).sum()) for name in plan.passes)
    if weight_bytes is None:
        unknown = None if copies else 0
        return copies, refreshes, unknown, unknown, None if slots else 0
    gradient_bytes = weight_bytes // plan.shape.item_bytes * 4
    memory = slots * (layers * (weight_bytes + gradient_bytes) + gradient_bytes)
    return copies, refreshes, copies * weight_bytes, copies * gradient_bytes, memory


class PassFigures:
    """Arrays of one pass over its Q = M * L instances.

    Args:
        plan: holds the pass.
        name: of the pass.
        one: the pass.
    """

    def __init__(self, plan: StepPlan, name: str, one: PassPlan) -> None:
        rows = one.slot_rows_MLGn.reshape(-1, *one.slot_rows_MLGn.shape[2:])
        num_uses, num_experts = len(rows), plan.shape.num_experts
        loads = plan.loads.get(name)
        experts = pass_slot_experts(plan, one).reshape(rows.shape)
        cells = (np.arange(num_uses)[:, None, None] * num_experts + experts)[experts >= 0]
        if loads is None:
            totals = np.bincount(cells, rows[experts >= 0], minlength=num_uses * num_experts)
            self.totals_QE = totals.reshape(num_uses, num_experts).astype(np.int64)
        else:
            self.totals_QE = loads.totals_MLE.reshape(num_uses, num_experts)
        self.rank_rows_QG = rows.sum(2)
        self.routed_rank_rows_QG: npt.NDArray[Any] = self.rank_rows_QG
        if loads is not None and loads.padding_MLGE is not None:
            routed = loads.routed_totals_MLE.reshape(num_uses, num_experts)
            share = routed / np.maximum(self.totals_QE, 1)
            held = np.maximum(experts, 0).reshape(num_uses, -1)
            scaled = rows * np.take_along_axis(share, held, 1).reshape(rows.shape)
            self.routed_rank_rows_QG = scaled.sum(2)
        replicas = one.replica_slot_expert_MLGS.reshape(num_uses, -1)
        use, slot = np.nonzero(replicas >= 0)
        copies = use * num_experts + replicas[use, slot]
        self.fan_out_QE = np.bincount(copies, minlength=num_uses * num_experts)
        padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
        self.worst_padded = int(padded.sum(2).max(initial=0))


def imbalance_figures(
    rows: npt.NDArray[Any], weight: npt.NDArray[Any] | None = None
) -> tuple[float, float, float]:
    """Mean, p99 and max of max / mean along the last axis; means weighted by `weight`."""
    mean = np.average(rows, axis=1, weights=weight) if len(rows) else np.zeros(0)
    rows, mean = rows[mean > 0], mean[mean > 0]
    if len(rows) == 0:
        return 1.0, 1.0, 1.0
    single = rows.max(1) / mean
    total = float(rows.max(1).sum() / mean.sum())
    return total, float(np.quantile(single, 0.99)), float(single.max())


def _gaps(
    plan: StepPlan, rank_rows: Int64Array, node_rows: Int64Array, totals: Int64Array
) -> tuple[float, float, float]:
    """gap_replication, gap_layout, gap_total."""
    if len(rank_rows) == 0:
        return 1.0, 1.0, 1.0
    sizes = np.asarray(plan.topology.node_sizes)
    largest = rank_rows.max(1).sum()
    by_node = (-(-node_rows // sizes)).max(1).sum()
    by_rank = (-(-totals.sum(1) // plan.topology.num_ranks)).sum()
    fullest = (node_rows / sizes).max(1).sum()
    return (
        float(largest / by_node),
        float(fullest / _least_fullest_node(plan, totals).sum()),
        float(largest / by_rank),
    )


def _least_fullest_node(plan: StepPlan, totals: Int64Array) -> npt.NDArray[np.float64]:
    """Bound on the fullest node, in rows a rank of the node.

    Its share of the total, or the largest expert with the smallest company that the largest node
    can have; with static copies an expert need not stay on one node.
    """
    sizes = plan.topology.node_sizes
    width = max(sizes)
    home_slots = plan.layouts[0].slots_per_rank
    fillers = plan.topology.num_ranks * home_slots - plan.shape.num_experts
    company = width * home_slots - min(width, fillers) - 1
    ordered = np.sort(totals, axis=1)
    crowded = ordered[:, -1] + ordered[:, : max(company, 0)].sum(1)
    if len(set(sizes)) == 1:
        even = -(-totals.sum(1) // len(sizes))
    else:
        even = totals.sum(1) * width / plan.topology.num_ranks
    if plan.static_slot_expert_LGX.size:
        crowded = np.zeros_like(crowded)
    bound: npt.NDArray[np.float64] = np.maximum(even, crowded) / width
    return bound


def _traffic(plan: StepPlan) -> tuple[int | None, int | None, int | None]:
    """Rows executed at their source, inside its node, and elsewhere."""
    if not plan.is_executable or set(plan.loads) != set(plan.passes):
        return None, None, None
    sums = np.zeros(3, np.int64)
    for name, one in plan.passes.items():
        sums += native.planner().count_traffic(
            plan.loads[name].rows_MLGE,
            pass_slot_experts(plan, one),
            one.slot_rows_MLGn,
            plan.topology.rank_to_node_G,
            plan.topology.rank_to_rail_G,
            plan.config.num_threads,
        )
    return int(sums[0]), int(sums[1]), int(sums[2])


def _moves(plan: StepPlan) -> tuple[int, int, int | None]:
    """Experts that move, those that leave their node, bytes."""
    node = plan.topology.rank_to_node_G
    moved = across = 0
    for old, new in zip(plan.base_layouts, plan.layouts, strict=True):
        experts = new.moved_experts(old)
        moved += len(experts)
        across += int((node[old.home_rank_E[experts]] != node[new.home_rank_E[experts]]).sum())
    weight_bytes, item = plan.shape.expert_bytes, plan.shape.item_bytes
    state_bytes = None if weight_bytes is None else weight_bytes // item * (item + OPTIMIZER_BYTES)
    return moved, across, _times(moved, state_bytes)


def _times(count: int, size: int | None) -> int | None:
    return None if size is None else count * size
