"""`BalancedMoE` in one process: equality, inputs of every kind, what it refuses."""

import copy
import gc
import weakref

import pytest
import torch
from moe_world import World, calc_diff, check

import relibra
from relibra_kernels.reference.moe import dense_moe

SIZES = {"hidden": 64, "expert": 64}


def layer_and_batch(world, seed=0):
    """A whole layer, and x, scores, ids, dy for it."""
    moe = relibra.BalancedMoE.from_dense(*world.weights(1), layer=1)
    x, scores, dy = world.batch(0, 0)
    ids = torch.from_numpy(world.ids(0, 0))[:, 0].long()
    return moe, x.requires_grad_(), scores[0].clone().requires_grad_(), ids, dy


def dense_result(world):
    """Output and gradients of x, scores, w13, w2 of the dense loop in fp64."""
    w13, w2 = (w.double().requires_grad_() for w in world.weights(1))
    x, scores, dy = world.batch(0, 0)
    x, scores = x.double().requires_grad_(), scores[0].double().requires_grad_()
    y = dense_moe(x, torch.from_numpy(world.ids(0, 0))[:, 0], scores, w13, w2)
    y.backward(dy.double())
    return y.detach(), x.grad, scores.grad, w13.grad, w2.grad


@pytest.mark.parametrize("num_experts", [8, 60, 72, 384])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_kernel_07_kernel_12_equals_the_dense_layer(num_experts, top_k):
    tokens = max(24, 2 * num_experts // top_k)
    world = World(
        num_experts=num_experts, top_k=top_k, tokens=tokens, skew=0.5, **SIZES, seed=top_k
    )
    moe, x, scores, ids, dy = layer_and_batch(world)
    y = moe(x, scores, ids)
    y.backward(dy)
    got = (y.detach(), x.grad, scores.grad, moe.w13.grad, moe.w2.grad)
    for name, mine, need in zip(
        ("y", "dx", "dscores", "dw13", "dw2"), got, dense_result(world), strict=True
    ):
        assert calc_diff(mine, need) < 1e-12, name


def test_kernel_07_dropping_scores_from_the_weight_gradient_is_caught():
    """Mutation: `dW2` without the routing weight differs from the reference."""
    world = World(num_experts=8, top_k=2, **SIZES)
    moe, x, scores, ids, dy = layer_and_batch(world)
    moe(x, torch.ones_like(scores), ids).backward(dy)
    with pytest.raises(AssertionError, match="dw2"):
        check(moe.w2.grad, dense_result(world)[4], "dw2")


def test_replay_10_works_without_a_training_step_and_keeps_no_state():
    before = {name: set(vars(module)) for name, module in our_modules().items()}
    world = World(num_experts=8, top_k=2, **SIZES)
    moe, x, scores, ids, dy = layer_and_batch(world)
    assert moe.replayed_ids() is None
    y = moe(x.view(4, 6, 64), scores, ids)
    assert y.shape == (4, 6, 64)
    check(y.detach().view(24, 64), dense_result(world)[0], "y")
    y.view(24, 64).backward(dy)
    assert {name: set(vars(module)) for name, module in our_modules().items()} == before


def our_modules():
    import sys

    return {
        name: module
        for name, module in sys.modules.items()
        if name.split(".")[0] in ("relibra", "relibra_kernels")
    }


def test_replay_09_a_discarded_model_leaves_nothing_behind():
    """replay-09 (verl#7340): plans attach to the live layers by number."""
    world = World(num_experts=8, top_k=2, num_layers=5)

    def build():
        return torch.nn.ModuleList(
            relibra.BalancedMoE.from_dense(*world.weights(layer), layer=layer)
            for layer in world.shape.moe_layers
        )

    dropped = build()
    gone = [weakref.ref(module) for module in dropped]
    model = build()
    del dropped
    runtime = relibra.Runtime()
    runtime.attach(model)
    plan = relibra.plan_step(
        {"train": world.loads()}, world.topology, model=world.shape, strategy="none"
    )
    x, scores, _ = world.batch(0, 0)
    with runtime.step(plan, {"train": world.routes(0)}) as step, step.forward(micro_batch=0):
        for place, moe in enumerate(model):
            assert torch.equal(
                moe.replayed_ids(), torch.from_numpy(world.ids(0, 0))[:, place].long()
            )
            moe(x, scores[place])
    gc.collect()
    assert all(reference() is None for reference in gone)


def test_kernel_05_expanded_gradients():
    """kernel-05 (torchtitan#1265): the gradient of a sum has stride (0, 0)."""
    world = World(num_experts=8, top_k=2, **SIZES)
    results = []
    for run in (lambda y: y.sum().backward(), lambda y: y.backward(torch.ones_like(y))):
        moe, x, scores, ids, _ = layer_and_batch(world)
        run(moe(x, scores, ids))
        results.append((x.grad, scores.grad, moe.w13.grad, moe.w2.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_kernel_06_strided_inputs():
    """kernel-06: x with a row stride, w13 as a view of a larger tensor, strided dy."""
    world = World(num_experts=8, top_k=2, hidden=192, expert=64)
    moe, x, scores, ids, dy = layer_and_batch(world)
    plain = moe(x, scores, ids)
    plain.backward(dy)
    other, x2, scores2, _, _ = layer_and_batch(world)
    wide = torch.zeros(24, 196)
    wide[:, :192] = x2.detach()
    strided = wide[:, :192].requires_grad_()
    dy_wide = torch.zeros(24, 256)
    dy_wide[:, :192] = dy
    y = other(strided, scores2, ids)
    y.backward(dy_wide[:, :192])
    assert torch.equal(y, plain)
    assert torch.equal(strided.grad, x.grad)
    assert torch.equal(other.w13.grad, moe.w13.grad)


def test_kernel_08_one_choice_and_the_router():
    """kernel-08 (minimind#858): scores are used as given; p/p teaches the router nothing."""
    world = World(num_experts=8, top_k=1, **SIZES)
    moe, x, _, _, dy = layer_and_batch(world)
    gate = torch.nn.Linear(64, 8, bias=False)
    for normalise, learns in ((False, True), (True, False)):
        gate.weight.grad = None
        top, ids = gate(x.detach()).softmax(-1).topk(1)
        scores = top / top.sum(-1, keepdim=True) if normalise else top
        moe(x, scores, ids).backward(dy)
        assert (float(gate.weight.grad.abs().max()) > 1e-5) == learns


def test_kernel_11_ids_out_of_range():
    """kernel-11: -1 takes no part; E and 2^31-1 are refused with place and id."""
    world = World(num_experts=8, top_k=2, **SIZES)
    moe, x, scores, ids, dy = layer_and_batch(world)
    ids[3, 1] = -1
    y = moe(x, scores, ids)
    y.backward(dy)
    assert float(scores.grad[3, 1]) == 0.0
    w13, w2 = world.weights(1)
    kept = scores.detach().clone()
    kept[3, 1] = 0.0
    check(y.detach(), dense_moe(x.detach(), ids.clamp(min=0), kept, w13, w2), "y")
    for wrong in (8, 2**31 - 1, -2):
        ids[5, 0] = wrong
        message = f"need -1 <= id < 8, got {wrong} at token 5, choice 0"
        with pytest.raises(ValueError, match=message):
            moe(x, scores, ids)


def test_kernel_13_no_tokens_and_contractions_of_length_zero():
    """kernel-13: T = 0 gives empty outputs with gradients defined; one slot without rows."""
    moe = relibra.BalancedMoE(4, 16, 8, layer=0)
    x = torch.empty(0, 16, requires_grad=True)
    scores = torch.empty(0, 2, requires_grad=True)
    y = moe(x, scores, torch.empty(0, 2, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 16)
    assert scores.grad.shape == (0, 2)
    assert (moe.w13.grad == 0).all()
    assert (moe.w2.grad == 0).all()
    moe.zero_grad()
    moe(
        torch.randn(32, 16), torch.ones(32, 1), torch.ones(32, 1, dtype=torch.int64)
    ).sum().backward()
    assert (moe.w13.grad[[0, 2, 3]] == 0).all()
    assert (moe.w13.grad[1] != 0).any()


def test_frozen_weights_and_inputs_without_gradients():
    world = World(num_experts=8, top_k=2, **SIZES)
    expected = dense_result(world)
    moe, x, scores, ids, dy = layer_and_batch(world)
    moe.w13.requires_grad_(False)
    moe(x.detach(), scores, ids).backward(dy)
    assert moe.w13.grad is None
    check(moe.w2.grad, expected[4], "dw2")
    check(scores.grad, expected[2], "dscores")
    moe.requires_grad_(False)
    y = moe(x, scores.detach(), ids)
    y.backward(dy)
    check(x.grad, expected[1], "dx")


def test_a_second_derivative_is_refused():
    moe = relibra.BalancedMoE(4, 16, 8, layer=0)
    x = torch.randn(3, 16, requires_grad=True)
    y = moe(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_main_grad_mode_accumulates_and_keeps_bits_of_idle_experts():
    world = World(num_experts=8, top_k=2, **SIZES)
    moe, x, scores, ids, dy = layer_and_batch(world)
    runtime = relibra.Runtime(grad_mode="main_grad", replica_slots=0)
    runtime.attach(moe)
    ids[ids == 5] = 4
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    with pytest.raises(ValueError, match="main_grad: .* needs a tensor param.main_grad"):
        moe(x, scores, ids).backward(dy)
    for param in moe.parameters():
        param.main_grad = torch.full_like(param, -0.0)
        param.grad_added_to_main_grad = False
        param.main_grad[5] = torch.rand_like(param.main_grad[5])
    before = [param.main_grad[5].clone() for param in moe.parameters()]
    moe(x, scores, ids).backward(dy)
    first = moe.w13.main_grad.clone()
    moe(x, scores, ids).backward(dy)
    assert torch.allclose(moe.w13.main_grad[:5], 2 * first[:5], rtol=1e-5)
    for param, kept in zip(moe.parameters(), before, strict=True):
        assert torch.equal(param.main_grad[5].view(torch.int32), kept.view(torch.int32))
        assert param.grad_added_to_main_grad
        assert param.grad is not None
        assert param.grad.shape == param.shape
    moe.w13.main_grad = torch.zeros_like(moe.w13, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="main_grad: need torch.float32"):
        moe(x, scores, ids).backward(dy)


def test_arguments_are_checked():
    moe = relibra.BalancedMoE(4, 16, 8, layer=2)
    x, scores, ids = torch.randn(3, 16), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    for arguments, error, message in (
        ((x, scores, None), ValueError, "expert_ids: need \\[T, K\\] ids outside"),
        ((x, scores, ids.float()), TypeError, "expert_ids: need an integer dtype"),
        ((x, scores, ids[:, 0]), ValueError, "expert_ids: need \\[T, K\\]"),
        ((x[:2], scores, ids), ValueError, "x_TD: need 3 tokens"),
        ((x, scores[:, :1], ids), ValueError, "scores_TK"),
        ((x, scores.long(), ids), TypeError, "scores_TK: need a floating-point dtype"),
        ((x.double(), scores, ids), TypeError, "w13_H2FD"),
        ((torch.randn(3, 12), scores, ids), ValueError, "w13_H2FD: need .* D = 12"),
    ):
        with pytest.raises(error, match=message):
            moe(*arguments)
    for sizes, message in (
        ({"num_experts": 0}, "num_experts: need at least 1"),
        ({"rank": 3}, "rank: need 0 to 0, got 3"),
        ({"layer": -1}, "layer: need at least 0, got -1"),
    ):
        options = {"num_experts": 4, "layer": 0, **sizes}
        with pytest.raises(ValueError, match=message):
            relibra.BalancedMoE(options.pop("num_experts"), 16, 8, **options)
    sharded = relibra.BalancedMoE(4, 16, 8, layer=2, num_ranks=2)
    with pytest.raises(RuntimeError, match="runtime.attach"):
        sharded(x, scores, ids)


def test_a_deep_copy_of_an_attached_layer_is_not_attached():
    moe = relibra.BalancedMoE(4, 16, 8, layer=2)
    runtime = relibra.Runtime()
    runtime.attach(moe)
    twin = copy.deepcopy(moe)
    assert moe._attached() is not None
    assert twin._attached() is None
    assert torch.equal(twin.w13, moe.w13)
    runtime.close()
    runtime.close()
    assert moe._attached() is None
    with pytest.raises(RuntimeError, match="closed"):
        runtime.attach(moe)


@pytest.mark.parametrize(
    ("w13", "w2", "error", "message"),
    [
        (torch.ones(4, 5, 8), torch.ones(4, 8, 2), ValueError, r"w13_E2FD: need \[E, 2F, D\]"),
        (torch.ones(4, 6, 8), torch.ones(4, 8, 2), ValueError, r"w2_EDF: need shape \[4, 8, 3\]"),
        (torch.ones(4, 4, 8), torch.ones(4, 8, 2).half(), TypeError, "w2_EDF: need dtype"),
        (torch.ones(4, 8), torch.ones(4, 8, 2), ValueError, "w13_E2FD: need 3 dimensions"),
    ],
)
def test_weights_that_do_not_fit_each_other_are_refused(w13, w2, error, message):
    with pytest.raises(error, match=message):
        relibra.BalancedMoE.from_dense(w13, w2, layer=0)
