"""F1: gather rows, multiply by the gate and up weights of their slots, apply the activation.

Bounds: 2*R*D*2F operations; bytes U*D (R*D un-gathered) + R*3F + weights once a strip of 8 m tiles.
Deterministic: one program owns an output tile, k ascends, fp32 accumulation; a row's bits depend on
the row, its weight and the block sizes only, so not on its slot, its tile or the programs' order.

Letters: U tokens received, R rows (every slot's rows padded to whole tiles), D model dim, F expert
dim, H home, X static, S replica slots, B tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from relibra_kernels.triton_ops.activation import activate
from relibra_kernels.triton_ops.descriptors import (
    bias_operands,
    count_processors,
    fits_descriptor,
    matrix_descriptor,
    weight_operands,
)
from relibra_kernels.triton_ops.tiles import (
    keep_rows,
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


@triton.jit
def rounded(block, dtype, lanes, num_rows, CLEARS_PADS: tl.constexpr):
    """The block in a dtype; with `CLEARS_PADS` zeros from row `num_rows` on."""
    out = block.to(dtype)
    if CLEARS_PADS:
        out = keep_rows(out, lanes, num_rows)
    return out


@triton.jit
def scored(a, scores_ptr, rows, ok, dtype):
    """``score * a`` from the rounded ``a``, where there are scores."""
    out = a.to(dtype)
    if scores_ptr is not None:
        score = tl.load(scores_ptr + rows, mask=ok, other=0.0)
        out = (out.to(tl.float32) * score[:, None]).to(dtype)
    return out


@triton.jit(
    do_not_specialize_on_alignment=[
        "tiles_ptr", "num_tiles_ptr", "row_to_token_ptr", "scores_ptr",
    ]
)  # fmt: skip
def _expert_up_kernel(
    x_ptr,  # [U, D] with row_to_token, else [R, D]
    x_desc,  # blocks [BLOCK_M, BLOCK_K]; None: by pointers
    home,  # [H, halves, F, D]: descriptor, pointer, or table of all slots' addresses
    static,  # [X, halves, F, D], or None
    replica,  # [S, halves, F, D], or None
    home_bias,  # [H, halves * F], table of all slots' addresses, or None without bias
    static_bias, replica_bias,
    tiles_ptr,  # [B, 4] int32
    num_tiles_ptr,  # [1] int32
    row_to_token_ptr,  # [R] int32, -1 = padding; None: x comes by row
    scores_ptr,  # [R] fp32, or None: they do not multiply the activation
    h_ptr,  # [R, halves * F], out: gate | up, before the activation
    gate_desc,  # [R, F], blocks [BLOCK_M, BLOCK_N / 2]: left half of h; with TMA
    up_desc,  # right half of h; with TMA and a gate
    a_ptr,  # [R, F], out
    a_desc,  # with TMA
    x_stride,
    home_slot, home_half, home_line,
    static_slot, static_half, static_line,
    replica_slot, replica_half, replica_line,
    home_bias_slot, static_bias_slot, replica_bias_slot,
    num_home, num_static,
    alpha, limit,
    D: tl.constexpr,
    F: tl.constexpr,
    ACT: tl.constexpr,  # see activation.py
    W_TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE: tl.constexpr,
    APART: tl.constexpr,  # see stored_half
    BIAS_PAIRS: tl.constexpr,  # gate and up biases alternate
    BIAS_TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    HALVES: tl.constexpr = 2 if ACT <= 1 else 1
    dtype = h_ptr.dtype.element_ty
    num_m = tl.load(num_tiles_ptr)
    for tile in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0)):
        m, n = swizzled(tile, num_m, NUM_N)
        index, family, row, tile_rows = load_tile(tiles_ptr, m)
        col = n * BLOCK_N
        w, slot, slot_stride, half_stride, row_stride, col_stride = open_weights(
            family, index, home, static, replica, home_slot, home_half, home_line, static_slot,
            static_half, static_line, replica_slot, replica_half, replica_line, num_home,
            num_static, h_ptr, HALVES, F, D, BLOCK_N, BLOCK_K, W_TMA, TRANSPOSED, UNIT, TABLE, APART
        )  # fmt: skip
        lanes = tl.arange(0, BLOCK_M)
        ok = lanes < tile_rows
        if row_to_token_ptr is not None:
            source = tl.load(row_to_token_ptr + row + lanes, mask=ok, other=0).to(tl.int64)
        else:
            source = (row + lanes).to(tl.int64)
        gate_half = stored_half(0, family, APART)
        up_half = stored_half(1, family, APART)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            x = row_block(x_desc, x_ptr, row, source, ok, k, x_stride, D, D % BLOCK_K == 0, BLOCK_K)
            w_gate = weight_block(
                w, slot, gate_half, col, k, slot_stride, half_stride, row_stride, col_stride,
                F, D, BLOCK_N, BLOCK_K, W_TMA, TRANSPOSED,
            )  # fmt: skip
            gate = tl.dot(x, w_gate.T, gate, input_precision="ieee")
            if HALVES == 2:
                w_up = weight_block(
                    w, slot, up_half, col, k, slot_stride, half_stride, row_stride, col_stride,
                    F, D, BLOCK_N, BLOCK_K, W_TMA, TRANSPOSED,
                )  # fmt: skip
                up = tl.dot(x, w_up.T, up, input_precision="ieee")
        cols = col + tl.arange(0, BLOCK_N)
        if home_bias is not None:
            bias = open_bias(
                family, index, home_bias, static_bias, replica_bias, home_bias_slot,
                static_bias_slot, replica_bias_slot, num_home, num_static, h_ptr, BIAS_TABLE,
            )  # fmt: skip
            gate += load_bias(bias, 0, cols, F, HALVES, BIAS_PAIRS)
            if HALVES == 2:
                up += load_bias(bias, 1, cols, F, HALVES, BIAS_PAIRS)
        # Pads: exact zeros, whatever the rows hold. Wide tiles by their bits after rounding: that
        # takes fewest registers on sm_90, while narrow ones spill with it on sm_100 (Triton 3.9).
        BY_BITS: tl.constexpr = a_desc is not None and BLOCK_N >= 128
        if not BY_BITS:  # noqa: SIM102 - of the two only this one is known when compiling
            if tile_rows < BLOCK_M:  # a branch: after a plain select every wgmma waits
                gate = tl.where(ok[:, None], gate, 0.0)
                if HALVES == 2:
                    up = tl.where(ok[:, None], up, 0.0)
        if a_desc is not None:
            # In halves of the columns, all of h before the activation: any other order spills.
            SIDE: tl.constexpr = BLOCK_N // 2
            gate_l, gate_r = split_columns(gate, BLOCK_M, BLOCK_N)
            up_l, up_r = split_columns(up, BLOCK_M, BLOCK_N)
            gate_l = rounded(gate_l, dtype, lanes, tile_rows, BY_BITS)
            gate_desc.store([row, col], gate_l)
            if HALVES == 2:
                up_l = rounded(up_l, dtype, lanes, tile_rows, BY_BITS)
                up_desc.store([row, col], up_l)
            gate_r = rounded(gate_r, dtype, lanes, tile_rows, BY_BITS)
            gate_desc.store([row, col + SIDE], gate_r)
            if HALVES == 2:
                up_r = rounded(up_r, dtype, lanes, tile_rows, BY_BITS)
                up_desc.store([row, col + SIDE], up_r)
            a_l = activate(gate_l.to(tl.float32), up_l.to(tl.float32), ACT, alpha, limit)
            a_desc.store([row, col], scored(a_l, scores_ptr, row + lanes, ok, dtype))
            a_r = activate(gate_r.to(tl.float32), up_r.to(tl.float32), ACT, alpha, limit)
            a_desc.store([row, col + SIDE], scored(a_r, scores_ptr, row + lanes, ok, dtype))
        else:
            inside = (cols < F)[None, :]
            rows = (row + lanes).to(tl.int64)[:, None]
            h_ptrs = h_ptr + rows * (HALVES * F) + cols[None, :]
            gate = gate.to(dtype)
            tl.store(h_ptrs, gate, mask=inside)
            if HALVES == 2:
                up = up.to(dtype)
                tl.store(h_ptrs + F, up, mask=inside)
            a = activate(gate.to(tl.float32), up.to(tl.float32), ACT, alpha, limit)
            a = scored(a, scores_ptr, row + lanes, ok, dtype)
            tl.store(a_ptr + rows * F + cols[None, :], a, mask=inside)


def expert_up(
    x: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    w13: WeightSet,
    mtile_B4: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    config: GemmConfig,
    num_rows: int | None = None,
    bias: WeightSet | None = None,
    score_R: torch.Tensor | None = None,
    activation: int = 0,
    alpha: float = 0.0,
    limit: float = 0.0,
    num_programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = w13[slot of r] @ x[token of r] + b13`` and ``a = activation(h)`` for the tiles' rows.

    Source: kernels.md, F1. Derived: gate and up are rounded to the dtype of x, then activated in
    fp32, then rounded.

    Args:
        x: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``; contiguous columns.
        row_to_token_R: int32 ``[R]``, -1 on padding rows; None: ``x`` already lies by row.
        w13: ``[slots, halves * F, D]``, dtype of x; one half for activations without a gate.
        mtile_B4: int32 ``[B, 4]``, see ``relibra_kernels.tables.m_tiles``, tiles of
            ``config.block_m`` rows.
        num_tiles: int32 ``[1]``, B, on the device of x.
        config: block sizes.
        num_rows: R; by default that of ``row_to_token_R`` or of ``x``.
        bias: ``[slots, halves * F, 1]``, contiguous, in the order of ``w13``; None without.
        score_R: fp32 ``[R]``: the rounded ``a`` is multiplied by it; None: it is not.
        activation: 0 SwiGLU, 1 clamped SwiGLU, 2 GELU, 3 squared ReLU.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.
        num_programs: programs launched; None: one a multiprocessor.

    Returns:
        ``h [R, halves * F]``, gate | up whatever the storage of the weights, and ``a [R, F]``.
        Pad rows of tiles are exact zeros; rows outside of all tiles are not written.
    """
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    halves, dim, width = w13.halves, w13.num_columns, w13.num_rows
    num_rows = num_rows or len(x if row_to_token_R is None else row_to_token_R)
    h = torch.empty((num_rows, halves * width), dtype=x.dtype, device=x.device)
    a = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return h, a
    w = weight_operands(w13, block_n, block_k, config.tma)
    if config.tma and not w.constexprs["W_TMA"]:
        block_n = max(block_n // 2, 16)  # weights by pointers take registers
    b = bias_operands(bias)
    counts = b.counts if w.counts[0] is None else w.counts
    x_desc = gate_desc = up_desc = a_desc = None
    if config.tma:
        gate_desc = matrix_descriptor(h[:, :width], block_m, block_n // 2)
        up_desc = matrix_descriptor(h[:, width:], block_m, block_n // 2) if halves == 2 else None
        a_desc = matrix_descriptor(a, block_m, block_n // 2)
        if row_to_token_R is None and fits_descriptor(x):
            x_desc = matrix_descriptor(x, block_m, block_k)
    _expert_up_kernel[(num_programs or count_processors(x.device),)](
        x, x_desc, *w.pointers, *b.pointers, mtile_B4, num_tiles, row_to_token_R, score_R,
        h, gate_desc, up_desc, a, a_desc, x.stride(0), *w.strides, *b.strides, *counts,
        alpha, limit, D=dim, F=width, ACT=activation, APART=w.apart, **w.constexprs, **b.constexprs,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return h, a
