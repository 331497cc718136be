"""Activations and their gradients in the interpreter, against torch in fp64."""

import pytest
import torch
import triton
import triton.language as tl

from relibra_kernels.reference.activation import activate as reference
from relibra_kernels.triton_ops import activation
from relibra_kernels.triton_ops.activation import activate, activate_grad

ALPHA, LIMIT, SIZE = 1.702, 7.0, 256
NAMES = {
    "swiglu": activation.SWIGLU,
    "clamped": activation.CLAMPED_SWIGLU,
    "gelu": activation.GELU,
    "relu2": activation.SQUARED_RELU,
}


@triton.jit
def _activation_kernel(
    gate_ptr, up_ptr, da_ptr, a_ptr, d_gate_ptr, d_up_ptr, alpha, limit, ACT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, SIZE)
    gate, up, da = tl.load(gate_ptr + lanes), tl.load(up_ptr + lanes), tl.load(da_ptr + lanes)
    tl.store(a_ptr + lanes, activate(gate, up, ACT, alpha, limit))
    d_gate, d_up = activate_grad(da, gate, up, ACT, alpha, limit)
    tl.store(d_gate_ptr + lanes, d_gate)
    tl.store(d_up_ptr + lanes, d_up)


def run(kind, gate, up, da):
    """a, d gate, d up."""
    out = [torch.empty(SIZE) for _ in range(3)]
    _activation_kernel[(1,)](gate, up, da, *out, ALPHA, LIMIT, ACT=kind, SIZE=SIZE)
    return out


def inputs():
    """Values on both sides of every clamp, on the clamps, and zeros."""
    gen = torch.Generator().manual_seed(3)
    gate, up, da = (torch.randn(SIZE, generator=gen) * scale for scale in (5.0, 5.0, 1.0))
    gate[:4] = torch.tensor([LIMIT, 0.0, -LIMIT, LIMIT])
    up[:4] = torch.tensor([LIMIT, -LIMIT, 0.0, -LIMIT])
    assert (gate > LIMIT).any()
    assert (up > LIMIT).any()
    assert (up < -LIMIT).any()
    return gate, up, da


@pytest.mark.parametrize("name", NAMES)
def test_equals_torch(name):
    kind = NAMES[name]
    gate, up, da = inputs()
    gated = kind <= activation.CLAMPED_SWIGLU
    parts = [x.double().requires_grad_() for x in ((gate, up) if gated else (gate,))]
    expected = reference(torch.stack(parts, dim=1), kind, ALPHA, LIMIT)[:, 0]
    grads = torch.autograd.grad(expected, parts, da.double())
    a, d_gate, d_up = run(kind, gate, up, da)
    torch.testing.assert_close(a.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(d_gate.double(), grads[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(d_up.double(), grads[-1], rtol=2e-6, atol=2e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", NAMES)
def test_large_values_stay_finite(name):
    """exp overflows in fp32 from 89 on."""
    gate = torch.linspace(-500, 500, SIZE)
    for out in run(NAMES[name], gate, torch.ones(SIZE), torch.ones(SIZE)):
        assert out.isfinite().all()
