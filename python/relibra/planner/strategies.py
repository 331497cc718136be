"""`plan_step`, and the table of strategies: one signature for all."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING

from relibra.plan import StepPlan
from relibra.planner import balance, baselines, eplb
from relibra.planner.problem import make_problem
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relibra.layout import ExpertLayout
    from relibra.load_matrix import LoadMatrix
    from relibra.plan_config import PlannerConfig
    from relibra.planner.outcome import Outcome
    from relibra.planner.problem import Problem
    from relibra.shape import ModelShape
    from relibra.topology import Topology

STRATEGIES: Mapping[str, Callable[[Problem], Outcome]] = MappingProxyType(
    {
        "none": baselines.plan_none,
        "lpt": baselines.plan_lpt,
        "eplb_oracle": eplb.plan_eplb_oracle,
        "reorder_only": balance.plan_reorder_only,
        "replicate_only": balance.plan_replicate_only,
        "relibra": balance.plan_relibra,
        "ideal": baselines.plan_ideal,
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
    if strategy not in STRATEGIES:
        raise PlanError(f"strategy: need one of {', '.join(STRATEGIES)}, got {strategy!r}")
    problem = make_problem(loads, topology, model, layout, config)
    start = time.perf_counter()
    outcome = STRATEGIES[strategy](problem)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    return StepPlan(
        topology=topology,
        shape=model,
        layouts=outcome.layouts,
        passes={name: outcome.passes[problem.same_as[name]] for name in problem.loads},
        loads=problem.loads,
        base_layouts=problem.base_layouts,
        strategy=strategy,
        config=problem.config,
        is_executable=outcome.is_executable,
        planner_ms=elapsed_ms,
    )
