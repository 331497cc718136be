"""Copies rows back to the (token, choice) pairs they belong to."""

from __future__ import annotations

import torch

from relibra_kernels.reference.token_permute import take_rows


def token_unpermute(rows_RD: torch.Tensor, token_choice_to_row_UK: torch.Tensor) -> torch.Tensor:
    """``out[u, k] = rows[token_choice_to_row[u, k]]``, zeros where the choice is elsewhere.

    Args:
        rows_RD: ``[R, D]``, any float dtype.
        token_choice_to_row_UK: int32 ``[U, K]``, -1 = none; every row at most once.

    Returns:
        ``[U, K, D]`` in the dtype of ``rows``. Differentiable in ``rows``.

    Raises:
        TypeError, ValueError: an argument breaks the contract above.

    Example:
        >>> import torch, relibra_kernels
        >>> torch.ops.relibra.token_unpermute(
        ...     torch.tensor([[1.0], [0.0], [2.0]]),
        ...     torch.tensor([[2, -1], [-1, 0]], dtype=torch.int32)).squeeze(2).tolist()
        [[2.0, 0.0], [0.0, 1.0]]
    """
    flat = take_rows(rows_RD, token_choice_to_row_UK.reshape(-1))
    return flat.reshape(*token_choice_to_row_UK.shape, rows_RD.shape[1])


def token_unpermute_backward(
    grad_UKD: torch.Tensor, token_choice_to_row_UK: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Gradient of `token_unpermute`: every row takes the gradient of the choice that it serves.

    Args:
        grad_UKD: ``[U, K, D]``, any strides.
        token_choice_to_row_UK: int32 ``[U, K]``, -1 = none; every row at most once.
        num_rows: R.

    Returns:
        ``[R, D]``, zeros in rows that no choice has.

    Example:
        >>> import relibra_kernels
        >>> torch.ops.relibra.token_unpermute_backward(
        ...     torch.tensor([[[5.0], [6.0]], [[7.0], [8.0]]]),
        ...     torch.tensor([[2, -1], [-1, 0]], dtype=torch.int32), 3).squeeze(1).tolist()
        [8.0, 0.0, 5.0]
    """
    row = token_choice_to_row_UK.reshape(-1)
    place = torch.where(row >= 0, row, num_rows).long()
    flat = grad_UKD.reshape(-1, grad_UKD.shape[2])
    grad = flat.new_zeros(num_rows + 1, flat.shape[1]).index_copy(0, place, flat)
    return grad[:num_rows].clone()
