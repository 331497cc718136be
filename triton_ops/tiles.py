"""Device functions that the GEMM kernels share: tiles, weights by family, blocks of weights.

Letters: R rows computed here (every slot's rows padded to whole tiles), B tiles of rows.
"""

import triton
import triton.language as tl

SWIZZLE = tl.constexpr(8)  # m tiles that pass over one strip of weights while it is in L2


@triton.jit
def swizzled(tile, num_m, NUM_N: tl.constexpr):
    """Number of a tile -> (m tile, n tile): groups of 8 m tiles, m fastest, the last one ragged.

    With 10 m tiles and 2 n tiles, tiles 0..15 are (0..7, 0), (0..7, 1); tiles 16..19 are (8, 0),
    (9, 0), (8, 1), (9, 1).
    """
    group = tile // (SWIZZLE * NUM_N)
    first = group * SWIZZLE
    size = min(SWIZZLE, num_m - first)
    rest = tile - group * (SWIZZLE * NUM_N)
    return first + rest % size, rest // size


@triton.jit
def load_tile(tiles_ptr, m):
    """One entry of `mtile`: (weight index inside its family, family, first row, rows)."""
    word = tl.load(tiles_ptr + m * 4)
    row = tl.load(tiles_ptr + m * 4 + 1)
    num_rows = tl.load(tiles_ptr + m * 4 + 2)
    return word & 0xFFFFFF, word >> 24, row, num_rows


@triton.jit
def pick_family(family, home, static, replica):
    """What belongs to a family: one 64-bit select, outside the k loop.

    None stands for a family that is not there, or for a number equal to the home family's.
    """
    chosen = home
    if static is not None:  # noqa: SIM102 - at compile time, so apart from the comparison
        if family == 1:
            chosen = static
    if replica is not None:  # noqa: SIM102
        if family == 2:
            chosen = replica
    return chosen


@triton.jit
def load_address(table_ptr, family, index, num_home, num_static):
    """int64 address of a slot in a table of all home, then static, then replica slots."""
    first = tl.where(family == 0, 0, tl.where(family == 1, num_home, num_home + num_static))
    return tl.load(table_ptr + first + index)


@triton.jit
def open_weights(
    family,
    index,
    home,  # descriptor (W_TMA), pointer, or int64 table of all slots' addresses (TABLE)
    static,
    replica,
    home_slot,  # strides of slots, halves and lines of storage; lines = columns if TRANSPOSED
    home_half,
    home_line,
    static_slot,  # None: as home
    static_half,
    static_line,
    replica_slot,
    replica_half,
    replica_line,
    num_home,  # H, with TABLE
    num_static,  # X, with TABLE
    like_ptr,  # a pointer of the weights' dtype, with TABLE
    HALVES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    W_TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE: tl.constexpr,
    APART: tl.constexpr = 0,  # gate and up weights of home are two tensors: halves are far apart
):
    """A tile's weight for `weight_block`: (weights, index, strides of slot, half, row, column)."""
    if TABLE:
        address = load_address(home, family, index, num_home, num_static)
        weights = tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
        slot = tl.zeros((), tl.int32)
        half_stride = home_half
        line = home_line
        slot_stride = 0
        if W_TMA:
            lines: tl.constexpr = NUM_COLS if TRANSPOSED else NUM_ROWS
            width: tl.constexpr = NUM_ROWS if TRANSPOSED else NUM_COLS
            line_block: tl.constexpr = COLS if TRANSPOSED else ROWS
            width_block: tl.constexpr = ROWS if TRANSPOSED else COLS
            weights = tl.make_tensor_descriptor(
                weights,
                shape=[1, HALVES, lines, width],
                strides=[tl.cast(line, tl.int64), tl.cast(half_stride, tl.int64),
                         tl.cast(line, tl.int64), 1],
                block_shape=[1, 1, line_block, width_block],
            )  # fmt: skip
    else:
        weights = pick_family(family, home, static, replica)
        slot = index
        if W_TMA:  # the descriptors know them
            slot_stride = 0
            half_stride = 0
            line = 0
        else:
            slot_stride = pick_family(family, home_slot, static_slot, replica_slot)
            if APART != 0:
                half_stride = tl.cast(home_half, tl.int64)
                if static_half is not None:
                    half_stride = tl.where(family == 1, static_half, half_stride)
                if replica_half is not None:
                    half_stride = tl.where(family == 2, replica_half, half_stride)
            else:
                half_stride = pick_family(family, home_half, static_half, replica_half)
            line = pick_family(family, home_line, static_line, replica_line)
    if TRANSPOSED:
        row_stride = UNIT
        col_stride = line
    else:
        row_stride = line
        col_stride = UNIT
    return weights, slot, slot_stride, half_stride, row_stride, col_stride


@triton.jit
def stored_half(half, family, APART: tl.constexpr):
    """Place of a half in a descriptor: of two home tensors that at the lower address is first."""
    if APART == 2:
        half = tl.where(family == 0, 1 - half, half)
    return half


@triton.jit
def matrix_block(
    first_ptr,
    row,
    col,
    stride_row,
    stride_col,
    NUM_ROWS: tl.constexpr,
    NUM_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Block of a matrix by pointers, zeros outside of it; masked only where it can overrun."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    ptrs = first_ptr + rows.to(tl.int64)[:, None] * stride_row
    ptrs += cols.to(tl.int64)[None, :] * stride_col
    if NUM_ROWS % ROWS == 0 and NUM_COLS % COLS == 0:
        block = tl.load(ptrs)
    elif NUM_ROWS % ROWS == 0:
        block = tl.load(ptrs, mask=(cols < NUM_COLS)[None, :], other=0.0)
    elif NUM_COLS % COLS == 0:
        block = tl.load(ptrs, mask=(rows < NUM_ROWS)[:, None], other=0.0)
    else:
        inside = (rows < NUM_ROWS)[:, None] & (cols < NUM_COLS)[None, :]
        block = tl.load(ptrs, mask=inside, other=0.0)
    return block


@triton.jit
def weight_block(
    weights,  # descriptor with blocks [1, 1, ROWS, COLS] (TMA), or pointer to the family's first
    index,
    half,
    row,
    col,
    stride_slot,
    stride_half,
    stride_row,
    stride_col,
    NUM_ROWS: tl.constexpr,
    NUM_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # stored [slots, halves, columns, rows]; blocks [1, 1, COLS, ROWS]
):
    """Block `[ROWS, COLS]` of one weight at (row, col); zeros outside of it.

    Strides count elements and are read without TMA only. A descriptor's bounds hide what lies
    outside; pointers are masked where a block can overrun.
    """
    if TMA:
        if TRANSPOSED:
            block = weights.load([index, half, col, row]).reshape(COLS, ROWS).T
        else:
            block = weights.load([index, half, row, col]).reshape(ROWS, COLS)
    else:
        first = weights + index.to(tl.int64) * stride_slot + tl.cast(half, tl.int64) * stride_half
        if TRANSPOSED:  # lanes along the contiguous dimension
            block = matrix_block(
                first, col, row, stride_col, stride_row, NUM_COLS, NUM_ROWS, COLS, ROWS
            ).T
        else:
            block = matrix_block(
                first, row, col, stride_row, stride_col, NUM_ROWS, NUM_COLS, ROWS, COLS
            )
    return block


@triton.jit
def open_bias(
    family,
    index,
    home,  # [H, N], or int64 table of all slots' addresses (TABLE)
    static,
    replica,
    home_slot,
    static_slot,  # None: as home
    replica_slot,
    num_home,
    num_static,
    like_ptr,
    TABLE: tl.constexpr,
):
    """Pointer to the bias of a tile's slot."""
    if TABLE:
        address = load_address(home, family, index, num_home, num_static)
        bias = address.to(tl.pointer_type(like_ptr.dtype.element_ty))
    else:
        slot = index.to(tl.int64) * pick_family(family, home_slot, static_slot, replica_slot)
        bias = pick_family(family, home, static, replica) + slot
    return bias


@triton.jit
def load_bias(
    bias_ptr,
    half: tl.constexpr,
    cols,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """fp32 bias `[1, BLOCK_N]` of one half: gate then up, or in pairs; 0 beyond the columns."""
    ptrs = bias_ptr + (cols * HALVES + half if PAIRS else cols + half * WIDTH)
    return tl.load(ptrs, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def row_block(
    desc,  # blocks [BLOCK_M, BLOCK_K], or None: by pointers
    rows_ptr,
    row,  # first row of the tile, for the descriptor
    source,  # [BLOCK_M] int64, row of each lane, for the pointers
    ok,  # [BLOCK_M] bool, whether the lane has a row
    k,
    stride,
    end,  # column after the last one
    EVEN: tl.constexpr,  # no block passes the end
    BLOCK_K: tl.constexpr,
):
    """Block `[BLOCK_M, BLOCK_K]` of the left operand at column k; zeros past its end.

    By pointers lanes without a row give zeros; a descriptor reads what the buffer
    holds there, and knows the end of the buffer only.
    """
    if desc is not None:
        block = desc.load([row, k])
    else:
        ks = k + tl.arange(0, BLOCK_K)
        ptrs = rows_ptr + source[:, None] * stride + ks[None, :]
        if EVEN:
            block = tl.load(ptrs, mask=ok[:, None], other=0.0)
        else:
            block = tl.load(ptrs, mask=ok[:, None] & (ks < end)[None, :], other=0.0)
    return block


@triton.jit
def keep_rows(block, lanes, num_rows):
    """The block with exact zeros from row `num_rows` on, whatever it holds there.

    By its bits: of a select on a value from the accumulators ptxas makes a second writer of
    them, which costs 80 registers of F1 or a wait after every wgmma.
    """
    keep = (lanes - num_rows) >> 31  # all bits up to there, none from there on
    if block.dtype.primitive_bitwidth == 32:
        bits = block.to(tl.int32, bitcast=True) & keep[:, None]
    else:
        bits = block.to(tl.int16, bitcast=True) & keep.to(tl.int16)[:, None]
    return bits.to(block.dtype, bitcast=True)


@triton.jit
def split_columns(block, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(block, (ROWS, 2, COLS // 2)), (0, 2, 1)))
