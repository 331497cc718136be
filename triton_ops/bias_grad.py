"""Gradients of both biases of the experts in one launch.

``db13 = sum over a slot's rows r of dh[r]``, ``db2 = sum over them of score[r] * dy[r]``.
Bounds: bytes R*(D + 2F). Deterministic: one program owns some columns of a slot and adds its rows
in ascending blocks, fp32.

Letters: U tokens received, R rows (every slot's rows padded to whole tiles), K choices, D model
dim, F expert dim, B tiles of `w_tiles`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from relibra_kernels.triton_ops.descriptors import bias_operands, count_processors
from relibra_kernels.triton_ops.expert_down_backward import load_scores
from relibra_kernels.triton_ops.tiles import open_bias

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet

BLOCK_ROWS, BLOCK_COLUMNS = 32, 128
INTERPRETER_COLUMNS = 32


@triton.jit
def add_columns(grad_ptr, place, total, inside, stores):
    """Overwrites, or adds to, some columns of one slot."""
    if stores == 0:
        total += tl.load(grad_ptr + place, mask=inside, other=0.0)
    tl.store(grad_ptr + place, total, mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "tiles_ptr", "num_tiles_ptr", "row_to_token_ptr", "scores_ptr", "row_to_choice_ptr",
    ]
)  # fmt: skip
def _expert_bias_grad_kernel(
    tiles_ptr,  # [B, 4] int32, see w_tiles; an output tile is a block of columns
    num_tiles_ptr,  # [1] int32
    dh_ptr,  # [R, HALVES * F]
    dy_ptr,  # [U, D] with row_to_token, else [R, D]
    row_to_token_ptr,  # [R] int32, -1 = padding; None: dy comes by row
    scores_ptr,  # [U, K] with row_to_choice, else [R]; None: dy is not scaled
    row_to_choice_ptr,  # [R] int32, place in scores, -1 = padding; or None
    home13,  # [H, HALVES * F] fp32, out: pointer, table of addresses, or None: not wanted
    static13,
    replica13,
    home2,  # [H, D] fp32, out: likewise
    static2,
    replica2,
    dy_stride,
    home13_slot,
    static13_slot,
    replica13_slot,
    home2_slot,
    static2_slot,
    replica2_slot,
    num_home,
    num_static,
    D: tl.constexpr,
    F: tl.constexpr,
    HALVES: tl.constexpr,
    PAIRS: tl.constexpr,  # gate and up biases alternate
    TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # rows
):
    like_ptr = tiles_ptr.to(tl.pointer_type(tl.float32))  # only its type is used
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr), tl.num_programs(0)):
        word = tl.load(tiles_ptr + tile * 4)
        first = tl.load(tiles_ptr + tile * 4 + 1)
        end = tl.load(tiles_ptr + tile * 4 + 2)
        flags = tl.load(tiles_ptr + tile * 4 + 3)
        index = word & 0xFFFFFF
        family = word >> 24
        stores = (flags >> 24) & 1
        cols = (flags & 0x3FFFFF) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N,), tl.float32)
        if ((flags >> 22) & 1) != 0:
            for k in tl.range(first, end, BLOCK_K):
                rows = k + tl.arange(0, BLOCK_K)
                source = rows
                if row_to_token_ptr is not None:
                    source = tl.load(row_to_token_ptr + rows, mask=rows < end, other=-1)
                taken = (rows < end) & (source >= 0)
                ptrs = dy_ptr + source.to(tl.int64)[:, None] * dy_stride + cols[None, :]
                mask = cols[None, :] < tl.where(taken, D, 0)[:, None]
                block = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
                if scores_ptr is not None:
                    block *= load_scores(scores_ptr, row_to_choice_ptr, rows, taken)[:, None]
                total += tl.sum(block, axis=0)
            if home2 is not None:
                grad = open_bias(
                    family, index, home2, static2, replica2, home2_slot, static2_slot,
                    replica2_slot, num_home, num_static, like_ptr, TABLE,
                )  # fmt: skip
                add_columns(grad, cols, total, cols < D, stores)
        else:
            for k in tl.range(first, end, BLOCK_K):
                rows = k + tl.arange(0, BLOCK_K)
                ptrs = dh_ptr + rows.to(tl.int64)[:, None] * (HALVES * F) + cols[None, :]
                mask = cols[None, :] < tl.where(rows < end, HALVES * F, 0)[:, None]
                total += tl.sum(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), axis=0)
            if home13 is not None:
                grad = open_bias(
                    family, index, home13, static13, replica13, home13_slot, static13_slot,
                    replica13_slot, num_home, num_static, like_ptr, TABLE,
                )  # fmt: skip
                place = cols % F * HALVES + cols // F if PAIRS else cols
                add_columns(grad, place, total, cols < HALVES * F, stores)


def bias_columns(device: torch.device) -> int:
    """Columns of an output tile of :func:`expert_bias_grad`.

    Args:
        device: where the kernel runs.
    """
    return BLOCK_COLUMNS if device.type == "cuda" else INTERPRETER_COLUMNS


def expert_bias_grad(
    dh_R2F: torch.Tensor,
    dy: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    scores: torch.Tensor | None,
    row_to_choice_R: torch.Tensor | None,
    btile_B4: torch.Tensor,
    num_tiles: torch.Tensor,
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    *,
    expert_size: int,
    num_programs: int | None = None,
) -> None:
    """Writes db13 and db2 of every slot, fp32.

    Derived: the bias is added to every row, so its gradient is the sum of the rows' gradients.

    Args:
        dh_R2F: ``[R, halves * F]`` contiguous.
        dy: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``; contiguous columns.
        row_to_token_R: int32 ``[R]``, -1 on padding rows.
        scores: ``[U, K]`` contiguous with ``row_to_choice_R``, else ``[R]``; None where the score
            multiplies the activation, and the bias goes out unscaled.
        row_to_choice_R: int32 ``[R]``, place in ``scores``, -1 on padding rows; or None.
        btile_B4: int32 ``[B, 4]`` from ``tables.w_tiles`` with ``tiles13 = ceil(halves * F / N)``
            and ``tiles2 = ceil(D / N)`` for N of :func:`bias_columns`.
        num_tiles: int32 ``[1]``, B, on the device.
        grad13: ``[slots, halves * F, 1]`` fp32 of every family; None: not wanted.
        grad2: ``[slots, D, 1]`` fp32 of every family; None: not wanted.
        expert_size: F.
        num_programs: programs launched; None: one a multiprocessor.
    """
    g13, g2 = bias_operands(grad13), bias_operands(grad2)
    chosen = grad13 if grad13 is not None else grad2
    counts: tuple[int | None, int | None] = (None, None)
    if chosen is not None and chosen.is_table:
        counts = (chosen.num_home, 0 if chosen.static is None else len(chosen.static))
    grid = (num_programs or count_processors(dh_R2F.device),)
    _expert_bias_grad_kernel[grid](
        btile_B4, num_tiles, dh_R2F, dy, row_to_token_R, scores, row_to_choice_R,
        *g13.pointers, *g2.pointers, dy.stride(0), *g13.strides, *g2.strides, *counts,
        D=dy.shape[1], F=expert_size, HALVES=dh_R2F.shape[1] // expert_size,
        PAIRS=g13.constexprs["BIAS_PAIRS"],
        TABLE=g13.constexprs["BIAS_TABLE"] or g2.constexprs["BIAS_TABLE"],
        BLOCK_N=bias_columns(dh_R2F.device), BLOCK_K=BLOCK_ROWS,
    )  # fmt: skip
