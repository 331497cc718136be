"""Backward of the second GEMM of the experts and of the activation before it, in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra_kernels.reference.activation import SWIGLU, activate_grad, activate_rounded
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.grouped_gemm import slot_segments
from relibra_kernels.reference.swiglu import swiglu_backward
from relibra_kernels.reference.token_permute import take_rows
from relibra_kernels.reference.weight_products import multiply_backward, slot_view

if TYPE_CHECKING:
    from relibra_kernels.weights import WeightSet


def expert_down_backward(
    dy: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    w2: WeightSet,
    h_R2F: torch.Tensor,
    score_R: torch.Tensor,
    mtile_B4: torch.Tensor,
    block_rows: int,
    *,
    exact: bool = False,
    bias: WeightSet | None = None,
    score_at: str = "output",
    activation: int = SWIGLU,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of h and of the scores, and score * a, from those of the experts' outputs.

    Derived: with ``g = w2.T @ dy[token of r]`` and ``a`` the rounded activation of ``h``:
    ``scored_a = score * a``, ``dh = d activation(h) . (score * g)`` and ``dscore = <g, a>``,
    ``+ <dy, b2>`` where the score multiplies the biased output.

    Args:
        dy: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``.
        row_to_token_R: int32 ``[R]``, -1 on padding rows; None: ``dy`` already lies by row.
        w2: ``[slots, D, F]``, dtype of h.
        h_R2F: ``[R, halves * F]``, gate | up, or ``[R, F]`` for activations without a gate.
        score_R: ``[R]``, any float dtype.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: see ``grouped_gemm``.
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
        ...     torch.tensor([[3.0]]), torch.tensor([0.5]), m_tiles([1], 1, 1), 1, activation=3)
        (tensor([[12.]]), tensor([[4.5000]]), tensor([36.]))
    """
    dy_RD = dy if row_to_token_R is None else take_rows(dy, row_to_token_R)
    g = multiply_backward(dy_RD, w2, mtile_B4, block_rows, exact)
    dh, scored, dscore = from_activation_grad(g, h_R2F, score_R, activation, alpha, limit)
    if bias is not None and score_at == "output":
        add_bias_dots(dscore, dy_RD, bias, mtile_B4, block_rows)
    for rows in (dh, scored, dscore):
        select_tile_rows(rows, mtile_B4)
    return dh, scored, dscore


def from_activation_grad(
    g: torch.Tensor,
    h: torch.Tensor,
    score_R: torch.Tensor,
    activation: int,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dh``, ``score * a`` and ``<g, a>``; products in the accumulation dtype, one rounding each.

    Args:
        g: ``[R, F]``, gradient of the activation before its score.
        h: ``[R, halves * F]``.
        score_R: ``[R]``, any float dtype.
        activation: see `relibra_kernels.reference.activation.activate`.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.
    """
    wide = accumulation_dtype(h.dtype)
    score = score_R[:, None].to(wide)
    a = activate_rounded(h, activation, alpha, limit)
    g = g.to(wide)
    if activation == SWIGLU:
        dh = swiglu_backward(g * score, h)
    else:
        dh = activate_grad(g * score, h.to(wide), activation, alpha, limit).to(h.dtype)
    return dh, (a.to(wide) * score).to(h.dtype), (g * a.to(wide)).sum(1)


def add_bias_dots(
    dscore: torch.Tensor,
    dy: torch.Tensor,
    bias: WeightSet,
    mtile_B4: torch.Tensor,
    block_rows: int,
) -> None:
    """Adds ``<dy[r], b2[slot of r]>`` to the gradients of the scores, in place.

    Args:
        dscore: ``[R]``.
        dy: ``[R, D]``.
        bias: ``[slots, D, 1]``.
        mtile_B4: int32 ``[B, 4]`` on the CPU.
        block_rows: rows of a tile.
    """
    for segment in slot_segments(mtile_B4, block_rows):
        rows = slice(segment.first, segment.first + segment.rows)
        b2 = slot_view(bias, (segment.family, segment.weight)).reshape(-1)
        dscore[rows] += dy[rows].to(dscore.dtype) @ b2.to(dscore.dtype)


def select_tile_rows(rows: torch.Tensor, mtile_B4: torch.Tensor) -> torch.Tensor:
    """Zeros, in place, in the rows that belong to no tile and in tiles' padding.

    Args:
        rows: ``[R, ...]``.
        mtile_B4: int32 ``[B, 4]`` on the CPU.

    Returns:
        ``rows``.

    Example:
        >>> select_tile_rows(torch.ones(4), torch.tensor([[0, 2, 1, 0]], dtype=torch.int32))
        tensor([0., 0., 1., 0.])
    """
    used = np.zeros(len(rows) + 1, np.int32)
    first, count = mtile_B4.numpy()[:, 1], mtile_B4.numpy()[:, 2]
    np.add.at(used, first, 1)
    np.add.at(used, first + count, -1)
    unused = torch.from_numpy(np.flatnonzero(np.cumsum(used[:-1]) == 0))
    return rows.index_fill_(0, unused, 0)
