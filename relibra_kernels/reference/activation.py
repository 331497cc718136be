"""The activation between the two GEMMs of an expert, and its gradient by hand."""

from __future__ import annotations

import math

import torch

from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.swiglu import swiglu

SWIGLU, CLAMPED_SWIGLU, GELU, SQUARED_RELU = 0, 1, 2, 3


def activate(h: torch.Tensor, activation: int, alpha: float, limit: float) -> torch.Tensor:
    """The activation between the GEMMs, in the dtype of h, differentiable.

    Derived: the clamped SwiGLU is ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate cut at
    ``limit`` and up at both limits.

    Args:
        h: ``[R, 2F]`` gate | up, or ``[R, F]`` for an activation without a gate.
        activation: 0 SwiGLU, 1 clamped SwiGLU, 2 GELU, 3 squared ReLU.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.

    Returns:
        ``[R, F]``.

    Example:
        >>> activate(torch.tensor([[9.0, -9.0]]), CLAMPED_SWIGLU, alpha=0.0, limit=2.0)
        tensor([[-1.]])
    """
    if activation == GELU:  # as in `swiglu`, of functions whose bits depend on no element's place
        return 0.5 * h * (1 + torch.erf(h * 0.5**0.5))
    if activation == SQUARED_RELU:
        return torch.relu(h).square()
    gate, up = h.chunk(2, dim=1)
    if activation == SWIGLU:
        return gate / (1 + torch.exp(-gate)) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate / (1 + torch.exp(-alpha * gate))


def activate_grad(
    da: torch.Tensor, h: torch.Tensor, activation: int, alpha: float, limit: float
) -> torch.Tensor:
    """Gradient of h of :func:`activate`; by hand, since op bodies run below autograd.

    Derived: where a clamp cuts, the gradient is 0; at the limit itself it is 1.

    Args:
        da: ``[R, F]``.
        h: ``[R, 2F]`` gate | up, or ``[R, F]`` for an activation without a gate.
        activation: 0 SwiGLU, 1 clamped SwiGLU, 2 GELU, 3 squared ReLU.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.

    Returns:
        The shape of h.

    Example:
        >>> activate_grad(torch.ones(1, 1), torch.tensor([[3.0]]), SQUARED_RELU, 0.0, 0.0)
        tensor([[6.]])
    """
    if activation == GELU:
        below = 0.5 * (1 + torch.erf(h * 0.5**0.5))
        density: torch.Tensor = torch.exp(-0.5 * h * h) * (2 * math.pi) ** -0.5
        return da * (below + h * density)
    if activation == SQUARED_RELU:
        return da * 2 * torch.relu(h)
    gate, up = h.chunk(2, dim=1)
    factor = 1.0
    free_gate = free_up = torch.ones_like(gate, dtype=torch.bool)
    if activation == CLAMPED_SWIGLU:
        factor, free_gate, free_up = alpha, gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    s = torch.sigmoid(factor * gate)
    d_gate = da * up * s * (1 + factor * gate * (1 - s)) * free_gate
    return torch.cat([d_gate, da * gate * s * free_up], dim=1)


def activate_rounded(h: torch.Tensor, activation: int, alpha: float, limit: float) -> torch.Tensor:
    """:func:`activate` in the accumulation dtype, then rounded to that of h.

    Args:
        h: ``[R, 2F]`` gate | up, or ``[R, F]`` for an activation without a gate.
        activation: see :func:`activate`.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.

    Returns:
        ``[R, F]``.
    """
    if activation == SWIGLU:
        return swiglu(h)
    return activate(h.to(accumulation_dtype(h.dtype)), activation, alpha, limit).to(h.dtype)
