"""Baselines that copy experts in place: what each may use, and what it may not."""

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology

TOPOLOGY = Topology(2, 4)


def make_rows(seed: int, micro_batches: int = 4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    skew = np.exp(rng.normal(size=(micro_batches, 2, 1, 16)))
    return rng.poisson(100 * skew, (micro_batches, 2, 8, 16)).astype(np.int32)


def make_plan(
    rows: np.ndarray,
    strategy: str,
    previous: np.ndarray | None = None,
    topology: Topology = TOPOLOGY,
    slots: int = 1,
) -> StepPlan:
    return plan_step(
        {"train": LoadMatrix(rows)},
        topology,
        model=ModelShape(rows.shape[3], 2, range(rows.shape[1])),
        config=PlannerConfig(replica_slots=slots, proposals=1000),
        strategy=strategy,
        previous=None if previous is None else {"train": LoadMatrix(previous)},
    )


def replicas(plan: StepPlan) -> np.ndarray:
    return plan.passes["train"].replica_slot_expert_MLGS


def loads(plan: StepPlan) -> np.ndarray:
    return plan.passes["train"].slot_rows_MLGn.sum(3)


def test_history_plans_every_micro_batch_on_the_one_before() -> None:
    rows = make_rows(0)
    plan, exact = make_plan(rows, "history"), make_plan(rows, "replicate_only")
    assert (replicas(plan)[0] == -1).all()
    assert np.array_equal(replicas(plan)[1:], replicas(exact)[:-1])
    after = make_plan(rows, "history", previous=make_rows(1))
    assert np.array_equal(
        replicas(after)[0], replicas(make_plan(make_rows(1), "replicate_only"))[3]
    )
    assert np.array_equal(replicas(after)[1:], replicas(plan)[1:])


def test_history_is_exact_when_loads_repeat() -> None:
    """Shares of the micro-batch before, applied to the same rows, leave nothing over."""
    rows = np.repeat(make_rows(2)[:1], 3, axis=0)
    plan, exact = make_plan(rows, "history"), make_plan(rows, "replicate_only")
    assert np.array_equal(loads(plan)[1:], loads(exact)[1:])
    doubled = np.concatenate([rows[:1], 2 * rows[1:]])
    assert np.array_equal(loads(make_plan(doubled, "history"))[1], 2 * loads(plan)[1])


def test_history_keeps_large_counts_exact() -> None:
    rows = np.full((2, 1, 8, 16), 2**31 - 1, np.int32)
    rows[:, :, :, 8:] = 3
    load = loads(make_plan(rows, "history"))
    assert (load.sum(2) == rows.sum((2, 3), dtype=np.int64)).all()


def test_donors_only_give() -> None:
    """No rank both hosts a used replica and has given rows of its own experts away."""
    for seed in range(5):
        plan = make_plan(make_rows(seed), "donor_only")
        one = plan.passes["train"]
        home = plan.layouts[0].home_rank_E
        used = np.argwhere(one.replica_slot_expert_MLGS >= 0)
        for m, layer, rank, slot in used:
            expert = one.replica_slot_expert_MLGS[m, layer, rank, slot]
            assert (one.replica_slot_expert_MLGS[m, layer, home[expert]] == -1).all()
        best = make_plan(make_rows(seed), "replicate_only")
        assert (loads(best).max(2) <= loads(plan).max(2)).all()
    none = make_plan(make_rows(0), "none")
    assert loads(make_plan(make_rows(0), "donor_only")).max(2).sum() < loads(none).max(2).sum()


def test_a_chain_beats_donors_that_only_give() -> None:
    """Ranks of 14, 12 and 4 rows, one slot each: donors reach 11, a chain 10.

    10, 10, 10 needs 4 rows from rank 0 and 2 from rank 1, but rank 2 has one slot: rank 0 gives 6
    and takes 2 of rank 1.
    """
    rows = np.array([14, 12, 4], np.int32).reshape(1, 1, 1, 3)
    rows = np.concatenate([rows, 0 * rows, 0 * rows], axis=2)
    worst = {
        strategy: loads(make_plan(rows, strategy, topology=Topology(1, 3))).max()
        for strategy in ("donor_only", "replicate_only")
    }
    assert worst == {"donor_only": 12, "replicate_only": 10}


def test_split_only_has_one_set_of_places_and_splits_it_exactly() -> None:
    rows = make_rows(3)
    rows[2] = 0
    plan = make_plan(rows, "split_only")
    places = replicas(plan)
    assert (places[2] == -1).all()
    assert (places[[0, 1, 3]] == places[0]).all()
    summed = make_plan(rows.sum(0, keepdims=True), "replicate_only")
    assert np.array_equal(places[0], replicas(summed)[0])
    even = make_plan(rows, "place_only")
    best = make_plan(rows, "replicate_only")
    assert (loads(best).max(2) <= loads(plan).max(2)).all()
    assert (loads(best).max(2) <= loads(even).max(2)).all()


def test_place_only_splits_evenly() -> None:
    plan = make_plan(make_rows(4), "place_only", slots=2)
    one, best = plan.passes["train"], make_plan(make_rows(4), "replicate_only", slots=2)
    assert np.array_equal(replicas(plan), replicas(best))
    total = plan.loads["train"].totals_MLE
    for m, layer, rank, slot in np.argwhere(one.replica_slot_expert_MLGS >= 0):
        expert = one.replica_slot_expert_MLGS[m, layer, rank, slot]
        copies = 1 + (one.replica_slot_expert_MLGS[m, layer] == expert).sum()
        assert one.slot_rows_MLGn[m, layer, rank, 2 + slot] == total[m, layer, expert] // copies


@pytest.mark.parametrize("strategy", ["history", "donor_only", "split_only", "place_only"])
def test_without_slots_every_baseline_is_none(strategy: str) -> None:
    rows = make_rows(5)
    assert np.array_equal(
        loads(make_plan(rows, strategy, slots=0)), loads(make_plan(rows, "none", slots=0))
    )


@pytest.mark.parametrize("strategy", ["split_only", "place_only", "donor_only"])
def test_empty_micro_batches_on_one_rank_are_planned(strategy: str) -> None:
    """Arrays of length-one axes keep other orders in memory than the native code reads."""
    loads = {"train": LoadMatrix(np.zeros((2, 1, 1, 2), np.int32))}
    plan = plan_step(loads, Topology(1, 1), model=ModelShape(2, 1, (0,)), strategy=strategy)
    assert plan.report.worst_rank_rows == 0
