"""First GEMM of the experts with the gather before it and the activation after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.activation import SWIGLU, activate_rounded
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.token_permute import take_rows
from relibra_kernels.reference.weight_products import add_bias, multiply_forward

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet


def expert_up(
    x: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    w13: WeightSet,
    mtile_B4: torch.Tensor,
    block_rows: int,
    *,
    exact: bool = False,
    bias: WeightSet | None = None,
    score_R: torch.Tensor | None = None,
    activation: int = SWIGLU,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = w13[slot of r] @ x[token of r] + b13`` and ``a = activation(h)`` for the tiles' rows.

    Gate and up are rounded to the dtype of x, then activated in the accumulation dtype, then
    rounded, so that ``a`` can be made again from ``h``; a score multiplies the rounded ``a`` and is
    rounded once more.

    Args:
        x: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``.
        row_to_token_R: int32 ``[R]``, -1 on padding rows; None: ``x`` already lies by row.
        w13: ``[slots, halves * F, D]``, dtype of x; one half for activations without a gate.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: see ``grouped_gemm``.
        bias: ``[slots, halves * F, 1]``, in the order of ``w13``; None without.
        score_R: ``[R]`` in the accumulation dtype: ``a`` is multiplied by it; None: it is not.
        activation: 0 SwiGLU, 1 clamped SwiGLU, 2 GELU, 3 squared ReLU.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.

    Returns:
        ``h [R, halves * F]``, gate | up whatever the storage of the weights, and ``a [R, F]``;
        zeros on rows that are in no tile.

    Example:
        >>> import torch
        >>> from relibra_kernels.tables import m_tiles
        >>> from relibra_kernels.weights import WeightSet
        >>> w = WeightSet(torch.tensor([[[2.0]], [[-1.0]]]))
        >>> expert_up(torch.tensor([[3.0]]), torch.tensor([0, 0], dtype=torch.int32), w,
        ...           m_tiles([1, 1], 2, 1), 1, activation=3)
        (tensor([[ 6.],
                [-3.]]), tensor([[36.],
                [ 0.]]))
    """
    rows = x if row_to_token_R is None else take_rows(x, row_to_token_R)
    h = multiply_forward(rows, w13, mtile_B4, block_rows, exact)
    if bias is not None:
        add_bias(h, bias, mtile_B4, block_rows)
    a = activate_rounded(h, activation, alpha, limit)
    if score_R is not None:
        a = (a.to(accumulation_dtype(a.dtype)) * score_R[:, None]).to(a.dtype)
    return h, a
