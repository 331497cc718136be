"""Ops that copy tokens to rows and back; contracts: reference/<op>.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relibra_kernels.checks import check_tensor
from relibra_kernels.ops.argument_checks import FLOATS, check_float_matrix, check_table
from relibra_kernels.ops.backend import error_word, use_triton
from relibra_kernels.reference import row_scores as _row_scores
from relibra_kernels.reference import token_permute as _token_permute
from relibra_kernels.reference import token_unpermute as _token_unpermute

DEVICES = ("cpu", "cuda")


@torch.library.custom_op("relibra::token_permute", mutates_args=(), device_types=DEVICES)
def token_permute(
    x_UD: Tensor, row_to_token_R: Tensor, token_choice_to_row_UK: Tensor, backend: str = "auto"
) -> Tensor:
    """Received tokens -> rows."""
    check_float_matrix("x_UD", x_UD)
    check_table("row_to_token_R", row_to_token_R, (None,), x_UD.shape[0])
    num_rows = row_to_token_R.shape[0]
    check_table("token_choice_to_row_UK", token_choice_to_row_UK, (len(x_UD), None), num_rows)
    if use_triton(backend, x_UD):
        from relibra_kernels.triton_ops import permute

        return permute.token_permute(x_UD, row_to_token_R)
    return _token_permute.token_permute(x_UD, row_to_token_R, token_choice_to_row_UK)


@token_permute.register_fake
def _(
    x_UD: Tensor, row_to_token_R: Tensor, token_choice_to_row_UK: Tensor, backend: str = "auto"
) -> Tensor:
    return x_UD.new_empty(row_to_token_R.shape[0], x_UD.shape[1])


def _permute_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.backend = inputs[3]


def _permute_backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    (token_choice_to_row_UK,) = ctx.saved_tensors
    grad = torch.ops.relibra.combine(grad_RD, token_choice_to_row_UK, None, ctx.backend)
    return grad, None, None, None


token_permute.register_autograd(_permute_backward, setup_context=_permute_context)


@torch.library.custom_op("relibra::token_unpermute", mutates_args=(), device_types=DEVICES)
def token_unpermute(
    rows_RD: Tensor, token_choice_to_row_UK: Tensor, backend: str = "auto"
) -> Tensor:
    """Rows -> (token, choice)."""
    check_float_matrix("rows_RD", rows_RD)
    check_table("token_choice_to_row_UK", token_choice_to_row_UK, (None, None), len(rows_RD))
    if use_triton(backend, rows_RD):
        from relibra_kernels.triton_ops import permute

        return permute.token_unpermute(rows_RD, token_choice_to_row_UK)
    return _token_unpermute.token_unpermute(rows_RD, token_choice_to_row_UK)


@token_unpermute.register_fake
def _(rows_RD: Tensor, token_choice_to_row_UK: Tensor, backend: str = "auto") -> Tensor:
    return rows_RD.new_empty(*token_choice_to_row_UK.shape, rows_RD.shape[1])


@torch.library.custom_op("relibra::token_unpermute_backward", mutates_args=(), device_types=DEVICES)
def token_unpermute_backward(
    grad_UKD: Tensor, token_choice_to_row_UK: Tensor, num_rows: int, backend: str = "auto"
) -> Tensor:
    """Gradient of the rows of ``token_unpermute``."""
    check_tensor("grad_UKD", grad_UKD, dtype=FLOATS, shape=(*token_choice_to_row_UK.shape, None))
    check_table("token_choice_to_row_UK", token_choice_to_row_UK, (None, None), num_rows)
    if use_triton(backend, grad_UKD):
        from relibra_kernels.triton_ops import permute

        error = error_word(grad_UKD)
        return permute.token_unpermute_backward(grad_UKD, token_choice_to_row_UK, num_rows, error)
    return _token_unpermute.token_unpermute_backward(grad_UKD, token_choice_to_row_UK, num_rows)


@token_unpermute_backward.register_fake
def _(
    grad_UKD: Tensor, token_choice_to_row_UK: Tensor, num_rows: int, backend: str = "auto"
) -> Tensor:
    return grad_UKD.new_empty(num_rows, grad_UKD.shape[2])


def _unpermute_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_RD, token_choice_to_row_UK, ctx.backend = inputs
    ctx.save_for_backward(token_choice_to_row_UK)
    ctx.num_rows = rows_RD.shape[0]


def _unpermute_backward(ctx: Any, grad_UKD: Tensor) -> tuple[Tensor | None, ...]:
    (table,) = ctx.saved_tensors
    backward = torch.ops.relibra.token_unpermute_backward
    return backward(grad_UKD, table, ctx.num_rows, ctx.backend), None, None


token_unpermute.register_autograd(_unpermute_backward, setup_context=_unpermute_context)


@torch.library.custom_op("relibra::row_scores", mutates_args=(), device_types=DEVICES)
def row_scores(scores: Tensor, index: Tensor, inverse: Tensor, backend: str = "auto") -> Tensor:
    """Scores of choices -> scores of rows, or of rows -> of choices."""
    check_tensor("scores", scores, dtype=FLOATS, shape=tuple(inverse.shape))
    check_table("index", index, (None,) * index.ndim, scores.numel())
    check_table("inverse", inverse, (None,) * inverse.ndim, index.numel())
    if use_triton(backend, scores):
        from relibra_kernels.triton_ops import row_scores as triton_row_scores

        return triton_row_scores.row_scores(scores, index)
    return _row_scores.row_scores(scores, index, inverse)


@row_scores.register_fake
def _(scores: Tensor, index: Tensor, inverse: Tensor, backend: str = "auto") -> Tensor:
    return scores.new_empty(index.shape)


def _scores_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.backend = inputs[3]


def _scores_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, inverse = ctx.saved_tensors
    return torch.ops.relibra.row_scores(grad, inverse, index, ctx.backend), None, None, None


row_scores.register_autograd(_scores_backward, setup_context=_scores_context)
