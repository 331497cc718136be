"""Second GEMM of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.weight_products import add_bias, multiply_forward

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet


def expert_down(
    a_RF: torch.Tensor,
    w2: WeightSet,
    mtile_B4: torch.Tensor,
    block_rows: int,
    *,
    exact: bool = False,
    bias: WeightSet | None = None,
) -> torch.Tensor:
    """``y[r] = w2[slot of r] @ a[r] + b2[slot of r]`` for the rows of the tiles, zeros elsewhere.

    Args:
        a_RF: ``[R, F]``; pad rows are not read.
        w2: ``[slots, D, F]``, dtype of a.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: see ``grouped_gemm``.
        bias: ``[slots, D, 1]``; None without.

    Returns:
        ``[R, D]`` in the dtype of a.

    Example:
        >>> import torch
        >>> from relibra_kernels.tables import m_tiles
        >>> from relibra_kernels.weights import WeightSet
        >>> expert_down(
        ...     torch.tensor([[3.0]]), WeightSet(torch.full((1, 1, 1), 2.0)), m_tiles([1], 1, 1), 1,
        ...     bias=WeightSet(torch.ones(1, 1, 1)))
        tensor([[7.]])
    """
    y = multiply_forward(a_RF, w2, mtile_B4, block_rows, exact)
    return y if bias is None else add_bias(y, bias, mtile_B4, block_rows)
