"""F2 and B3 against an fp64 oracle: cases, storage, orders of programs, splits, mutants."""

import dataclasses
from pathlib import Path

import pytest
import torch
from kernel_cases import (
    CASE,
    CASES,
    KernelCase,
    assert_same_bits,
    check_pads,
    guarded_allocations,
    mutate,
    poison_empty_slots,
    run_orders,
    slot_weights,
    sparse_memory,
    split_case,
)
from kernel_mutants import killed

from relibra_kernels.testing.compare import MAX_CALC_DIFF, calc_diff
from relibra_kernels.triton_ops.configs import GemmConfig
from relibra_kernels.triton_ops.grouped_gemm import grouped_gemm
from relibra_kernels.weights import WeightSet

POINTERS, TMA = GemmConfig(16, 16, 16), GemmConfig(16, 16, 16, tma=True)
MODES = pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
DIRECTION = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])

LAYOUTS = ["strided", "interleaved", "transposed", "transposed_pairs", "table"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one launch computes; sizes of the weights are no multiples of the blocks."""

    case: KernelCase
    config: GemmConfig = POINTERS
    backward: bool = False
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    halves: int = 1
    with_bias: bool = False
    width: int = 24  # rows of one half of a weight
    depth: int = 40  # columns

    def weights(self) -> WeightSet:
        size = self.width, self.depth, self.dtype
        w = self.case.weights(*size, halves=self.halves, layout=self.layout)
        return poison_empty_slots(self.case, w)

    def bias(self) -> WeightSet | None:
        layout = "table" if self.layout == "table" else "contiguous"
        size = self.width, 1, self.dtype
        return self.case.weights(*size, layout=layout, seed=30) if self.with_bias else None

    def rows(self) -> torch.Tensor:
        """NaN behind every row, and in pad rows."""
        columns = self.halves * self.width if self.backward else self.depth
        x = self.case.rows(columns, self.dtype)
        wide = x.new_full((len(x), columns + 16), torch.nan)
        wide[:, :columns] = x
        return wide[:, :columns]

    def launch(self, op=grouped_gemm, num_programs=None) -> torch.Tensor:
        case = self.case
        with guarded_allocations():
            return op(
                self.rows(), self.weights(), case.mtile, case.num_tiles, config=self.config,
                backward=self.backward, bias=self.bias(), num_programs=num_programs,
            )  # fmt: skip

    def oracle(self) -> torch.Tensor:
        case, x, weights = self.case, self.rows().double(), self.weights()
        if not self.backward:
            out = case.multiply(x, weights)
            if (bias := self.bias()) is not None:
                out += case.multiply(case.poison(torch.ones(case.num_rows, 1)), bias)
            return out
        out = torch.zeros(case.num_rows, self.depth, dtype=torch.float64)
        for slot, weight in enumerate(slot_weights(weights)):
            mine = case.row_to_slot == slot
            out[mine] = x[mine] @ weight.double().reshape(-1, self.depth)
        return out


def check(setting: Setting, op=grouped_gemm) -> None:
    """The result equals the oracle, pads are zeros, and nothing else was written."""
    out = setting.launch(op)
    rows = setting.case.row_to_slot >= 0
    limit = 1e-10 if setting.dtype == torch.float32 else MAX_CALC_DIFF[setting.dtype]
    assert out.dtype == setting.dtype
    assert calc_diff(out[rows], setting.oracle()[rows]) < limit
    check_pads(setting.case, out)


FIRST = [(case, POINTERS, back) for case in CASES for back in (False, True)]
SECOND = [(case, TMA, back) for case in CASES[:2] for back in (False, True)]


@pytest.mark.parametrize(("case", "config", "backward"), FIRST + SECOND, ids=str)
def test_equals_the_oracle(case: KernelCase, config: GemmConfig, backward: bool) -> None:
    halves, width = (2, 24) if backward else (1, 40)
    check(Setting(case, config, backward, halves=halves, width=width))


@pytest.mark.parametrize(
    "layout", ["strided", "interleaved", "transposed", "transposed_pairs", "table"]
)
@MODES
def test_storage_of_weights_backward(layout: str, config: GemmConfig) -> None:
    case = KernelCase("storage", (17, 5, 18, 16), num_home=2, num_static=1)
    check(Setting(case, config, backward=True, layout=layout, halves=2))


@pytest.mark.parametrize("layout", ["strided", "transposed", "table"])
@MODES
def test_storage_of_weights_forward(layout: str, config: GemmConfig) -> None:
    case = KernelCase("storage", (17, 5, 18, 16), num_home=2, num_static=1)
    check(Setting(case, config, layout=layout, with_bias=True))


@DIRECTION
def test_wide_blocks_cover_a_ragged_width(backward: bool) -> None:
    """Like 2880 columns in blocks of 256: the second half of the last block is outside."""
    config = GemmConfig(16, 32, 16, tma=True)
    size = {"width": 32, "depth": 72} if backward else {"width": 72, "depth": 32}
    check(Setting(CASE["replica_serves_all"], config, backward, **size))


def test_rows_that_no_descriptor_can_describe() -> None:
    """A row stride that is no multiple of 16 bytes falls back to pointers."""
    case = CASE["one_home_no_replica"]
    w = case.weights(24, 40, torch.float32)
    x = case.rows(45, torch.float32)[:, :40]
    out = grouped_gemm(x, w, case.mtile, case.num_tiles, config=TMA)
    rows = case.row_to_slot >= 0
    assert calc_diff(out[rows], case.multiply(x, w)[rows]) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@MODES
@DIRECTION
def test_short_dtypes(dtype: torch.dtype, config: GemmConfig, backward: bool) -> None:
    case = KernelCase("short", (17, 0, 21), num_home=2)
    check(Setting(case, config, backward, dtype, halves=2 if backward else 1))


@MODES
@DIRECTION
def test_order_and_number_of_programs(config: GemmConfig, backward: bool) -> None:
    case = KernelCase("orders", (17, 0, 21), num_home=2)
    size = {"width": 16, "depth": 24} if backward else {"width": 24, "depth": 16}
    setting = Setting(case, config, backward, **size)
    run_orders(lambda programs: (setting.launch(num_programs=programs),), 2 * len(case.mtile))


@MODES
def test_two_groups_of_the_swizzle(config: GemmConfig) -> None:
    case = KernelCase("ten_tiles", (37, 0, 97), num_home=2)
    assert len(case.mtile) == 10
    check(Setting(case, config, width=24, depth=16))


@pytest.mark.parametrize("seed", range(4))
@MODES
def test_bits_do_not_depend_on_the_split(seed: int, config: GemmConfig) -> None:
    case = KernelCase("home_only", (37, 20, 5), num_home=3)
    new, copies, moved = split_case(case, num_replica=2, seed=seed)
    w = case.weights(24, 24, torch.float32)
    same = WeightSet(w.home, replica=w.home[copies])
    x, rows = case.rows(24, torch.float32), moved >= 0
    moved_x = torch.full((new.num_rows, 24), torch.nan)
    moved_x[moved[rows]] = x[rows]
    before = grouped_gemm(x, w, case.mtile, case.num_tiles, config=config)
    after = grouped_gemm(moved_x, same, new.mtile, new.num_tiles, config=config)
    assert_same_bits([after[moved[rows]]], [before[rows]])


def test_rows_beyond_2_31_elements() -> None:
    """Case kernel-02: row * stride in 32 bits."""
    stride, row = 2112, 1_030_000 // 16 * 16
    assert row * stride > 2**31
    x = sparse_memory((row + 16) * stride, torch.float16).view(-1, stride)[:, :16]
    x[row] = far = torch.randn(16).half()
    w = WeightSet(torch.randn(1, 4, 16).half())
    tile = torch.tensor([[0, row, 1, 0]], dtype=torch.int32)
    out = grouped_gemm(x, w, tile, torch.ones(1, dtype=torch.int32), config=POINTERS)
    assert calc_diff(out[row], w.home[0].double() @ far.double()) < MAX_CALC_DIFF[torch.float16]


def test_no_rows_at_all() -> None:
    assert Setting(KernelCase("nothing", (0, 0), num_home=1)).launch().shape == (0, 24)


BACK = {"backward": True, "halves": 2}
EVEN = {"width": 32, "depth": 32}
STEPS = "tl.range(0, HALVES * NUM_K)"
MUTANTS = {  # name: text, replacement, settings of the launch
    "gate and up swapped": ("w, slot, w_half,", "w, slot, 1 - w_half,", BACK),
    "replica rows meet home weights": ("if family == 2:", "if family == 3:", {}),
    "home rows meet replica weights": ("if family == 2:", "if family != 1:", {}),
    "k range one tile short": (STEPS, "tl.range(0, HALVES * NUM_K - 1)", {}),
    "k range one tile short, backward": (STEPS, "tl.range(0, HALVES * NUM_K - 1)", BACK),
    "k range one tile long": (STEPS, "tl.range(0, HALVES * NUM_K + 1)", EVEN),
    "k range one tile long, backward": (STEPS, "tl.range(0, HALVES * NUM_K + 1)", EVEN | BACK),
    "pad select removed": ("tl.where(ok[:, None], acc, 0.0)", "acc", {"with_bias": True}),
    "pad select removed, tma": ("tl.where(ok[:, None], acc, 0.0)", "acc", {"config": TMA}),
    "tail columns unmasked": ("(cols < N)[None, :]", "(cols < N + BLOCK_N)[None, :]", {}),
    "halves of the block swapped": ("left, right = split", "right, left = split", {"config": TMA}),
    "transpose lost": ("block if BACKWARD else block.T", "block", {"width": 32, "depth": 32}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str, tmp_path: Path) -> None:
    old, new, options = MUTANTS[name]
    setting = Setting(KernelCase("mutant", (17, 3, 5, 18), num_home=2), **options)
    check(setting)
    mutant = mutate("grouped_gemm", old, new, tmp_path)
    with killed(name):
        check(setting, mutant.grouped_gemm)
