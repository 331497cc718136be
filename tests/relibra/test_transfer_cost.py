"""Seconds of moving experts and of refreshing static copies."""

from dataclasses import replace

import numpy as np
import pytest

from relibra.cost_model import CostModel
from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.pass_plan import PassPlan, ReportSlots
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.presets import Hardware
from relibra.shape import ModelShape
from relibra.token_copies import TokenCopies, plan_copies
from relibra.topology import Topology
from relibra.transfer_cost import (
    move_seconds,
    move_seconds_L,
    static_seconds,
    static_seconds_L,
)

HARD = Hardware("test", 1.0, 2.0, 1000.0, 100.0, 10.0, 50.0, 5.0, 2.0, 80.0, 2)
TOPOLOGY = Topology(2, 2)
SHAPE = ModelShape(8, 2, (0, 1), 64, 32)
RNG = np.random.default_rng(0)
ROWS = (RNG.integers(0, 200, (3, 2, 4, 8)) * np.linspace(2, 0.1, 8)).astype(np.int32) * 2
COST = CostModel(HARD, SHAPE, TOPOLOGY, overlap=0.5, block_rows=16)


def make(strategy: str = "relibra", **config: object) -> StepPlan:
    settings = PlannerConfig(proposals=300, num_threads=1, **config)
    return plan_step(
        {"train": LoadMatrix(ROWS)}, TOPOLOGY, model=SHAPE, config=settings, strategy=strategy
    )


def by_hand(layouts: list[ExpertLayout], base: list[ExpertLayout], **more) -> StepPlan:
    rows = np.zeros((1, 1, 4, 4), np.int32)
    slots = 1 + (more["static_slot_expert_LGX"].shape[2] if more else 0)
    one = PassPlan(np.zeros((1, 1, 4, 0), np.int32), np.zeros((1, 1, 4, slots), np.int64))
    return StepPlan.from_arrays(
        TOPOLOGY,
        ModelShape(4, 2, (0,), 64, 32),
        layouts,
        {"train": one},
        {"train": LoadMatrix(rows)},
        base_layouts=base,
        **more,
    )


def test_moves_use_the_link_between_the_ranks() -> None:
    base = [ExpertLayout([[0], [1], [2], [3]])]
    size = 3 * 64 * 32 * 14
    near = by_hand([ExpertLayout([[1], [0], [2], [3]])], base)
    far = by_hand([ExpertLayout([[2], [1], [0], [3]])], base)
    assert move_seconds(near, "train", COST) == pytest.approx(size / 100e9)
    assert move_seconds(far, "train", COST) == pytest.approx(size / 10e9)
    assert move_seconds(by_hand(base, base), "train", COST) == 0
    assert move_seconds_L(far, "train", COST).sum() == move_seconds(far, "train", COST)
    sharded = COST.with_values(data_parallel=4)
    assert move_seconds(far, "train", sharded) == pytest.approx(3 * 64 * 32 * 5 / 10e9)


def test_static_copies_are_refreshed_every_optimizer_step() -> None:
    base = [ExpertLayout([[0], [1], [2], [3]])]
    static = np.full((1, 4, 1), -1, np.int32)
    static[0, 2, 0] = 0  # a copy of expert 0 on the other node
    plan = by_hand(base, base, static_slot_expert_LGX=static)
    assert static_seconds(plan, "train", COST) == pytest.approx(3 * 64 * 32 * 6 / 10e9)
    assert static_seconds_L(plan, "train", COST).shape == (len(plan.layouts),)


def test_only_new_copies_are_paid_for() -> None:
    """The homes and a far copy of expert 0, then the same; or then every expert elsewhere."""
    plan = plan_step(
        {"train": LoadMatrix(np.ones((2, 1, 4, 4), np.int32))},
        TOPOLOGY,
        model=ModelShape(4, 2, (0,), 64, 32),
        strategy="ideal",
    )
    slots = np.array([[0, -1], [1, -1], [2, 0], [3, -1]], np.int32)
    for micro_batches, paid in (((slots, slots), 1), ((slots, slots[::-1]), 2)):
        experts = np.stack(micro_batches)[:, None]
        known = ReportSlots(experts, np.zeros(experts.shape, np.int64))
        seconds = move_seconds(replace(plan, report_slots={"train": known}), "train", COST)
        assert seconds == pytest.approx(paid * 3 * 64 * 32 * 6 / 10e9)


def test_copies_of_eplb_are_paid_for() -> None:
    plan = make("eplb_oracle")
    slots = plan.report_slots["train"].slot_expert_MLGn
    assert move_seconds(plan, "train", COST) > 0
    per_micro_batch = make("eplb_micro_batch")
    assert slots.shape == per_micro_batch.report_slots["train"].slot_expert_MLGn.shape
    assert move_seconds(per_micro_batch, "train", COST) > move_seconds(plan, "train", COST)
    assert move_seconds(make("ideal"), "train", COST) == 0
    # tiles of the real slots, not of evenly filled ones
    rows = plan.report_slots["train"].slot_rows_MLGn
    assert np.array_equal(rows.sum(3), plan.passes["train"].slot_rows_MLGn.sum(3))
    assert isinstance(plan_copies(plan, "train"), TokenCopies)


def test_layers_add_up() -> None:
    plan = make()
    seconds = move_seconds_L(plan, "train", COST)
    assert seconds.shape == (2,)
    assert (seconds > 0).any()
    assert move_seconds(plan, "train", COST) == pytest.approx(seconds.sum())
