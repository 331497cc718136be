"""Copies rows back to the (token, choice) pairs they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.token_permute import take_rows

if TYPE_CHECKING:
    import torch


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
