"""Shares of layers, and outcomes that travel between ranks as bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.load_matrix import LoadMatrix
from relibra.planner import STRATEGIES, PlannerConfig, plan_step
from relibra.planner.outcome import join_layers
from relibra.planner.problem import Problem, make_problem
from relibra.planner.shares import layer_shares, pack_outcome, plan_layers, unpack_outcome
from relibra.planner.strategies import finish_plan
from relibra.shape import ModelShape
from relibra.topology import Topology


def small_problem(config: PlannerConfig, num_layers: int = 4) -> Problem:
    """The first two passes differ only in the last layer, the third is the first again."""
    rng = np.random.default_rng(7)
    rows = rng.poisson(20 * np.exp(rng.normal(size=(1, num_layers, 1, 8))), (3, num_layers, 4, 8))
    other = rows.copy()
    other[:, -1] += 1
    loads = {"logprob": rows, "train": other, "again": rows}
    return make_problem(
        {name: LoadMatrix(one.astype(np.int32)) for name, one in loads.items()},
        Topology(2, 2),
        ModelShape(8, 2, range(num_layers)),
        None,
        config,
        {name: LoadMatrix(one[::-1].astype(np.int32)) for name, one in loads.items()},
    )


@given(st.integers(0, 200), st.integers(1, 200))
def test_shares_are_neighbouring_complete_and_equal(num_layers: int, num_planners: int) -> None:
    shares = layer_shares(num_layers, num_planners)
    assert len(shares) == num_planners
    assert [layer for share in shares for layer in share] == list(range(num_layers))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("static_copies", [0, 2])
def test_parts_that_travelled_make_the_plan_of_one_call(strategy: str, static_copies: int) -> None:
    config = PlannerConfig(proposals=200, static_copies=static_copies)
    problem = small_problem(config)
    parts = [
        unpack_outcome(pack_outcome(plan_layers(problem, strategy, share, 1)))
        for share in layer_shares(4, 3)
    ]
    plan = finish_plan(problem, join_layers(parts), strategy, 0.0)
    whole = plan_step(
        problem.loads,
        problem.topology,
        model=problem.shape,
        config=config,
        strategy=strategy,
        previous=problem.previous,
    )
    assert plan.hash == whole.hash
    assert plan.is_executable == whole.is_executable
    figures = plan.report.as_dict() | {"planner_ms": whole.report.planner_ms}
    assert figures == whole.report.as_dict()


def test_settings_change_without_forgetting_which_passes_are_the_same() -> None:
    problem = small_problem(PlannerConfig())
    changed = problem.with_config(replace(problem.config, num_threads=2))
    assert changed.config.num_threads == 2
    part = changed.only_layers(0, 2)  # in which all passes are equal
    assert part.same_as == {"logprob": "logprob", "train": "train", "again": "logprob"}
