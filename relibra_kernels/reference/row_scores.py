"""Scores by row, and their gradients back by (token, choice)."""

from __future__ import annotations

import torch


def row_scores(scores: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``out[i] = scores.flat[index[i]]``, zero where the index is -1.

    From choices to rows with ``index = row_to_choice_R`` and ``inverse = token_choice_to_row_UK``;
    from rows to choices with the two exchanged.

    Args:
        scores: ``[U, K]``, or ``[R]``; any float dtype.
        index: int32, for every output the flat place of its score, -1 = none.
        inverse: int32 in the shape of ``scores``, the inverse of ``index``; the gradient reads it.

    Returns:
        The shape of ``index``, the dtype of ``scores``. Differentiable in ``scores``.

    Raises:
        TypeError, ValueError: an argument breaks the contract above.

    Example:
        >>> import relibra_kernels
        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> torch.ops.relibra.row_scores(
        ...     torch.tensor([[0.25, 0.75], [0.5, 0.125]]), int32([3, -1, 0]),
        ...     int32([[2, -1], [-1, 0]])).tolist()
        [0.125, 0.0, 0.25]
    """
    flat = scores.reshape(-1)
    if not flat.numel():
        return flat.new_zeros(index.shape)
    taken = flat[index.clamp_min(0).long()]
    return torch.where(index >= 0, taken, taken.new_zeros(()))
