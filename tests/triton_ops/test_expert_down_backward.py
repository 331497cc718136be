"""B1 in the interpreter: equal to autograd in fp64, with every option, order and dirty buffer."""

import dataclasses

import kernel_cases
import kernel_mutants
import pytest
import torch

from relibra_kernels.reference.expert_down_backward import expert_down_backward as reference
from relibra_kernels.testing.compare import assert_close_gemm
from relibra_kernels.triton_ops import expert_down_backward as product
from relibra_kernels.triton_ops.configs import GemmConfig
from relibra_kernels.weights import WeightSet

DIM, WIDTH = 80, 72  # with blocks of 32: three k steps and three n tiles, the last ones ragged
POINTERS = GemmConfig(16, 32, 32)
TMA = dataclasses.replace(POINTERS, tma=True)
ALPHA, LIMIT = 1.702, 0.9
NAMES = ("dh", "scored_a", "dscore")
SMALL = kernel_cases.CASE["one_home_no_replica"]
FAMILIES = kernel_cases.KernelCase("families", (18, 5, 3), num_home=1, num_static=1)
TWO_TILES = kernel_cases.KernelCase("two_tiles", (20,), num_home=1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands of one call; pad and spare rows hold NaN."""

    case: kernel_cases.KernelCase
    dtype: torch.dtype = torch.float32
    gathered: bool = True
    by_choice: bool = True
    layout: kernel_cases.Layout = "contiguous"
    activation: int = 0
    score_at: str = "output"
    biased: bool = True

    def dy(self):
        case = self.case
        return (case.tokens if self.gathered else case.rows)(DIM, self.dtype)

    def h(self):
        return self.case.rows(WIDTH * (2 if self.activation <= 1 else 1), self.dtype)

    def w2(self):
        return self.case.weights(DIM, WIDTH, self.dtype, layout=self.layout)

    def bias(self):
        if not self.biased:
            return None
        stored = [None if b is None else b[:, :, None] for b in self.case.bias(DIM, self.dtype)]
        home = tuple(stored[0]) if self.layout == "table" else stored[0]
        return WeightSet(home, *stored[1:])

    def options(self):
        return {
            "bias": self.bias(),
            "score_at": self.score_at,
            "activation": self.activation,
            "alpha": ALPHA,
            "limit": LIMIT,
        }

    def run(self, config=POINTERS, programs=None, module=product):
        """The kernel, in guarded buffers full of NaN."""
        case = self.case
        scores = (case.choice_scores, case.row_to_choice)
        with kernel_cases.guarded_allocations():
            return module.expert_down_backward(
                self.dy(),
                case.row_to_token if self.gathered else None,
                self.w2(),
                self.h(),
                *(scores if self.by_choice else (case.row_score, None)),
                case.mtile,
                case.num_tiles,
                config=config,
                num_programs=programs,
                **self.options(),
            )

    def oracle(self):
        """fp64 autograd through the second half of every expert, real rows only."""
        case, slot_R = self.case, self.case.row_to_slot
        real = slot_R >= 0
        h = self.h()[real].double().requires_grad_()
        score = case.row_score[real].double().requires_grad_()
        source = case.row_to_token[real].long() if self.gathered else real
        dy = self.dy()[source].double()
        a = activation64(h, self.activation)
        weights = [w[0].double() for w in kernel_cases.slot_weights(self.w2())]
        bias = self.bias()
        biases = [0.0] * len(weights)
        if bias is not None:
            biases = [b[0, :, 0].double() for b in kernel_cases.slot_weights(bias)]
        loss = torch.zeros((), dtype=torch.float64)
        for slot, weight in enumerate(weights):
            here = slot_R[real] == slot
            y, scale = a[here] @ weight.T, score[here, None]
            late = self.score_at == "output"
            y = scale * (y + biases[slot]) if late else scale * y + biases[slot]
            loss = loss + (y * dy[here]).sum()
        dh, dscore = torch.autograd.grad(loss, (h, score))
        return dh, (a * score[:, None]).detach(), dscore

    def check(self, results):
        """Right rows, exact zeros on pad rows, and untouched spare rows."""
        real, used = self.case.row_to_slot >= 0, self.case.is_tile_row
        for name, actual, expected in zip(NAMES, results, self.oracle(), strict=True):
            assert_close_gemm(name, actual[real], expected, dtype=self.dtype)
            assert (actual[used & ~real] == 0).all(), f"{name}: pad rows are not zeros"
            assert actual[~used].isnan().all(), f"{name}: wrote to rows of no tile"


def activation64(h, activation):
    """Written again, from the definitions."""
    if activation == 2:
        return h * 0.5 * (1 + torch.erf(h / 2**0.5))
    if activation == 3:
        return torch.where(h > 0, h**2, 0 * h)
    gate, up = h[:, :WIDTH], h[:, WIDTH:]
    if activation == 0:
        return gate / (1 + torch.exp(-gate)) * up
    gate, up = torch.clamp(gate, max=LIMIT), torch.clamp(up, -LIMIT, LIMIT)
    return (up + 1) * gate / (1 + torch.exp(-ALPHA * gate))


@pytest.mark.parametrize("case", kernel_cases.CASES, ids=str)
def test_equals_autograd_in_every_case(case):
    problem = Problem(case)
    problem.check(problem.run())


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_equals_autograd_in_half_precision(dtype, config):
    problem = Problem(SMALL, dtype)
    problem.check(problem.run(config))


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.parametrize("activation", [0, 1, 2, 3], ids=["swiglu", "clamped", "gelu", "relu2"])
def test_every_activation(activation, config):
    problem = Problem(TWO_TILES, activation=activation, gathered=False, by_choice=False)
    problem.check(problem.run(config))


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "table"])
def test_every_storage_of_the_weights(layout, config):
    problem = Problem(FAMILIES, layout=layout)
    problem.check(problem.run(config))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score_at", ["output", "activation"])
def test_every_place_of_the_score(score_at, biased):
    problem = Problem(FAMILIES, score_at=score_at, biased=biased)
    problem.check(problem.run())


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
def test_any_order_of_programs_gives_equal_bits(config):
    small = kernel_cases.KernelCase("orders", (5, 0, 16), num_home=2)
    narrow = dataclasses.replace(config, block_n=64, block_k=64)
    problem = Problem(small)
    results = kernel_cases.run_orders(
        lambda programs: problem.run(narrow, programs), 2 * len(small.mtile)
    )
    problem.check(results)


def test_a_row_has_the_same_bits_in_any_slot():
    """One expert's rows over one slot, or over three slots with equal weights."""
    whole = kernel_cases.KernelCase("whole", (48,), num_home=1, num_choices=1, spare_tokens=0)
    parts = kernel_cases.KernelCase("parts", (16, 16, 16), 1, 1, num_choices=1, spare_tokens=0)
    weight = Problem(whole).w2().home
    dy, h = Problem(whole).dy(), Problem(whole).h()
    results = []
    for case, w2 in ((whole, WeightSet(weight)), (parts, WeightSet(weight, weight, weight))):
        results.append(
            product.expert_down_backward(
                dy,
                whole.row_to_token,
                w2,
                h,
                whole.row_score,
                None,
                case.mtile,
                case.num_tiles,
                config=POINTERS,
            )  # fmt: skip
        )
    kernel_cases.assert_same_bits(*results)


@pytest.mark.parametrize("activation", [0, 1, 2, 3])
def test_the_reference_equals_autograd(activation):
    problem = Problem(FAMILIES, activation=activation)
    case = problem.case
    actual = reference(
        problem.dy(), case.row_to_token, problem.w2(), problem.h(), case.row_score, case.mtile,
        case.block_rows, **problem.options(),
    )  # fmt: skip
    real = case.row_to_slot >= 0
    for name, ours, expected in zip(NAMES, actual, problem.oracle(), strict=True):
        assert_close_gemm(name, ours[real], expected, dtype=torch.float32)
        assert (ours[~real] == 0).all()


MUTANTS = {
    "score omitted in a'": ("(a * score[:, None]).to(dtype)", "a.to(dtype)"),
    "score omitted in dh": ("da = acc * score[:, None]", "da = acc"),
    "score gradient scaled": ("da_raw * a, axis=1)", "da_raw * a * a, axis=1)"),
    "b2 term dropped": ("total += tl.sum(dy.to", "total += 0.0 * tl.sum(dy.to"),
    "row_to_choice off by one": ("mask=ok, other=-1)", "mask=ok, other=-1) + 1"),
    "k range one block short": (
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n        for k in tl.range(0, D, BLOCK_K):",
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n"
        "        for k in tl.range(0, D - BLOCK_K, BLOCK_K):",
    ),
    "one partial sum left out": ("in tl.range(0, NUM_N):", "in tl.range(0, NUM_N - 1):"),
    "pad select removed from dh": (
        "d_gate = tl.where(ok[:, None], d_gate, 0.0)\n            tl.store",
        "tl.store",
    ),
    "pad select removed from a'": (
        "keep_rows((a * score[:, None]).to(dtype), lanes, tile_rows)",
        "(a * score[:, None]).to(dtype)",
    ),
    "pad zeros removed from dh, tma": (
        "keep_rows(d_up.to(dtype), lanes, tile_rows)",
        "d_up.to(dtype)",
    ),
    "pad select removed from dscore": ("tl.where(ok, total, 0.0)", "tl.where(ok, total, 1.0)"),
    "tail columns unmasked": ("inside = (cols < F)[None, :]", "inside = (cols < F + 8)[None, :]"),
    "gate and up swapped": ("up = tl.load(h_ptr + place + F", "up = tl.load(h_ptr + place"),
    "d up lands on d gate": ("tl.store(dh_ptr + place + F", "tl.store(dh_ptr + place"),
    "gather ignored": ("source = tl.load(row_to_token_ptr + rows, mask=ok, other=0).to(tl.int64)\n"
                       "        else", "source = rows % 8\n        else"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MUTANTS if "tma" not in name])
def test_mutant_is_killed(name, tmp_path):
    mutant = kernel_mutants.mutated("expert_down_backward", *MUTANTS[name], tmp_path)
    problem = Problem(TWO_TILES)
    with kernel_mutants.killed(name):
        problem.check(problem.run(module=mutant))


ACTIVATION_MUTANTS = {
    "second term of dSwiGLU dropped": (
        "d_gate = da * up * (s + silu * (1.0 - s))",
        "d_gate = da * up * s",
    ),
    "sigmoid of d up dropped": ("d_up = da * silu", "d_up = da * gate"),
}


@pytest.mark.parametrize("name", ACTIVATION_MUTANTS)
def test_activation_mutant_is_killed(name, tmp_path, monkeypatch):
    mutant = kernel_mutants.mutated("activation", *ACTIVATION_MUTANTS[name], tmp_path)
    monkeypatch.setattr(product, "activate_grad", mutant.activate_grad)
    problem = Problem(TWO_TILES)
    with kernel_mutants.killed(name, match="dh"):
        problem.check(problem.run())


BY_DESCRIPTOR = [
    "k range one block short",
    "b2 term dropped",
    "pad select removed from a'",
    "pad zeros removed from dh, tma",
]


@pytest.mark.parametrize("name", BY_DESCRIPTOR)
def test_mutant_is_killed_with_descriptors(name, tmp_path):
    mutant = kernel_mutants.mutated("expert_down_backward", *MUTANTS[name], tmp_path)
    problem = Problem(kernel_cases.KernelCase("one tile", (13,), num_home=1))
    with kernel_mutants.killed(name):
        problem.check(problem.run(TMA, module=mutant))
