"""Every option of the layer in one process, against the dense layer in fp64."""

import dataclasses

import pytest
import torch
import torch._dynamo.testing
from moe_world import World
from option_worlds import (
    CASES,
    Case,
    OneLayer,
    compare,
    logical_weights,
    reference,
    run_layer,
    stored,
)

import relibra
from relibra import BalancedMoE, LayerOptions, balanced_moe
from relibra.local_use import local_handle
from relibra_kernels.tables import m_tiles
from relibra_kernels.testing.compare import calc_diff

WORLD = World(num_experts=5, top_k=2, hidden=12, expert=9, tokens=17, micro_batches=2)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_layer_live_and_under_a_plan(name):
    case = CASES[name]
    expected = reference(WORLD, 0, case)
    compare(run_layer(WORLD, 0, case, None), expected, "live")
    compare(run_layer(WORLD, 0, case, WORLD.random_plan()), expected, "plan")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_layer_to_rounding_in_fp64(name):
    moe = OneLayer(WORLD, 0, CASES[name], torch.float64).moe
    x, scores, dy = (part.double() for part in WORLD.batch(0, 0))
    x.requires_grad_(), scores.requires_grad_()
    moe(x, scores[0], torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()).backward(dy)
    expected = reference(dataclasses.replace(WORLD, micro_batches=1), 0, CASES[name])
    got = {"dx0": x.grad, "dscores0": scores.grad[0]}
    got |= {f"d{n}": param.grad for n, param in moe.named_parameters()}
    assert {n: float(calc_diff(g, expected[n])) < 1e-28 for n, g in got.items()} == dict.fromkeys(
        got, True
    )


def test_equals_the_dense_layer_on_triton_kernels():
    case = CASES["gpt-oss"]
    world = World(num_experts=2, top_k=2, hidden=64, expert=64, tokens=5)
    expected = reference(world, 0, case)
    compare(run_layer(world, 0, case, None, kernels="triton"), expected, "triton")


@pytest.mark.parametrize("changed", ["activation", "score_at", "interleaved", "alpha", "limit"])
def test_every_option_matters(changed):
    """Mutation: the oracle of one option refuses the layer of another."""
    case = Case(LayerOptions("clamped_swiglu", limit=0.7, alpha=1.0, interleaved=True))
    other = {
        "activation": Case(LayerOptions("swiglu", interleaved=True)),
        "score_at": _with(case, score_at="activation"),
        "interleaved": _with(case, interleaved=False),
        "alpha": _with(case, alpha=1.1),
        "limit": _with(case, limit=0.8),
    }[changed]
    got = run_layer(WORLD, 0, case, None)
    compare(got, reference(WORLD, 0, case), "own oracle")
    with pytest.raises(AssertionError, match="y0: calc_diff"):
        compare(got, _with_weights_of(case, other), "other oracle")


def _with(case, **options):
    return dataclasses.replace(case, options=dataclasses.replace(case.options, **options))


def _with_weights_of(case, other):
    """Results of the options of ``other`` on the stored tensors of ``case``."""
    import option_worlds

    fields = stored({n: w.double() for n, w in logical_weights(WORLD, case).items()}, case)
    parts = option_worlds.unstored(fields, other)
    results = reference(WORLD, 0, case)
    for m in range(WORLD.micro_batches):
        x, scores, _ = (part.double() for part in WORLD.batch(0, m))
        ids = torch.from_numpy(WORLD.ids(0, m))[:, 0]
        results[f"y{m}"] = option_worlds.dense(x, ids, scores[0], parts, other.options)
    return {name: results[name] for name in sorted(results, key=lambda n: n[0] != "y")}


@pytest.mark.parametrize("combine", ["reduced", "exact"])
@pytest.mark.parametrize(
    "options", [{"save": "redispatch"}, {"recompute_h": True}], ids=["redispatch", "recompute"]
)
def test_keeping_less_changes_no_bit(options, combine):
    case = dataclasses.replace(CASES["gpt-oss"], combine=combine)
    plan = WORLD.random_plan()
    expected = run_layer(WORLD, 0, case, plan)
    got = run_layer(WORLD, 0, _with(case, **options), plan)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def saved_sizes(options):
    """Sizes of the activations that one forward keeps."""
    moe = OneLayer(WORLD, 0, Case(options, bias=False)).moe
    x, scores, _ = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()
    held = []

    def keep(tensor):
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moe(x.requires_grad_(), scores[0], ids)
    params = {param.data_ptr() for param in moe.parameters()}
    return x, [one for one in held if one.data_ptr() not in params]


def test_what_is_kept():
    x, copies = saved_sizes(LayerOptions())
    assert sorted(one.shape[1] for one in copies) == [2, 12, 18]
    assert all(one.data_ptr() != x.data_ptr() for one in copies)
    x, less = saved_sizes(LayerOptions(save="redispatch", recompute_h=True))
    assert sorted(one.shape[1] for one in less) == [2, 12]
    assert any(one.data_ptr() == x.data_ptr() for one in less)


@pytest.mark.parametrize("grad_mode", ["returned", "main_grad"])
@pytest.mark.parametrize("name", ["gpt-oss", "relu2-transposed"])
def test_one_parameter_an_expert(name, grad_mode):
    """Tuples of tensors give the bits of one tensor, gradients and ``main_grad`` by expert."""
    case = CASES[name]
    fields = stored(logical_weights(WORLD, case), case)
    x, scores, dy = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()
    handle = dataclasses.replace(
        local_handle(ids, torch.arange(WORLD.num_experts), WORLD.num_experts),
        combine="exact",
        grad_mode=grad_mode,
    )
    results = []
    for split in (False, True):
        weights = {
            n: tuple(e.clone().requires_grad_() for e in w)
            if split and n in ("w13", "w2")
            else w.clone().requires_grad_()
            for n, w in fields.items()
        }
        flat = [p for w in weights.values() for p in (w if isinstance(w, tuple) else (w,))]
        for param in flat:
            param.main_grad = torch.full_like(param, 0.5)
        one = x.clone().requires_grad_()
        rest = {n: weights[n] for n in ("b13", "b2") if n in weights}
        y = balanced_moe(
            one, scores[0], weights["w13"], weights["w2"], handle=handle, **rest,
            options=case.options,
        )  # fmt: skip
        y.backward(dy)
        grads = [p.main_grad if grad_mode == "main_grad" else p.grad for p in flat]
        assert all((p.grad is None) == (grad_mode == "main_grad") for p in flat)
        joined = torch.cat([g.reshape(-1) for g in grads])
        results.append((y.detach(), one.grad, joined))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("grad_mode", ["returned", "main_grad"])
def test_frozen_experts_and_frozen_biases(grad_mode):
    case = CASES["swiglu-bias"]
    fields = stored(logical_weights(WORLD, case), case)
    x, scores, dy = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()
    handle = dataclasses.replace(
        local_handle(ids, torch.arange(WORLD.num_experts), WORLD.num_experts), grad_mode=grad_mode
    )
    w13 = tuple(e.clone().requires_grad_(i != 2) for i, e in enumerate(fields["w13"]))
    w2, b13 = fields["w2"].clone(), fields["b13"].clone()
    b2 = fields["b2"].clone().requires_grad_()
    for param in (*w13, b2):
        param.main_grad = torch.zeros_like(param)
    balanced_moe(x, scores[0], w13, w2, handle=handle, b13=b13, b2=b2).backward(dy)
    one = dataclasses.replace(WORLD, micro_batches=1)
    expected = reference(one, 0, case)
    for i, param in enumerate(w13):
        grad = param.main_grad if grad_mode == "main_grad" else param.grad
        if i == 2:
            assert param.grad is None
            assert not param.main_grad.any()
        else:
            compare({"dw13": grad}, {"dw13": expected["dw13"][i]}, f"expert {i}")
    grad = b2.main_grad if grad_mode == "main_grad" else b2.grad
    compare({"db2": grad}, {"db2": expected["db2"]}, "bias")
    assert w2.grad is None
    assert b13.grad is None


@pytest.mark.parametrize("name", ["gpt-oss", "swiglu-bias"])
def test_static_slots_take_part(name):
    """Two of five home slots called static: the same results, their gradients apart."""
    case = CASES[name]
    fields = stored(logical_weights(WORLD, case), case)
    x, scores, dy = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()
    handle = local_handle(ids, torch.arange(WORLD.num_experts), WORLD.num_experts)
    tiles = m_tiles(handle.tables.slot_rows_n, 3, handle.block_rows, num_static=2)
    handle = dataclasses.replace(
        handle,
        tables=dataclasses.replace(handle.tables, mtile_B4=tiles, num_home=3),
        static={n: w[3:].contiguous() for n, w in fields.items()},
        static_grads={n: torch.full_like(w[3:], 7.0) for n, w in fields.items()},
    )
    home = {n: w[:3].clone().requires_grad_() for n, w in fields.items()}
    x.requires_grad_()
    y = balanced_moe(
        x, scores[0], home["w13"], home["w2"], handle=handle, b13=home["b13"], b2=home["b2"],
        options=case.options,
    )  # fmt: skip
    y.backward(dy)
    got = {"y0": y.detach(), "dx0": x.grad}
    for n, param in home.items():
        got[f"d{n}"] = torch.cat((param.grad, handle.static_grads[n]))
    expected = reference(dataclasses.replace(WORLD, micro_batches=1), 0, case)
    expected.pop("dscores0")
    compare(got, expected, name)


@pytest.mark.parametrize("name", ["gpt-oss", "redispatch-recompute", "gelu-bias-main-grad"])
def test_compiled_layers_take_biases_and_options(name):
    case = CASES[name]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    world = dataclasses.replace(WORLD, micro_batches=4)
    plan = world.random_plan()
    got = run_layer(
        world, 0, case, plan, compiled={"fullgraph": True, "backend": counter, "dynamic": True}
    )
    expected = run_layer(world, 0, case, plan)
    assert counter.frame_count == 1
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_compiled_layer_gets_its_input_from_the_graph():
    """Compilers may reuse the memory of inputs that the graph itself does not keep."""
    case = CASES["redispatch-recompute"]
    moe = OneLayer(WORLD, 0, case).moe
    x, scores, dy = WORLD.batch(0, 0)
    ids = torch.from_numpy(WORLD.ids(0, 0))[:, 0].long()
    weights = (moe.w13.detach(), moe.w2.detach())
    biases = (moe.b13.detach(), moe.b2.detach())
    ops = torch.ops.relibra
    _, ticket = ops.moe_forward(
        x, scores[0], *weights, ids, moe._layer_id, True, "returned", *biases, True
    )
    kept = moe._opaque.kept[int(ticket[1])][1]
    assert kept.tokens.numel() == 0
    rest = ticket, 2, torch.float32, [True] * 6, "returned", *biases
    expected = ops.moe_backward(dy, *weights, *rest, x.clone())
    x.fill_(float("nan"))
    got = ops.moe_backward(dy, *weights, *rest, WORLD.batch(0, 0)[0])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(RuntimeError, match='compiled for save="copy"'):
        ops.moe_backward(dy, *weights, *rest)


def test_state_of_a_layer_with_biases():
    moe = OneLayer(WORLD, 0, CASES["gpt-oss"]).moe
    assert list(dict(moe.named_parameters())) == ["w13", "w2", "b13", "b2"]
    again = BalancedMoE(5, 12, 9, layer=1, bias=True, options=moe.options)
    assert not again.b13.any()
    again.load_state_dict(moe.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), moe.parameters(), strict=True))
    assert "bias=True" in repr(moe)
    assert "hidden_size=12, expert_size=9" in repr(moe)
    plain = BalancedMoE(5, 12, 9, layer=1, options=moe.options)
    assert (plain.b13, plain.b2) == (None, None)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict(moe.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": "silu"}, ValueError, "activation: need one of .*'silu'"),
        ({"score_at": "input"}, ValueError, "score_at: need one of"),
        ({"save": "nothing"}, ValueError, "save: need one of"),
        ({"activation": "gelu", "interleaved": True}, ValueError, "interleaved: need .* gate"),
        ({"activation": "relu2", "interleaved": True}, ValueError, "activation='relu2'"),
        ({"alpha": 1.0}, ValueError, 'alpha: need activation="clamped_swiglu", got alpha=1.0'),
        ({"activation": "gelu", "limit": 1.0}, ValueError, "limit: need activation="),
        ({"activation": "clamped_swiglu", "limit": 0.0}, ValueError, "limit: need a positive"),
        ({"activation": "clamped_swiglu", "alpha": float("nan")}, ValueError, "alpha: need a fin"),
        ({"activation": "clamped_swiglu", "limit": "7"}, TypeError, "limit: need a number"),
        ({"interleaved": 1}, TypeError, "interleaved: need a bool, got 1"),
        ({"recompute_h": None}, TypeError, "recompute_h: need a bool"),
        ({"activation": ["gelu"]}, ValueError, r"activation: need one of .*\['gelu'\]"),
        ({"activation": "clamped_swiglu", "alpha": 10**400}, ValueError, "alpha: need a finite"),
    ],
)
def test_options_that_do_not_exist(arguments, error, message):
    with pytest.raises(error, match=message):
        LayerOptions(**arguments)


def whole(*, gated=True, **other):
    """Arguments of `BalancedMoE.from_dense` for 4 experts, D = 8, F = 3."""
    rows = 6 if gated else 3
    found = {
        "w13_E2FD": torch.ones(4, rows, 8),
        "w2_EDF": torch.ones(4, 8, 3),
        "b13": torch.ones(4, rows),
        "b2": torch.ones(4, 8),
    }
    return found | other


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (whole(b2=None), ValueError, "b2: need both biases or none"),
        (whole(b13=None), ValueError, "b13: need both biases or none"),
        (whole(b13=torch.ones(4, 3)), ValueError, r"b13: need shape \[4, 6\], got .*\[4, 3\]"),
        (whole(b2=torch.ones(3, 8)), ValueError, r"b2: need shape \[4, 8\]"),
        (whole(b2=torch.ones(4, 8).double()), TypeError, "b2: need dtype torch.float32"),
        (whole(b2=torch.ones(8, 4).t()), ValueError, "b2: need contiguous memory"),
        (whole(gated=False), ValueError, r"w13_E2FD: need \[E, 2F, D\]"),
        (
            whole(gated=False, options=LayerOptions("gelu"), w2_EDF=torch.ones(4, 8, 2)),
            ValueError,
            r"w2_EDF: need shape \[4, 8, 3\]",
        ),
        (
            whole(options=LayerOptions(transposed=True)),
            ValueError,
            r"w13_E2FD: need \[E, D, 2F\] with D = 3",
        ),
        (whole(options="gelu"), TypeError, "options: need a LayerOptions, got 'gelu'"),
    ],
)
def test_whole_layers_that_are_refused(arguments, error, message):
    weights = [arguments.pop(name) for name in ("w13_E2FD", "w2_EDF")]
    with pytest.raises(error, match=message):
        BalancedMoE.from_dense(*weights, layer=0, **arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"w13": ()}, ValueError, "w13_H2FD: need at least one expert, got a tuple of 0"),
        ({"w2": (torch.ones(8, 3),) * 3}, ValueError, "w2_HDF: need 4 experts, got a tuple of 3"),
        (
            {"w2": (*(torch.ones(8, 3),) * 3, torch.ones(3, 8).t())},
            ValueError,
            r"w2_HDF\[3\]: need the strides of w2_HDF\[0\]",
        ),
        ({"w2": (*(torch.ones(8, 3),) * 3, None)}, TypeError, r"w2_HDF\[3\]: need a torch.Tensor"),
        (
            {"w13": (*(torch.ones(6, 8),) * 3, torch.ones(5, 8))},
            ValueError,
            r"w13_H2FD\[3\]: need shape \[6, 8\]",
        ),
        ({"w13": [torch.ones(6, 8)] * 4}, TypeError, "w13_H2FD: need a torch.Tensor"),
        ({"b13": torch.ones(4, 5)}, ValueError, r"b13: need shape \[4, 6\]"),
        ({"options": None}, TypeError, "options: need a LayerOptions, got None"),
        ({"w13": torch.ones(5, 6, 8), "w2": torch.ones(5, 8, 3)}, ValueError, "4 home slots .* 5"),
        ({"w13": torch.ones(3, 6, 8), "w2": torch.ones(3, 8, 3)}, ValueError, "4 home slots .* 3"),
    ],
)
def test_calls_that_are_refused(changed, error, message):
    given = {"w13": torch.ones(4, 6, 8), "w2": torch.ones(4, 8, 3)} | changed
    ids = torch.tensor([[0, 1]])
    handle = local_handle(ids, torch.arange(4), 4)
    with pytest.raises(error, match=message):
        balanced_moe(
            torch.ones(1, 8), torch.ones(1, 2), given.pop("w13"), given.pop("w2"), handle=handle,
            **given,
        )  # fmt: skip


def test_bias_must_be_a_bool():
    with pytest.raises(TypeError, match="bias: need a bool, got 1"):
        BalancedMoE(4, 8, 3, layer=0, bias=1)


def test_attached_layers_have_one_replica_buffer_with_all_fields():
    world = dataclasses.replace(WORLD, replica_slots=2)
    runtime = relibra.Runtime(None, world.topology, replica_slots=2)
    moe = OneLayer(world, 0, CASES["gpt-oss"]).moe
    runtime.attach(moe)
    slots = moe.expert_weights.slots()
    views = runtime.buffers.weights(slots)
    assert list(views) == ["w13", "w2", "b13", "b2"]
    assert len({view.untyped_storage().data_ptr() for view in views.values()}) == 1
    grads = runtime.buffers.grads(slots)
    assert {view.dtype for view in grads.values()} == {torch.float32}
    assert views["w13"].data_ptr() == runtime.buffers.weights(slots)["w13"].data_ptr()
    runtime.close()
