"""Weighted sums of rows in a fixed order: all four sums of a layer, forward and backward."""

from __future__ import annotations

import functools

import torch

from relibra_kernels.reference.token_permute import take_rows


@functools.cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over rows of ``dtype``, of scores and of weight gradients: fp32 or fp64."""
    return torch.promote_types(dtype, torch.float32)


def combine(
    rows_ND: torch.Tensor, index_TJ: torch.Tensor, scores_TJ: torch.Tensor | None
) -> torch.Tensor:
    """``out[t] = sum_j scores[t, j] * rows[index[t, j]]``, j ascending, one rounding at the end.

    Args:
        rows_ND: ``[N, D]``, any float dtype.
        index_TJ: int32 ``[T, J]``, -1 takes no part (by select: a NaN there cannot leak).
        scores_TJ: fp32 ``[T, J]`` (fp64 with fp64 rows), or None for ones.

    Returns:
        ``[T, D]`` in the dtype of ``rows``; accumulated in fp32 (fp64 for fp64). Differentiable
        in ``rows`` and ``scores``.

    Raises:
        TypeError, ValueError: an argument breaks the contract above.

    Example:
        >>> import relibra_kernels
        >>> torch.ops.relibra.combine(
        ...     torch.tensor([[1.0], [10.0], [100.0]]),
        ...     torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
        ...     torch.tensor([[0.5, 2.0], [3.0, 9.0]])).tolist()
        [[52.0], [30.0]]
    """
    wide = accumulation_dtype(rows_ND.dtype)
    total = rows_ND.new_zeros(index_TJ.shape[0], rows_ND.shape[1], dtype=wide)
    for j in range(index_TJ.shape[1]):
        term = take_rows(rows_ND, index_TJ[:, j]).to(wide)
        total += term if scores_TJ is None else term * scores_TJ[:, j, None]
    return total.to(rows_ND.dtype)


def combine_backward(
    grad_TD: torch.Tensor,
    rows_ND: torch.Tensor,
    index_TJ: torch.Tensor,
    scores_TJ: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `combine`.

    ``d_rows[n] = sum over index[t, j] == n of scores[t, j] * grad[t]`` in ascending (j, t) order
    and ``d_scores[t, j] = <grad[t], rows[index[t, j]]>``.

    Args:
        grad_TD: ``[T, D]``, gradient of the output; any strides.
        rows_ND: ``[N, D]``, as given to `combine`.
        index_TJ: int32 ``[T, J]``.
        scores_TJ: as given to `combine`.

    Returns:
        ``[N, D]`` in the dtype of ``rows`` and ``[T, J]`` in the dtype of ``scores`` (``[0, J]``
        without scores).

    Example:
        >>> import relibra_kernels
        >>> d_rows, d_scores = torch.ops.relibra.combine_backward(
        ...     torch.tensor([[2.0]]), torch.tensor([[1.0], [10.0]]),
        ...     torch.tensor([[1, -1]], dtype=torch.int32), torch.tensor([[0.5, 7.0]]))
        >>> d_rows.tolist(), d_scores.tolist()
        ([[0.0], [1.0]], [[20.0, 0.0]])
    """
    wide = accumulation_dtype(rows_ND.dtype)
    grad = grad_TD.to(wide)
    d_rows = rows_ND.new_zeros(rows_ND.shape, dtype=wide)
    columns = []
    for j in range(index_TJ.shape[1]):
        used = torch.nonzero(index_TJ[:, j] >= 0).squeeze(1)
        row = index_TJ[:, j].index_select(0, used)
        grad_used = grad.index_select(0, used)
        scale = 1.0 if scores_TJ is None else scores_TJ[:, j].index_select(0, used)[:, None]
        d_rows.index_add_(0, row, grad_used * scale)
        if scores_TJ is not None:
            dot = (grad_used * rows_ND.index_select(0, row).to(wide)).sum(1)
            columns.append(dot.new_zeros(grad.shape[0]).index_copy_(0, used, dot))
    d_scores = torch.stack(columns, 1) if columns else d_rows.new_zeros(0, index_TJ.shape[1])
    if scores_TJ is not None:
        d_scores = d_scores.to(scores_TJ.dtype).reshape(scores_TJ.shape)
    return d_rows.to(rows_ND.dtype), d_scores
