"""The two opaque ops of the layer: their contract, stale numbers, copies of a layer."""

import copy
import gc

import pytest
import torch
from moe_world import World

import relibra
from relibra.local_use import local_handle

WORLD = World(hidden=8, expert=8)
ops = torch.ops.relibra


def alone():
    """A layer that no runtime is attached to, and the first five arguments of its op."""
    moe = relibra.BalancedMoE.from_dense(*WORLD.weights(1), layer=1)
    x, scores, _ = WORLD.batch(0, 0)
    return moe, (x, scores[0], moe.w13, moe.w2, torch.from_numpy(WORLD.ids(0, 0))[:, 0])


def test_a_ticket_without_keep_has_no_number():
    moe, given = alone()
    numbers = [
        int(ops.moe_forward(*given, moe._layer_id, keep, "returned")[1][1])
        for keep in (False, True)
    ]
    assert numbers[0] == -1
    assert numbers[1] >= 0
    assert not moe._opaque.kept


def test_a_layer_without_a_runtime():
    moe, (x, scores, _, _, ids) = alone()
    expected = moe(x, scores, ids)
    assert torch.equal(
        torch.compile(moe, fullgraph=True, backend="aot_eager")(x, scores, ids), expected
    )


def test_comm_05_opcheck():
    moe, given = alone()
    fixed = [t.detach() if t.is_floating_point() else t for t in given]
    torch.library.opcheck(ops.moe_forward, (*fixed, moe._layer_id, False, "returned"))
    # The numbers on two tickets differ, so only gradients can be compared, as above.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in fixed]
    full = (*leaves, moe._layer_id, True, "returned")
    torch.library.opcheck(ops.moe_forward, full, test_utils=tests)
    ticket = ops.moe_forward(*fixed, moe._layer_id, True, "returned")[1]
    dy, (w13, w2) = torch.randn(fixed[0].shape), fixed[2:4]
    for needs in ([True] * 6, [True, False, False, True, False, True], [False] * 6):
        rest = ticket, 2, torch.float32, needs, "returned"
        torch.library.opcheck(ops.moe_backward, (dy, w13, w2, *rest))


def test_a_stale_id_names_the_module():
    moe, given = alone()
    stale, tail = moe._layer_id, (True, "returned")
    ticket = ops.moe_forward(*given, stale, *tail)[1]
    given = [t.detach().clone() if t.is_floating_point() else t for t in given]
    del moe
    gc.collect()
    with pytest.raises(RuntimeError, match="layer_id: need the id of a live BalancedMoE"):
        ops.moe_forward(*given, stale, *tail)
    with pytest.raises(RuntimeError, match="ticket: need the id of a live BalancedMoE"):
        ops.moe_backward(given[0], *given[2:4], ticket, 2, torch.float32, [True] * 6, "returned")
    with pytest.raises(TypeError, match="layer_id: need"):
        ops.moe_forward(*given, stale.int(), *tail)
    with pytest.raises(ValueError, match="weight_grads: need one of"):
        ops.moe_forward(*given, stale, True, "somewhere")


def test_main_grad_is_that_of_the_parameters_whatever_weights_a_graph_passes():
    moe, (x, scores, _, _, ids) = alone()
    runtime = relibra.Runtime(grad_mode="main_grad")
    runtime.attach(moe)
    for param in moe.parameters():
        param.main_grad = torch.zeros_like(param)
    weights = moe.w13.detach(), moe.w2.detach()
    ticket = ops.moe_forward(x, scores, *weights, ids, moe._layer_id, True, "main_grad")[1]
    rest = ticket, 2, torch.float32, [True] * 6, "main_grad"
    grads = ops.moe_backward(torch.randn(x.shape), *weights, *rest)
    assert [g.numel() for g in grads] == [x.numel(), scores.numel(), 0, 0, 0, 0]
    assert all(param.main_grad.any() for param in moe.parameters())


def test_wrong_arguments_are_refused_when_the_op_runs():
    moe, (x, scores, w13, w2, ids) = alone()
    tail = moe._layer_id, True, "returned"
    with pytest.raises(TypeError, match="scores_TK: need a floating-point dtype"):
        ops.moe_forward(x, scores.int(), w13, w2, ids, *tail)
    with pytest.raises(ValueError, match="w2_HDF: need"):
        ops.moe_forward(x, scores, w13, w2[:, :, 1:], ids, *tail)


def test_a_ticket_whose_memory_was_copied_is_refused():
    moe, given = alone()
    x = given[0].requires_grad_()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        y = compiled(x, given[1], given[4])
    with pytest.raises(RuntimeError, match="layer 1 keeps nothing for number .*_hooks"):
        y.sum().backward()


def test_a_copy_is_a_layer_of_its_own():
    moe, given = alone()
    twin = copy.deepcopy(moe)
    assert int(twin._layer_id[0]) != int(moe._layer_id[0])
    with torch.no_grad():
        twin.w13.mul_(2)
    x, scores, ids = given[0], given[1], given[4]
    for one in (moe, twin):
        torch._dynamo.reset()
        got = torch.compile(one, fullgraph=True, backend="aot_eager")(x, scores, ids)
        assert torch.equal(got, one(x, scores, ids))
    assert not torch.equal(moe(x, scores, ids), twin(x, scores, ids))


def test_handles_of_the_op_are_those_of_the_eager_layer():
    moe, given = alone()
    handle = local_handle(given[4], moe.home_slot_expert, moe.num_experts)
    y, _ = ops.moe_forward(*given, moe._layer_id, False, "returned")
    assert torch.equal(y, relibra.balanced_moe(*given[:4], handle=handle))
