"""Backward of the second GEMM of the experts and of the activation before it, in one step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.tables import tile_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relibra_kernels.weights import WeightSet

SWIGLU, CLAMPED_SWIGLU, GELU, SQUARED_RELU = 0, 1, 2, 3


def expert_down_backward(
    dy: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    w2: WeightSet,
    h_R2F: torch.Tensor,
    score_R: torch.Tensor,
    mtile_B4: torch.Tensor,
    *,
    bias: WeightSet | None = None,
    score_at: str = "output",
    activation: int = SWIGLU,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of h and of the scores, and score * a, from those of the experts' outputs.

    Derived: with ``g = w2.T @ dy[token of r]`` in fp32 and ``a`` the rounded activation of ``h``:
    ``scored_a = score * a``, ``dh = d activation(h) . (score * g)`` and ``dscore = <g, a>``,
    ``+ <dy, b2>`` where the score multiplies the biased output.

    Args:
        dy: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``.
        row_to_token_R: int32 ``[R]``, -1 on padding rows; None: ``dy`` already lies by row.
        w2: ``[slots, D, F]``, dtype of h.
        h_R2F: ``[R, halves * F]``, gate | up, or ``[R, F]`` for activations without a gate.
        score_R: ``[R]``, any float dtype.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        bias: ``[slots, D, 1]`` down biases; None without.
        score_at: ``"output"``, or ``"activation"``: the score does not multiply the bias.
        activation: 0 SwiGLU, 1 clamped SwiGLU, 2 GELU, 3 squared ReLU.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.

    Returns:
        ``dh`` like h, ``scored_a [R, F]`` of its dtype, ``dscore [R]`` in fp32 (fp64 for fp64);
        zeros on rows that are in no tile.

    Example:
        >>> from relibra_kernels.tables import m_tiles
        >>> from relibra_kernels.weights import WeightSet
        >>> expert_down_backward(
        ...     torch.tensor([[1.0]]), None, WeightSet(torch.full((1, 1, 1), 4.0)),
        ...     torch.tensor([[3.0]]), torch.tensor([0.5]), m_tiles([1], 1, 1), activation=3)
        (tensor([[12.]]), tensor([[4.5000]]), tensor([36.]))
    """
    wide = accumulation_dtype(h_R2F.dtype)
    width = w2.view(w2.families()[0][1]).shape[3]
    dh = torch.zeros_like(h_R2F)
    scored = h_R2F.new_zeros(len(h_R2F), width)
    dscore = h_R2F.new_zeros(len(h_R2F), dtype=wide)
    for rows, slot in tile_rows(mtile_B4):
        grad = dy[rows if row_to_token_R is None else row_to_token_R[rows].long()].to(wide)
        h = h_R2F[rows].to(wide)
        g = grad @ slot_view(w2, slot)[0].to(wide)
        score = score_R[rows].to(wide)[:, None]
        a_rounded = activate(h, activation, alpha, limit).to(h_R2F.dtype).to(wide)
        scored[rows] = (score * a_rounded).to(h_R2F.dtype)
        dh[rows] = activate_grad(score * g, h, activation, alpha, limit).to(h_R2F.dtype)
        dscore[rows] = (g * a_rounded).sum(1)
        if bias is not None and score_at == "output":
            dscore[rows] += grad @ slot_view(bias, slot)[0, :, 0].to(wide)
    return dh, scored, dscore


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
    if activation == GELU:
        return torch.nn.functional.gelu(h)
    if activation == SQUARED_RELU:
        return torch.relu(h).square()
    gate, up = h.chunk(2, dim=1)
    if activation == SWIGLU:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


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


def tile_rows(mtile_B4: torch.Tensor) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Real rows of every tile, and its (family, slot inside the family).

    Args:
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
    """
    family, index = tile_weights(mtile_B4)
    places = zip(family.tolist(), index.tolist(), mtile_B4.tolist(), strict=True)
    for which, slot, (_, row, rows, _) in places:
        yield slice(row, row + rows), (which, slot)


def slot_view(field: WeightSet, slot: tuple[int, int]) -> torch.Tensor:
    """Logical ``[halves, rows, columns]`` of one slot.

    Args:
        field: weights or gradients.
        slot: family and slot inside it.
    """
    family = (field.home, field.static, field.replica)[slot[0]]
    assert family is not None
    return field.view(family[slot[1]])[0]
