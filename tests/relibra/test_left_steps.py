"""What a step that is left, closed or forgotten must not hand on, and what hosts may say."""

import contextlib

import pytest
import torch
from local_world import all_routes, joined_batch, make_local
from moe_world import Model, World, check, references

import relibra

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=2, tokens=6, replica_slots=1, dtype=torch.float64
)
PLAN = WORLD.random_plan(fill=1.0, reorder=False)
ONE = World(1, 1, num_experts=4, tokens=6, dtype=torch.float64)
ONE_PLAN = ONE.random_plan()


def forward(step, model):
    x, scores, dy = joined_batch(WORLD, 0)
    with step.forward(micro_batch=0):
        return x, model(x, scores), dy


def test_weights_that_were_pushed_ahead_in_a_left_step_are_not_used():
    """The host may have loaded others since, and its new step begins with the same use."""
    runtime, model = make_local(WORLD)
    with contextlib.suppress(KeyError), runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        step.next(micro_batch=0)
        assert step.report()["layer_1/replica_pushed_bytes"] > 0
        raise KeyError
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-2)
    with runtime.step(PLAN, {"train": all_routes(WORLD)}) as step:
        x, y, dy = forward(step, model)
        y.backward(dy)
    weights = [tuple(-2 * w for w in WORLD.weights(layer)) for layer in WORLD.shape.moe_layers]
    need = references(WORLD, weights=weights)
    check(y.detach(), torch.cat([one.y[0] for one in need]), "y")
    check(x.grad, torch.cat([one.dx[0] for one in need]), "dx")
    runtime.close()


@pytest.mark.parametrize("said", [False, 0, "no"])
def test_weights_are_ready_only_where_the_host_says_so(said):
    runtime, model = make_local(WORLD)
    runtime.set_layer_hooks(2, weights_ready=lambda: said)
    text = f"weights_ready: need None, True or an event, got {said!r}"
    with (
        pytest.raises(TypeError, match=text),
        runtime.step(PLAN, {"train": all_routes(WORLD)}) as step,
    ):
        forward(step, model)
    runtime.close()


@pytest.mark.parametrize("transport", ["local", "dist"])
def test_a_model_is_forgotten_after_its_step(transport):
    world, options = (WORLD, {"replica_slots": 1}) if transport == "local" else (ONE, {})
    plan = PLAN if transport == "local" else ONE_PLAN
    routes = all_routes(world) if transport == "local" else world.routes(0)
    runtime = relibra.Runtime(topology=world.topology, transport=transport, **options)
    model = Model(world, 0, 1)
    runtime.attach(model)
    with runtime.step(plan, {"train": routes}) as step:
        x, scores, dy = joined_batch(world, 0)
        with step.forward(micro_batch=0):
            y = model(x, scores)
        with pytest.raises(RuntimeError, match="detach: model 'actor' is in a training step"):
            runtime.detach("actor")
        runtime.close()
        with pytest.raises(RuntimeError, match="closed|its training step is not active"):
            y.backward(dy)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"timeout_s": "5"}, TypeError, "timeout_s: need a number of seconds or None, got '5'"),
        ({"timeout_s": True}, TypeError, "timeout_s: need a number of seconds or None, got True"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s: need more than 0 .*, got nan"),
        ({"transport_options": 3}, TypeError, "transport_options: need ProviderOptions .*, got 3"),
    ],
)
def test_waits_that_cannot_be(options, error, text):
    with pytest.raises(error, match=text):
        relibra.Runtime(**options)


def test_a_model_that_found_no_memory_is_as_before():
    runtime = relibra.Runtime(replica_slots=10**12, grad_mode="main_grad")
    model = Model(ONE, 0, 1)
    with pytest.raises(RuntimeError):
        runtime.attach(model)
    assert not model._forward_hooks
    assert not model.layers[0]._grads_to_main
    relibra.Runtime().attach(model)
