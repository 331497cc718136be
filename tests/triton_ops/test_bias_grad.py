"""Bias gradients in the interpreter: equal to fp64 sums, in both modes, orders and layouts."""

import dataclasses

import kernel_cases
import kernel_mutants
import pytest
import torch
import triton

from relibra_kernels.tables import w_tiles
from relibra_kernels.testing.compare import assert_close_gemm
from relibra_kernels.triton_ops import bias_grad as product
from relibra_kernels.weights import WeightSet

DIM, WIDTH = 80, 40  # columns in blocks of 32: three blocks each, the last ones ragged
TWO_SLOTS = kernel_cases.KernelCase("two_slots", (35, 5), num_home=1, spare_rows=32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands of one call; pad and spare rows hold NaN, and so do the gradients of copies."""

    case: kernel_cases.KernelCase
    accumulate: bool = False
    dtype: torch.dtype = torch.float32
    gathered: bool = True
    by_choice: bool = True
    scored: bool = True
    layout: str = "contiguous"
    halves: int = 2

    def dy(self):
        rows = (self.case.tokens if self.gathered else self.case.rows)(DIM, self.dtype)
        return torch.cat([rows.new_full((1, DIM), torch.nan), rows])[1:]

    def dh(self):
        return self.case.rows(self.halves * WIDTH, self.dtype, 5)

    def grads(self):
        """db13 and db2."""
        made = []
        for rows, halves in ((WIDTH, self.halves), (DIM, 1)):
            stored = [None if b is None else b[:, :, None]
                      for b in self.case.bias(rows, torch.float32, halves)]  # fmt: skip
            if not self.accumulate:
                stored[0].fill_(torch.nan)
            for copies in stored[1:]:
                if copies is not None:
                    copies.fill_(torch.nan)
            home = tuple(stored[0]) if self.layout == "table" else stored[0]
            pairs = self.layout == "interleaved" and halves == 2
            made.append(WeightSet(home, *stored[1:], halves=halves, interleaved=pairs))
        return made

    def run(self, programs=None, module=product):
        case = self.case
        columns = product.bias_columns(torch.device("cpu"))
        counts = [triton.cdiv(n, columns) for n in (self.halves * WIDTH, DIM)]
        tiles = w_tiles(
            case.slot_rows, case.num_home, case.num_static, case.block_rows, *counts,
            self.accumulate,
        )  # fmt: skip
        scores = (case.choice_scores, case.row_to_choice)
        scores = scores if self.by_choice else (case.row_score, None)
        grads = self.grads()
        module.expert_bias_grad(
            self.dh(), self.dy(), case.row_to_token if self.gathered else None,
            *(scores if self.scored else (None, None)), tiles,
            torch.tensor([len(tiles)], dtype=torch.int32), *grads, expert_size=WIDTH,
            num_programs=programs,
        )  # fmt: skip
        return self.flat(grads)

    def flat(self, grads):
        return tuple(s.clone() for one in grads for s in kernel_cases.slot_weights(one))

    def check(self, results):
        """Sums over real rows, added to what was there for home slots in main_grad mode."""
        case, before = self.case, self.flat(self.grads())
        slots = len(case.slot_rows)
        for i, actual in enumerate(results):
            slot = i % slots
            rows = torch.nonzero(case.row_to_slot == slot).flatten()
            if i < slots:
                new = self.dh()[rows].double().sum(0).view(self.halves, WIDTH, 1)
            else:
                source = case.row_to_token[rows].long() if self.gathered else rows
                score = case.row_score[rows].double() if self.scored else torch.ones(len(rows))
                new = (self.dy()[source].double() * score[:, None]).sum(0).view(1, DIM, 1)
            if self.accumulate and slot < case.num_home:
                if not len(rows):
                    assert torch.equal(actual, before[i]), "an empty slot lost its bits"
                new = new + before[i].double()
            assert_close_gemm(f"gradient {i}", actual, new, dtype=torch.float32)


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("case", kernel_cases.CASES, ids=str)
def test_equals_sums_in_every_case(case, accumulate):
    problem = Problem(case, accumulate)
    problem.check(problem.run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_rows_are_summed_in_fp32(dtype):
    problem = Problem(TWO_SLOTS, dtype=dtype)
    problem.check(problem.run())


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "by_row"])
@pytest.mark.parametrize(
    ("scored", "by_choice"), [(True, True), (True, False), (False, False)]
)  # fmt: skip
def test_scores_by_choice_by_row_or_none(scored, by_choice, gathered):
    problem = Problem(TWO_SLOTS, gathered=gathered, scored=scored, by_choice=by_choice)
    problem.check(problem.run())


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("layout", ["interleaved", "table"])
def test_gradients_lie_like_the_biases(layout, accumulate):
    problem = Problem(kernel_cases.CASE["three_families"], accumulate, layout=layout)
    problem.check(problem.run())


def test_no_gate():
    problem = Problem(TWO_SLOTS, halves=1)
    problem.check(problem.run())


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
def test_any_order_of_programs_gives_equal_bits(accumulate):
    problem = Problem(kernel_cases.KernelCase("orders", (35,), num_home=1), accumulate)
    results = kernel_cases.run_orders(problem.run, 6)
    problem.check(results)


MUTANTS = {
    "score omitted": ("block *= load_scores", "block *= 1.0 + 0.0 * load_scores"),
    "STORE and ADD swapped": ("stores = (flags >> 24) & 1", "stores = 1 - ((flags >> 24) & 1)"),
    "pads of dh added": ("rows < end, HALVES * F, 0)", "rows < end + 8, HALVES * F, 0)"),
    "pads of dy added": ("(rows < end) & (source >= 0)", "(rows >= 0) & (source >= -1)"),
    "only the last block of dh": (
        "    total += tl.sum(tl.load(ptrs, mask", "    total = tl.sum(tl.load(ptrs, mask"
    ),
    "home and replica swapped": (
        "family, index, home2, static2, replica2", "family, index, replica2, static2, home2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, tmp_path):
    mutant = kernel_mutants.mutated("bias_grad", *MUTANTS[name], tmp_path)
    problem = Problem(TWO_SLOTS, True)
    with kernel_mutants.killed(name):
        problem.check(problem.run(module=mutant))
