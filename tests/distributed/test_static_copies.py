"""Training with static copies equals training without, step by step."""

import dataclasses

import numpy as np
import pytest
import torch
from static_world import STEPS, WORLD, Trainer, X

import relibra
from relibra.static_slots import StaticSlots
from relibra_kernels.testing.compare import assert_close_gemm, assert_equal_bits
from relibra_kernels.testing.launch import run_ranks

pytestmark = pytest.mark.xdist_group("static_copies")  # one launch for all tests
CASES = {
    "returned-forwards-first": {"forwards_first": True},
    "main_grad-two_hop-exact-recompute": {
        "grad_mode": "main_grad", "dispatch": "two_hop", "combine": "exact", "recompute": True,
    },
    "main_grad-cpu_shm": {"grad_mode": "main_grad", "transport": "cpu_shm"},
}  # fmt: skip


def plan_of(world, trainer, batch):
    """With static copies: at random in the first rollout batch, then from the planner."""
    loads, layout = {"train": world.loads(STEPS)}, trainer.runtime.layout
    if batch == 0:
        return world.random_plan(loads["train"], base=layout, static_slots=X)
    config = relibra.PlannerConfig(static_copies=2 * X, proposals=200, num_threads=1)
    return relibra.plan_step(loads, world.topology, model=world.shape, layout=layout, config=config)


def no_copies(world, trainer, batch):
    """Experts stay where they are."""
    base = trainer.runtime.layout
    return world.random_plan(world.loads(STEPS), base=base, fill=0.0, reorder=False)


def train(trainer, make_plan, batches=2):
    """What every step gave, and the reports."""
    done, reports = [], []
    for batch in range(batches):
        world = dataclasses.replace(WORLD, seed=batch)
        plan = make_plan(world, trainer, batch)
        done += [trainer.step(world, plan, number) for number in range(3)]
        reports.append(plan.report)
    trainer.runtime.close()
    return done, reports


def differences(done, needed):
    """(step, what, message) of all that is not equal up to rounding."""
    found = []
    for number, (one, need) in enumerate(zip(done, needed, strict=False)):
        for name in ("outputs", "grads", "weights"):
            for a, b in zip(getattr(one, name), getattr(need, name), strict=True):
                try:
                    assert_close_gemm(name, a, b)
                except AssertionError as error:
                    found.append((number, name, str(error)))
    return found


def run_all(rank, num_ranks):
    torch.set_num_threads(1)
    needed, reports = train(Trainer(rank, combine="exact"), no_copies)
    found = {"no copies": reports}
    for name, options in CASES.items():
        done, reports = train(Trainer(rank, **options), plan_of)
        if options.get("combine") == "exact":  # at first the weights are the same
            for a, b in zip(done[0].outputs, needed[0].outputs, strict=True):
                assert_equal_bits("y", a, b)
        sent = [one.sent_bytes for one in done]
        found[name] = differences(done, needed), sent, reports
    send = StaticSlots.send_weights
    StaticSlots.send_weights = lambda self, plan, what: (
        send(self, plan, what) if plan.hash != self._plan_hash else 0
    )
    found["mutation"] = differences(train(Trainer(rank), plan_of, batches=1)[0], needed)
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(4, run_all)


@pytest.mark.parametrize("name", CASES)
def test_two_rollout_batches_of_three_steps_equal_training_without_copies(found, name):
    different, sent, reports = zip(*(one[name] for one in found), strict=True)
    assert different == ([],) * 4
    planned = [report.static_push_bytes for report in reports[0] for _ in range(3)]
    assert np.sum(sent, 0).tolist() == planned
    for report, without in zip(reports[0], found[0]["no copies"], strict=True):
        assert report.static_copies > 3
        assert report.replicas > 3
        assert without.static_copies == without.replicas == 0
    assert reports[0][1].gap_total < 1.05 < found[0]["no copies"][1].gap_total


def test_weights_sent_once_a_rollout_batch_give_other_results(found):
    for one in found:
        places = {(number, name) for number, name, _ in one["mutation"]}
        assert {(1, "outputs"), (2, "outputs"), (1, "grads")} <= places
        assert not [place for place in places if place[0] == 0]
