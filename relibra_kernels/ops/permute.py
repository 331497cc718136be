"""Ops that copy tokens to rows and back; contracts: reference/<op>.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relibra_kernels.ops.argument_checks import check_float_matrix, check_table
from relibra_kernels.reference import token_permute as _token_permute
from relibra_kernels.reference import token_unpermute as _token_unpermute


@torch.library.custom_op("relibra::token_permute", mutates_args=(), device_types="cpu")
def token_permute(x_UD: Tensor, row_to_token_R: Tensor, token_choice_to_row_UK: Tensor) -> Tensor:
    """Received tokens -> rows."""
    check_float_matrix("x_UD", x_UD)
    check_table("row_to_token_R", row_to_token_R, (None,), x_UD.shape[0])
    num_rows = row_to_token_R.shape[0]
    check_table("token_choice_to_row_UK", token_choice_to_row_UK, (len(x_UD), None), num_rows)
    return _token_permute.token_permute(x_UD, row_to_token_R, token_choice_to_row_UK)


@token_permute.register_fake
def _(x_UD: Tensor, row_to_token_R: Tensor, token_choice_to_row_UK: Tensor) -> Tensor:
    return x_UD.new_empty(row_to_token_R.shape[0], x_UD.shape[1])


def _permute_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    (token_choice_to_row_UK,) = ctx.saved_tensors
    return torch.ops.relibra.combine(grad_RD, token_choice_to_row_UK, None), None, None


token_permute.register_autograd(_permute_backward, setup_context=_permute_context)


@torch.library.custom_op("relibra::token_unpermute", mutates_args=(), device_types="cpu")
def token_unpermute(rows_RD: Tensor, token_choice_to_row_UK: Tensor) -> Tensor:
    """Rows -> (token, choice)."""
    check_float_matrix("rows_RD", rows_RD)
    check_table("token_choice_to_row_UK", token_choice_to_row_UK, (None, None), len(rows_RD))
    return _token_unpermute.token_unpermute(rows_RD, token_choice_to_row_UK)


@token_unpermute.register_fake
def _(rows_RD: Tensor, token_choice_to_row_UK: Tensor) -> Tensor:
    return rows_RD.new_empty(*token_choice_to_row_UK.shape, rows_RD.shape[1])


def _unpermute_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_RD, token_choice_to_row_UK = inputs
    ctx.save_for_backward(token_choice_to_row_UK)
    ctx.num_rows = rows_RD.shape[0]


def _unpermute_backward(ctx: Any, grad_UKD: Tensor) -> tuple[Tensor | None, ...]:
    (token_choice_to_row_UK,) = ctx.saved_tensors
    row = token_choice_to_row_UK.reshape(-1)
    place = torch.where(row >= 0, row, ctx.num_rows).long()
    flat = grad_UKD.reshape(-1, grad_UKD.shape[2])
    grad = flat.new_zeros(ctx.num_rows + 1, flat.shape[1]).index_copy(0, place, flat)
    return grad[: ctx.num_rows], None


token_unpermute.register_autograd(_unpermute_backward, setup_context=_unpermute_context)
