"""Order of tiles, words of the tile table, and blocks of weights from every storage."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import KernelCase, slot_weights, sparse_memory

from relibra_kernels.tables import tile_weights
from relibra_kernels.triton_ops.descriptors import fits_descriptor, weight_operands
from relibra_kernels.triton_ops.tiles import (
    load_tile,
    open_weights,
    split_columns,
    swizzled,
    weight_block,
)
from relibra_kernels.weights import WeightSet

LAYOUTS = ["contiguous", "strided", "interleaved", "transposed", "transposed_pairs", "table"]
CASE = KernelCase("blocks", (17, 5, 18, 16), num_home=2, num_static=1)


@triton.jit
def _swizzle_kernel(out_ptr, num_m, NUM_N: tl.constexpr):
    for tile in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0)):
        m, n = swizzled(tile, num_m, NUM_N)
        tl.store(out_ptr + tile * 2, m)
        tl.store(out_ptr + tile * 2 + 1, n)


@triton.jit
def _words_kernel(tiles_ptr, out_ptr):
    m = tl.program_id(0)
    index, family, row, rows = load_tile(tiles_ptr, m)
    tl.store(out_ptr + m * 4, index)
    tl.store(out_ptr + m * 4 + 1, family)
    tl.store(out_ptr + m * 4 + 2, row)
    tl.store(out_ptr + m * 4 + 3, rows)


@triton.jit
def _block_kernel(
    tiles_ptr, out_ptr, like_ptr, home, static, replica,
    home_slot, home_half, home_line, static_slot, static_half, static_line,
    replica_slot, replica_half, replica_line, num_home, num_static, half, row, col,
    HALVES: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_COLS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, W_TMA: tl.constexpr, TRANSPOSED: tl.constexpr,
    UNIT: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    index, family, _, _ = load_tile(tiles_ptr, m)
    w, slot, slot_stride, half_stride, row_stride, col_stride = open_weights(
        family, index, home, static, replica, home_slot, home_half, home_line, static_slot,
        static_half, static_line, replica_slot, replica_half, replica_line, num_home, num_static,
        like_ptr, HALVES, NUM_ROWS, NUM_COLS, ROWS, COLS, W_TMA, TRANSPOSED, UNIT, TABLE,
    )  # fmt: skip
    block = weight_block(
        w, slot, half, row, col, slot_stride, half_stride, row_stride, col_stride,
        NUM_ROWS, NUM_COLS, ROWS, COLS, W_TMA, TRANSPOSED,
    )  # fmt: skip
    offs = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out_ptr + m * ROWS * COLS + offs, block)


@triton.jit
def _split_kernel(x_ptr, left_ptr, right_ptr):
    rows = tl.arange(0, 4)[:, None]
    x = tl.load(x_ptr + rows * 8 + tl.arange(0, 8)[None, :])
    left, right = split_columns(x, 4, 8)
    offs = rows * 4 + tl.arange(0, 4)[None, :]
    tl.store(left_ptr + offs, left)
    tl.store(right_ptr + offs, right)


def blocks(w: WeightSet, mtile, half: int, row: int, col: int, size: tuple[int, int], tma: bool):
    """The block at (row, col) of the weight of every tile, [B, rows, columns]."""
    operands = weight_operands(w, *size, tma)
    out = torch.full((len(mtile), *size), torch.nan, dtype=w.dtype)
    _block_kernel[(len(mtile),)](
        mtile, out, out, *operands.pointers, *operands.strides, *operands.counts, half, row, col,
        w.halves, w.num_rows, w.num_columns, *size, **operands.constexprs,
    )  # fmt: skip
    return out


def expected_blocks(w: WeightSet, mtile, half: int, row: int, col: int, size: tuple[int, int]):
    family, index = (torch.from_numpy(x).long() for x in tile_weights(mtile))
    first = torch.tensor([0, CASE.num_home, CASE.num_home + CASE.num_static])
    slots = torch.stack(slot_weights(w))[first[family] + index]
    padded = torch.nn.functional.pad(slots, (0, size[1], 0, size[0]))
    return padded[:, half, row : row + size[0], col : col + size[1]]


@pytest.mark.parametrize(("num_m", "num_n"), [(1, 1), (3, 5), (8, 2), (10, 2), (17, 3), (0, 4)])
def test_every_tile_has_its_turn(num_m: int, num_n: int) -> None:
    out = torch.full((num_m * num_n, 2), -1, dtype=torch.int32)
    _swizzle_kernel[(3,)](out, num_m, num_n)
    expected = [
        [first + m, n]
        for first in range(0, num_m, 8)
        for n in range(num_n)
        for m in range(min(8, num_m - first))
    ]
    assert out.tolist() == expected


def test_words_of_the_tile_table() -> None:
    out = torch.zeros(len(CASE.mtile), 4, dtype=torch.int32)
    _words_kernel[(len(CASE.mtile),)](CASE.mtile, out)
    assert out.tolist() == [
        [0, 0, 0, 16],
        [0, 0, 16, 1],
        [1, 0, 32, 5],
        [0, 1, 48, 16],
        [0, 1, 64, 2],
        [0, 2, 80, 16],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
def test_blocks_of_every_family_and_storage(layout: str, tma: bool) -> None:
    w = CASE.weights(24, 40, torch.float32, halves=2, layout=layout)
    size = 16, 32
    for half, row, col in ((0, 0, 0), (1, 0, 0), (0, 16, 0), (1, 16, 32), (1, 0, 32)):
        actual = blocks(w, CASE.mtile, half, row, col, size, tma)
        assert torch.equal(actual, expected_blocks(w, CASE.mtile, half, row, col, size))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_families_with_strides_of_their_own(layout: str) -> None:
    w = CASE.weights(24, 40, torch.float32, halves=2, layout=layout)
    wide = torch.full((1, *w.home.shape[1:-1], w.home.shape[2] + 8), torch.nan)
    wide[..., :-8] = w.replica
    own = WeightSet(w.home, w.static, wide[..., :-8], halves=2, transposed=layout == "transposed")
    actual = blocks(own, CASE.mtile, 1, 16, 32, (16, 16), tma=False)
    assert torch.equal(actual, expected_blocks(w, CASE.mtile, 1, 16, 32, (16, 16)))


def test_even_blocks_are_not_masked() -> None:
    w = CASE.weights(32, 32, torch.float16)
    actual = blocks(w, CASE.mtile, 0, 16, 16, (16, 16), tma=False)
    assert torch.equal(actual, expected_blocks(w, CASE.mtile, 0, 16, 16, (16, 16)))


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
def test_slots_beyond_2_31_elements(tma: bool) -> None:
    far = 2**31 + 64
    home = sparse_memory(2 * far, torch.float16).as_strided((2, 16, 16), (far, 16, 1))
    home[1] = values = torch.arange(256).view(16, 16).half()
    tile = torch.tensor([[1, 0, 16, 0]], dtype=torch.int32)
    assert torch.equal(blocks(WeightSet(home), tile, 0, 0, 0, (16, 16), tma)[0], values)


def test_what_no_descriptor_describes_goes_by_pointers() -> None:
    pairs = CASE.weights(24, 40, torch.float32, halves=2, layout="transposed_pairs")
    odd = WeightSet(torch.zeros(2, 8, 9)[:, :, :8])
    plain = CASE.weights(24, 40, torch.float32)
    used = [weight_operands(w, 16, 16, tma=True).constexprs["W_TMA"] for w in (pairs, odd, plain)]
    assert used == [False, False, True]
    assert not fits_descriptor(torch.zeros(4, 9)[:, 1:5])


def test_operands_are_remembered_until_a_parameter_moves() -> None:
    w = CASE.weights(24, 40, torch.float32, layout="table")
    first = weight_operands(w, 16, 16, tma=False)
    assert weight_operands(w, 16, 16, tma=False) is first
    w.home[1].data = w.home[1].clone()
    second = weight_operands(w, 16, 16, tma=False)
    assert second.home[1] == w.home[1].data_ptr()
    assert second.home[0] == first.home[0]


def test_a_table_needs_one_set_of_strides() -> None:
    w = CASE.weights(24, 40, torch.float32, layout="table")
    wide = torch.zeros(1, 24, 48)[:, :, :40]
    with pytest.raises(ValueError, match="replica: need the strides"):
        weight_operands(WeightSet(w.home, replica=wide), 16, 16, tma=False)


def test_halves_of_the_columns() -> None:
    x = torch.arange(32.0).view(4, 8)
    left, right = torch.zeros(4, 4), torch.zeros(4, 4)
    _split_kernel[(1,)](x, left, right)
    assert torch.equal(left, x[:, :4])
    assert torch.equal(right, x[:, 4:])
