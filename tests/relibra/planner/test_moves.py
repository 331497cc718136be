"""Layouts from batch to batch when moving an expert has a price."""

from collections.abc import Callable

import numpy as np
import pytest

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.reorder import Reorder
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels import native

SIZES = {"hidden_size": 2048, "expert_size": 768}


def drifting_loads(
    seed: int, experts: int, micro_batches: int, ranks: int, steps: int
) -> list[LoadMatrix]:
    """Loads of a layer: lognormal(0, 0.8), times lognormal(0, 0.05) each step."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(0.8 * rng.normal(size=(micro_batches, 1, 1, experts)))
    found = []
    for _ in range(steps):
        share = popularity / popularity.mean(3, keepdims=True)
        rows = rng.poisson(np.broadcast_to(512 * share, (micro_batches, 1, ranks, experts)))
        found.append(LoadMatrix(rows.astype(np.int32)))
        popularity = popularity * np.exp(0.05 * rng.normal(size=popularity.shape))
    return found


@pytest.mark.parametrize(
    ("cost", "seed"), [("rows", 16), ("rows", 0), ("rows", 1), ("time", 16), ("time", 0)]
)
def test_plan_16_loads_that_drift(
    cost: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Modelled moves are dear, so time mode may let imbalance grow; it must not move much.

    The report of the test run (`pytest --junitxml`) has both series.
    """
    topology, shape = Topology(2, 4), ModelShape(64, 8, (0,), **SIZES)
    price = {"move_rows": 100} if cost == "rows" else {"horizon_steps": 20}
    config = PlannerConfig(cost=cost, proposals=20_000, **price)
    layout: tuple[ExpertLayout, ...] | None = None
    imbalance, moved = [], []
    for loads in drifting_loads(seed, 64, 8, 8, 50):
        arguments = ({"train": loads}, topology)
        plan = plan_step(*arguments, model=shape, layout=layout, config=config)
        none = plan_step(*arguments, model=shape, config=config, strategy="none")
        assert plan.report.imbalance_mean <= none.report.imbalance_mean
        imbalance.append(plan.report.imbalance_mean)
        if layout is not None:
            moved.append(plan.report.moved_experts)
        layout = plan.layouts
    record_property("imbalance", [round(one, 4) for one in imbalance])
    record_property("moved_experts", moved)
    if cost == "rows":
        assert np.mean(imbalance[-10:]) <= np.mean(imbalance[:10]) + 0.01
    assert 0 < np.mean(moved) <= 6.4
    again = plan_step({"train": loads}, topology, model=shape, layout=layout, config=config)
    assert again.report.moved_experts == 0


def planned(
    seed: int,
    layout: tuple[ExpertLayout, ...] | None,
    *,
    slots: int = 1,
    strategy: str | None = None,
    **settings: object,
) -> StepPlan:
    rng = np.random.default_rng(seed)
    rows = rng.poisson(200 * np.exp(rng.normal(size=(4, 3, 1, 24))) * np.ones((1, 1, 8, 1)))
    return plan_step(
        {"train": LoadMatrix(rows.astype(np.int32))},
        Topology(rank_to_node=[0, 1, 1, 0, 0, 1, 2, 2]),
        model=ModelShape(24, 2, (0, 1, 2), **SIZES),
        layout=layout,
        config=PlannerConfig(replica_slots=slots, proposals=4000, **settings),
        strategy=strategy or ("relibra" if slots else "reorder_only"),
    )


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_move_must_save_its_price_and_equal_loads_move_nothing(seed: int, slots: int) -> None:
    base = planned(seed + 100, None, slots=slots).layouts
    saved = {}
    for price in (1, 300, 10**9):
        plan = planned(seed, base, slots=slots, move_rows=price)
        again = planned(seed, plan.layouts, slots=slots, move_rows=price)
        assert again.report.moved_experts == 0
        assert again.passes["train"].slot_rows_MLGn.tobytes() == (
            plan.passes["train"].slot_rows_MLGn.tobytes()
        )
        saved[price] = plan.report.moved_experts
        stay = planned(seed, base, slots=slots, strategy="replicate_only").passes["train"]
        none = planned(seed, None, slots=slots, strategy="none").passes["train"]
        largest = [
            one.slot_rows_MLGn.sum(3).max(2).sum(0) for one in (plan.passes["train"], stay, none)
        ]
        for layer, (new, old) in enumerate(zip(plan.layouts, base, strict=True)):
            ours, kept, in_order = (3 * rows[layer] for rows in largest)  # a backward counts twice
            if kept <= in_order:
                assert kept - ours >= price * len(new.moved_experts(old))
    if slots:  # else a base may be worse than none, and then moves whatever the price
        assert saved[1] > saved[300] > saved[10**9] == 0


def test_no_price_keeps_a_layout_that_is_worse_than_none() -> None:
    rows = np.zeros((1, 1, 4, 4), np.int32)
    rows[..., [0, 3]] = 100
    plan = plan_step(
        {"train": LoadMatrix(rows[:, :, :2])},
        Topology(2, 1),
        model=ModelShape(4, 1, (0,)),
        layout=[ExpertLayout([[0, 3], [1, 2]])],
        config=PlannerConfig(move_rows=10**9),
    )
    assert plan.report.gap_total == 1.0


def test_a_candidate_that_gains_less_than_its_moves_cost_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search may promise what replication does not keep: here 10 rows for two moves."""
    rows = np.zeros((1, 1, 2, 4), np.int32)
    rows[0, 0, 0] = [60, 60, 50, 50]
    better = np.array([[[0, 2], [1, 3]]], np.int32)
    monkeypatch.setattr(Reorder, "near", lambda self, home, layers, price: better)
    monkeypatch.setattr(Reorder, "cold", lambda self: self.problem.base_LGH)
    moved = {}
    for price in (12, 16):  # the backward included, 30 rows are saved
        plan = plan_step(
            {"train": LoadMatrix(rows)},
            Topology(2, 1),
            model=ModelShape(4, 1, (0,)),
            layout=[ExpertLayout([[0, 1], [2, 3]])],
            config=PlannerConfig(move_rows=price),
        )
        moved[price] = plan.report.moved_experts
    assert moved == {12: 2, 16: 0}


def test_a_longer_horizon_allows_more_moves() -> None:
    base = planned(100, None).layouts
    few, many = (
        planned(0, base, move_rows=3000, horizon_steps=steps).report for steps in (1, 1000)
    )
    assert few.moved_experts < many.moved_experts
    assert few.imbalance_mean > many.imbalance_mean


def test_the_plan_does_not_depend_on_threads() -> None:
    base = planned(100, None).layouts
    assert len({planned(0, base, move_rows=50, num_threads=n).hash for n in (1, 2, 3)}) == 1


def test_newcomers_of_a_node_take_the_places_that_balance_its_ranks() -> None:
    """Two hot and two cold experts must change nodes; each rank gets one of each kind."""
    load = np.zeros((1, 8, 1), np.int64)
    load[0, :, 0] = [100, 1, 100, 1, 10, 50, 10, 50]
    base = np.array([[[0, 1], [2, 3], [4, 6], [5, 7]]], np.int32)
    found = native.planner().warm_layouts(
        load, base, np.array([0, 0, 1, 1], np.int32), np.array([1]), 0, 1000, 0
    )[0]
    assert sorted(found.reshape(-1)) == list(range(8))
    rows = load[0, found, 0].sum(1)
    assert rows[:2].sum() == rows[2:].sum() == 161
    assert abs(rows[0] - rows[1]) < 100


def test_fillers_keep_their_places() -> None:
    base = np.array([[[0, -1, 1], [2, 3, -1]]], np.int32)
    load = np.array([[[9], [8], [1], [2]]], np.int64)
    found = native.planner().warm_layouts(
        load, base, np.array([0, 1], np.int32), np.array([1]), 1, 1000, 10
    )
    assert ((found < 0) == (base < 0)).all()
    assert load[0, np.maximum(found, 0), 0][0][found[0] >= 0].reshape(2, 2).sum(1).max() == 10
