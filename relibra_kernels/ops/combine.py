"""The op that sums rows in a fixed order; contract: reference/combine.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relibra_kernels.checks import check_tensor
from relibra_kernels.ops.argument_checks import check_float_matrix, check_table, check_wide
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.reference import combine as _combine

DEVICES = ("cpu", "cuda")


def _check(rows_ND: Tensor, index_TJ: Tensor, scores_TJ: Tensor | None) -> None:
    check_float_matrix("rows_ND", rows_ND)
    check_table("index_TJ", index_TJ, (None, None), rows_ND.shape[0])
    if scores_TJ is not None:
        check_tensor("scores_TJ", scores_TJ, shape=tuple(index_TJ.shape))
        check_wide("scores_TJ", scores_TJ, rows_ND, f"rows_ND is {rows_ND.dtype}")


@torch.library.custom_op("relibra::combine", mutates_args=(), device_types=DEVICES)
def combine(
    rows_ND: Tensor, index_TJ: Tensor, scores_TJ: Tensor | None, backend: str = "auto"
) -> Tensor:
    """Weighted sums of rows in a fixed order."""
    _check(rows_ND, index_TJ, scores_TJ)
    if use_triton(backend, rows_ND):
        from relibra_kernels.triton_ops import combine as triton_combine

        return triton_combine.combine(rows_ND, index_TJ, scores_TJ)
    return _combine.combine(rows_ND, index_TJ, scores_TJ)


@combine.register_fake
def _(rows_ND: Tensor, index_TJ: Tensor, scores_TJ: Tensor | None, backend: str = "auto") -> Tensor:
    return rows_ND.new_empty(index_TJ.shape[0], rows_ND.shape[1])


@torch.library.custom_op("relibra::combine_backward", mutates_args=(), device_types=DEVICES)
def combine_backward(
    grad_TD: Tensor,
    rows_ND: Tensor,
    index_TJ: Tensor,
    scores_TJ: Tensor | None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and the scores of ``combine``."""
    _check(rows_ND, index_TJ, scores_TJ)
    shape = (index_TJ.shape[0], rows_ND.shape[1])
    check_tensor("grad_TD", grad_TD, dtype=rows_ND.dtype, shape=shape)
    if use_triton(backend, rows_ND):
        from relibra_kernels.triton_ops import combine as triton_combine

        return triton_combine.combine_backward(grad_TD, rows_ND, index_TJ, scores_TJ)
    return _combine.combine_backward(grad_TD, rows_ND, index_TJ, scores_TJ)


@combine_backward.register_fake
def _(
    grad_TD: Tensor,
    rows_ND: Tensor,
    index_TJ: Tensor,
    scores_TJ: Tensor | None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    d_rows = rows_ND.new_empty(rows_ND.shape)
    if scores_TJ is None:
        wide = _combine.accumulation_dtype(rows_ND.dtype)
        return d_rows, rows_ND.new_empty(0, index_TJ.shape[1], dtype=wide)
    return d_rows, scores_TJ.new_empty(scores_TJ.shape)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.backend = inputs[3]


def _combine_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    rows_ND, index_TJ, scores_TJ = ctx.saved_tensors
    d_rows, d_scores = torch.ops.relibra.combine_backward(
        grad_TD, rows_ND, index_TJ, scores_TJ, ctx.backend
    )
    return d_rows, None, None if scores_TJ is None else d_scores, None


combine.register_autograd(_combine_backward, setup_context=_combine_context)
