"""All ranks in one process: first used in inference mode, and inherited by a forked child."""

import pytest
import torch
from forked import told_in_fork
from local_world import all_routes, joined_batch, make_local, run_local_step, weight_grads
from moe_world import Model, World, compare, references

import relibra
from relibra_kernels.ops import backend

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=2, tokens=9, replica_slots=1, dtype=torch.float64
)


def check_training(runtime, model, plan):
    """A step that equals the dense reference; its gradients are ordinary tensors."""
    for param in model.parameters():
        param.grad = None
    results = run_local_step(WORLD, runtime, model, plan)
    weight_grads(runtime, model, results)
    for result, need in zip(results, references(WORLD), strict=True):
        compare(result, need)


@pytest.mark.parametrize("dispatch", ["flat", "peer"])
def test_what_is_made_in_inference_mode_serves_training(dispatch):
    model = Model(WORLD, 0, 1)
    with torch.inference_mode():
        runtime = relibra.Runtime(
            topology=WORLD.topology, transport="local", replica_slots=1, dispatch=dispatch
        )
        runtime.attach(model)
    check_training(runtime, model, WORLD.random_plan(fill=1.0))
    plan = WORLD.random_plan(fill=1.0, static_slots=1, base=runtime.layout)
    with torch.inference_mode():
        runtime.suspend()
        runtime.resume(None)
        step = runtime.step(plan, {"train": all_routes(WORLD)})
        with step, step.forward(micro_batch=0):
            model(*joined_batch(WORLD, 0)[:2])
    check_training(runtime, model, plan)
    runtime.close()


def test_gradients_of_a_step_that_ends_in_inference_mode_are_added_to():
    """Static copies return theirs at the end, to parameters that may have none so far."""
    runtime, model = make_local(WORLD)
    plan = WORLD.random_plan(fill=1.0, static_slots=1)
    x, scores, dy = joined_batch(WORLD, 0)
    with torch.inference_mode():
        step = runtime.step(plan, {"train": all_routes(WORLD)}).__enter__()
    with step.forward(micro_batch=0):
        y = model(x, scores)
    y.backward(dy)
    for param in model.parameters():
        param.grad = None
    with torch.inference_mode():
        step.__exit__(None, None, None)
    for param in model.parameters():
        assert not param.grad.is_inference()
        param.grad += 1
    assert all(not moe.home_slot_expert.is_inference() for moe in model.layers)
    runtime.close()


def test_a_forked_child_is_told_and_its_parent_trains_on():
    runtime, model = make_local(WORLD)
    plan = WORLD.random_plan(fill=1.0)
    check_training(runtime, model, plan)
    x, scores, dy = joined_batch(WORLD, 0)
    need = "need process PARENT, which made it and runs its threads, got process CHILD, a fork"
    with runtime.step(plan, {"train": all_routes(WORLD)}) as step:
        with step.forward(micro_batch=0):
            assert need in told_in_fork(lambda: model(x, scores))
            y = model(x, scores)
        assert need in told_in_fork(lambda: y.backward(dy))
        y.backward(dy)
    assert need in told_in_fork(lambda: runtime.step(plan, {"train": all_routes(WORLD)}))
    assert need in told_in_fork(lambda: runtime.on_ranks(lambda rank: rank))
    assert told_in_fork(runtime.close) == "nothing"
    check_training(runtime, model, plan)
    runtime.close()


def test_error_words_that_are_made_in_inference_mode_take_errors_of_any_mode():
    backend._error_word.cache_clear()
    with torch.inference_mode():
        backend.note_other_ids(torch.tensor([False]))
    backend.note_other_ids(torch.tensor([True]))
    with pytest.raises(ValueError, match="other ids than the replayed ones"):
        backend.raise_device_errors("cpu")
    backend.raise_device_errors("cpu")
