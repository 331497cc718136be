"""First GEMM of the experts with the gather before it and the activation after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.expert_down_backward import (
    SWIGLU,
    activate,
    slot_view,
    tile_rows,
)

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet


def expert_up(
    x: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    w13: WeightSet,
    mtile_B4: torch.Tensor,
    *,
    bias: WeightSet | None = None,
    activation: int = SWIGLU,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = w13[slot of r] @ x[token of r] + b13`` and ``a = activation(h)`` for the tiles' rows.

    Gate and up are rounded to the dtype of x, then activated in the accumulation dtype, then
    rounded, so that ``a`` can be made again from ``h``.

    Args:
        x: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``.
        row_to_token_R: int32 ``[R]``, -1 on padding rows; None: ``x`` already lies by row.
        w13: ``[slots, halves * F, D]``, dtype of x; one half for activations without a gate.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        bias: ``[slots, halves * F, 1]``, in the order of ``w13``; None without.
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
        ...           m_tiles([1, 1], 2, 1), activation=3)
        (tensor([[ 6.],
                [-3.]]), tensor([[36.],
                [ 0.]]))
    """
    wide = accumulation_dtype(x.dtype)
    num_rows = len(x if row_to_token_R is None else row_to_token_R)
    width = w13.num_rows
    h = x.new_zeros(num_rows, w13.halves * width)
    a = x.new_zeros(num_rows, width)
    for rows, slot in tile_rows(mtile_B4):
        tokens = x[rows if row_to_token_R is None else row_to_token_R[rows].long()].to(wide)
        for half, weight in enumerate(slot_view(w13, slot).to(wide)):
            out = tokens @ weight.t()
            if bias is not None:
                out += slot_view(bias, slot)[half, :, 0].to(wide)
            h[rows, half * width : (half + 1) * width] = out.to(x.dtype)
        a[rows] = activate(h[rows].to(wide), activation, alpha, limit).to(x.dtype)
    return h, a
