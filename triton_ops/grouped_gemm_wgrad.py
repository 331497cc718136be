"""B2: gradients of both weights of the experts in one launch.

``dW13[f, d] = sum over rows r of dh[r, f] * x[r, d]`` and
``dW2[d, f] = sum over rows r of dy[r, d] * scored_a[r, f]``. Both have the rows of dh or scored_a
on the left and gathered rows of width D on the right, so one k loop serves both matrices.

Bounds: 6*R*D*F operations for gated experts; bytes U*2D + R*3F once a strip of tiles + 3*D*F fp32 a
slot. Deterministic: an output tile has one owner and is never split over rows; ADD tiles use an
atomic add only because it needs no registers for the old values, nobody else adds to the tile.

Letters: U tokens received, R rows (every slot's rows padded to whole tiles), D model dim, F expert
dim, B tiles of `w_tiles`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from relibra_kernels.triton_ops.descriptors import (
    count_processors,
    fits_descriptor,
    weight_operands,
)
from relibra_kernels.triton_ops.tiles import open_weights

if TYPE_CHECKING:
    from relibra_kernels.triton_ops.configs import GemmConfig
    from relibra_kernels.weights import WeightSet

FAMILIES = ("home", "static", "replica")


@triton.jit
def load_wtile(tiles_ptr, tile):
    """One entry of `w_tiles`, in its parts."""
    word = tl.load(tiles_ptr + tile * 4)
    first = tl.load(tiles_ptr + tile * 4 + 1)
    end = tl.load(tiles_ptr + tile * 4 + 2)
    flags = tl.load(tiles_ptr + tile * 4 + 3)
    second = (flags >> 22) & 1
    stores = (flags >> 24) & 1
    signals = (flags >> 25) & 1
    return word & 0xFFFFFF, word >> 24, first, end, second, stores, signals, flags & 0x3FFFFF


@triton.jit
def open_gradient(
    index, family, half, home, static, replica, home_slot, home_half, home_line, static_slot,
    static_half, static_line, replica_slot, replica_half, replica_line, num_home, num_static,
    any_ptr, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, TABLE: tl.constexpr,
    APART: tl.constexpr,
    D_ROWS: tl.constexpr,  # logical rows are those of D (w2), else those of F (w13)
):  # fmt: skip
    """Pointer to one half of a slot's gradient, and its strides along F and D."""
    like_ptr = any_ptr.to(tl.pointer_type(tl.float32))  # only its type is used
    grad, slot, slot_stride, half_stride, row_stride, col_stride = open_weights(
        family, index, home, static, replica, home_slot, home_half, home_line, static_slot,
        static_half, static_line, replica_slot, replica_half, replica_line, num_home, num_static,
        like_ptr, 1, 1, 1, 1, 1, False, TRANSPOSED, UNIT, TABLE, APART,
    )  # fmt: skip
    grad += slot.to(tl.int64) * slot_stride + half.to(tl.int64) * half_stride
    if D_ROWS:
        f_step = col_stride
        d_step = row_stride
    else:
        f_step = row_stride
        d_step = col_stride
    return grad, f_step, d_step


@triton.jit
def write_tile(grad_ptr, f_step, d_step, fs, ds, acc, inside, stores):
    """Overwrites, or adds to, one output tile."""
    ptrs = grad_ptr + fs.to(tl.int64)[:, None] * f_step + ds.to(tl.int64)[None, :] * d_step
    if stores:
        tl.store(ptrs, acc, mask=inside)
    else:
        tl.atomic_add(ptrs, acc, mask=inside, sem="relaxed")


@triton.jit
def publish(arrived_ptr, ready_ptr, slot, ready_value, signals, TILES: tl.constexpr):
    """Sets the ready flag of a replica slot after the last of its tiles was written.

    Every tile adds 1 to the slot's counter, and the one with SIGNAL subtracts the others, so the
    sum is 0 again only when all have arrived, in whatever order.
    """
    tl.debug_barrier()  # the whole program's stores come before its arrival
    step = tl.where(signals != 0, 1 - TILES, 1)
    before = tl.atomic_add(arrived_ptr + slot, step, sem="acq_rel", scope="gpu")
    if before + step == 0:
        tl.atomic_xchg(ready_ptr + slot, ready_value, sem="release", scope="sys")


@triton.jit
def right_block(rows_ptr, stride, source, ds, D: tl.constexpr):
    """Block `[BLOCK_K, BLOCK_N]` of gathered rows; zeros for row -1."""
    ptrs = rows_ptr + source.to(tl.int64)[:, None] * stride + ds[None, :]
    return tl.load(ptrs, mask=(source >= 0)[:, None] & (ds < D)[None, :], other=0.0)


@triton.jit
def row_sources(row_to_token_ptr, rows, end):
    """Row of x for each row from a table, or the row itself; -1 where there is none."""
    if row_to_token_ptr is None:
        source = tl.where(rows < end, rows, -1)
    else:
        source = tl.load(row_to_token_ptr + rows, mask=rows < end, other=-1)
    return source


@triton.jit
def left_block(
    desc,  # [R, halves, F], or None: by pointers
    left_ptr,
    stride,
    k,
    half,
    f,
    rows,
    taken,  # [BLOCK_K] bool, whether the row counts
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Block `[BLOCK_K, BLOCK_M]` of dh or scored_a at (row k, column f).

    A descriptor reads pad rows too: their writer made them zeros. Pointers do not read them.
    """
    if desc is not None:
        block = desc.load([k, half, f]).reshape(BLOCK_K, BLOCK_M)
    else:
        fs = f + tl.arange(0, BLOCK_M)
        ptrs = left_ptr + rows.to(tl.int64)[:, None] * stride + fs[None, :]
        block = tl.load(ptrs, mask=taken[:, None] & (fs < F)[None, :], other=0.0)
    return block


@triton.jit(
    do_not_specialize=["ready_value"],
    do_not_specialize_on_alignment=[
        "tiles_ptr", "num_tiles_ptr", "counter_ptr", "row_to_token_ptr", "arrived_ptr", "ready_ptr",
    ],
)  # fmt: skip
def _expert_wgrad_kernel(
    tiles_ptr,  # [B, 4] int32, see w_tiles
    num_tiles_ptr,  # [1] int32
    counter_ptr,  # [1] int32, the next tile; 0 at the start
    row_to_token_ptr,  # [R] int32, -1 = padding; None: x and dy come by row
    x_ptr,  # [U, D] with row_to_token, else [R, D]
    dy_ptr,  # likewise
    dh_ptr,  # [R, HALVES * F]
    scored_ptr,  # [R, F]: score * a
    dh_desc,  # [R, HALVES, F], blocks [BLOCK_K, 1, BLOCK_M]; with TMA
    scored_desc,  # [R, 1, F], likewise
    home13,  # [H, HALVES, F, D] fp32, out: pointer, table of addresses, or None: not wanted
    static13,  # [X, HALVES, F, D], or None
    replica13,  # [S, HALVES, F, D], or None
    home2,  # [H, 1, D, F] fp32, out: likewise
    static2,
    replica2,
    arrived_ptr,  # [S] int32, zeros before and after; or None
    ready_ptr,  # [S] int64, out: ready_value once a replica slot is complete; or None
    ready_value,
    x_stride,
    dy_stride,
    home13_slot,
    home13_half,
    home13_line,
    static13_slot,
    static13_half,
    static13_line,
    replica13_slot,
    replica13_half,
    replica13_line,
    home2_slot,
    home2_half,
    home2_line,
    static2_slot,
    static2_half,
    static2_line,
    replica2_slot,
    replica2_half,
    replica2_line,
    num_home,
    num_static,
    D: tl.constexpr,
    F: tl.constexpr,
    HALVES: tl.constexpr,
    TRANSPOSED13: tl.constexpr,
    UNIT13: tl.constexpr,
    TRANSPOSED2: tl.constexpr,
    UNIT2: tl.constexpr,
    TABLE: tl.constexpr,
    APART: tl.constexpr,  # gate and up gradients of home slots are two tensors
    BLOCK_M: tl.constexpr,  # of F
    BLOCK_N: tl.constexpr,  # of D
    BLOCK_K: tl.constexpr,  # of rows
):
    NUM_F: tl.constexpr = (F + BLOCK_M - 1) // BLOCK_M
    NUM_D: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    TILES13: tl.constexpr = HALVES * NUM_F * NUM_D if home13 is not None else 0
    TILES2: tl.constexpr = NUM_F * NUM_D if home2 is not None else 0
    num_tiles = tl.load(num_tiles_ptr)
    tile = tl.atomic_add(counter_ptr, 1, sem="relaxed")
    while tile < num_tiles:
        index, family, first, end, second, stores, signals, output = load_wtile(tiles_ptr, tile)
        half = output // (NUM_F * NUM_D)
        f = (output // NUM_D % NUM_F) * BLOCK_M
        d = (output % NUM_D) * BLOCK_N
        fs = f + tl.arange(0, BLOCK_M)
        ds = d + tl.arange(0, BLOCK_N)
        right_ptr = x_ptr
        right_stride = tl.cast(x_stride, tl.int64)
        left_ptr = dh_ptr + half * F
        left_stride = HALVES * F
        left_desc = dh_desc
        if second != 0:
            right_ptr = dy_ptr
            right_stride = tl.cast(dy_stride, tl.int64)
            left_ptr = scored_ptr
            left_stride = F
            if scored_desc is not None:
                left_desc = scored_desc
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        rows = first + tl.arange(0, BLOCK_K)
        # A step ahead: a load of the same step would use up levels of the pipeline.
        source = row_sources(row_to_token_ptr, rows, end)
        for k in tl.range(first, end, BLOCK_K):
            right = right_block(right_ptr, right_stride, source, ds, D)
            left = left_block(
                left_desc, left_ptr, left_stride, k, half, f, rows, source >= 0, F, BLOCK_M, BLOCK_K
            )
            acc = tl.dot(left.T, right, acc, input_precision="ieee")
            rows += BLOCK_K
            source = row_sources(row_to_token_ptr, rows, end)
        inside = (fs < F)[:, None] & (ds < D)[None, :]
        if second != 0:
            if home2 is not None:
                grad2, f_step2, d_step2 = open_gradient(
                    index, family, half, home2, static2, replica2, home2_slot, home2_half,
                    home2_line, static2_slot, static2_half, static2_line, replica2_slot,
                    replica2_half, replica2_line, num_home, num_static, tiles_ptr, TRANSPOSED2,
                    UNIT2, TABLE, 0, True,
                )  # fmt: skip
                write_tile(grad2, f_step2, d_step2, fs, ds, acc, inside, stores)
        else:
            if home13 is not None:
                grad, f_step, d_step = open_gradient(
                    index, family, half, home13, static13, replica13, home13_slot, home13_half,
                    home13_line, static13_slot, static13_half, static13_line, replica13_slot,
                    replica13_half, replica13_line, num_home, num_static, tiles_ptr, TRANSPOSED13,
                    UNIT13, TABLE, APART, False,
                )  # fmt: skip
                write_tile(grad, f_step, d_step, fs, ds, acc, inside, stores)
        if ready_ptr is not None:
            tiles: tl.constexpr = TILES13 + TILES2
            if family == 2:
                publish(arrived_ptr, ready_ptr, index, ready_value, signals, tiles)
        tile = tl.atomic_add(counter_ptr, 1, sem="relaxed")


def count_output_tiles(hidden_size: int, expert_size: int, config: GemmConfig) -> int:
    """Output tiles of one half of dW13, or of dW2: what ``w_tiles`` needs to be told.

    Args:
        hidden_size: D.
        expert_size: F.
        config: block sizes: ``block_m`` of F, ``block_n`` of D.
    """
    return -(-expert_size // config.block_m) * -(-hidden_size // config.block_n)


def _rows_descriptor(rows: torch.Tensor, halves: int, config: GemmConfig) -> TensorDescriptor:
    width = rows.shape[1] // halves
    if len(rows) == 0:  # a rank without rows: tiles are empty, and a descriptor must not be
        rows = rows.new_empty(1, rows.shape[1])
    block = [config.block_k, 1, config.block_m]
    strides = [rows.stride(0), width, 1]
    return TensorDescriptor(rows, [rows.shape[0], halves, width], strides, block)


def expert_wgrad(
    x: torch.Tensor,
    dy: torch.Tensor,
    dh: torch.Tensor,
    scored_a: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    wtile_B4: torch.Tensor,
    num_tiles: torch.Tensor,
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    *,
    config: GemmConfig,
    counter: torch.Tensor | None = None,
    arrived_S: torch.Tensor | None = None,
    ready_S: torch.Tensor | None = None,
    ready_value: int = 0,
    num_programs: int | None = None,
) -> None:
    """Writes dW13 and dW2 of every slot, fp32, in the storage layout of the weights.

    Source: kernels.md, B2. ``STORE`` tiles overwrite, the others add; see ``tables.w_tiles``.

    Args:
        x: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``; contiguous columns.
        dy: gradient of the experts' outputs, likewise.
        dh: ``[R, halves * F]`` contiguous. With ``config.tma`` and ``row_to_token_R`` its pad rows
            are read, and finite (``expert_down_backward`` writes zeros); otherwise not read.
        scored_a: ``[R, F]``, likewise: score * a.
        row_to_token_R: int32 ``[R]``, -1 on padding rows.
        wtile_B4: int32 ``[B, 4]``, for the tile counts of :func:`count_output_tiles`.
        num_tiles: int32 ``[1]``, B, on the device.
        grad13: ``[slots, halves * F, D]`` fp32 of every family; None: not wanted.
        grad2: ``[slots, D, F]`` fp32 of every family; None: not wanted.
        config: block sizes; ``num_stages`` counts the buffers of an operand, and with ``tma``
            ``block_k`` divides the ``block_rows`` of the table.
        counter: int32 ``[1]``, overwritten: programs take tiles from it; None: a new one.
        arrived_S: int32 ``[S]`` of zeros, left as zeros; with ``ready_S``.
        ready_S: int64 ``[S]``: set to ``ready_value``, release.sys, when a replica slot's
            gradients are complete.
        ready_value: what is published.
        num_programs: programs launched; None: one a multiprocessor.
    """
    launch = _launch_arguments(x, dh, scored_a, row_to_token_R, grad13, grad2, config)
    if counter is None:
        counter = torch.empty(1, dtype=torch.int32, device=dh.device)
    counter.zero_()
    grid = (num_programs or count_processors(dh.device),)
    _expert_wgrad_kernel[grid](
        wtile_B4, num_tiles, counter, row_to_token_R, x, dy, dh, scored_a,
        arrived_ptr=arrived_S, ready_ptr=ready_S, ready_value=ready_value,
        x_stride=x.stride(0), dy_stride=dy.stride(0),
        **launch,
    )  # fmt: skip


def _launch_arguments(
    x: torch.Tensor,
    dh: torch.Tensor,
    scored_a: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    config: GemmConfig,
) -> dict[str, Any]:
    """Gradient buffers, descriptors and sizes by argument name."""
    hidden, expert = x.shape[1], scored_a.shape[1]
    halves = dh.shape[1] // expert
    gathered = row_to_token_R is not None
    tma = config.tma and gathered and fits_descriptor(dh) and fits_descriptor(scored_a)
    launch: dict[str, Any] = {
        "dh_desc": _rows_descriptor(dh, halves, config) if tma else None,
        "scored_desc": _rows_descriptor(scored_a, 1, config) if tma else None,
        "num_home": None, "num_static": None, "TABLE": False,
        "APART": int(grad13 is not None and grad13.halves_apart),
        "D": hidden, "F": expert, "HALVES": halves,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }  # fmt: skip
    for field, grads in (("13", grad13), ("2", grad2)):
        launch |= _field_arguments(field, grads)
    return launch


def _field_arguments(field: str, grads: WeightSet | None) -> dict[str, Any]:
    """What one gradient adds to the arguments; remembered with the field's operands."""
    op = None if grads is None else weight_operands(grads, 1, 1, tma=False)
    if grads is not None:
        known = grads.launches.get(field)
        if known is not None and known[0] is op:
            arguments: dict[str, Any] = known[1]
            return arguments
    pointers, strides = ((None,) * 3, (None,) * 9) if op is None else (op.pointers, op.strides)
    names = [f"{family}{field}_{part}" for family in FAMILIES for part in ("slot", "half", "line")]
    arguments = dict(zip((f"{family}{field}" for family in FAMILIES), pointers, strict=True))
    arguments |= dict(zip(names, strides, strict=True))
    arguments |= {f"TRANSPOSED{field}": False, f"UNIT{field}": 1}
    if op is not None and grads is not None:
        arguments |= {f"{key}{field}": op.constexprs[key] for key in ("TRANSPOSED", "UNIT")}
        arguments["TABLE"] = op.constexprs["TABLE"]
        arguments["num_home"], arguments["num_static"] = op.counts
        grads.launches[field] = (op, arguments)
    return arguments
