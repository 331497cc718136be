"""Which replicas are pushed before their turn, as the log of submitted operations shows."""

import threading
import time

import pytest
import torch
from moe_world import Result, World, collect_weight_grads, compare, reference
from replica_training import make, run_step, train

from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=4, micro_batches=2, tokens=9, replica_slots=1,
    dtype=torch.float64,
)  # fmt: skip
LAYERS = (1, 2, 3, 4)


def logged(rank, num_ranks, order, recompute):
    """(operation, micro-batch, layer, direction) of every operation."""
    options = {"transport": "cpu_shm", "timeout_s": 20.0, "grad_mode": "returned"}
    _, log = train(WORLD, rank, order, recompute, **options)
    return [(op, key.micro_batch, key.layer, key.direction) for op, key in log]


def before_experts(log, m, layer, direction):
    """Operations up to the first read of the weights of a use."""
    return log[: log.index(("weights", m, layer, direction))]


@pytest.mark.parametrize("order", ["in-turn", "1f1b"])
def test_the_next_layer_is_pushed_before_the_experts_of_this_one(order):
    for log in run_ranks(2, logged, order, "off"):
        assert not [entry for entry in log if entry[0] == "abandon"]
        assert sum(entry[0] == "push" for entry in log) == 2 * 2 * len(LAYERS)
        for m in range(2):
            for here, there in zip(LAYERS, LAYERS[1:], strict=False):
                pushed = before_experts(log, m, here, "forward")
                assert ("push", m, there, "forward") in pushed
                pushed = before_experts(log, m, there, "backward")
                assert ("push", m, here, "backward") in pushed
            for layer, direction in ((LAYERS[0], "forward"), (LAYERS[-1], "backward")):
                place = log.index(("push", m, layer, direction))  # uncertain: at its own entry
                assert place == 0 or log[place - 1][0] != "push"
                later = [op for op, *use in log[place + 1 :] if use == [m, layer, direction]]
                assert later[0] == "weights"
                assert log[place + 2] == ("weights", m, layer, direction)


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_nothing_is_pushed_across_a_recompute(recompute):
    for log in run_ranks(2, logged, "in-turn", recompute):
        assert not [entry for entry in log if entry[0] == "abandon"]
        pushes = [entry[1:] for entry in log if entry[0] == "push"]
        assert not [use for use in pushes if use[2] == "backward"], "the recompute's are read"
        assert all(pushes.count((m, layer, "forward")) == 2 for m in range(2) for layer in LAYERS)
        retired = [entry[1:] for entry in log if entry[0] == "retire"]
        assert retired == pushes
        for m in range(2):
            first = log.index(("push", m, LAYERS[-1], "forward"))
            again = log.index(("push", m, LAYERS[-1], "forward"), first + 1)
            end = log.index(("home_reduce", m, LAYERS[0], "forward"))
            for op, entry in zip(log[again:end], log[again + 1 : end], strict=False):
                if op[0] == "push":
                    assert entry == ("weights", *op[1:]), "pushed at its own entry"


def run_chunks(rank, num_ranks, starts_stage):
    """Two pipeline chunks of two layers each; both micro-batches run chunk 0, then chunk 1."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    log = runtime.domain_sync.log = []
    if starts_stage:
        runtime.set_layer_hooks(3, starts_stage=True)
    hidden, batches, outputs = {}, {}, {}
    result = Result([], [], [], [], [])
    with runtime.step(WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}) as step:
        for chunk in range(2):
            for m in range(2):
                with step.forward(micro_batch=m):
                    if chunk == 0:
                        x, scores, dy = WORLD.batch(rank, m)
                        batches[m] = x.requires_grad_(), scores.requires_grad_(), dy
                        hidden[m] = x
                    y, scores = hidden[m], batches[m][1]
                    for place in (2 * chunk, 2 * chunk + 1):
                        moe = model.layers[place]
                        y = y + moe(y, scores[place], moe.replayed_ids())
                    outputs[m, chunk] = y
                    hidden[m] = y.detach().requires_grad_()
                    batches[m, chunk] = hidden[m]
        grads = {m: batches[m][2] for m in range(2)}
        for chunk in (1, 0):
            for m in range(2):
                outputs[m, chunk].backward(grads[m])
                grads[m] = batches[m, 0].grad
    for m in range(2):
        x, scores, _ = batches[m]
        result.y.append(outputs[m, 1].detach()), result.dx.append(x.grad)
        result.dscores.append(scores.grad)
    collect_weight_grads(WORLD, runtime, model, result)
    runtime.close()
    compare(result, reference(WORLD, rank), "chunks")
    return [(op, key.layer, key.direction) for op, key in log]


def test_a_push_whose_use_does_not_come_next_is_given_back():
    for log in run_ranks(2, run_chunks, False):
        assert {entry for entry in log if entry[0] == "abandon"} == {
            ("abandon", 3, "forward"),
            ("abandon", 2, "backward"),
        }


def test_nothing_is_pushed_across_the_border_of_a_stage():
    for log in run_ranks(2, run_chunks, True):
        assert not [entry for entry in log if entry[0] == "abandon"]
        assert sum(entry[0] == "push" for entry in log) == 2 * 2 * len(LAYERS)


def run_late_weights(rank, num_ranks, with_hooks):
    """A host whose layers have weights from their entry to their exit only, as FSDP2 does."""
    need = reference(WORLD, rank).y
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    held, released, same = {}, [], []

    def fill(moe, *_):
        for param, value in zip(moe.parameters(), held[moe.layer], strict=True):
            param.data.copy_(value)

    def poison(moe, *_):
        for param in moe.parameters():
            param.data.fill_(1e3)

    plan, routes = WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}
    with torch.no_grad(), runtime.step(plan, routes) as step:
        for moe in model.layers:
            held[moe.layer] = [param.detach().clone() for param in moe.parameters()]
            poison(moe)
            moe.register_forward_pre_hook(fill)
            moe.register_forward_hook(poison)
            if with_hooks:
                hooks = {"weights_ready": lambda: None, "weights_release": released.append}
                runtime.set_layer_hooks(moe.layer, **hooks)
        for m in range(WORLD.micro_batches):
            x, scores, _ = WORLD.batch(rank, m)
            with step.forward(micro_batch=m):
                same.append(torch.allclose(model(x, scores), need[m], rtol=1e-9, atol=1e-9))
    runtime.close()
    return all(same), len(released)


def test_weights_that_come_late_are_pushed_at_their_layer():
    uses = WORLD.micro_batches * len(LAYERS)
    assert run_ranks(2, run_late_weights, True) == [(True, uses)] * 2


def test_mutation_pushing_ahead_of_late_weights_is_caught():
    assert not all(same for same, _ in run_ranks(2, run_late_weights, False))


def run_gathered_weights(rank, num_ranks, is_event):
    """A host that gathers each layer's weights behind its back, as the all-gather of a stream."""
    need = reference(WORLD, rank).y
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    held, events, threads, same = {}, {}, [], []
    pause_s = 0.02 if is_event else 0.3  # a push that does not wait is sooner on a busy machine too

    def gather(moe):
        time.sleep(pause_s)
        for param, value in zip(moe.parameters(), held[moe.layer], strict=True):
            param.data.copy_(value)
        events[moe.layer].set()

    def start(moe):
        events[moe.layer] = threading.Event()
        threads.append(threading.Thread(target=gather, args=(moe,)))
        threads[-1].start()

    def enter(moe, *_):
        events[moe.layer].wait()
        if moe.layer < LAYERS[-1]:  # the next layer's gather goes on while this one computes
            start(model.layers[moe.layer])

    def poison(moe, *_):
        for param in moe.parameters():
            param.data.fill_(1e3)

    plan, routes = WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}
    with torch.no_grad(), runtime.step(plan, routes) as step:
        for moe in model.layers:
            held[moe.layer] = [param.detach().clone() for param in moe.parameters()]
            poison(moe)
            moe.register_forward_pre_hook(enter)
            moe.register_forward_hook(poison)
            ready = (lambda layer=moe.layer: events[layer]) if is_event else (lambda: True)
            runtime.set_layer_hooks(moe.layer, weights_ready=ready)
        for m in range(WORLD.micro_batches):
            x, scores, _ = WORLD.batch(rank, m)
            start(model.layers[0])
            with step.forward(micro_batch=m):
                same.append(torch.allclose(model(x, scores), need[m], rtol=1e-9, atol=1e-9))
    for thread in threads:
        thread.join()
    ahead = sum(value for name, value in step.report().items() if name.endswith("pushed_ahead"))
    runtime.close()
    return all(same), ahead


def test_a_push_waits_for_the_event_of_its_weights():
    uses = WORLD.micro_batches * (len(LAYERS) - 1)
    assert run_ranks(2, run_gathered_weights, True) == [(True, uses)] * 2


def test_mutation_a_push_that_does_not_wait_for_its_weights_is_caught():
    assert not all(same for same, _ in run_ranks(2, run_gathered_weights, False))


def run_hooks_of_dist(rank, num_ranks):
    runtime, _ = make(WORLD, rank, transport="dist")
    runtime.set_layer_hooks(3, starts_stage=True)  # nothing is pushed ahead: nothing is asked
    with pytest.raises(ValueError, match="layer: need one of"):
        runtime.set_layer_hooks(9)
    return True


def test_hooks_name_a_layer():
    assert all(run_ranks(2, run_hooks_of_dist))


class _StopError(Exception):
    """A host's own."""


def run_interrupted(rank, num_ranks):
    """All ranks leave a step in the middle of a forward, with a push ahead; then train, twice."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=60.0)
    plan, routes = WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}

    def interrupt():
        x, scores, _ = WORLD.batch(rank, 0)
        with runtime.step(plan, routes) as step, step.forward(micro_batch=0):
            moe = model.layers[0]
            moe(x, scores[0], moe.replayed_ids())
            raise _StopError

    for _ in range(2):
        with pytest.raises(_StopError):
            interrupt()
        model.zero_grad()
        result = run_step(WORLD, rank, runtime, model, plan)
        collect_weight_grads(WORLD, runtime, model, result)
        compare(result, reference(WORLD, rank), "after an interrupted step")
    with pytest.raises(_StopError):
        interrupt()
    start = time.monotonic()
    runtime.close()
    return time.monotonic() - start


def test_a_step_that_the_host_leaves_disturbs_none_after_it():
    assert max(run_ranks(2, run_interrupted)) < 30, "no wait lasts until its time-out"
