"""F2 and B3: rows times the weight of their slot, or times its transpose.

F2 (``rows @ w.T``) is the down projection; B3 (``rows @ w``) takes h's gradient back to x, one k
loop over both halves of w13. Bounds: 2*R*N*K operations; bytes R*(N + K) + weights once a strip of
8 m tiles. Deterministic: one program owns an output tile, k ascends, fp32 accumulation; a row's
bits depend on the row, its weight and the block sizes only.

Letters: R rows (every slot's rows padded to whole tiles), K summed and N other dimension of the
weights, H home, X static, S replica slots, B tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from relibra_kernels.triton_ops.descriptors import (
    bias_operands,
    count_processors,
    fits_descriptor,
    matrix_descriptor,
    weight_operands,
)
from relibra_kernels.triton_ops.tiles import (
    load_bias,
    load_tile,
    open_bias,
    open_weights,
    row_block,
    split_columns,
    stored_half,
    swizzled,
    weight_block,
)

if TYPE_CHECKING:
    from relibra_kernels.triton_ops.configs import GemmConfig
    from relibra_kernels.weights import WeightSet


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr", "num_tiles_ptr"])
def _grouped_gemm_kernel(
    rows_ptr,  # [R, halves * K]
    rows_desc,  # blocks [BLOCK_M, BLOCK_K]; None: by pointers
    home,  # [H, halves, N, K], BACKWARD [H, halves, K, N]: descriptor, pointer, or address table
    static,  # likewise, or None
    replica,  # likewise, or None
    home_bias,  # [H, N], table of all slots' addresses, or None without bias
    static_bias,
    replica_bias,
    tiles_ptr,  # [B, 4] int32
    num_tiles_ptr,  # [1] int32
    out_ptr,  # [R, N], out
    out_desc,  # blocks [BLOCK_M, BLOCK_N / 2]; None: by pointers
    rows_stride,
    home_slot,
    home_half,
    home_line,
    static_slot,
    static_half,
    static_line,
    replica_slot,
    replica_half,
    replica_line,
    home_bias_slot,
    static_bias_slot,
    replica_bias_slot,
    num_home,
    num_static,
    N: tl.constexpr,
    K: tl.constexpr,  # of one half
    HALVES: tl.constexpr,
    BACKWARD: tl.constexpr,  # rows @ w instead of rows @ w.T
    W_TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE: tl.constexpr,
    APART: tl.constexpr,  # see stored_half
    BIAS_PAIRS: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    W_ROWS: tl.constexpr = K if BACKWARD else N
    W_COLS: tl.constexpr = N if BACKWARD else K
    ROW_BLOCK: tl.constexpr = BLOCK_K if BACKWARD else BLOCK_N
    COL_BLOCK: tl.constexpr = BLOCK_N if BACKWARD else BLOCK_K
    dtype = out_ptr.dtype.element_ty
    num_m = tl.load(num_tiles_ptr)
    for tile in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0)):
        m, n = swizzled(tile, num_m, NUM_N)
        index, family, row, tile_rows = load_tile(tiles_ptr, m)
        col = n * BLOCK_N
        w, slot, slot_stride, half_stride, row_stride, col_stride = open_weights(
            family, index, home, static, replica, home_slot, home_half, home_line, static_slot,
            static_half, static_line, replica_slot, replica_half, replica_line, num_home,
            num_static, out_ptr, HALVES, W_ROWS, W_COLS, ROW_BLOCK, COL_BLOCK, W_TMA, TRANSPOSED,
            UNIT, TABLE, APART,
        )  # fmt: skip
        lanes = tl.arange(0, BLOCK_M)
        ok = lanes < tile_rows
        source = (row + lanes).to(tl.int64)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, HALVES * NUM_K):
            # B3 goes through both halves in one loop: two loops would double the buffers.
            half = 0 if HALVES == 1 else step // NUM_K
            k = step * BLOCK_K if HALVES == 1 else (step - half * NUM_K) * BLOCK_K
            # A block past the end of a half meets weights that are zero there.
            rows = row_block(
                rows_desc, rows_ptr, row, source, ok, half * K + k, rows_stride, half * K + K,
                K % BLOCK_K == 0, BLOCK_K,
            )  # fmt: skip
            w_half = stored_half(half, family, APART)
            w_row = k if BACKWARD else col
            w_col = col if BACKWARD else k
            block = weight_block(
                w, slot, w_half, w_row, w_col, slot_stride, half_stride, row_stride, col_stride,
                W_ROWS, W_COLS, ROW_BLOCK, COL_BLOCK, W_TMA, TRANSPOSED,
            )  # fmt: skip
            acc = tl.dot(rows, block if BACKWARD else block.T, acc, input_precision="ieee")
        cols = col + tl.arange(0, BLOCK_N)
        if home_bias is not None:
            bias = open_bias(
                family, index, home_bias, static_bias, replica_bias, home_bias_slot,
                static_bias_slot, replica_bias_slot, num_home, num_static, out_ptr, BIAS_TABLE,
            )  # fmt: skip
            acc += load_bias(bias, 0, cols, N, 1, BIAS_PAIRS)
        # Pads: exact zeros, whatever the rows hold. In a branch, since ptxas otherwise takes the
        # select for a second writer of the accumulator and waits after every wgmma.
        if tile_rows < BLOCK_M:
            acc = tl.where(ok[:, None], acc, 0.0)
        if out_desc is not None:  # in two halves: half the staging buffer
            left, right = split_columns(acc, BLOCK_M, BLOCK_N)
            out_desc.store([row, col], left.to(dtype))
            out_desc.store([row, col + BLOCK_N // 2], right.to(dtype))
        else:
            ptrs = out_ptr + source[:, None] * N + cols[None, :]
            tl.store(ptrs, acc.to(dtype), mask=(cols < N)[None, :])


def grouped_gemm(
    rows_RK: torch.Tensor,
    weights: WeightSet,
    mtile_B4: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    config: GemmConfig,
    backward: bool = False,
    bias: WeightSet | None = None,
    num_programs: int | None = None,
) -> torch.Tensor:
    """``out[r] = w[slot of r] @ rows[r] + b`` or, backward, ``w[slot of r].T @ rows[r]``.

    Source: kernels.md, F2 and B3.

    Args:
        rows_RK: ``[R, K]``, or backward ``[R, halves * N]`` (gate | up whatever the storage of the
            weights); contiguous columns.
        weights: ``[slots, N, K]``, or backward ``[slots, halves * N, K]``, dtype of rows.
        mtile_B4: int32 ``[B, 4]``, see ``relibra_kernels.tables.m_tiles``, tiles of
            ``config.block_m`` rows.
        num_tiles: int32 ``[1]``, B, on the device of rows.
        config: block sizes.
        backward: multiply by the weights as they are instead of by their transposes.
        bias: ``[slots, N, 1]``, contiguous; forward only; None without.
        num_programs: programs launched; None: one a multiprocessor.

    Returns:
        ``[R, N]``, backward ``[R, K]``. Pad rows of tiles are exact zeros; rows outside of all
        tiles are not written.
    """
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    width, depth, block = weights.num_rows, weights.num_columns, (block_n, block_k)
    if backward:
        width, depth, block = depth, width, (block_k, block_n)
    out = torch.empty((len(rows_RK), width), dtype=rows_RK.dtype, device=rows_RK.device)
    if out.numel() == 0:
        return out
    w = weight_operands(weights, *block, config.tma)
    if config.tma and not w.constexprs["W_TMA"]:
        block_n = max(block_n // 2, 16)  # weights by pointers take registers
    b = bias_operands(bias)
    counts = b.counts if w.counts[0] is None else w.counts
    rows_desc = out_desc = None
    if config.tma:
        out_desc = matrix_descriptor(out, block_m, block_n // 2)
        rows_desc = (
            matrix_descriptor(rows_RK, block_m, block_k) if fits_descriptor(rows_RK) else None
        )
    _grouped_gemm_kernel[(num_programs or count_processors(out.device),)](
        rows_RK, rows_desc, *w.pointers, *b.pointers, mtile_B4, num_tiles, out, out_desc,
        rows_RK.stride(0), *w.strides, *b.strides, *counts, N=width, K=depth,
        HALVES=weights.halves, BACKWARD=backward, APART=w.apart, **w.constexprs, **b.constexprs,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
