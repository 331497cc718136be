"""Gradient of the rows that went into the first GEMM of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.weight_products import multiply_backward

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet


def expert_up_backward(
    dh_R2F: torch.Tensor,
    w13: WeightSet,
    mtile_B4: torch.Tensor,
    block_rows: int,
    *,
    exact: bool = False,
) -> torch.Tensor:
    """``dx[r] = w13[slot of r].T @ dh[r]`` for the rows of the tiles, zeros elsewhere.

    Args:
        dh_R2F: ``[R, halves * F]``, gate | up whatever the storage; pad rows are not read.
        w13: ``[slots, halves * F, D]``, dtype of dh.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: see ``grouped_gemm``.

    Returns:
        ``[R, D]`` in the dtype of dh.

    Example:
        >>> import torch
        >>> from relibra_kernels.tables import m_tiles
        >>> from relibra_kernels.weights import WeightSet
        >>> w13 = WeightSet(torch.tensor([[[2.0], [10.0]]]), halves=2)
        >>> expert_up_backward(torch.tensor([[3.0, 1.0]]), w13, m_tiles([1], 1, 1), 1)
        tensor([[16.]])
    """
    return multiply_backward(dh_R2F, w13, mtile_B4, block_rows, exact)
