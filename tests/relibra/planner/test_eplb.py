"""The EPLB baseline equals the example of its README."""

import numpy as np
import pytest
from scipy.optimize import linprog

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.eplb import even_rank_rows, place_copies
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels import native
from relibra_kernels.errors import PlanError

README_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def test_readme_example() -> None:
    slots = place_copies(README_LOADS, num_slots=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_copies_share_their_rows_evenly() -> None:
    slots = np.array([[0, 1, 0, 2, 0, 1]])
    rows = even_rank_rows(slots, np.array([[[10, 5, 7]]]), 3)
    assert rows.tolist() == [[[4 + 3, 3 + 7, 3 + 2]]]


def test_the_strategy_matches_the_functions_on_interleaved_nodes() -> None:
    """Ranks of a node need not be contiguous: rank loads follow the real ranks."""
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=16)), (3, 1, 4, 16)).astype(np.int32)
    shape, loads = ModelShape(16, 2, (0,)), {"train": LoadMatrix(rows)}
    plans = [
        plan_step(loads, topology, model=shape, strategy="eplb_oracle")
        for topology in (Topology(2, 2), Topology(rank_to_node=[0, 1, 0, 1]))
    ]
    straight, mixed = (plan.passes["train"].slot_rows_MLGn.sum(3) for plan in plans)
    assert np.array_equal(straight[:, :, [0, 1, 2, 3]], mixed[:, :, [0, 2, 1, 3]])
    assert np.array_equal(straight.sum(2), rows.sum((2, 3)))
    assert not plans[0].is_executable


def test_more_slots_help() -> None:
    rng = np.random.default_rng(1)
    rows = rng.poisson(30 * np.exp(rng.normal(size=32)), (4, 2, 8, 32)).astype(np.int32)
    imbalance = [
        plan_step(
            {"train": LoadMatrix(rows)},
            Topology(2, 4),
            model=ModelShape(32, 2, (0, 1)),
            config=PlannerConfig(replica_slots=slots),
            strategy="eplb_oracle",
        ).report.imbalance_mean
        for slots in (0, 2, 8)
    ]
    assert imbalance[0] > imbalance[1] > imbalance[2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((15, 4, 2, 8), "num_slots: need a multiple of 8, got 15"),
        ((16, 3, 2, 8), "num_groups: need a multiple of 2, got 3"),
        ((16, 4, 2, 7), "num_slots: need a multiple of 7"),
        ((8, 4, 2, 8), "num_slots: need at least 12 experts, got 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: tuple[int, int, int, int], message: str
) -> None:
    slots, groups, nodes, ranks = sizes
    with pytest.raises(PlanError, match=message):
        place_copies(
            README_LOADS, num_slots=slots, num_groups=groups, num_nodes=nodes, num_ranks=ranks
        )


def loads_of(plan: StepPlan) -> np.ndarray:
    return plan.passes["train"].slot_rows_MLGn.sum(3)


def test_what_each_eplb_knows() -> None:
    """History of the batch before, the batch itself, or every micro-batch for itself."""
    rng = np.random.default_rng(2)
    first, second = (
        rng.poisson(30 * np.exp(rng.normal(size=(4, 2, 1, 32))), (4, 2, 8, 32)).astype(np.int32)
        for _ in range(2)
    )
    made = {
        strategy: plan_step(
            {"train": LoadMatrix(second)},
            Topology(2, 4),
            model=ModelShape(32, 2, (0, 1)),
            strategy=strategy,
            previous={"train": LoadMatrix(first)},
        )
        for strategy in ("eplb", "eplb_oracle", "eplb_micro_batch", "eplb_flat", "lplb_like")
    }
    slots = place_copies(first.sum((0, 2)), num_slots=40, num_groups=32, num_nodes=2, num_ranks=8)
    expected = even_rank_rows(slots, second.sum(2, dtype=np.int64), 8)
    assert np.array_equal(loads_of(made["eplb"]), expected)
    alone = plan_step(
        {"train": LoadMatrix(second[2:3])},
        Topology(2, 4),
        model=ModelShape(32, 2, (0, 1)),
        strategy="eplb_oracle",
    )
    assert np.array_equal(loads_of(made["eplb_micro_batch"])[2], loads_of(alone)[0])
    mean = {name: plan.report.imbalance_mean for name, plan in made.items()}
    assert mean["eplb_micro_batch"] < mean["lplb_like"] < mean["eplb_oracle"] < mean["eplb"]
    assert not np.array_equal(loads_of(made["eplb_flat"]), loads_of(made["eplb"]))


def test_eplb_on_history_needs_history() -> None:
    loads = {"train": LoadMatrix(np.ones((1, 1, 2, 4), np.int32))}
    with pytest.raises(PlanError, match="previous: need the loads of the batch before"):
        plan_step(loads, Topology(1, 2), model=ModelShape(4, 1, (0,)), strategy="eplb")


def test_the_split_over_given_copies_equals_a_linear_program() -> None:
    """Small instances with copies anywhere, two on a rank too; rows are whole, so the optimum is
    the rounded-up real one."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        experts, ranks, per_rank = 6, int(rng.integers(2, 6)), 4
        slots = rng.integers(-1, experts, (ranks, per_rank))
        slots.reshape(-1)[rng.permutation(ranks * per_rank)[:experts]] = np.arange(experts)
        totals = rng.integers(0, 100, experts)
        totals[~np.isin(np.arange(experts), slots)] = 0
        rows, largest = native.planner().split_sites(
            totals.reshape(1, 1, -1), slots[None, None].astype(np.int32), 1
        )
        rows = rows[0, 0]
        assert rows.sum(1).max() == largest[0, 0]
        assert (rows[slots < 0] == 0).all()
        assert [rows[slots == e].sum() for e in range(experts)] == totals.tolist()
        used = np.argwhere(slots >= 0)
        held = slots[slots >= 0]
        conserve = (held == np.arange(experts)[:, None]).astype(float)
        load = (used[:, 0] == np.arange(ranks)[:, None]).astype(float)
        best = linprog(
            np.append(np.zeros(len(held)), 1.0),
            A_ub=np.c_[load, -np.ones(ranks)],
            b_ub=np.zeros(ranks),
            A_eq=np.c_[conserve, np.zeros(experts)],
            b_eq=totals,
        )
        assert largest[0, 0] == np.ceil(best.fun - 1e-6)


def test_an_expert_with_rows_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slot_expert: need a slot for expert 1"):
        native.planner().split_sites(
            np.ones((1, 1, 2), np.int64), np.zeros((1, 1, 2, 1), np.int32), 1
        )
