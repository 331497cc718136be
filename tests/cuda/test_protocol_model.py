"""The protocol of replica synchronisation has no race and no deadlock, and its mutants are found.

``pytest tests/cuda/test_protocol_model.py --list-mutants`` prints what each mutant does.
"""

import dataclasses
import itertools

import pytest
from kernel_mutants import killed
from protocol import model_check, mutants, schedules
from protocol.model_check import Violation, explore, prove, verdict
from protocol.programs import QUEUES, Case
from protocol.schedules import ORDERS, PLANS, number

LAGS = {1: (0, 1), 2: (0, 1), 3: (1,)}  # a queue of their own makes reductions late at any lag
WRONG_DATA = ("race", "wrong value")  # a race may be met first as the value that it spoils


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("order", ORDERS)
def test_properties_hold_in_every_interleaving_of_two_ranks(order, queues):
    for plan, lag in itertools.product(PLANS, LAGS[queues]):
        case = Case(ORDERS[order], plan, queues=queues, lag=lag)
        assert explore(case) > sum(use.n >= 0 for use in number(case.order)), plan


@pytest.mark.parametrize(
    ("ranks", "queues", "order"),
    [(3, 1, "1F1B"), (3, 2, "one layer, 2 micro-batches"), (4, 1, "one layer")],
)
def test_properties_hold_in_every_interleaving_of_more_ranks(ranks, queues, order):
    for plan in ("ring", "mixed"):
        assert explore(Case(ORDERS[order], plan, ranks=ranks, queues=queues, lag=1)) > 100


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_properties_hold_along_one_run_with_a_look_ahead(order, ranks):
    for plan, queues in itertools.product(PLANS, QUEUES):
        for lag in LAGS[queues]:
            prove(Case(ORDERS[order], plan, ranks, queues, lag=lag))
        prove(Case(ORDERS[order], plan, ranks, queues, lag=1, gathered=True))


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
@pytest.mark.parametrize("queues", QUEUES)
def test_prefetch_distance_below_the_buffers_never_deadlocks(buffers, queues):
    order = schedules.forward_backward(4)
    for distance, plan in itertools.product(range(buffers), PLANS):
        prove(Case(order, plan, 3, queues, buffers=buffers, distance=distance))


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_prefetch_distance_of_all_buffers_deadlocks_on_one_queue(buffers):
    case = Case(schedules.forward_backward(5), queues=1, buffers=buffers, distance=buffers)
    assert verdict(explore, case) == verdict(prove, case) == "deadlock"
    assert verdict(prove, dataclasses.replace(case, queues=2)) == "ok"


@pytest.mark.parametrize(
    ("order", "ranks", "queues"),
    [("one layer", 2, 3), ("one layer", 4, 1), ("forward, backward, 2 steps", 2, 3)]
    + [("per-layer recompute", 2, 2), ("1F1B", 2, 3), ("one layer, 2 micro-batches", 3, 2)],
)
def test_every_fault_ends_on_all_survivors_with_one_decision(order, ranks, queues):
    for plan in ("ring", "mixed") if ranks < 4 else ("mixed",):
        prove(Case(ORDERS[order], plan, ranks, queues, lag=1), faults=True)


def test_diverged_rank_is_reported_by_its_peers():
    case = Case(ORDERS["forward, backward"], diverged=1)
    with pytest.raises(Violation, match=r"diverged: .* expected .* observed") as caught:
        prove(case)
    assert caught.value.verdict == "diverged"
    assert verdict(explore, case) == "diverged"


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.case.mutant)
def test_mutants_are_found(mutant):
    case = mutant.case
    correct = dataclasses.replace(case, mutant="", distance=1, lag=min(case.lag, 1))
    assert verdict(prove, correct, faults=mutant.faults) == mutant.correct
    if not mutant.faults:
        assert verdict(explore, correct) == mutant.correct
        found = verdict(explore, case)
        assert found in (WRONG_DATA if mutant.verdict == "race" else (mutant.verdict,))
    with killed(case.mutant, Violation, match=f"^{mutant.verdict}: "):
        prove(case, faults=mutant.faults)


@pytest.mark.parametrize("order", ["one layer, 2 micro-batches", "1F1B"])
def test_both_checkers_agree_on_every_single_wait_that_is_left_out(order):
    case = Case(ORDERS[order], queues=2, lag=1)
    num_waits, num_found = len(model_check.Machine(case).waits), 0
    for index in range(0, num_waits, 1 if num_waits < 60 else 3):
        changed = dataclasses.replace(case, without_wait=index)
        found = verdict(prove, changed)
        assert (found == "ok") == (verdict(explore, changed) == "ok"), (index, found)
        num_found += found != "ok"
    assert num_found > 10


def test_mutants_have_names_of_their_own_that_change_a_program():
    names = [mutant.case.mutant for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 20


@pytest.mark.parametrize("order", ORDERS)
def test_only_certain_successors_are_pushed_ahead(order):
    """The order in which a rank submits: push(n + 1) before use(n) if, and only if, certain."""
    uses = [use for use in number(ORDERS[order]) if use.kind != "update"]
    (submitted,) = model_check.Rank(Case(ORDERS[order], queues=1), 0).program()
    names = [op.word for op in submitted if op.kind == "access"]
    for use, following in itertools.pairwise(uses):
        if not following.reuses:
            ahead = names.index(("push", following.n)) < names.index((use.kind, use.n))
            assert ahead == use.certain, (use, following)


def test_uses_are_numbered_by_buffer_and_backward():
    uses = number(schedules.recompute(2, whole=True))
    assert [use.kind[0] for use in uses] == list("ffrrbbu")
    assert [use.n for use in uses] == [0, 1, 2, 3, 3, 4, -1]  # the last recompute is reused
    assert [use.q for use in uses] == [-1, -1, -1, -1, 0, 1, -1]
