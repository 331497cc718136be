"""In bf16 the gradients at the activation are rounded once, from fp32, by every body."""

import pytest
import torch
from kernel_cases import CASE

from relibra_kernels.reference.activation import activate, activate_grad

WIDTH = 64
ALPHA, LIMIT = 1.702, 1.0
CASE = CASE["ragged_with_empty_slots"]


def half_ulps(got, exact):
    """Largest error in halves of the distance between neighbouring bf16 values."""
    exponent = torch.frexp(exact).exponent.clamp_min(-60)  # exact = mantissa in [0.5, 1) * 2^e
    half_ulp = torch.ldexp(torch.ones_like(exact), exponent - 9)
    return ((got.double() - exact).abs() / half_ulp).max().item()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("activation", range(4))
def test_gradients_at_the_activation_are_rounded_once(activation, backend):
    """With w2 = 1 the gradient of the activation is that of the output, exact in bf16."""
    w2 = CASE.weights(WIDTH, WIDTH, torch.bfloat16)
    for family in (w2.home, w2.replica):
        family.copy_(torch.eye(WIDTH, dtype=torch.bfloat16).expand_as(family))
    h = torch.nan_to_num(CASE.rows((2 if activation <= 1 else 1) * WIDTH, torch.bfloat16))
    dy, score = CASE.tokens(WIDTH, torch.bfloat16, seed=9), torch.nan_to_num(CASE.row_score)
    dh, scored, dscore = torch.ops.relibra.expert_down_backward(
        dy, CASE.row_to_token, [w2.home], w2.static, w2.replica, h, score, CASE.mtile,
        CASE.block_rows, False, activation, ALPHA, LIMIT, w2.transposed, backend,
    )  # fmt: skip
    used = torch.nonzero(CASE.row_to_token >= 0).squeeze(1)
    g = dy[CASE.row_to_token[used]].double()
    h, score = h[used].double(), score[used, None].double()
    exact = activate_grad(g * score, h, activation, ALPHA, LIMIT)
    a = activate(h, activation, ALPHA, LIMIT).bfloat16().double()  # as the forward keeps it
    assert half_ulps(dh[used], exact) < 1.01
    assert half_ulps(scored[used], a * score) < 1.01
    torch.testing.assert_close(dscore[used].double(), (g * a).sum(1), rtol=1e-4, atol=1e-4)
