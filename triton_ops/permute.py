"""Copies rows by an index table: tokens to rows, rows back to (token, choice).

Letters as in `relibra_kernels.tables`; D columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from relibra_kernels.triton_ops.build_rows import build_rows

if TYPE_CHECKING:
    import torch

BLOCK = 1024  # columns of a program
NUM_WARPS = 4


def unit_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with neighbouring columns: itself, or a copy of an expanded or transposed one."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


@triton.jit(do_not_specialize=["index_ptr", "num_rows"])
def _copy_rows_kernel(
    rows_ptr,  # [N, D]
    index_ptr,  # [R] int32, -1 = zeros
    out_ptr,  # [R, D]
    num_rows,  # N
    num_columns,  # D
    stride_row,
    stride_out,
    BLOCK: tl.constexpr,
):
    """out[r] = rows[index[r]], by select: a NaN in row 0 cannot reach a padding row."""
    place = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + place)
    row = tl.where(row < num_rows, row, -1)  # never outside the buffer, whatever a table holds
    # A limit on the columns, not (row >= 0) & (cols < D): that fails in the interpreter of 3.9.
    mask = cols < tl.where(row >= 0, num_columns, 0)
    value = tl.load(rows_ptr + row.to(tl.int64) * stride_row + cols, mask=mask, other=0.0)
    tl.store(out_ptr + place.to(tl.int64) * stride_out + cols, value, mask=cols < num_columns)


def copy_rows(
    rows_ND: torch.Tensor,
    index_R: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """``out[r] = rows[index[r]]``, bit for bit; exact zeros where the index is -1.

    Args:
        rows_ND: ``[N, D]``, any row stride.
        index_R: int32 ``[R]``.
        out: ``[R, D]`` to write to, neighbouring columns, any row stride; None makes one.
        block: columns of a program.
    """
    rows, index = unit_columns(rows_ND), index_R.contiguous()
    if out is None:
        out = rows.new_empty(index.numel(), rows.shape[1])
    if out.numel():
        grid = (out.shape[0], -(-out.shape[1] // block))
        sizes = rows.shape[0], rows.shape[1], rows.stride(0), out.stride(0)
        _copy_rows_kernel[grid](rows, index, out, *sizes, BLOCK=block, num_warps=NUM_WARPS)
    return out


def token_permute(
    x_UD: torch.Tensor,
    row_to_token_R: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """Received tokens -> rows; contract in ``reference/token_permute.py``."""
    return copy_rows(x_UD, row_to_token_R, out=out, block=block)


def token_unpermute(
    rows_RD: torch.Tensor, token_choice_to_row_UK: torch.Tensor, *, block: int = BLOCK
) -> torch.Tensor:
    """Rows -> (token, choice); contract in ``reference/token_unpermute.py``."""
    flat = copy_rows(rows_RD, token_choice_to_row_UK.reshape(-1), block=block)
    return flat.view(*token_choice_to_row_UK.shape, rows_RD.shape[1])


def token_unpermute_backward(
    grad_UKD: torch.Tensor,
    token_choice_to_row_UK: torch.Tensor,
    num_rows: int,
    error: torch.Tensor,
    *,
    block: int = BLOCK,
) -> torch.Tensor:
    """Gradient of the rows: each row takes the gradient of the choice that it serves.

    Args:
        grad_UKD: ``[U, K, D]``, any strides.
        token_choice_to_row_UK: int32 ``[U, K]``, every row at most once.
        num_rows: R.
        error: as for ``build_rows``.
        block: columns of a program.
    """
    _, row_to_choice_R = build_rows(token_choice_to_row_UK, num_rows, error)
    return copy_rows(grad_UKD.reshape(-1, grad_UKD.shape[2]), row_to_choice_R, block=block)
