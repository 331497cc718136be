"""Layers in stages on several ranks: the same bits, and nothing left over at the end of a step."""

import pytest
import torch
import torch.distributed as dist
from moe_world import Model, World
from torch.utils.checkpoint import checkpoint

import relibra
from relibra_kernels.testing.launch import run_ranks

WORLD = World(2, 2, num_experts=12, top_k=4, num_layers=2, replica_slots=2)


def set_up(rank, **options):
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, replica_slots=2, **options)
    model = Model(WORLD, rank, WORLD.num_ranks)
    runtime.attach(model)
    return runtime, model


def plain(first, second, x, scores):
    return first(x, scores[0]), second(x, scores[1])


def overlapped(first, second, x, scores):
    """Both layers on the same tokens: all exchanges of both are in flight at times."""
    one, two = first.start(x, scores[0]), second.start(x, scores[1])
    one, two = one.compute(), two.compute()
    return one.wait(), two.wait()


def recomputed(*arguments):
    return checkpoint(overlapped, *arguments, use_reentrant=False)


def train(rank, run, **options):
    """Outputs and gradients of both layers side by side."""
    runtime, model = set_up(rank, **options)
    x, scores, dy = WORLD.batch(rank, 0)
    x.requires_grad_(), scores.requires_grad_()
    step = runtime.step(WORLD.random_plan(), {"train": WORLD.routes(rank)})
    with step, step.forward(micro_batch=0):
        y, z = run(*model.layers, x, scores)
        (y + 2 * z).backward(dy)
    weights = [p.grad for p in model.parameters()]
    runtime.close()
    return [y.detach(), z.detach(), x.grad, scores.grad, *weights]


def run_stages(rank, num_ranks):
    torch.set_num_threads(1)
    for dispatch, combine in (("flat", "reduced"), ("two_hop", "exact")):
        options = {"dispatch": dispatch, "combine": combine}
        expected = train(rank, plain, **options)
        for run in (overlapped, recomputed):
            found = train(rank, run, **options)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return True


def test_stages_are_the_layer():
    assert all(run_ranks(4, run_stages))


def run_left_over(rank, num_ranks):
    """Rank 2 does not wait for its outputs; all ranks raise at the end of the step, and go on."""
    runtime, model = set_up(rank, timeout_s=60.0)
    x, scores, _ = WORLD.batch(rank, 0)
    plan, routes = WORLD.random_plan(), {"train": WORLD.routes(rank)}
    message = ""
    try:
        with runtime.step(plan, routes) as step, step.forward(micro_batch=0):
            pending = model.layers[0].start(x, scores[0]).compute()
            if rank != 2:
                pending.wait()
    except (RuntimeError, relibra.PlanError) as error:
        message = str(error)
    with runtime.step(plan, routes) as step, step.forward(micro_batch=0):
        model.layers[0](x, scores[0])
    return message


def test_outputs_that_nobody_waited_for_end_the_step():
    for rank, message in enumerate(run_ranks(4, run_left_over)):
        assert "layer 1: outputs were never waited for" in message
        assert ("refused by rank(s) [2]" in message) == (rank != 2)


def run_all_left(rank, num_ranks):
    runtime, model = set_up(rank, timeout_s=60.0)
    x, scores, _ = WORLD.batch(rank, 0)
    plan, routes = WORLD.random_plan(), {"train": WORLD.routes(rank)}

    def start_only(error=None):
        with runtime.step(plan, routes) as step, step.forward(micro_batch=0):
            model.layers[0].start(x, scores[0])
            if error is not None:
                raise error

    with pytest.raises(RuntimeError, match="tokens were dispatched, no balanced_moe took them"):
        start_only()
    with pytest.raises(KeyError):
        start_only(KeyError("left"))
    with runtime.step(plan, routes) as step, step.forward(micro_batch=0):
        model.layers[0](x, scores[0])  # what an error left behind is forgotten
    return True


def test_tokens_that_nobody_took_end_the_step():
    assert all(run_ranks(4, run_all_left))


def run_other_order(rank, num_ranks):
    """Rank 0 computes its layers the other way round."""
    runtime, model = set_up(rank, timeout_s=60.0)
    x, scores, _ = WORLD.batch(rank, 0)

    def train():
        step = runtime.step(WORLD.random_plan(), {"train": WORLD.routes(rank)})
        with step, step.forward(micro_batch=0):
            started = [moe.start(x, scores[place]) for place, moe in enumerate(model.layers)]
            for one in started if rank else started[::-1]:
                one.compute().wait()

    with pytest.raises(relibra.PlanError, match="need the same order of passes"):
        train()
    return True


def test_ranks_that_compute_their_layers_in_another_order():
    assert all(run_ranks(4, run_other_order))


def run_two_models(rank, num_ranks):
    """A step of the critic begins and ends while a stage of the actor is in flight."""
    runtime, actor = set_up(rank)
    critic = Model(WORLD, rank, num_ranks)
    runtime.attach(critic, name="critic")
    x, scores, _ = WORLD.batch(rank, 0)
    plan, routes = WORLD.random_plan(), {"train": WORLD.routes(rank)}
    with runtime.step(plan, routes) as step, step.forward(micro_batch=0):
        pending = actor.layers[0].start(x, scores[0]).compute()
        with (
            runtime.step(plan, routes, model="critic") as other,
            other.forward(micro_batch=0),
        ):
            expected = critic.layers[0](x, scores[0])
        found = pending.wait()
    runtime.close()
    return torch.equal(found, expected)


def test_a_step_of_another_model_leaves_open_stages_alone():
    assert all(run_ranks(4, run_two_models))
