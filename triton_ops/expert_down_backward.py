"""B1: from the gradient of an expert's output to those of its two GEMMs' inner operands.

One pass: gather dy, multiply by the down weights of the row's slot, recompute the activation from
the saved h, and make dh, score * a and the gradient of the score. Bounds: 2*R*D*F operations;
bytes U*D + R*5F + weights once a strip of 8 m tiles. Deterministic: one program owns an output
tile, k ascends, fp32 accumulation; the row sums of the score's gradient go to one buffer per n
tile, and a second kernel adds them in ascending n.

Letters: U tokens received, R rows (every slot's rows padded to whole tiles), K choices, D model
dim, F expert dim, B tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from relibra_kernels.triton_ops.activation import activate, activate_grad
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
    swizzled,
    weight_block,
)

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from relibra_kernels.triton_ops.configs import GemmConfig
    from relibra_kernels.weights import WeightSet


@triton.jit
def load_scores(scores_ptr, row_to_choice_ptr, rows, ok):
    """fp32 scores of some rows; 0 on padding. Without `row_to_choice` they are given by row."""
    if row_to_choice_ptr is None:
        score = tl.load(scores_ptr + rows, mask=ok, other=0.0)
    else:
        choice = tl.load(row_to_choice_ptr + rows, mask=ok, other=-1)
        score = tl.load(scores_ptr + choice, mask=choice >= 0, other=0.0)
    return score.to(tl.float32)


@triton.jit
def scored_and_sums(
    da_raw, gate, up, score, lanes, tile_rows, dtype, ACT: tl.constexpr, alpha, limit
):
    """Some columns of score * a, and the row sums of da_raw * a; `a` rounded as in the forward."""
    a = activate(gate, up, ACT, alpha, limit).to(dtype).to(tl.float32)
    sums = tl.where(lanes < tile_rows, tl.sum(da_raw * a, axis=1), 0.0)
    return keep_rows((a * score[:, None]).to(dtype), lanes, tile_rows), sums


TABLES = ["tiles_ptr", "num_tiles_ptr", "row_to_token_ptr"]  # a plan's, of any alignment


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[*TABLES, "scores_ptr", "row_to_choice_ptr"],
)
def _expert_down_backward_kernel(
    dy_ptr,  # [U, D] with row_to_token, else [R, D]
    dy_desc,  # blocks [BLOCK_M, BLOCK_K]; None: by pointers
    home,  # [H, 1, D, F]: descriptor, pointer, or table of all slots' addresses
    static,  # [X, 1, D, F], or None
    replica,  # [S, 1, D, F], or None
    tiles_ptr,  # [B, 4] int32
    num_tiles_ptr,  # [1] int32
    row_to_token_ptr,  # [R] int32, -1 = padding; None: dy comes by row
    scores_ptr,  # [U, K] with row_to_choice, else [R]
    row_to_choice_ptr,  # [R] int32, place in scores, -1 = padding; or None
    h_ptr,  # [R, halves * F]: gate | up
    gate_desc,  # [R, F], blocks [BLOCK_M, BLOCK_N / 2]: left half of h; with TMA
    up_desc,  # right half of h; with TMA and a gate
    dh_ptr,  # [R, halves * F], out
    d_gate_desc,  # with TMA
    d_up_desc,  # with TMA and a gate
    scored_ptr,  # [R, F], out: score * a
    scored_desc,  # with TMA
    partial_ptr,  # [NUM_N, R] fp32, out: row sums of (dy W2) * a over an n tile's columns
    num_rows,  # R
    dy_stride,
    home_slot, home_half, home_line,
    static_slot, static_half, static_line,
    replica_slot, replica_half, replica_line,
    num_home, num_static,
    alpha, limit,
    D: tl.constexpr,
    F: tl.constexpr,
    ACT: tl.constexpr,  # see activation.py
    W_TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    GATED: tl.constexpr = ACT <= 1
    H_WIDTH: tl.constexpr = 2 * F if GATED else F
    dtype = h_ptr.dtype.element_ty
    num_m = tl.load(num_tiles_ptr)
    for tile in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0)):
        m, n = swizzled(tile, num_m, NUM_N)
        index, family, row, tile_rows = load_tile(tiles_ptr, m)
        w, slot, slot_stride, half_stride, row_stride, col_stride = open_weights(
            family, index, home, static, replica, home_slot, home_half, home_line, static_slot,
            static_half, static_line, replica_slot, replica_half, replica_line, num_home,
            num_static, h_ptr, 1, D, F, BLOCK_K, BLOCK_N, W_TMA, TRANSPOSED, UNIT, TABLE,
        )  # fmt: skip
        lanes = tl.arange(0, BLOCK_M)
        ok = lanes < tile_rows
        rows = (row + lanes).to(tl.int64)
        if row_to_token_ptr is not None:
            source = tl.load(row_to_token_ptr + rows, mask=ok, other=0).to(tl.int64)
        else:
            source = rows
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            dy = row_block(
                dy_desc, dy_ptr, row, source, ok, k, dy_stride, D, D % BLOCK_K == 0, BLOCK_K
            )
            block = weight_block(
                w, slot, 0, k, n * BLOCK_N, slot_stride, half_stride, row_stride, col_stride,
                D, F, BLOCK_K, BLOCK_N, W_TMA, TRANSPOSED,
            )  # fmt: skip
            acc = tl.dot(dy, block, acc, input_precision="ieee")
        score = load_scores(scores_ptr, row_to_choice_ptr, rows, ok)
        if scored_desc is not None:  # in two halves: half the registers, half the staging buffer
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            sums = tl.zeros((BLOCK_M,), tl.float32)
            for side in tl.static_range(1, -1, -1):  # the left half first spills more
                da_raw = left if side == 0 else right
                col = n * BLOCK_N + side * (BLOCK_N // 2)
                gate = gate_desc.load([row, col]).to(tl.float32)
                up = gate
                if GATED:
                    up = up_desc.load([row, col]).to(tl.float32)
                scored, part = scored_and_sums(
                    da_raw, gate, up, score, lanes, tile_rows, dtype, ACT, alpha, limit
                )
                sums += part
                scored_desc.store([row, col], scored)
                if ACT == 1:  # too much for the registers: h is read again, from L2
                    gate = gate_desc.load([row, col]).to(tl.float32)
                    up = up_desc.load([row, col]).to(tl.float32)
                da = da_raw * score[:, None]
                d_gate, d_up = activate_grad(da, gate, up, ACT, alpha, limit)
                if GATED:  # first: the other order spills on sm_100
                    d_up_desc.store([row, col], keep_rows(d_up.to(dtype), lanes, tile_rows))
                d_gate_desc.store([row, col], keep_rows(d_gate.to(dtype), lanes, tile_rows))
        else:
            cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (cols < F)[None, :]
            place = rows[:, None] * H_WIDTH + cols[None, :]
            gate = tl.load(h_ptr + place, mask=inside, other=0.0).to(tl.float32)
            up = gate
            if GATED:
                up = tl.load(h_ptr + place + F, mask=inside, other=0.0).to(tl.float32)
            scored, sums = scored_and_sums(
                acc, gate, up, score, lanes, tile_rows, dtype, ACT, alpha, limit
            )
            tl.store(scored_ptr + rows[:, None] * F + cols[None, :], scored, mask=inside)
            da = acc * score[:, None]
            d_gate, d_up = activate_grad(da, gate, up, ACT, alpha, limit)
            d_gate = tl.where(ok[:, None], d_gate, 0.0)
            tl.store(dh_ptr + place, d_gate.to(dtype), mask=inside)
            if GATED:
                d_up = tl.where(ok[:, None], d_up, 0.0)
                tl.store(dh_ptr + place + F, d_up.to(dtype), mask=inside)
        tl.store(partial_ptr + n.to(tl.int64) * num_rows + rows, sums)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=TABLES)
def _score_gradient_kernel(
    partial_ptr,  # [NUM_N, R] fp32
    dy_ptr,  # [U, D] with row_to_token, else [R, D]; with a bias
    home_bias,  # [H, D], table of all slots' addresses, or None without bias
    static_bias,
    replica_bias,
    tiles_ptr,  # [B, 4] int32
    num_tiles_ptr,  # [1] int32
    row_to_token_ptr,  # [R] int32, -1 = padding; None: dy comes by row
    dscore_ptr,  # [R] fp32, out
    num_rows,  # R
    dy_stride,
    home_bias_slot,
    static_bias_slot,
    replica_bias_slot,
    num_home,
    num_static,
    D: tl.constexpr,
    NUM_N: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums the partial sums in ascending n, and adds <dy, b2>; zeros on pad rows."""
    for m in tl.range(tl.program_id(0), tl.load(num_tiles_ptr), tl.num_programs(0)):
        index, family, row, tile_rows = load_tile(tiles_ptr, m)
        lanes = tl.arange(0, BLOCK_M)
        ok = lanes < tile_rows
        rows = (row + lanes).to(tl.int64)
        total = tl.zeros((BLOCK_M,), tl.float32)
        ptrs = partial_ptr + rows
        for _ in tl.range(0, NUM_N):
            total += tl.load(ptrs)
            ptrs += num_rows
        if home_bias is not None:
            bias = open_bias(
                family, index, home_bias, static_bias, replica_bias, home_bias_slot,
                static_bias_slot, replica_bias_slot, num_home, num_static, dy_ptr, BIAS_TABLE,
            )  # fmt: skip
            if row_to_token_ptr is not None:
                source = tl.load(row_to_token_ptr + rows, mask=ok, other=0).to(tl.int64)
            else:
                source = rows
            for k in tl.range(0, D, BLOCK_K):
                dy = row_block(
                    None, dy_ptr, row, source, ok, k, dy_stride, D, D % BLOCK_K == 0, BLOCK_K
                )
                b2 = load_bias(bias, 0, k + tl.arange(0, BLOCK_K), D, 1, False)
                total += tl.sum(dy.to(tl.float32) * b2, axis=1)
        tl.store(dscore_ptr + rows, tl.where(ok, total, 0.0))


def expert_down_backward(
    dy: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    w2: WeightSet,
    h_R2F: torch.Tensor,
    scores: torch.Tensor,
    row_to_choice_R: torch.Tensor | None,
    mtile_B4: torch.Tensor,
    num_tiles: torch.Tensor,
    *,
    config: GemmConfig,
    bias: WeightSet | None = None,
    score_at: str = "output",
    activation: int = 0,
    alpha: float = 0.0,
    limit: float = 0.0,
    num_programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of h and of the scores, and score * a, from those of the experts' outputs.

    Source: kernels.md, B1. Derived: with ``g = w2.T @ dy[token of r]`` in fp32 and ``a`` the
    rounded activation of ``h``: ``scored_a = score * a``, ``dh = d activation(h) . (score * g)``
    and ``dscore = <g, a>``, ``+ <dy, b2>`` where the score multiplies the biased output.

    Args:
        dy: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``; contiguous columns.
        row_to_token_R: int32 ``[R]``, -1 on padding rows; None: ``dy`` already lies by row.
        w2: ``[slots, D, F]``, dtype of h.
        h_R2F: ``[R, halves * F]`` contiguous, from ``expert_up``.
        scores: ``[U, K]`` contiguous with ``row_to_choice_R``, else ``[R]``.
        row_to_choice_R: int32 ``[R]``, place in ``scores``, -1 on padding rows; or None.
        mtile_B4: int32 ``[B, 4]``, see ``relibra_kernels.tables.m_tiles``.
        num_tiles: int32 ``[1]``, B, on the device of h.
        config: block sizes.
        bias: ``[slots, D, 1]`` down biases; None without.
        score_at: ``"output"``, or ``"activation"``: the score does not multiply the bias.
        activation: 0 SwiGLU, 1 clamped SwiGLU, 2 GELU, 3 squared ReLU.
        alpha: factor inside the sigmoid of the clamped SwiGLU.
        limit: its clamp.
        num_programs: programs launched; None: one a multiprocessor.

    Returns:
        ``dh`` like h, ``scored_a [R, F]`` of its dtype, ``dscore`` fp32 ``[R]``. Pad rows of tiles
        are exact zeros; rows outside of all tiles are not written.
    """
    num_rows, dim = h_R2F.shape[0], dy.shape[1]
    width = h_R2F.shape[1] // (2 if activation <= 1 else 1)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    num_n = -(-width // block_n)
    dh = torch.empty(h_R2F.shape, dtype=h_R2F.dtype, device=h_R2F.device)
    scored = torch.empty((num_rows, width), dtype=h_R2F.dtype, device=h_R2F.device)
    partial = torch.empty((num_n, num_rows), dtype=torch.float32, device=h_R2F.device)
    dscore = torch.empty((num_rows,), dtype=torch.float32, device=h_R2F.device)
    if num_rows == 0:
        return dh, scored, dscore
    w = weight_operands(w2, block_k, block_n, config.tma)
    b = bias_operands(bias if score_at == "output" else None)
    by_tma = row_to_token_R is None and config.tma and fits_descriptor(dy)
    dy_desc = matrix_descriptor(dy, block_m, block_k) if by_tma else None
    h_descs, dh_descs = (_half_descriptors(x, width, config) for x in (h_R2F, dh))
    scored_desc, _ = _half_descriptors(scored, width, config)
    grid = (num_programs or count_processors(h_R2F.device),)
    _expert_down_backward_kernel[grid](
        dy, dy_desc, *w.pointers, mtile_B4, num_tiles, row_to_token_R, scores, row_to_choice_R,
        h_R2F, *h_descs, dh, *dh_descs, scored, scored_desc, partial, num_rows, dy.stride(0),
        *w.strides, *w.counts, alpha, limit, D=dim, F=width, ACT=activation, **w.constexprs,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    _score_gradient_kernel[grid](
        partial, dy, *b.pointers, mtile_B4, num_tiles, row_to_token_R, dscore, num_rows,
        dy.stride(0), *b.strides, *w.counts, D=dim, NUM_N=num_n,
        BIAS_TABLE=b.constexprs["BIAS_TABLE"], BLOCK_M=block_m, BLOCK_K=block_k,
    )  # fmt: skip
    return dh, scored, dscore


def _half_descriptors(
    rows: torch.Tensor, width: int, config: GemmConfig
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Bounded views of the gate and the up columns, so that a ragged last block stays in its half.

    Blocks are half as wide as an n tile.
    """
    if not config.tma:
        return None, None
    block = config.block_m, config.block_n // 2
    gated = rows.shape[1] > width
    up = matrix_descriptor(rows[:, width:], *block) if gated else None
    return matrix_descriptor(rows[:, :width], *block), up
