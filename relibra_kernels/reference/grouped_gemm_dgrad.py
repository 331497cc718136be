"""Gradient of the rows of a grouped GEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.grouped_gemm import multiply

if TYPE_CHECKING:
    import torch


def grouped_gemm_dgrad(
    grad_RN: torch.Tensor,
    home_w_HND: torch.Tensor,
    replica_w_SND: torch.Tensor,
    mtile_B4: torch.Tensor,
    block_rows: int,
    exact: bool,
) -> torch.Tensor:
    """``out[r] = grad[r] @ w[slot of r]`` for the rows of every tile, exact zeros elsewhere.

    Args:
        grad_RN: ``[R, N]``, gradient of the output of ``grouped_gemm``; rows outside the tiles are
            never read.
        home_w_HND: ``[H, N, D]``, dtype of ``grad``, any strides; never copied.
        replica_w_SND: ``[S, N, D]``, likewise; S may be 0.
        mtile_B4: int32 ``[B, 4]``, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: as for ``grouped_gemm``.

    Returns:
        ``[R, D]`` in the dtype of ``grad``; fp32 accumulation.

    Raises:
        TypeError, ValueError: an argument breaks the contract above, or a tile leaves its buffer.

    Example:
        >>> import torch, relibra_kernels
        >>> from relibra_kernels.tables import m_tiles
        >>> torch.ops.relibra.grouped_gemm_dgrad(
        ...     torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[[10.0], [0.5]]]),
        ...     torch.zeros(0, 2, 1), m_tiles([1], num_home=1, block_rows=2), 2, True).tolist()
        [[11.0], [0.0]]
    """
    return multiply(grad_RN, (home_w_HND, (), replica_w_SND), mtile_B4, block_rows, exact)
