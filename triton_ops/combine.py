"""Weighted sums of rows in a fixed order, and their gradients; contracts: reference/combine.py.

All four sums of a layer are this op: at the destination (F3, B4) and at the source (F4, B5).
Products are rounded before they are added (no fused multiply-add), so that the bits are those of
the reference. N rows, T sums of J terms each, D columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relibra_kernels.triton_ops.permute import BLOCK, NUM_WARPS, unit_columns

SCAN = 256  # table entries that a search looks at together
NO_CLAIM = 2**31 - 1


@triton.jit(do_not_specialize=["index_ptr", "scores_ptr", "num_rows"])
def _combine_kernel(
    rows_ptr,  # [N, D]
    index_ptr,  # [T, J] int32, -1 takes no part
    scores_ptr,  # [T, J] in WIDE, or None
    out_ptr,  # [T, D]
    num_rows,  # N
    num_columns,  # D
    stride_row,
    stride_out,
    J: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum_j scores[t, j] * rows[index[t, j]], j ascending, one rounding at the end."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    for j in tl.static_range(J):
        row = tl.load(index_ptr + token * J + j)
        row = tl.where(row < num_rows, row, -1)  # never outside the buffer
        # A block-wide where on the columns would hide their contiguity: scalar loads.
        mask = cols < tl.where(row >= 0, num_columns, 0)
        term = tl.load(rows_ptr + row.to(tl.int64) * stride_row + cols, mask=mask, other=0.0)
        term = term.to(WIDE)
        if scores_ptr is not None:
            # A score without a row may be NaN.
            term *= tl.load(scores_ptr + token * J + j, mask=row >= 0, other=0.0)
        total += term
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out + cols, out, mask=cols < num_columns)


@triton.jit(do_not_specialize=["index_ptr", "num_tokens", "num_rows"])
def _claims_kernel(
    index_ptr,  # [T, J] int32
    first_ptr,  # [N] int32, filled with NO_CLAIM
    last_ptr,  # [N] int32, filled with -1
    num_tokens,  # T
    num_rows,  # N
    J: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First and last term, as j * T + t, that uses a row."""
    term = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = (term % num_tokens).to(tl.int64) * J + term // num_tokens
    row = tl.load(index_ptr + place, mask=term < num_tokens * J, other=-1)
    used = (row >= 0) & (row < num_rows)
    tl.atomic_min(first_ptr + row, term, mask=used, sem="relaxed")
    tl.atomic_max(last_ptr + row, term, mask=used, sem="relaxed")


@triton.jit(do_not_specialize=["index_ptr", "scores_ptr", "num_tokens"])
def _combine_rows_grad_kernel(
    grad_ptr,  # [T, D]
    index_ptr,  # [T, J] int32
    scores_ptr,  # [T, J] in WIDE, or None
    first_ptr,  # [N] int32
    last_ptr,  # [N] int32
    out_ptr,  # [N, D]
    num_tokens,  # T
    num_columns,  # D
    stride_grad,
    J: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """out[n] = sum of scores[t, j] * grad[t] over the terms that use n, in (j, t) order.

    A row that one term uses costs one read; further terms are searched for in the table.
    """
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    term = tl.load(first_ptr + row)
    last = tl.load(last_ptr + row)
    while term <= last:
        token = (term % num_tokens).to(tl.int64)
        j = term // num_tokens
        value = tl.load(grad_ptr + token * stride_grad + cols, mask=cols < num_columns, other=0.0)
        value = value.to(WIDE)
        if scores_ptr is not None:
            value *= tl.load(scores_ptr + token * J + j)
        total += value
        begin = term + 1
        term = last + 1
        while begin <= last:
            lane = begin + tl.arange(0, SCAN)
            place = (lane % num_tokens).to(tl.int64) * J + lane // num_tokens
            hit = tl.load(index_ptr + place, mask=lane <= last, other=-1) == row
            term = tl.min(tl.where(hit, lane, last + 1))
            begin = tl.where(term <= last, last + 1, begin + SCAN)
    out = total.to(out_ptr.dtype.element_ty)
    place = out_ptr + row.to(tl.int64) * num_columns + cols
    tl.store(place, out, mask=cols < num_columns)


@triton.jit(do_not_specialize=["index_ptr", "num_rows"])
def _combine_scores_grad_kernel(
    grad_ptr,  # [T, D]
    rows_ptr,  # [N, D]
    index_ptr,  # [T, J] int32
    out_ptr,  # [T, J] in WIDE
    num_rows,  # N
    num_columns,  # D
    stride_grad,
    stride_row,
    J: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t, j] = <grad[t], rows[index[t, j]]>, zero where the index is -1."""
    token = tl.program_id(0).to(tl.int64)
    place = token * J + tl.program_id(1)
    row = tl.load(index_ptr + place)
    row = tl.where(row < num_rows, row, -1)
    end = tl.where(row >= 0, num_columns, 0)
    total = tl.zeros((BLOCK,), WIDE)
    for first in range(0, end, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + token * stride_grad + cols, mask=cols < end, other=0.0)
        value = tl.load(rows_ptr + row.to(tl.int64) * stride_row + cols, mask=cols < end, other=0.0)
        total += grad.to(WIDE) * value.to(WIDE)
    tl.store(out_ptr + place, tl.sum(total))


def _wide(rows: torch.Tensor) -> tl.dtype:
    return tl.float64 if rows.dtype == torch.float64 else tl.float32


def combine(
    rows_ND: torch.Tensor,
    index_TJ: torch.Tensor,
    scores_TJ: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """``out[t] = sum_j scores[t, j] * rows[index[t, j]]``, j ascending.

    Args:
        rows_ND: ``[N, D]``, any row stride.
        index_TJ: int32 ``[T, J]``, -1 takes no part.
        scores_TJ: fp32 ``[T, J]`` (fp64 with fp64 rows), or None for ones.
        out: ``[T, D]`` to write to, neighbouring columns, any row stride; None makes one.
        block: columns of a program.
    """
    rows, index = unit_columns(rows_ND), index_TJ.contiguous()
    scores = None if scores_TJ is None else scores_TJ.contiguous()
    if out is None:
        out = rows.new_empty(index.shape[0], rows.shape[1])
    if out.numel():
        grid = (out.shape[0], -(-out.shape[1] // block))
        sizes = rows.shape[0], rows.shape[1], rows.stride(0), out.stride(0)
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        _combine_kernel[grid](
            rows, index, scores, out, *sizes, index.shape[1], _wide(rows), block, **options
        )
    return out


def combine_backward(
    grad_TD: torch.Tensor,
    rows_ND: torch.Tensor,
    index_TJ: torch.Tensor,
    scores_TJ: torch.Tensor | None,
    *,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the scores (``[0, J]`` without scores) of ``combine``.

    Args:
        grad_TD: ``[T, D]``, any strides.
        rows_ND: as given to ``combine``.
        index_TJ: as given to ``combine``; a row may be used more than once.
        scores_TJ: as given to ``combine``.
        block: columns of a program.
    """
    grad, index = unit_columns(grad_TD), index_TJ.contiguous()
    scores = None if scores_TJ is None else scores_TJ.contiguous()
    d_rows = _rows_grad(grad, rows_ND, index, scores, block)
    if scores is None:
        wide = torch.promote_types(rows_ND.dtype, torch.float32)
        return d_rows, rows_ND.new_empty(0, index.shape[1], dtype=wide)
    rows, d_scores = unit_columns(rows_ND), scores.new_empty(scores.shape)
    if d_scores.numel():
        sizes = rows.shape[0], rows.shape[1], grad.stride(0), rows.stride(0)
        _combine_scores_grad_kernel[tuple(index.shape)](
            grad, rows, index, d_scores, *sizes, index.shape[1], _wide(rows), block
        )
    return d_rows, d_scores


def _rows_grad(
    grad: torch.Tensor,
    rows_ND: torch.Tensor,
    index: torch.Tensor,
    scores: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    num_tokens, num_terms = index.shape
    num_rows, num_columns = rows_ND.shape
    d_rows = grad.new_empty(num_rows, num_columns)
    if not index.numel() or not d_rows.numel():
        return d_rows.zero_()
    first = index.new_empty(num_rows).fill_(NO_CLAIM)
    last = index.new_empty(num_rows).fill_(-1)
    _claims_kernel[(-(-index.numel() // SCAN),)](
        index, first, last, num_tokens, num_rows, num_terms, BLOCK=SCAN
    )
    grid = (num_rows, -(-num_columns // block))
    sizes = num_tokens, num_columns, grad.stride(0), num_terms, _wide(rows_ND), block, SCAN
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    _combine_rows_grad_kernel[grid](grad, index, scores, first, last, d_rows, *sizes, **options)
    return d_rows
