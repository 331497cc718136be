"""What strategies would be worth on a cluster: plans, costed by `relibra.cost_model`.

Every number is simulated, except the planner's time, which is measured where this runs. Gross
leaves out what balancing costs; net has pushes, replica gradients in memory and on the links, moves
of experts, refreshes of static copies, and planning, all of it at full length.

Letters: M micro-batches, L MoE layers, G ranks, n slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from relibra.cost_model import CostModel
from relibra.layout import ExpertLayout
from relibra.pass_cost import (
    MemoryForecast,
    PassCost,
    executed_rows,
    memory_forecast,
    move_seconds,
    pass_cost,
    static_seconds,
)
from relibra.plan_config import PlannerConfig
from relibra.planner import STRATEGIES, plan_step
from relibra.shape import ModelShape
from relibra.token_copies import plan_copies
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from relibra.layout import Int64Array
    from relibra.plan import StepPlan
    from relibra.presets import Hardware, ModelPreset
    from relibra.simulate_input import SimulationInput, Source
    from relibra.token_copies import FloatArray

_PASS = "train"
OVERLAPS = (0.0, 0.5, 0.8, 1.0)
# Strategies that every simulation plans: what the others are compared with.
REFERENCES = ("none", "eplb_oracle", "ideal")


@dataclass(frozen=True)
class SimulateSettings:
    """Choices of a simulation.

    Args:
        model: for D, F and the dense part.
        hardware: rates.
        ep: numbers of ranks G to try.
        ranks_per_node: None = the hardware's domain; a smaller G is one node.
        strategies: names; None = all that the planner has.
        overlaps: of RDMA and NVLink, in the order of the report; the first table uses `overlap`.
        overlap: of the first table.
        reroute: percentages of rows that do not follow the plan.
        dispatch: `flat` or `two_hop`.
        combine: `reduced` or `exact`.
        recompute: `none` or `full`.
        planner: settings of the planner.

    Raises:
        PlanError: a value out of range, or an unknown strategy.
    """

    model: ModelPreset
    hardware: Hardware
    ep: tuple[int, ...] = (8, 16, 32)
    ranks_per_node: int | None = None
    strategies: tuple[str, ...] | None = None
    overlaps: tuple[float, ...] = OVERLAPS
    overlap: float = 0.5
    reroute: tuple[float, ...] = ()
    dispatch: str = "flat"
    combine: str = "reduced"
    recompute: str = "none"
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def __post_init__(self) -> None:
        """Checks what no other class checks."""
        if not self.ep or min(self.ep) < 1:
            raise PlanError(f"ep: need numbers of ranks of at least 1, got {list(self.ep)}")
        for name in self.strategies or ():
            if name not in STRATEGIES:
                raise PlanError(f"strategy: need one of {', '.join(STRATEGIES)}, got {name!r}")
        for share in self.reroute:
            if not 0 <= share <= 100:
                raise PlanError(f"reroute: need percentages 0..100, got {share!r}")
        for value in (*self.overlaps, self.overlap):
            if not 0 <= value <= 1:
                raise PlanError(f"overlap: need 0..1, got {value!r}")
        for ranks in self.ep:
            self.topology(ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """Strategies to plan, the references included, in the planner's order."""
        asked = STRATEGIES if self.strategies is None else {*self.strategies, *REFERENCES}
        return tuple(name for name in STRATEGIES if name in asked)

    def topology(self, num_ranks: int) -> Topology:
        """Nodes of a group.

        Args:
            num_ranks: G.

        Raises:
            PlanError: G is no multiple of the ranks of a node.
        """
        width = self.ranks_per_node or self.hardware.domain_ranks
        if num_ranks <= width:
            return Topology(1, num_ranks)
        if num_ranks % width:
            raise PlanError(f"ep: need a multiple of {width} ranks a node, got {num_ranks}")
        return Topology(num_ranks // width, width)

    def cost(self, num_ranks: int, shape: ModelShape) -> CostModel:
        """The cost model for a group.

        Args:
            num_ranks: G.
            shape: of the loads.
        """
        return CostModel(
            self.hardware,
            shape,
            self.topology(num_ranks),
            self.model,
            dispatch=self.dispatch,
            combine=self.combine,
            overlap=self.overlap,
            recompute=self.recompute,
        )


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
        move_s: moving experts, once.
        static_s: static copies, all optimizer steps.
    """

    strategy: str
    plan: StepPlan
    cost: PassCost
    step_s: dict[tuple[float, bool, str], float]
    rerouted: dict[float, tuple[float, float, int]]
    memory: MemoryForecast
    move_s: float
    static_s: float

    @property
    def planner_s(self) -> float:
        """Measured seconds of planning."""
        return self.plan.planner_ms / 1e3


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
        return self.results[to].step_s[key] / self.results[strategy].step_s[key]


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
            batch = source.make(num_ranks, order)
            results, left_out = {}, {}
            for name in settings.names:
                if progress is not None:
                    progress(f"EP {num_ranks} {order} {name}")
                try:
                    results[name] = _simulate_one(batch, settings, name)
                except PlanError as error:
                    if batch.previous is not None or not str(error).startswith("previous:"):
                        raise
                    left_out[name] = str(error)
            batches.append(BatchResult(num_ranks, order, results, settings.overlap, left_out))
    return batches


def _simulate_one(
    batch: SimulationInput, settings: SimulateSettings, strategy: str
) -> StrategyResult:
    loads, model = batch.loads, settings.model
    shape = ModelShape(
        loads.num_experts,
        batch.top_k,
        range(loads.num_layers),
        model.hidden_size,
        model.expert_size,
    )
    cost = settings.cost(loads.num_ranks, shape)
    in_time = settings.planner.cost == "time"
    contiguous = ExpertLayout.identity(loads.num_experts, loads.num_ranks)
    plan = plan_step(
        {_PASS: loads},
        cost.topology,
        model=shape,
        layout=(contiguous,) * loads.num_layers if in_time else None,  # so moves have a price
        config=settings.planner,
        strategy=strategy,
        previous=None if batch.previous is None else {_PASS: batch.previous},
        cost_model=cost if in_time else None,
    )
    copies = plan_copies(plan, _PASS, dispatch=cost.dispatch, tokens=batch.tokens)
    rows_copies = None
    if cost.combine == "exact":
        rows_copies = plan_copies(plan, _PASS, dispatch=cost.dispatch, distinct=False)
    dense_MG = batch.dense_seconds(cost)
    move_s, static_s = move_seconds(plan, _PASS, cost), static_seconds(plan, _PASS, cost)
    extra = move_s + static_s + plan.planner_ms / 1e3

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
                step_s[overlap, net, dense] = one.seconds(net=net, dense=dense) + net * extra
    rerouted = {}
    for share in settings.reroute:
        rows = reroute(plan, _PASS, share / 100)
        worst = int(rows.sum(-1).max(initial=0))
        seconds = at(settings.overlap, rows).seconds() + extra
        rerouted[share] = (seconds, _imbalance(rows.sum(-1)), worst)
    memory = memory_forecast(plan, _PASS, cost, copies)
    return StrategyResult(
        strategy, plan, at(settings.overlap), step_s, rerouted, memory, move_s, static_s
    )


def reroute(plan: StepPlan, pass_: str, share: float) -> Int64Array:
    """Rows of every slot when a share of the rows does not follow the plan.

    The rest keeps its slots. The others choose experts like the whole batch does in that layer, and
    are executed at home: nothing was planned for them. Their all-to-all is taken to be the plan's.

    Args:
        plan: the plan.
        pass_: name of the pass.
        share: 0..1.

    Returns:
        int64 `[M, L, G, n]`, the total of every instance unchanged.

    Example:
        >>> from relibra.load_matrix import LoadMatrix
        >>> loads = {"train": LoadMatrix([[[[8, 0]]], [[[0, 8]]]])}  # M 2, E 2, one rank
        >>> plan = plan_step(loads, Topology(1, 1), model=ModelShape(2, 1, (0,)), strategy="none")
        >>> reroute(plan, "train", 0.5)[0, 0, 0].tolist()[:2]
        [6, 2]
    """
    rows = executed_rows(plan, pass_)
    if share == 0:
        return rows
    total_ML = rows.sum((2, 3))
    if plan.is_executable:
        home_LGH = np.stack([layout.home_slot_expert_GH for layout in plan.layouts])
        popular_LE = plan.loads[pass_].totals_MLE.sum(0).astype(np.float64)
        num_layers = len(home_LGH)
        flat = np.maximum(home_LGH, 0).reshape(num_layers, -1)
        held = np.take_along_axis(popular_LE, flat, 1).reshape(home_LGH.shape)
        wish = np.zeros(rows.shape[1:])
        wish[:, :, : home_LGH.shape[2]] = np.where(home_LGH >= 0, held, 0.0)
    else:
        wish = rows.sum(0).astype(np.float64)
    wish /= np.maximum(wish.sum((1, 2), keepdims=True), 1)
    mixed = (1 - share) * rows + share * total_ML[:, :, None, None] * wish
    return _round(mixed.reshape(*total_ML.shape, -1), total_ML).reshape(rows.shape)


def _round(wanted: FloatArray, total: Int64Array) -> Int64Array:
    """Integers near `wanted` along the last axis with the sums `total`."""
    whole = np.floor(wanted).astype(np.int64)
    rank = np.argsort(np.argsort(whole - wanted, axis=-1, kind="stable"), axis=-1, kind="stable")
    rounded: Int64Array = whole + (rank < (total - whole.sum(-1))[..., None])
    return rounded


def _imbalance(rows_MLG: npt.NDArray[np.number]) -> float:
    """Sum of the fullest ranks / sum of the means."""
    mean = float(rows_MLG.mean(-1).sum())
    return float(rows_MLG.max(-1).sum()) / mean if mean else 1.0


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
