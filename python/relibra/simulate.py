"""What strategies would be worth on a cluster: plans, costed by `relibra.cost_model`.

Every number is simulated, except the planner's time, which is measured where this runs. Gross
leaves out what balancing costs; net has pushes, replica gradients in memory and on the links, moves
of experts, refreshes of static copies, and planning, all of it at full length.

Letters: M micro-batches, L MoE layers, G ranks, n slots a rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.pass_cost import MemoryForecast, PassCost, memory_forecast, pass_cost, stage_layers
from relibra.planner import plan_groups, plan_step
from relibra.shape import ModelShape
from relibra.simulate_reroute import reroute, row_imbalance
from relibra.simulate_settings import REFERENCES, SimulateSettings
from relibra.token_copies import plan_copies
from relibra.transfer_cost import move_seconds_L, static_seconds_L
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from relibra.cost_model import CostModel
    from relibra.layout import Int64Array
    from relibra.plan import StepPlan
    from relibra.simulate_input import SimulationInput, Source
    from relibra.token_copies import FloatArray

__all__ = [
    "REFERENCES",
    "BatchResult",
    "SimulateSettings",
    "StrategyResult",
    "fullest_instance",
    "rank_rows",
    "reroute",
    "simulate",
]

_PASS = "train"


@dataclass(frozen=True, eq=False)
class StrategyResult:
    """One strategy on one batch.

    Args:
        strategy: name.
        plan: its plan.
        cost: seconds by part at the overlap of the first table.
        step_s: seconds of the step, keys (overlap, net, dense).
        rerouted: for each percentage seconds (net), imbalance and most rows of a rank.
        memory: forecast of the fullest rank.
        move_s: moving experts, once, on the pipeline stage that is slowest.
        static_s: static copies, all optimizer steps, on the stage that is slowest.
        planner_s: measured seconds of planning: by the clock, or of the processor where these are
            fewer, so that other work on the machine is not charged to the plan; with pipeline
            stages, a stage's share of them.
    """

    strategy: str
    plan: StepPlan
    cost: PassCost
    step_s: dict[tuple[float, bool, str], float]
    rerouted: dict[float, tuple[float, float, int]]
    memory: MemoryForecast
    move_s: float
    static_s: float
    planner_s: float


@dataclass(frozen=True, eq=False)
class BatchResult:
    """All strategies on one batch.

    Args:
        num_ranks: G.
        order: of the samples.
        results: by strategy.
        overlap: of the first table.
        left_out: strategies that this batch does not allow, with the reason.
    """

    num_ranks: int
    order: str
    results: dict[str, StrategyResult]
    overlap: float
    left_out: dict[str, str]

    def ratio(
        self,
        strategy: str,
        to: str = "none",
        *,
        overlap: float | None = None,
        net: bool = True,
        dense: str = "max",
    ) -> float:
        """Throughput of a strategy / throughput of another one.

        Args:
            strategy: name.
            to: name of the other.
            overlap: None = that of the first table.
            net: with or without what balancing costs.
            dense: `max` with, `mean` without imbalance of the dense part.
        """
        key = (self.overlap if overlap is None else overlap, net, dense)
        return _ratio(self.results[to].step_s[key], self.results[strategy].step_s[key])

    def rerouted_ratio(self, strategy: str, share: float) -> float:
        """Net throughput of a strategy / throughput of `none` when rows do not follow the plan.

        Args:
            strategy: name.
            share: percentage, one of those simulated.
        """
        none, own = (self.results[name].rerouted[share][0] for name in ("none", strategy))
        return _ratio(none, own)


def simulate(
    source: Source,
    settings: SimulateSettings,
    *,
    orders: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[BatchResult]:
    """Plans and costs every strategy for every group size and order.

    Args:
        source: the batch.
        settings: choices.
        orders: None = all that the source has.
        progress: called with a text before each plan.

    Returns:
        One result for each group size and order.

    Raises:
        PlanError, ValueError: a size that does not fit; names it.
    """
    batches = []
    for num_ranks in settings.ep:
        for order in source.orders if orders is None else orders:
            batch = source.make(num_ranks * settings.data_parallel, order)
            results, left_out = {}, {}
            for name in settings.names:
                if progress is not None:
                    progress(f"EP {num_ranks} {order} {name}")
                try:
                    results[name] = _simulate_groups(batch, settings, name)
                except PlanError as error:
                    if batch.previous is not None or not str(error).startswith("previous:"):
                        raise
                    left_out[name] = str(error)
            batches.append(BatchResult(num_ranks, order, results, settings.overlap, left_out))
    return batches


def _simulate_groups(
    batch: SimulationInput, settings: SimulateSettings, strategy: str
) -> StrategyResult:
    """All EP groups; at the end of the step the others wait for the slowest."""
    groups = batch.groups(settings.data_parallel)
    loads, model = groups[0].loads, settings.model
    stages, layers = settings.pipeline_stages, loads.num_layers
    if stages > layers:
        raise PlanError(f"pipeline_stages: need at most {layers} simulated layers, got {stages}")
    shape = ModelShape(
        loads.num_experts, batch.top_k, range(layers), model.hidden_size, model.expert_size
    )
    cost = settings.cost(loads.num_ranks, shape)
    start = time.process_time()
    plans = _plans(groups, settings, strategy, shape, cost)
    planner_s = min(time.process_time() - start, max(one.planner_ms for one in plans) / 1e3)
    results = [
        _simulate_one(group, settings, plan, cost, planner_s / stages)
        for group, plan in zip(groups, plans, strict=True)
    ]
    slowest = max(results, key=lambda one: one.step_s[settings.overlap, True, "max"])
    return replace(
        slowest,
        step_s={key: max(one.step_s[key] for one in results) for key in slowest.step_s},
        rerouted={share: max(one.rerouted[share] for one in results) for share in settings.reroute},
        memory=max((one.memory for one in results), key=lambda memory: memory.total_bytes),
    )


def _plans(
    groups: Sequence[SimulationInput],
    settings: SimulateSettings,
    strategy: str,
    shape: ModelShape,
    cost: CostModel,
) -> Sequence[StepPlan]:
    """Plans of the EP groups; those of `relibra` share their layouts."""
    in_time = settings.planner.cost == "time"
    contiguous = ExpertLayout.identity(shape.num_experts, cost.topology.num_ranks)
    common: dict[str, Any] = {
        "model": shape,
        "layout": (contiguous,) * shape.num_layers if in_time else None,  # so moves have a price
        "config": settings.planner,
        "cost_model": cost if in_time else None,
    }
    if strategy == "relibra" and len(groups) > 1:
        return plan_groups([{_PASS: group.loads} for group in groups], cost.topology, **common)
    return [
        plan_step(
            {_PASS: group.loads},
            cost.topology,
            strategy=strategy,
            previous=None if group.previous is None else {_PASS: group.previous},
            **common,
        )
        for group in groups
    ]


def _simulate_one(
    batch: SimulationInput,
    settings: SimulateSettings,
    plan: StepPlan,
    cost: CostModel,
    planner_s: float,
) -> StrategyResult:
    copies = plan_copies(plan, _PASS, dispatch=cost.dispatch, tokens=batch.tokens)
    rows_copies = None
    if cost.combine == "exact":
        rows_copies = plan_copies(plan, _PASS, dispatch=cost.dispatch, distinct=False)
    dense_MG = batch.dense_seconds(cost)
    stages = settings.pipeline_stages
    move_s = _slowest_stage(move_seconds_L(plan, _PASS, cost), stages)
    static_s = _slowest_stage(static_seconds_L(plan, _PASS, cost), stages)
    extra = move_s + static_s + planner_s + batch.compose_s

    def at(overlap: float, rows: Int64Array | None = None) -> PassCost:
        return pass_cost(
            plan,
            _PASS,
            cost.with_values(overlap=overlap),
            copies,
            dense_MG=dense_MG,
            rows_copies=rows_copies,
            slot_rows_MLGn=rows,
        )

    step_s = {}
    for overlap in dict.fromkeys((*settings.overlaps, settings.overlap)):
        one = at(overlap)
        for net in (False, True):
            for dense in ("max", "mean"):
                seconds = one.seconds(net=net, dense=dense, stages=stages)
                step_s[overlap, net, dense] = seconds + net * extra
    rerouted = {}
    for share in settings.reroute:
        rows = reroute(plan, _PASS, share / 100)
        worst = int(rows.sum(-1).max(initial=0))
        seconds = at(settings.overlap, rows).seconds(stages=stages) + extra
        rerouted[share] = (seconds, row_imbalance(rows.sum(-1)), worst)
    return StrategyResult(
        plan.strategy,
        plan,
        at(settings.overlap),
        step_s,
        rerouted,
        memory_forecast(plan, _PASS, cost, copies, num_layers=settings.layers_of_stage),
        move_s,
        static_s,
        planner_s,
    )


def _ratio(seconds: float, own_seconds: float) -> float:
    """1 where there is nothing to do."""
    return seconds / own_seconds if own_seconds else 1.0


def _slowest_stage(seconds_L: FloatArray, stages: int) -> float:
    return max(float(seconds_L[one].sum()) for one in stage_layers(len(seconds_L), stages))


def fullest_instance(batch: BatchResult) -> tuple[int, int]:
    """Micro-batch and layer whose fullest rank has most rows without balancing.

    Args:
        batch: with the strategy `none`.
    """
    rows = batch.results["none"].plan.passes[_PASS].slot_rows_MLGn.sum(3).max(2)
    micro_batch, layer = np.unravel_index(int(rows.argmax()), rows.shape)
    return int(micro_batch), int(layer)


def rank_rows(batch: BatchResult, strategy: str, micro_batch: int, layer: int) -> list[int]:
    """Rows of every rank in one instance.

    Args:
        batch: the results.
        strategy: name.
        micro_batch: m.
        layer: index of the MoE layer.
    """
    rows = batch.results[strategy].plan.passes[_PASS].slot_rows_MLGn[micro_batch, layer]
    return [int(value) for value in rows.sum(-1)]
