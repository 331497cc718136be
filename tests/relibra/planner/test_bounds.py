"""Bounds, and the router that is forced to be balanced."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.bounds import force_balanced_ids
from relibra.shape import ModelShape
from relibra.topology import Topology


def make_plan(rows: np.ndarray, topology: Topology, strategy: str) -> StepPlan:
    return plan_step(
        {"train": LoadMatrix(rows)},
        topology,
        model=ModelShape(rows.shape[3], 2, range(rows.shape[1])),
        config=PlannerConfig(proposals=1000),
        strategy=strategy,
    )


def loads(plan: StepPlan) -> np.ndarray:
    return plan.passes["train"].slot_rows_MLGn.sum(3)


def test_plan_11_ranks_do_not_share_a_prefix() -> None:
    """64 ranks x 16 tokens x 8 choices over 256 experts: 128 rows for every rank."""
    per_rank = [force_balanced_ids(16, 8, 256, first_token=16 * rank, seed=3) for rank in range(64)]
    rows = np.bincount(np.concatenate(per_rank).reshape(-1), minlength=256).reshape(64, 4).sum(1)
    assert (rows == 128).all()
    shared = force_balanced_ids(16, 8, 256, seed=3)
    same = 64 * np.bincount(shared.reshape(-1), minlength=256).reshape(64, 4).sum(1)
    assert same.max() > 128  # what a shared prefix gives
    spread = [len(np.unique(ids // 4)) for ids in np.concatenate(per_rank)]
    assert np.mean(spread) > 6  # choices of a token are not neighbours


@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 50), st.integers(0, 30))
def test_forced_ids_are_distinct_balanced_and_one_line(
    experts: int, top_k: int, tokens: int, first: int
) -> None:
    top_k = min(top_k, experts)
    ids = force_balanced_ids(tokens, top_k, experts, first_token=first)
    assert ids.shape == (tokens, top_k)
    assert all(len(set(token)) == top_k for token in ids.tolist())
    line = force_balanced_ids(first + tokens, top_k, experts)
    assert np.array_equal(line[first:], ids)
    period = experts // math.gcd(experts, top_k)  # tokens until every expert has the same
    whole = force_balanced_ids(3 * period, top_k, experts)
    assert len(set(np.bincount(whole.reshape(-1), minlength=experts))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 9, 8), "top_k: need at most 8 experts, got 9"),
        ((-1, 2, 8), "num_tokens: "),
        ((4, 2, 0), "num_experts: "),
    ],
)
def test_wrong_numbers_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        force_balanced_ids(*arguments)


def test_plan_15_ideal_and_the_forced_router_beside_the_others() -> None:
    rng = np.random.default_rng(0)
    rows = rng.poisson(50 * np.exp(rng.normal(size=(3, 2, 1, 16))), (3, 2, 8, 16)).astype(np.int32)
    total = rows.sum((2, 3))
    ideal = make_plan(rows, Topology(2, 4), "ideal")
    assert (loads(ideal) == -(-total // 8)[:, :, None]).all()
    assert ideal.report.gap_total == 1.0
    forced = loads(make_plan(rows, Topology(2, 4), "force_balanced"))
    assert np.array_equal(forced.sum(2), total)
    share = (total // 16)[:, :, None]
    assert ((forced >= 2 * share) & (forced <= 2 * share + 2)).all()
    node_ideal = loads(make_plan(rows, Topology(2, 4), "node_ideal"))
    ours = loads(make_plan(rows, Topology(2, 4), "relibra"))
    assert (node_ideal.max(2) <= ours.max(2)).all()
    assert (node_ideal.max(2) >= loads(ideal).max(2)).all()
    nodes = ours.reshape(3, 2, 2, 4).sum(3)
    assert np.array_equal(node_ideal.reshape(3, 2, 2, 4)[..., 0], -(-nodes // 4))
