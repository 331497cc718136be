"""Copies received tokens into the rows of the grouped GEMM."""

from __future__ import annotations

import torch


def token_permute(
    x_UD: torch.Tensor, row_to_token_R: torch.Tensor, token_choice_to_row_UK: torch.Tensor
) -> torch.Tensor:
    """``rows[r] = x[row_to_token[r]]``; padding rows are exact zeros.

    Args:
        x_UD: ``[U, D]``, any float dtype.
        row_to_token_R: int32 ``[R]``, -1 on padding rows.
        token_choice_to_row_UK: int32 ``[U, K]``, the inverse; the gradient of ``x`` reads it.

    Returns:
        ``[R, D]`` in the dtype of ``x``. Differentiable in ``x``.

    Raises:
        TypeError, ValueError: an argument breaks the contract above.

    Example:
        >>> import relibra_kernels
        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> torch.ops.relibra.token_permute(
        ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]]), int32([1, -1, 0, 1]),
        ...     int32([[2, -1], [0, 3]])).tolist()
        [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    """
    return take_rows(x_UD, row_to_token_R)


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[index]`` with exact zeros where the index is -1, whatever ``x`` holds."""
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], x.shape[1])
    taken = x.index_select(0, index.clamp_min(0))
    return taken.index_fill_(0, torch.nonzero(index < 0).squeeze(1), 0)
