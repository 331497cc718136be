"""B2 in the interpreter: equal to fp64 sums, in both gradient modes, every order and layout."""

import dataclasses

import kernel_cases
import kernel_mutants
import pytest
import torch

from relibra_kernels.reference.expert_wgrad import expert_wgrad as reference
from relibra_kernels.tables import w_tiles
from relibra_kernels.testing.compare import assert_close_gemm
from relibra_kernels.triton_ops import grouped_gemm_wgrad as product
from relibra_kernels.triton_ops.configs import GemmConfig

DIM, WIDTH = 72, 40  # with blocks of 16 x 32: three tiles each, the last ones ragged
POINTERS = GemmConfig(16, 32, 16)
TMA = dataclasses.replace(POINTERS, tma=True)
WIDE = GemmConfig(64, 128, 32)  # a block of rows passes the end of its slot
CONFIGS = pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
FAMILIES = kernel_cases.KernelCase("families", (35, 0, 9, 5), num_home=2, num_static=1)
TWO_SLOTS = kernel_cases.KernelCase("two_slots", (35, 5), num_home=1, spare_rows=16)
NO_REPLICA_ROWS = kernel_cases.KernelCase("no_replica_rows", (18, 0, 0, 0), num_home=2)
READY = 2**40 + 5


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands of one call. Home gradients hold numbers, those of copies NaN."""

    case: kernel_cases.KernelCase
    accumulate: bool = False
    dtype: torch.dtype = torch.float32
    gathered: bool = True
    layout: kernel_cases.Layout = "contiguous"
    halves: int = 2
    wanted: tuple[bool, bool] = (True, True)

    def tokens(self, seed):
        """Behind a row of NaN, which a pad row's token -1 would hit."""
        rows = (self.case.tokens if self.gathered else self.case.rows)(DIM, self.dtype, seed)
        return torch.cat([rows.new_full((1, DIM), torch.nan), rows])[1:]

    def rows(self, width, seed, *, zero_pads):
        rows = self.case.rows(width, self.dtype, seed)
        pads = (self.case.row_to_slot < 0) & self.case.is_tile_row
        return rows.masked_fill(pads[:, None], 0.0) if zero_pads else rows

    def operands(self, config=POINTERS):
        """x, dy, dh, scored_a; only descriptors read pad rows."""
        zero = config.tma and self.gathered
        dh = self.rows(self.halves * WIDTH, 5, zero_pads=zero)
        return self.tokens(1), self.tokens(4), dh, self.rows(WIDTH, 6, zero_pads=zero)

    def grads(self):
        """dW13, dW2."""
        made = []
        for rows, columns, halves, wanted in (
            (WIDTH, DIM, self.halves, self.wanted[0]),
            (DIM, WIDTH, 1, self.wanted[1]),
        ):
            layout = "contiguous" if self.layout == "interleaved" and halves == 1 else self.layout
            grads = self.case.weights(rows, columns, torch.float32, halves=halves, layout=layout)
            for family in (grads.static, grads.replica):
                if family is not None:
                    family.fill_(torch.nan)
            if not self.accumulate and not grads.is_table:
                grads.home.fill_(torch.nan)
            made.append(grads if wanted else None)
        return tuple(made)

    def tiles(self, config):
        case = self.case
        count = product.count_output_tiles(DIM, WIDTH, config)
        counts = [self.halves * count * self.wanted[0], count * self.wanted[1]]
        rest = (case.num_home, case.num_static, case.block_rows, *counts, self.accumulate)
        return w_tiles(case.slot_rows, *rest)

    def row_to_token(self):
        return self.case.row_to_token if self.gathered else None

    def run(self, config=POINTERS, programs=None, module=product, **signal):
        """Gradients of every slot of dW13, then of dW2."""
        tiles = self.tiles(config)
        grads = self.grads()
        module.expert_wgrad(
            *self.operands(config), self.row_to_token(), tiles,
            torch.tensor([len(tiles)], dtype=torch.int32), *grads,
            config=config, num_programs=programs, **signal,
        )  # fmt: skip
        if self.layout == "strided":
            self.check_gaps(grads)
        return self.flat(grads)

    def check_gaps(self, grads):
        """The NaN behind the rows and slots of strided gradients stay."""
        for one in grads:
            for _, family in one.families():
                base = family._base
                kept = base.isnan().sum() - family.isnan().sum()
                assert kept == base.numel() - family.numel(), "wrote outside of the gradients"

    def flat(self, grads):
        return tuple(
            slot.clone() for one in grads if one is not None
            for slot in kernel_cases.slot_weights(one)
        )  # fmt: skip

    def oracle(self):
        """fp64 sums over real rows, and what was there before where rows are added."""
        case, before = self.case, self.flat(self.grads())
        x, dy, dh, scored = (t.double() for t in self.operands())
        out = []
        for field in [i for i in (0, 1) if self.wanted[i]]:
            for slot in range(len(case.slot_rows)):
                rows = torch.nonzero(case.row_to_slot == slot).flatten()
                source = case.row_to_token[rows].long() if self.gathered else rows
                if field == 0:
                    new = (dh[rows].T @ x[source]).view(self.halves, WIDTH, DIM)
                else:
                    new = (dy[source].T @ scored[rows]).view(1, DIM, WIDTH)
                adds = self.accumulate and slot < case.num_home
                out.append(before[len(out)].double() + new if adds else new)
        return out

    def check(self, results):
        """All gradients; slots without rows to the bit."""
        before = self.flat(self.grads())
        slots = len(self.case.slot_rows)
        for i, (actual, expected) in enumerate(zip(results, self.oracle(), strict=True)):
            slot = i % slots
            if self.case.slot_rows[slot]:
                assert_close_gemm(f"gradient {i}", actual, expected, dtype=torch.float32)
            elif self.accumulate and slot < self.case.num_home:
                assert torch.equal(actual, before[i]), "an empty slot lost its bits"
            else:
                assert (actual == 0).all(), "an empty slot is not zero"


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("case", kernel_cases.CASES, ids=str)
def test_equals_sums_in_every_case(case, accumulate):
    problem = Problem(case, accumulate)
    problem.check(problem.run(WIDE))


@pytest.mark.parametrize(
    ("config", "gathered", "accumulate"),
    [(POINTERS, True, False), (TMA, True, True), (POINTERS, False, True), (TMA, False, False)],
    ids=["pointers", "tma", "by_row", "by_row_despite_tma"],
)
def test_ragged_tiles(config, gathered, accumulate):
    problem = Problem(TWO_SLOTS, accumulate, gathered=gathered)
    problem.check(problem.run(config))


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(dtype, config):
    problem = Problem(TWO_SLOTS, dtype=dtype)
    problem.check(problem.run(dataclasses.replace(config, block_m=64, block_n=128)))


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("layout", ["strided", "interleaved", "transposed", "table"])
def test_gradients_lie_like_the_weights(layout, accumulate):
    problem = Problem(FAMILIES, accumulate, layout=layout)
    problem.check(problem.run(dataclasses.replace(WIDE, block_m=32)))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["dW13", "dW2"])
def test_one_of_the_matrices(wanted):
    problem = Problem(FAMILIES, wanted=wanted)
    problem.check(problem.run(WIDE))


def test_no_gate():
    problem = Problem(TWO_SLOTS, halves=1)
    problem.check(problem.run(TMA))


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
def test_any_order_of_programs_gives_equal_bits(accumulate):
    problem = Problem(kernel_cases.KernelCase("orders", (17, 0, 3), num_home=2), accumulate)
    num_tiles = len(problem.tiles(WIDE))
    results = kernel_cases.run_orders(lambda programs: problem.run(WIDE, programs), num_tiles)
    problem.check(results)


@pytest.mark.parametrize(
    ("programs", "wanted"), [(1, (True, True)), (3, (True, True)), (1, (True, False))]
)
def test_ready_flags_of_replica_slots(programs, wanted):
    arrived = kernel_cases.guarded((2,), torch.int32)
    ready = kernel_cases.guarded((2,), torch.int64)
    arrived.tensor.zero_()
    problem = Problem(NO_REPLICA_ROWS, wanted=wanted)
    signal = {"arrived_S": arrived.tensor, "ready_S": ready.tensor, "ready_value": READY}
    problem.check(problem.run(WIDE, programs, **signal))
    assert ready.tensor.tolist() == [READY, READY]
    assert arrived.tensor.tolist() == [0, 0]
    arrived.check()
    ready.check()


def ready_without(left_out, module=product):
    """Ready flag of a replica slot with four tiles, one of them never computed."""
    config = dataclasses.replace(WIDE, block_m=32)
    problem = Problem(kernel_cases.KernelCase("flags", (3, 2), num_home=1), halves=1)
    tiles = problem.tiles(config)
    assert (tiles[:4, 0] >> 24 == 2).all()
    assert (tiles[4:, 0] >> 24 == 0).all()
    kept = torch.cat([tiles[:left_out], tiles[left_out + 1 :]])
    arrived, ready = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    module.expert_wgrad(
        *problem.operands(), problem.row_to_token(), kept,
        torch.tensor([len(kept)], dtype=torch.int32), *problem.grads(), config=config,
        arrived_S=arrived, ready_S=ready, ready_value=READY,
    )  # fmt: skip
    return ready.item()


@pytest.mark.parametrize("left_out", range(4))
def test_no_ready_flag_before_the_last_tile(left_out):
    assert ready_without(left_out) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tl.where(signals != 0, 1 - TILES, 1)", "tl.where(signals != 0, 2 - TILES, 1)"),
        ("if before + step == 0:", "if signals != 0:"),
    ],
    ids=["one tile too early", "by the SIGNAL tile alone"],
)
def test_mutant_of_the_ready_flag_is_killed(before, after, tmp_path):
    mutant = kernel_mutants.mutated("grouped_gemm_wgrad", before, after, tmp_path)
    assert {ready_without(left_out, mutant) for left_out in range(4)} != {0}


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "table"])
def test_the_reference_equals_the_sums(layout, accumulate):
    problem = Problem(FAMILIES, accumulate, layout=layout)
    grads = problem.grads()
    reference(
        *problem.operands(), problem.row_to_token(), torch.tensor(FAMILIES.slot_rows),
        FAMILIES.block_rows, *grads, accumulate,
    )  # fmt: skip
    problem.check(problem.flat(grads))


MUTANTS = {
    "STORE and ADD swapped": ("stores = (flags >> 24) & 1", "stores = 1 - ((flags >> 24) & 1)"),
    "k range one block short": (
        "in tl.range(first, end, BLOCK_K)", "in tl.range(first, end - BLOCK_K, BLOCK_K)"
    ),
    "k range one block long": ("rows < end, rows, -1)", "rows < end + 32, rows, -1)"),
    "row mask removed": ("mask=rows < end, other=-1)", "mask=rows >= 0, other=0)"),
    "pad rows not masked": ("(source >= 0)[:, None]", "(source >= -1)[:, None]"),
    "tail of D unmasked": ("] & (ds < D)[None, :]\n ", "] & (ds < D + 4)[None, :]\n "),
    "tail of F unmasked": ("(fs < F)[:, None]", "(fs < F + 4)[:, None]"),
    "x and dy swapped": ("            right_ptr = dy_ptr\n", ""),
    "home and replica swapped": (
        "half, home13, static13, replica13", "half, replica13, static13, home13"
    ),
    "half not added to the columns": ("left_ptr = dh_ptr + half * F", "left_ptr = dh_ptr"),
    "half not added to the gradient": (" + half.to(tl.int64) * half_stride", ""),
    "gather ignored": (
        "source = tl.load(row_to_token_ptr + rows, mask=rows < end, other=-1)",
        "source = tl.where(rows < end, rows % 8, -1)",
    ),
    "next tile skipped": ("sem=\"relaxed\")\n    while", "sem=\"relaxed\") + 1\n    while"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, tmp_path):
    mutant = kernel_mutants.mutated("grouped_gemm_wgrad", *MUTANTS[name], tmp_path)
    gathered = name != "k range one block long"
    accumulate = not name.startswith("tail")  # adding what is beyond the edge adds zeros
    problem = Problem(TWO_SLOTS, accumulate, gathered=gathered, layout="strided")
    config = dataclasses.replace(WIDE, block_m=32)
    with kernel_mutants.killed(name):
        problem.check(problem.run(config, module=mutant))
