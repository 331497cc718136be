"""Device functions of the activation between the two GEMMs of an expert, in fp32.

Numbers of the activations: 0 SwiGLU, 1 clamped SwiGLU (gpt-oss), 2 GELU, 3 squared ReLU; the last
two have no gate, and their ``up`` is not used.
"""

import triton
import triton.language as tl

SWIGLU, CLAMPED_SWIGLU, GELU, SQUARED_RELU = 0, 1, 2, 3
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def activate(gate, up, ACT: tl.constexpr, alpha, limit):
    """One activation of fp32 blocks; ``alpha`` and ``limit`` belong to the clamped SwiGLU.

    Clamped: with gate <= limit and -limit <= up <= limit,
    ``(up + 1) * gate * sigmoid(alpha * gate)``.
    """
    if ACT == 0:
        out = gate * tl.sigmoid(gate) * up
    elif ACT == 1:
        low = tl.minimum(gate, limit)
        bounded = tl.minimum(tl.maximum(up, -limit), limit)
        out = (bounded + 1.0) * low * tl.sigmoid(alpha * low)
    elif ACT == 2:
        out = 0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF))
    else:
        positive = tl.maximum(gate, 0.0)
        out = positive * positive
    return out


@triton.jit
def activate_grad(da, gate, up, ACT: tl.constexpr, alpha, limit):
    """Gradients (d gate, d up) of `activate`; without a gate both are d gate.

    Where the clamp cuts, its gradient is 0; at the limit itself it is 1, as in ``torch.clamp``.
    """
    if ACT == 0:
        s = tl.sigmoid(gate)
        silu = gate * s
        d_gate = da * up * (s + silu * (1.0 - s))
        d_up = da * silu
    elif ACT == 1:
        low = tl.minimum(gate, limit)
        bounded = tl.minimum(tl.maximum(up, -limit), limit)
        s = tl.sigmoid(alpha * low)
        slope = s * (1.0 + alpha * low * (1.0 - s))
        d_gate = tl.where(gate <= limit, da * (bounded + 1.0) * slope, 0.0)
        d_up = tl.where((up >= -limit) & (up <= limit), da * low * s, 0.0)
    elif ACT == 2:
        below = 0.5 * (1.0 + tl.erf(gate * SQRT_HALF))
        d_gate = da * (below + gate * INV_SQRT_2PI * tl.exp(-0.5 * gate * gate))
        d_up = d_gate
    else:
        d_gate = da * 2.0 * tl.maximum(gate, 0.0)
        d_up = d_gate
    return d_gate, d_up
