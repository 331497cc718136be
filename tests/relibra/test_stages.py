"""A layer in stages is the layer; handles that are misused say so."""

import pytest
import torch

import relibra

IDS = torch.tensor([[0, 2], [3, 1], [2, -1]])


@pytest.fixture
def moe():
    torch.manual_seed(3)
    return relibra.BalancedMoE(4, 8, 16, layer=0, bias=True)


def inputs():
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(2, 3, 8, generator=generator)
    scores = torch.rand(3, 2, generator=generator)
    return x.requires_grad_(), scores.requires_grad_(), dy


def grads(moe, run):
    """Output and all gradients."""
    x, scores, dy = inputs()
    moe.zero_grad(set_to_none=True)
    y = run(x, scores)
    y.backward(dy)
    return [y.detach(), x.grad, scores.grad, *(p.grad.clone() for p in moe.parameters())]


def functional(moe, **stages):
    """`balanced_moe` on the handle of the module."""

    def run(x, scores):
        handle = moe._handle(IDS, len(x))
        sent = relibra.dispatch(x, scores, handle=handle) if stages.get("dispatched") else None
        weights, options = (moe.w13, moe.w2), {"b13": moe.b13, "b2": moe.b2}
        wait = stages.get("wait", True)
        y = relibra.balanced_moe(
            x, scores, *weights, handle=handle, **options, dispatched=sent, wait=wait
        )
        return y if wait else y.wait()

    return run


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("dispatched", [True, False])
def test_functional_stages_are_the_layer(moe, dispatched, wait):
    expected = grads(moe, lambda x, scores: moe(x, scores, IDS))
    found = grads(moe, functional(moe, dispatched=dispatched, wait=wait))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_stages_of_the_module_are_the_layer(moe):
    expected = grads(moe, lambda x, scores: moe(x, scores, IDS))

    def run(x, scores):
        return moe.start(x.view(3, 1, 8), scores, IDS).compute().wait().view(3, 8)

    found = grads(moe, run)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    x, scores, _ = inputs()
    assert moe.start(x.view(3, 1, 8), scores, IDS).compute().wait().shape == (3, 1, 8)


def test_outputs_are_filled_when_they_are_waited_for(moe):
    x, scores, _ = inputs()
    pending = moe.start(x, scores, IDS).compute()
    memory = pending.output._y_TD
    assert not torch.equal(memory, moe(x, scores, IDS))
    y = pending.wait()
    assert pending.output.wait() is pending.output.wait() is memory
    assert torch.equal(y, moe(x, scores, IDS))
    assert y.requires_grad


def test_dispatched_tokens_are_not_sent_again(moe, monkeypatch):
    x, scores, _ = inputs()
    started = moe.start(x, scores, IDS)
    monkeypatch.setattr("relibra.layer_passes.start_tokens", None)
    y = started.compute().wait()
    monkeypatch.undo()
    assert torch.equal(y, moe(x, scores, IDS))


def test_strided_activations_and_no_gradients(moe):
    x, scores, _ = inputs()
    wide = torch.cat([x, x], 1)[:, ::2].detach()
    with torch.no_grad():
        y = moe.start(wide, scores, IDS).compute().wait()
    assert torch.equal(y, moe(wide, scores, IDS))
    assert not y.requires_grad
    with torch.inference_mode():
        again = moe.start(wide.clone(), scores.clone(), IDS).compute().wait()
    assert torch.equal(again, y)


def test_a_handle_serves_once(moe):
    x, scores, _ = inputs()
    started = moe.start(x, scores, IDS)
    started.compute().wait()
    with pytest.raises(RuntimeError, match="need unused tokens, got those of local use"):
        started.compute()


def test_a_handle_serves_what_was_dispatched(moe):
    x, scores, _ = inputs()
    handle = moe._handle(IDS, 3)
    sent = relibra.dispatch(x, scores, handle=handle)

    def call(x, scores, handle):
        weights = {"b13": moe.b13, "b2": moe.b2}
        relibra.balanced_moe(x, scores, moe.w13, moe.w2, handle=handle, **weights, dispatched=sent)

    with pytest.raises(ValueError, match="x_TD: need the tensor that was dispatched for local"):
        call(x.clone(), scores, handle)
    with pytest.raises(ValueError, match="scores_TK: need the tensor that was dispatched"):
        call(x, scores.clone(), handle)
    with pytest.raises(ValueError, match="dispatched: need the tokens of local use, got those of"):
        call(x, scores, moe._handle(IDS, 3))
    with torch.no_grad():
        x += 1
    with pytest.raises(ValueError, match="x_TD: need it as dispatched .*changed in place"):
        call(x, scores, handle)


def test_dispatch_checks_its_tensors(moe):
    x, scores, _ = inputs()
    handle = moe._handle(IDS, 3)
    with pytest.raises(ValueError, match="x_TD: need 3 tokens for local use, got 2"):
        relibra.dispatch(x[:2], scores, handle=handle)
    with pytest.raises(ValueError, match="scores_TK: need"):
        relibra.dispatch(x, scores[:, :1], handle=handle)
    with pytest.raises(TypeError, match="handle: need a MoEHandle, .* got NoneType"):
        relibra.dispatch(x, scores, handle=None)
    with pytest.raises(TypeError, match="dispatched: need what relibra.dispatch gave, got str"):
        relibra.balanced_moe(x, scores, moe.w13, moe.w2, handle=handle, dispatched="yes")
    with pytest.raises(TypeError, match="x_TD: need a floating-point dtype"):
        relibra.dispatch(x.long(), scores, handle=handle)
    with pytest.raises(ValueError, match=r"x: need \[..., D\], got a scalar"):
        moe.start(torch.tensor(1.0), scores, IDS)
