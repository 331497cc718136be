"""`plan_step`, and the table of strategies: one signature for all."""

from __future__ import annotations

import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from relibra.plan import StepPlan
from relibra.planner import balance, baselines, bounds, copy_baselines, eplb, expert_groups
from relibra.planner.problem import make_problem
from relibra_kernels.checks import describe
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from relibra.cost_model import CostModel
    from relibra.layout import ExpertLayout
    from relibra.load_matrix import LoadMatrix
    from relibra.plan_config import PlannerConfig
    from relibra.planner.outcome import Outcome
    from relibra.planner.problem import Problem
    from relibra.shape import ModelShape
    from relibra.token_sample import TokenSample
    from relibra.topology import Topology

STRATEGIES: Mapping[str, Callable[[Problem], Outcome]] = MappingProxyType(
    {
        "none": baselines.plan_none,
        "lpt": baselines.plan_lpt,
        "locality_only": baselines.plan_locality_only,
        "history": copy_baselines.plan_history,
        "donor_only": copy_baselines.plan_donor_only,
        "split_only": copy_baselines.plan_split_only,
        "place_only": copy_baselines.plan_place_only,
        "eplb": partial(eplb.plan_eplb, loads="previous"),
        "eplb_flat": partial(eplb.plan_eplb, loads="previous", flat=True),
        "eplb_oracle": partial(eplb.plan_eplb, loads="batch"),
        "eplb_oracle_flat": partial(eplb.plan_eplb, loads="batch", flat=True),
        "eplb_micro_batch": partial(eplb.plan_eplb, loads="micro_batch"),
        "eplb_micro_batch_flat": partial(eplb.plan_eplb, loads="micro_batch", flat=True),
        "lplb_like": eplb.plan_lplb_like,
        "reorder_only": expert_groups.plan_reorder_only,
        "replicate_only": balance.plan_replicate_only,
        "relibra": expert_groups.plan_relibra,
        "force_balanced": bounds.plan_force_balanced,
        "node_ideal": bounds.plan_node_ideal,
        "ideal": bounds.plan_ideal,
    }
)


def plan_step(
    loads: Mapping[str, LoadMatrix],
    topology: Topology,
    *,
    model: ModelShape,
    layout: Sequence[ExpertLayout] | None = None,
    config: PlannerConfig | None = None,
    strategy: str = "relibra",
    previous: Mapping[str, LoadMatrix] | None = None,
    cost_model: CostModel | None = None,
    token_sample: TokenSample | npt.ArrayLike | None = None,
) -> StepPlan:
    """Plans one rollout batch: a layout a layer, and replicas and row quotas for every micro-batch.

    Source: ReLibra, section 4 (expert reordering between batches, expert replication inside them).
    Deterministic: equal arguments give equal plans on every rank, for any number of threads, and no
    global random state is read.

    Args:
        loads: gathered `LoadMatrix` by pass name; all passes share the layouts.
        topology: nodes and rails of the G ranks.
        model: E, K and the MoE layers; D, F and dtype only for the bytes in the report.
        layout: one `ExpertLayout` a layer that the batch starts from (`runtime.layout`); None for
            experts in order.
        config: settings; None for the defaults.
        strategy: one of `STRATEGIES`.
        previous: loads of the batch before, by pass, for the baselines that plan on history:
            `eplb` and `eplb_flat` need them, `history` uses them for the first micro-batch.
        cost_model: for `cost="time"`; None = that of `config.hardware`, without a dense part that
            hides pushes.
        token_sample: for `relibra` on several nodes: some tokens of the batch, the same on all
            ranks, or their ids `[T, L, K]`. Experts that they choose together are then kept on one
            node, with loads within `config.grouping_slack` of the plan without.

    Returns:
        The checked plan; `plan.report` has the figures.

    Raises:
        PlanError: loads, topology, model and layout do not fit together, loads of one rank only,
            or an unknown strategy.
        TypeError: an argument of the wrong class.

    Example:
        >>> from relibra.load_matrix import LoadMatrix
        >>> from relibra.shape import ModelShape
        >>> from relibra.topology import Topology
        >>> loads = LoadMatrix([[[[90, 10, 50, 50], [0, 0, 0, 0]]]])
        >>> plan = plan_step({"train": loads}, Topology(1, 2), model=ModelShape(4, 1, (0,)),
        ...                  strategy="none")
        >>> plan.replica_plan("train", 0, 0).rank_rows_G.tolist()
        [100, 100]
    """
    check_strategy(strategy)
    problem = make_problem(
        loads, topology, model, layout, config, previous, cost_model, token_sample
    )
    start = time.perf_counter()
    outcome = STRATEGIES[strategy](problem)
    return finish_plan(problem, outcome, strategy, (time.perf_counter() - start) * 1e3)


def check_strategy(strategy: str) -> None:
    """Raises TypeError for what is no text, PlanError for an unknown strategy."""
    if not isinstance(strategy, str):
        raise TypeError(f"strategy: need a name, got {describe(strategy)}")
    if strategy not in STRATEGIES:
        raise PlanError(f"strategy: need one of {', '.join(STRATEGIES)}, got {strategy!r}")


def finish_plan(problem: Problem, outcome: Outcome, strategy: str, elapsed_ms: float) -> StepPlan:
    """The checked plan of an outcome."""
    static: Any = outcome.static_LGX
    return StepPlan(
        topology=problem.topology,
        shape=problem.shape,
        layouts=outcome.layouts,
        passes={name: outcome.passes[problem.same_as[name]] for name in problem.loads},
        loads=problem.loads,
        base_layouts=problem.base_layouts,
        strategy=strategy,
        config=problem.config,
        is_executable=outcome.is_executable,
        planner_ms=elapsed_ms,
        report_slots={
            name: outcome.report_slots[problem.same_as[name]]
            for name in problem.loads
            if problem.same_as[name] in outcome.report_slots
        },
        static_slot_expert_LGX=static,
    )
