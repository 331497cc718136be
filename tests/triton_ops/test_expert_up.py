"""F1 against an fp64 oracle: cases, storage, options, orders of programs, splits, mutants."""

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
    sparse_memory,
    split_case,
)
from kernel_mutants import killed

from relibra_kernels.testing.compare import MAX_CALC_DIFF, calc_diff
from relibra_kernels.triton_ops.configs import GemmConfig
from relibra_kernels.triton_ops.expert_up import expert_up
from relibra_kernels.weights import WeightSet

POINTERS, TMA = GemmConfig(16, 16, 16), GemmConfig(16, 16, 16, tma=True)
WIDE = GemmConfig(16, 128, 16, tma=True)  # pads are cleared by their bits
MODES = pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
ALL_MODES = pytest.mark.parametrize(
    "config", [POINTERS, TMA, WIDE], ids=["pointers", "tma", "wide"]
)
GATHER = pytest.mark.parametrize("gather", [True, False], ids=["gathered", "by_row"])
LAYOUTS = ["strided", "interleaved", "transposed", "transposed_pairs", "table"]
ALPHA, LIMIT = 1.702, 0.75


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one launch computes; D and F are no multiples of the blocks."""

    case: KernelCase
    config: GemmConfig = POINTERS
    gather: bool = True
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    activation: int = 0
    with_bias: bool = False
    dim: int = 24
    width: int = 24

    @property
    def halves(self) -> int:
        return 2 if self.activation <= 1 else 1

    def weights(self) -> WeightSet:
        size = self.width, self.dim, self.dtype
        w = self.case.weights(*size, halves=self.halves, layout=self.layout)
        return poison_empty_slots(self.case, w)

    def bias(self) -> WeightSet | None:
        """Gate and up in the order of the weights."""
        if not self.with_bias:
            return None
        layout = "table" if self.layout == "table" else "contiguous"
        layout = "interleaved" if self.layout in ("interleaved", "transposed_pairs") else layout
        return self.case.weights(
            self.width, 1, self.dtype, halves=self.halves, layout=layout, seed=30
        )

    def rows(self) -> torch.Tensor:
        """x with NaN behind every row, in pad rows, and in tokens that no row computes."""
        if self.gather:
            x = self.case.tokens(self.dim, self.dtype)
            used = self.case.row_to_token
            idle = ~torch.isin(torch.arange(len(x)), used[used >= 0])
            x = x.masked_fill(idle[:, None], torch.nan)
        else:
            x = self.case.rows(self.dim, self.dtype)
        wide = x.new_full((len(x), self.dim + 16), torch.nan)
        wide[:, : self.dim] = x
        return wide[:, : self.dim]

    def launch(self, op=expert_up, num_programs=None) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        table = case.row_to_token if self.gather else None
        with guarded_allocations():
            return op(
                self.rows(), table, self.weights(), case.mtile, case.num_tiles,
                config=self.config, num_rows=case.num_rows, bias=self.bias(),
                activation=self.activation, alpha=ALPHA, limit=LIMIT, num_programs=num_programs,
            )  # fmt: skip

    def oracle(self) -> torch.Tensor:
        """h in fp64."""
        x = self.rows()
        if self.gather:
            x = x[self.case.row_to_token.clamp(min=0).long()]
        halves = [self.case.multiply(x, self.weights(), half) for half in range(self.halves)]
        if (bias := self.bias()) is not None:
            ones = self.case.poison(torch.ones(self.case.num_rows, 1))
            halves = [h + self.case.multiply(ones, bias, i) for i, h in enumerate(halves)]
        return torch.cat(halves, 1)


def activation_oracle(h: torch.Tensor, activation: int) -> torch.Tensor:
    """The activation of h in fp64."""
    h = h.double()
    gate, up = h.chunk(2, dim=1) if activation <= 1 else (h, h)
    if activation == 0:
        return torch.nn.functional.silu(gate) * up
    if activation == 1:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    return torch.nn.functional.gelu(h) if activation == 2 else torch.relu(h) ** 2


def check(setting: Setting, op=expert_up) -> None:
    """h and a equal the oracle, pads are zeros, and nothing else was written."""
    h, a = setting.launch(op)
    rows = setting.case.row_to_slot >= 0
    limit = 1e-10 if setting.dtype == torch.float32 else MAX_CALC_DIFF[setting.dtype]
    assert h.dtype == a.dtype == setting.dtype
    expected_h = setting.oracle()
    assert calc_diff(h[rows], expected_h[rows]) < limit
    assert calc_diff(a[rows], activation_oracle(expected_h, setting.activation)[rows]) < limit
    check_pads(setting.case, h, a)
    exact = activation_oracle(h[rows], setting.activation)  # of the rounded h, rounded once
    half_step = torch.finfo(setting.dtype).eps / 2
    assert bool(((a[rows] - exact).abs() <= 1.01 * half_step * exact.abs() + 2e-6).all())


FIRST = [(case, POINTERS, True) for case in CASES] + [(case, TMA, False) for case in CASES]
SECOND = [(case, *mode) for case in CASES[:2] for mode in ((POINTERS, False), (TMA, True))]


@pytest.mark.parametrize(("case", "config", "gather"), FIRST + SECOND, ids=str)
def test_equals_the_oracle(case: KernelCase, config: GemmConfig, gather: bool) -> None:
    check(Setting(case, config, gather, dim=40, width=40))


@pytest.mark.parametrize("layout", LAYOUTS)
@MODES
def test_storage_of_weights(layout: str, config: GemmConfig) -> None:
    case = KernelCase("storage", (17, 5, 18, 16), num_home=2, num_static=1)
    check(Setting(case, config, layout=layout, with_bias=True))


@pytest.mark.parametrize("activation", [0, 1, 2, 3])
@ALL_MODES
@GATHER
def test_activations(activation: int, config: GemmConfig, gather: bool) -> None:
    case = KernelCase("activations", (17, 0, 21), num_home=2)
    width = 72 if config == WIDE else 24  # both halves of a block have columns
    check(Setting(case, config, gather, activation=activation, with_bias=True, width=width))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@ALL_MODES
@GATHER
def test_short_dtypes(dtype: torch.dtype, config: GemmConfig, gather: bool) -> None:
    case = KernelCase("short", (17, 0, 21), num_home=2)
    check(Setting(case, config, gather, dtype, width=72 if config == WIDE else 24))


@MODES
def test_order_and_number_of_programs(config: GemmConfig) -> None:
    # More than 8 m tiles: two groups of the swizzle, the second one ragged.
    case = (
        KernelCase("ten_tiles", (37, 0, 97), num_home=2)
        if config == POINTERS
        else CASE["one_expert"]
    )
    setting = Setting(case, config, dim=16)
    run_orders(lambda programs: setting.launch(num_programs=programs), 2 * len(case.mtile))


@MODES
def test_two_groups_of_the_swizzle(config: GemmConfig) -> None:
    case = KernelCase("ten_tiles", (37, 0, 97), num_home=2)
    assert len(case.mtile) == 10
    check(Setting(case, config, dim=16))


@pytest.mark.parametrize("seed", range(4))
@MODES
def test_bits_do_not_depend_on_the_split(seed: int, config: GemmConfig) -> None:
    case = KernelCase("home_only", (37, 20, 5), num_home=3)
    new, copies, moved = split_case(case, num_replica=2, seed=seed)
    w = case.weights(24, 24, torch.float32, halves=2)
    same = WeightSet(w.home, replica=w.home[copies], halves=2)
    token = torch.full((new.num_rows,), -1, dtype=torch.int32)
    rows = moved >= 0
    token[moved[rows]] = case.row_to_token[rows]
    x = case.tokens(24, torch.float32)
    before = expert_up(x, case.row_to_token, w, case.mtile, case.num_tiles, config=config)
    after = expert_up(x, token, same, new.mtile, new.num_tiles, config=config)
    assert_same_bits([y[moved[rows]] for y in after], [y[rows] for y in before])


def test_tokens_beyond_2_31_elements() -> None:
    """Case kernel-02: row * stride in 32 bits."""
    stride, token = 2112, 1_030_000
    assert token * stride > 2**31
    x = sparse_memory((token + 1) * stride, torch.float16).view(-1, stride)[:, :16]
    x[token] = case_x = torch.randn(16).half()
    w = WeightSet(torch.randn(1, 32, 16).half(), halves=2)
    case = KernelCase("far", (1,), num_home=1)
    table = torch.full((16,), -1, dtype=torch.int32)
    table[0] = token
    h, _ = expert_up(x, table, w, case.mtile, case.num_tiles, config=POINTERS)
    expected = w.home[0].double() @ case_x.double()
    assert calc_diff(h[0], expected) < MAX_CALC_DIFF[torch.float16]


def test_no_rows_at_all() -> None:
    case = KernelCase("nothing", (0, 0), num_home=1)
    h, a = Setting(case).launch()
    assert h.shape == (0, 48)
    assert a.shape == (0, 24)


EVEN = {"dim": 32, "width": 32}
MUTANTS = {  # name: text, replacement, settings of the launch
    "gate and up swapped": ("w, slot, gate_half, col", "w, slot, up_half, col", {}),
    "replica rows meet home weights": ("if family == 2:", "if family == 3:", {}),
    "home rows meet replica weights": ("if family == 2:", "if family != 1:", {}),
    "k range one tile short": ("tl.range(0, D, BLOCK_K)", "tl.range(0, D - BLOCK_K, BLOCK_K)", {}),
    "k range one tile long": ("tl.range(0, D, BLOCK_K)", "tl.range(0, D + 1, BLOCK_K)", EVEN),
    "pad select of gate removed": ("tl.where(ok[:, None], gate, 0.0)", "gate", {"with_bias": True}),
    "pad select of up removed": ("tl.where(ok[:, None], up, 0.0)", "up", {"with_bias": True}),
    "pad zeros of gate removed, tma": (
        "rounded(gate_r, dtype, lanes, tile_rows, BY_BITS)",
        "rounded(gate_r, dtype, lanes, tile_rows, False)",
        {"with_bias": True, "config": WIDE, "width": 72},
    ),
    "pad zeros of up removed, tma": (
        "rounded(up_l, dtype, lanes, tile_rows, BY_BITS)",
        "rounded(up_l, dtype, lanes, tile_rows, False)",
        {"with_bias": True, "config": WIDE, "width": 72},
    ),
    "pad select of gate removed, narrow tma": (
        "tl.where(ok[:, None], gate, 0.0)",
        "gate",
        {"with_bias": True, "config": TMA},
    ),
    "tail columns unmasked": ("(cols < F)[None, :]", "(cols < F + BLOCK_N)[None, :]", {}),
    "tail of the bias unmasked": ("mask=cols < WIDTH", "mask=cols < 0", {"with_bias": True}),
    "rows of the next slot": ("lanes < tile_rows", "lanes <= tile_rows", {"gather": False}),
    "activation of the unrounded h": (
        " gate = gate.to(dtype)",
        " gate = gate",
        {"dtype": torch.float16},
    ),
    "activation of the gate only": (
        "activate(gate.to(tl.float32), up.to",
        "activate(gate.to(tl.float32), gate.to",
        {},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str, tmp_path: Path) -> None:
    old, new, options = MUTANTS[name]
    setting = Setting(KernelCase("mutant", (17, 3, 5, 18), num_home=2), **options)
    check(setting)
    mutant = mutate("expert_up", old, new, tmp_path)
    with killed(name):
        check(setting, mutant.expert_up)
