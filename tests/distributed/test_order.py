"""Uses are found by key: any order of forwards and backwards, recompute, threads, two passes."""

import threading

import pytest
import torch
import torch.distributed as dist
from moe_world import Model, Result, World, check, reference
from torch.utils.checkpoint import checkpoint

import relibra
from relibra_kernels.testing.launch import run_ranks

STEPS_M = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
WORLD = World(2, 2, num_experts=8, top_k=2, num_layers=2, micro_batches=12, tokens=9)
LR = 0.05


def one_forward_one_backward(stage, num_stages, micro_batches):
    """Order of a 1F1B pipeline stage: [("F", m) | ("B", m)]."""
    micro_batches = list(micro_batches)
    warm_up = min(num_stages - stage - 1, len(micro_batches))
    order = [("F", m) for m in micro_batches[:warm_up]]
    for place, m in enumerate(micro_batches[warm_up:]):
        order += [("F", m), ("B", micro_batches[place])]
    return order + [("B", m) for m in micro_batches[len(micro_batches) - warm_up :]]


def test_1f1b_order_of_the_first_stage():
    order = one_forward_one_backward(0, 4, range(6))
    assert "".join(kind for kind, _ in order) == "FFFFBFBFBBBB"
    assert [m for kind, m in order if kind == "B"] == list(range(6))


def wrapper(recompute, kept=None):
    """Checkpoints a layer and an operation behind it, whose backward starts the recompute."""
    if recompute == "off":
        return None

    def region(moe, x, scores, ids):
        return moe(x, scores, ids) * torch.ones(())

    def wrap(*arguments):
        out = checkpoint(region, *arguments, use_reentrant=recompute == "reentrant")
        if kept is not None:
            kept.append(out)
        return out

    return wrap


def backward(y, dy, in_thread):
    if not in_thread:
        y.backward(dy)
        return
    errors = []

    def run():
        try:
            y.backward(dy)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


def run_schedule(rank, num_ranks, stage, recompute, in_thread):
    """Two optimizer steps with an SGD update between them, each against the dense reference."""
    torch.set_num_threads(1)
    world = WORLD
    loads = {name: world.loads(STEPS_M) for name in ("logprob", "train")}
    plan = make_two_pass_plan(world, loads)
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, replica_slots=1)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    routes = {name: world.routes(rank) for name in loads}
    for optimizer_step in (0, 1):
        own = [m for m, step in enumerate(STEPS_M) if step == optimizer_step]
        weights = [
            [runtime.gather_experts(w, moe.layer) for w in (moe.w13, moe.w2)]
            for moe in model.layers
        ]
        expected = reference(world, rank, own, weights)
        result = Result([], [], [], [], [])
        with runtime.step(plan, routes, optimizer_step=optimizer_step) as step:
            with torch.no_grad():
                for place, m in enumerate(own):
                    x, scores, _ = world.batch(rank, m)
                    with step.forward(micro_batch=m, pass_="logprob"):
                        check(model(x, scores), expected.y[place], "log-prob pass")
            run_order(
                world, rank, model, step, result,
                one_forward_one_backward(stage, 4, own), wrapper(recompute), in_thread,
            )  # fmt: skip
        compare_step(runtime, model, result, expected)
        with torch.no_grad():
            for param in model.parameters():
                param -= LR * param.grad
                param.grad = None
    runtime.close()
    return True


def make_two_pass_plan(world, loads):
    from relibra.testing.plans import make_plan

    return make_plan(world.rng(5), loads, world.topology, world.shape, replica_slots=1)


def run_order(world, rank, model, step, result, order, wrap, in_thread):
    flight = {}
    for kind, m in order:
        if kind == "F":
            x, scores, dy = world.batch(rank, m)
            x.requires_grad_(), scores.requires_grad_()
            with step.forward(micro_batch=m):
                flight[m] = (x, scores, dy, model(x, scores, wrap=wrap))
        else:
            x, scores, dy, y = flight.pop(m)
            backward(y, dy, in_thread)
            result.y.append(y.detach()), result.dx.append(x.grad)
            result.dscores.append(scores.grad)


def compare_step(runtime, model, result, expected):
    for name in ("y", "dx", "dscores"):
        for got, need in zip(getattr(result, name), getattr(expected, name), strict=True):
            check(got, need, name)
    for moe, dw13, dw2 in zip(model.layers, expected.dw13, expected.dw2, strict=True):
        check(runtime.gather_experts(moe.w13.grad, moe.layer), dw13, "dw13")
        check(runtime.gather_experts(moe.w2.grad, moe.layer), dw2, "dw2")


RECOMPUTES = ("off", "reentrant", "non-reentrant")
USUAL = {(0, "off"), (2, "reentrant"), (3, "non-reentrant")}  # each value once


@pytest.mark.parametrize(
    ("stage", "recompute"),
    [
        pytest.param(stage, how, marks=[] if (stage, how) in USUAL else pytest.mark.slow)
        for stage in (0, 2, 3)
        for how in RECOMPUTES
    ],
)
def test_1f1b_two_passes_two_optimizer_steps(stage, recompute):
    assert all(run_ranks(4, run_schedule, stage, recompute, False))


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param("off", marks=pytest.mark.slow),
        "reentrant",
        pytest.param("non-reentrant", marks=pytest.mark.slow),
    ],
)
def test_backward_on_another_thread(recompute):
    assert all(run_ranks(4, run_schedule, 0, recompute, True))


def run_outside(rank, num_ranks):
    """Uses outside a step, of another step, or of an unknown micro-batch are refused."""
    world = World(1, 2, num_experts=8, top_k=2)
    runtime = relibra.Runtime(dist.group.WORLD, world.topology)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    x, scores, dy = world.batch(rank, 0)
    step = runtime.step(world.random_plan(), {"train": world.routes(rank)})
    with step:
        with step.forward(micro_batch=0):
            y = model(x, scores)
        for arguments, message in (
            ({"micro_batch": 1}, "micro_batch: need one of \\[0\\]"),
            ({"micro_batch": 0, "pass_": "logprob"}, "pass_: need one of \\['train'\\]"),
        ):
            with pytest.raises(ValueError, match=message), step.forward(**arguments):
                pass
        with step.forward(micro_batch=0):
            with pytest.raises(ValueError, match="need 24 tokens|need 27 tokens"):
                model(x[:-1], scores[:, :-1], torch.from_numpy(world.ids(rank, 0))[:-1])
            wrong = torch.from_numpy(world.ids(rank, 0)).long()
            wrong[3, 0, 1] = (wrong[3, 0, 1] + 1) % 8
            with pytest.raises(ValueError, match="replayed ids .* at token 3, choice 1"):
                model(x, scores, wrong)
    with pytest.raises(RuntimeError, match="training step is not active"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="not active"), step.forward(micro_batch=0):
        pass
    return True


def test_uses_outside_their_step_are_refused():
    assert all(run_ranks(2, run_outside))


def test_recompute_without_a_known_micro_batch_is_refused():
    """A backward that starts inside the model, with two micro-batches in flight, is an error."""
    world = World(1, 1, num_experts=4, top_k=2, micro_batches=2, replica_slots=0)
    runtime = relibra.Runtime(replica_slots=0)
    model = Model(world, 0, 1)
    runtime.attach(model)
    kept = []
    with runtime.step(world.random_plan(), {"train": world.routes(0)}) as step:
        for m in (0, 1):
            x, scores, _ = world.batch(0, m)
            with step.forward(micro_batch=m):
                model(x.requires_grad_(), scores, wrap=wrapper("non-reentrant", kept))
        with pytest.raises(RuntimeError, match="micro-batch cannot be told"):
            kept[0].sum().backward()


class _EqualTokens(World):
    """Tables of one micro-batch would fit the tokens of another."""

    def tokens_of(self, rank, m):
        return self.tokens


MIXED = _EqualTokens(1, 1, num_experts=8, top_k=2, num_layers=2, micro_batches=2, tokens=9, seed=3)


def backward_of_two_micro_batches(interleaved):
    """One backward for both; layer 1 is recomputed, layer 2 is not; ids are looked up inside."""
    runtime = relibra.Runtime()
    model = Model(MIXED, 0, 1)
    runtime.attach(model)
    batches = [MIXED.batch(0, m) for m in (0, 1)]
    hidden = [x.requires_grad_() for x, _, _ in batches]

    def run(place, m):
        moe, scores = model.layers[place], batches[m][1][place]
        wrap = wrapper("non-reentrant") if place == 0 else _plain
        with step.forward(micro_batch=m):
            hidden[m] = hidden[m] + wrap(moe, hidden[m], scores, None)

    with runtime.step(MIXED.random_plan(), {"train": MIXED.routes(0)}) as step:
        for outer in (0, 1):
            for inner in (0, 1):
                run(*((outer, inner) if interleaved else (inner, outer)))
                if inner and not interleaved:  # what the forward hook does for a whole model
                    with step.forward(micro_batch=outer):
                        runtime.attachment().mark_outputs(hidden[outer])
        sum((y * dy).sum() for y, (_, _, dy) in zip(hidden, batches, strict=True)).backward()
    return [x.grad for x, _, _ in batches]


def _plain(moe, x, scores, ids):
    return moe(x, scores, ids)


def test_one_backward_over_two_micro_batches():
    for got, need in zip(backward_of_two_micro_batches(False), reference(MIXED, 0).dx, strict=True):
        check(got, need, "dx")


def test_recompute_in_a_graph_that_mixes_micro_batches_is_refused():
    with pytest.raises(RuntimeError, match="do not interleave the layers of several micro-batches"):
        backward_of_two_micro_batches(True)
