"""One layout for several EP groups (expert-data parallelism).

The groups hold copies of the same experts and wait for each other at the end of a step, so the
slowest counts. Their micro-batches become columns of one problem, weighted by each group's share of
the slowest one; a few rounds move weight to the groups that are behind.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relibra.planner.expert_groups import plan_relibra
from relibra.planner.objective import objective_of
from relibra.planner.problem import make_problem
from relibra.planner.strategies import finish_plan
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.cost_model import CostModel
    from relibra.layout import ExpertLayout
    from relibra.load_matrix import LoadMatrix
    from relibra.plan import StepPlan
    from relibra.plan_config import PlannerConfig
    from relibra.planner.outcome import Outcome
    from relibra.planner.problem import Problem
    from relibra.shape import ModelShape
    from relibra.topology import Topology

# Weight of the slowest group; the others get their share of it.
_FULL_WEIGHT = 64
# Exponent of the share that a round multiplies weights by: a group 1 % behind gains 10 %.
_SHARPNESS = 10
_MOST_ROUNDS = 1 << 10


def plan_groups(
    loads: Sequence[Mapping[str, LoadMatrix]],
    topology: Topology,
    *,
    model: ModelShape,
    layout: Sequence[ExpertLayout] | None = None,
    config: PlannerConfig | None = None,
    cost_model: CostModel | None = None,
    rounds: int = 3,
) -> tuple[StepPlan, ...]:
    """Plans the EP groups of one pipeline stage together: equal layouts, replicas of each its own.

    Args:
        loads: for each group its loads by pass name; all groups have the same passes.
        topology: of every group.
        model: as in `plan_step`.
        layout: as in `plan_step`; all groups start from it.
        config: as in `plan_step`.
        cost_model: as in `plan_step`.
        rounds: of weighting; the first weighs all groups alike, and the round whose slowest group
            is fastest is kept.

    Returns:
        One plan a group; their layouts are equal.

    Raises:
        PlanError, TypeError: as `plan_step`, or groups with different passes.

    Example:
        >>> from relibra.load_matrix import LoadMatrix
        >>> from relibra.shape import ModelShape
        >>> from relibra.topology import Topology
        >>> groups = [{"train": LoadMatrix([[[[9, 9, 1, 1], [0, 0, 0, 0]]]])},
        ...           {"train": LoadMatrix([[[[1, 9, 9, 1], [0, 0, 0, 0]]]])}]
        >>> plans = plan_groups(groups, Topology(2, 1), model=ModelShape(4, 1, (0,)))
        >>> [plan.report.imbalance_mean for plan in plans], plans[0].layouts == plans[1].layouts
        ([1.0, 1.0], True)
    """
    check_int("rounds", rounds, minimum=1, maximum=_MOST_ROUNDS)
    _check_groups(loads)
    alone = [make_problem(one, topology, model, layout, config, None, cost_model) for one in loads]
    start = time.perf_counter()
    weight = [_FULL_WEIGHT] * len(loads)
    best: tuple[int, Outcome] | None = None
    for _ in range(rounds if len(loads) > 1 else 1):
        joined = _joined(alone, weight)
        try:
            outcome = plan_relibra(joined)
        except PlanError as error:
            raise PlanError(_with_groups(str(error), alone)) from None
        # Equal totals are planned once, under the first name that has them.
        passes = {name: outcome.passes[joined.same_as[name]] for name in joined.loads}
        outcome = replace(outcome, passes=passes)
        cost = [_objective(one, outcome, index) for index, one in enumerate(alone)]
        if best is None or max(cost) < best[0]:
            best = (max(cost), outcome)
        if max(cost) == 0:
            break
        share = [(one / max(cost)) ** _SHARPNESS for one in cost]
        raw = [old * part for old, part in zip(weight, share, strict=True)]
        weight = [max(1, round(_FULL_WEIGHT * one / max(raw))) for one in raw]
    assert best is not None
    elapsed_ms = (time.perf_counter() - start) * 1e3
    return tuple(
        finish_plan(one, _part(one, best[1], index), "relibra", elapsed_ms)
        for index, one in enumerate(alone)
    )


def _check_groups(loads: object) -> None:
    """Loads by pass for each group, the same passes in all."""
    if not isinstance(loads, Sequence):
        raise TypeError(f"loads: need a sequence of EP groups, got {type(loads).__name__}")
    if not loads:
        raise PlanError("loads: need at least one EP group, got none")
    for index, one in enumerate(loads):
        if not isinstance(one, Mapping):
            raise TypeError(f"loads[{index}]: need loads by pass, got {type(one).__name__}")
        if list(one) != list(loads[0]):
            raise PlanError(
                f"loads[{index}]: need the passes {list(loads[0])} of group 0, got {list(one)}"
            )


def _with_groups(text: str, alone: Sequence[Problem]) -> str:
    """A message about the joined problem, with the names that the caller knows."""
    for index, problem in enumerate(alone):
        for name in problem.loads:
            text = text.replace(repr(_key(name, index)), f"{name!r} of group {index}")
    return text


def _key(name: str, group: int) -> str:
    """Name of a group's pass in the joined problem; the names of passes are short."""
    return f"{name[:40]}-{zlib.crc32(name.encode()):x}.{group}"


def _joined(alone: Sequence[Problem], weight: Sequence[int]) -> Problem:
    """All groups as one problem: a pass for each pass of each group."""
    loads, groups = {}, {}
    for index, problem in enumerate(alone):
        for name, matrix in problem.loads.items():
            loads[_key(name, index)] = matrix
            groups[_key(name, index)] = (name, weight[index])
    return replace(alone[0], loads=loads, groups=groups)


def _part(problem: Problem, joined: Outcome, group: int) -> Outcome:
    """What a joined outcome says for one group."""
    passes = {name: joined.passes[_key(name, group)] for name in problem.distinct_passes}
    return replace(joined, passes=passes)


def _objective(problem: Problem, joined: Outcome, group: int) -> int:
    """Objective of a group, all layers: forward-only rows of the fullest rank, or picoseconds."""
    part = _part(problem, joined, group)
    replica = np.concatenate([one.replica_slot_expert_MLGS for one in part.passes.values()])
    rows = np.concatenate([one.slot_rows_MLGn for one in part.passes.values()])
    base = np.stack([layout.home_slot_expert_GH for layout in part.layouts])
    if joined.static_LGX is not None:
        base = np.concatenate([base, joined.static_LGX], axis=2)
    unit = problem.weight_unit if problem.cost_model is None else 1
    return unit * int(objective_of(problem, base, replica, rows, rows.sum(3).max(2), None).sum())
