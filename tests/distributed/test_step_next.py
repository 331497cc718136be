"""``step.next``: what a host says runs next is pushed ahead; what it says wrongly does no harm."""

import contextlib
import dataclasses
import time

import pytest
import torch
from moe_world import Result, World, collect_weight_grads, compare, reference
from replica_training import ORDERS, make, recomputed, run_step

from relibra_kernels.errors import PlanError, ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.sync_engine import HostEngine

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=3, micro_batches=3, tokens=9, replica_slots=1,
    dtype=torch.float64,
)  # fmt: skip
ORDER = ORDERS["1f1b"](range(WORLD.micro_batches))
PLAN = WORLD.random_plan(fill=1.0)
PUSH_S = 0.02
NAMES = {"F": "forward", "B": "backward", "R": "recompute"}


def run_order(rank, say, recompute="off", transport="cpu_shm", inside=None, **options):
    """Results, log and report of a step; ``say(step, place)`` is called before every pass, and
    ``inside`` within every forward before its first layer."""
    runtime, model = make(WORLD, rank, transport=transport, timeout_s=20.0, **options)
    result, flight, log = Result([], [], [], [], []), {}, []
    if runtime.domain_sync is not None:
        runtime.domain_sync.log = log
    with runtime.step(PLAN, {"train": WORLD.routes(rank)}) as step:
        for place, (kind, m) in enumerate(ORDER):
            say(step, place)
            if kind == "F":
                x, scores, dy = WORLD.batch(rank, m)
                x.requires_grad_(), scores.requires_grad_()
                with step.forward(micro_batch=m):
                    if inside is not None:
                        inside(step, place)
                    flight[m] = x, scores, dy, model(x, scores, wrap=recomputed(recompute))
            else:
                x, scores, dy, y = flight.pop(m)
                y.backward(dy)
                result.y.append(y.detach()), result.dx.append(x.grad)
                result.dscores.append(scores.grad)
    collect_weight_grads(WORLD, runtime, model, result)
    runtime.close()
    return result, log, step.report()


def nothing(step, place):
    """A host that says nothing."""


def rightly(backward):
    """Says the first pass, and before every pass what follows it."""

    def say(step, place):
        for at in (place, place + 1) if place == 0 else (place + 1,):
            if at < len(ORDER):
                kind, m = ORDER[at]
                step.next(micro_batch=m, direction=NAMES["F" if kind == "F" else backward])

    return say


def wrongly(step, place):
    """Says passes that do not come, a layer in the middle and a recompute that is none."""
    step.next(micro_batch=2 - ORDER[place][1], direction="backward", layer=2)
    if place % 2:
        step.next(micro_batch=0, direction="recompute")


def wrongly_once(step, place):
    """Says one pass that does not come."""
    if place == 0:
        step.next(micro_batch=2, direction="backward")


def same_results(a, b):
    return all(
        torch.equal(x, y)
        for field in dataclasses.fields(Result)
        for x, y in zip(getattr(a, field.name), getattr(b, field.name), strict=True)
    )


def sums(report, name):
    return sum(value for key, value in report.items() if key.endswith(name))


@contextlib.contextmanager
def slow(call, seconds):
    """Every call of the engine of this name takes longer."""
    original = getattr(HostEngine, call)

    def late(self, stream, items, keep):
        self._run(stream, lambda: time.sleep(seconds))
        original(self, stream, items, keep)

    setattr(HostEngine, call, late)
    try:
        yield
    finally:
        setattr(HostEngine, call, original)


def run_said(rank, num_ranks):
    """All checks of one world."""
    found = {}
    for recompute, backward in (("off", "B"), ("non-reentrant", "R"), ("reentrant", "R")):
        plain, _, before = run_order(rank, nothing, recompute)
        result, log, report = run_order(rank, rightly(backward), recompute)
        compare(result, reference(WORLD, rank), recompute)
        assert same_results(result, plain)
        found[recompute] = log, report, before
    result, log, report = run_order(rank, nothing, inside=rightly("B"))
    assert same_results(result, plain)
    found["inside"] = log, report, None
    wrong, log, report = run_order(rank, wrongly)
    assert same_results(wrong, run_order(rank, nothing)[0])
    found["wrong"] = log, report, None
    over_dist, _, report = run_order(rank, wrongly, transport="dist")
    assert same_results(over_dist, wrong)
    assert sums(report, "/replica_uses_pushed_at_entry") == 2 * 3 * 3
    before = found["off"][2]
    assert sums(report, "/replica_pushed_bytes") == sums(before, "/replica_pushed_bytes") > 0
    found["once"] = run_order(rank, wrongly_once)
    with slow("push", PUSH_S):
        found["slow"] = run_order(rank, nothing)
    return found


def test_what_is_said_is_pushed_ahead_and_what_is_wrong_is_given_back():
    for found in run_ranks(2, run_said):
        for recompute in ("off", "non-reentrant", "reentrant"):
            log, report, before = found[recompute]
            assert not [entry for entry in log if entry[0] == "abandon"], recompute
            pushes = [key for op, key in log if op == "push"]
            uses = [key for op, key in log if op == "retire"]
            assert pushes == uses, "in the order of their uses"
            for n in range(1, len(uses)):  # pushed before the experts of the use before run
                assert nth(log, "push", n) < nth_read(log, n - 1), (recompute, n)
            assert sums(report, "/replica_uses_pushed_ahead") == len(uses)
            assert sums(report, "/replica_uses_pushed_at_entry") == 0
            assert sums(before, "/replica_uses_pushed_at_entry") > 0
            total = sums(report, "/replica_uses_reused") + len(uses)
            assert total == (2 if recompute == "off" else 3) * 3 * 3
            assert sums(report, "/replica_pushed_bytes") == sums(before, "/replica_pushed_bytes")
        log, report, _ = found["inside"]
        assert not [entry for entry in log if entry[0] == "abandon"], "the certain uses come first"
        forwards = [at for at, (kind, _) in enumerate(ORDER) if kind == "F"]
        at_entry = len(ORDER) - sum(at + 1 < len(ORDER) for at in forwards)
        assert sums(report, "/replica_uses_pushed_at_entry") == at_entry
        _, log, report = found["slow"]
        at_entry = sums(report, "/replica_uses_pushed_at_entry")
        assert sums(report, "/replica_exposed_push_s") > at_entry * PUSH_S / 2, "none is hidden"
        log = found["once"][1]
        assert [key.micro_batch for op, key in log if op == "abandon"] == [2], "pushed once"
        log, report, _ = found["wrong"]
        given_back = sum(op == "abandon" for op, _ in log)
        assert given_back > 0
        assert sums(report, "/replica_pushes_given_back") == given_back


def nth(log, operation, n):
    """Place of the n-th entry of an operation."""
    return [at for at, (op, _) in enumerate(log) if op == operation][n]


def nth_read(log, n):
    """Place of the first read of the n-th use."""
    begin = nth(log, "retire", n - 1) if n else 0
    return next(at for at in range(begin, len(log)) if log[at][0] == "weights")


def run_diverging(rank, num_ranks, says, checks_order):
    """Rank 0 says something else than rank 1, or nothing; the error and whether params stayed."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=60.0)
    runtime.checks_order = checks_order
    before = []

    def train():
        with runtime.step(PLAN, {"train": WORLD.routes(rank)}) as step:
            before.extend(param.detach().clone() for param in model.parameters())
            if rank == 1 or says is not None:
                step.next(micro_batch=1 if rank == 1 else says)
            for m in range(WORLD.micro_batches):
                x, scores, dy = WORLD.batch(rank, m)
                with step.forward(micro_batch=m):
                    y = model(x.requires_grad_(), scores.requires_grad_())
                y.backward(dy)

    with pytest.raises((PlanError, ReplicaSyncError)) as caught:
        train()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.close()
    return type(caught.value).__name__, str(caught.value), same


@pytest.mark.parametrize("says", [0, None])
def test_ranks_that_say_different_things_are_an_error_at_once(says):
    for kind, message, same in run_ranks(2, run_diverging, says, True):
        assert kind == "PlanError"
        assert "need the same order of passes, micro-batches and layers" in message
        assert same


@pytest.mark.parametrize("says", [0, None])
def test_ranks_that_say_different_things_do_not_hang_where_no_order_is_checked(says):
    """As over NCCL: the words of the use tell, or the end of the step."""
    for _, message, same in run_ranks(2, run_diverging, says, False):
        assert "micro-batch" in message
        assert same


def run_refused(rank, num_ranks):
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    with runtime.step(PLAN, {"train": WORLD.routes(rank)}) as step:
        for wrong, message in (
            ({"micro_batch": 7}, "micro_batch: need one of"),
            ({"micro_batch": 0, "pass_": "other"}, "pass_: need one of"),
            ({"micro_batch": 0, "direction": "sideways"}, "direction: need one of"),
            ({"micro_batch": 0, "layer": 9}, "layer: need one of"),
        ):
            with pytest.raises(ValueError, match=message):
                step.next(**wrong)
        step.next(micro_batch=0)  # and never runs it
        step.next(micro_batch=1)
    with pytest.raises(RuntimeError, match="its training step is not active"):
        step.next(micro_batch=0)
    log = runtime.domain_sync.log = []
    with runtime.step(PLAN, {"train": WORLD.routes(rank)}) as step, step.forward(micro_batch=2):
        model(*(part.requires_grad_() for part in WORLD.batch(rank, 2)[:2]))
    assert [key.micro_batch for op, key in log if op == "push"] == [2, 2, 2]
    leave_by_a_hook(rank, runtime, model)
    runtime.close()
    leave_with_gradients_on_their_way(rank)
    return True


def leave_by_a_hook(rank, runtime, model):
    """A hook that raises just after its layer was pushed; the next step is as good as ever."""

    def refuse(event):
        raise ArithmeticError("not released")

    for layer in (1, 2):  # pushed at its entry, and ahead of it
        runtime.set_layer_hooks(layer, weights_release=refuse)
        with pytest.raises(ArithmeticError, match="not released"):
            run_step(WORLD, rank, runtime, model, PLAN)
        runtime.set_layer_hooks(layer)
        for param in model.parameters():
            param.grad = None
        result = run_step(WORLD, rank, runtime, model, PLAN)
        collect_weight_grads(WORLD, runtime, model, result)
        compare(result, reference(WORLD, rank), f"after layer {layer}")


def leave_with_gradients_on_their_way(rank):
    """They are home before the host can clear its own."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0, grad_mode="main_grad")
    with (
        slow("reduce", 0.1),
        contextlib.suppress(ArithmeticError),
        runtime.step(PLAN, {"train": WORLD.routes(rank)}) as step,
    ):
        x, scores, dy = WORLD.batch(rank, 0)
        with step.forward(micro_batch=0):
            y = model(x.requires_grad_(), scores)
        y.backward(dy)
        raise ArithmeticError("left")
    for param in model.parameters():
        param.main_grad.zero_()
    result = run_step(WORLD, rank, runtime, model, PLAN)
    collect_weight_grads(WORLD, runtime, model, result)
    compare(result, reference(WORLD, rank), "after gradients on their way")
    runtime.close()


def test_what_cannot_run_is_refused_and_what_did_not_run_is_forgotten():
    assert all(run_ranks(2, run_refused))
