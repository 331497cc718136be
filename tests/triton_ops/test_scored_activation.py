"""F1 where scores multiply the activation: the rounded product, zeros on pads, mutants."""

import kernel_cases
import pytest
import torch
from kernel_mutants import killed

from relibra_kernels.triton_ops import expert_up as product
from relibra_kernels.triton_ops.configs import GemmConfig

POINTERS, TMA = GemmConfig(16, 16, 16), GemmConfig(16, 16, 16, tma=True)
CASE = kernel_cases.KernelCase("scored", (17, 0, 5, 12), num_home=2, spare_rows=16)
D, F = 48, 24


def check(config, dtype, module=product):
    """Against the same kernel without scores; scores are NaN on pad and spare rows."""
    w13 = CASE.weights(F, D, dtype, halves=2)
    operands = CASE.tokens(D, dtype), CASE.row_to_token, w13, CASE.mtile, CASE.num_tiles
    h, a = product.expert_up(*operands, config=config)
    with kernel_cases.guarded_allocations():
        found = module.expert_up(*operands, config=config, score_R=CASE.row_score)
    real = CASE.row_to_slot >= 0
    need = (a.float() * CASE.row_score[:, None]).to(dtype)
    kernel_cases.assert_same_bits((found[0][real], found[1][real]), (h[real], need[real]))
    kernel_cases.check_pads(CASE, *found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
def test_the_rounded_activation_is_multiplied(config, dtype):
    check(config, dtype)


MUTANTS = {
    "score omitted in F1": ("out = (out.to(tl.float32) * score[:, None]).to(dtype)", "out = out"),
    "score times the unrounded activation": ("out.to(tl.float32) * score", "a * score"),
    "scores of pads not masked": (
        "tl.load(scores_ptr + rows, mask=ok, other=0.0)", "tl.load(scores_ptr + rows)"
    ),
    "score of the neighbouring row": ("(scores_ptr + rows,", "(scores_ptr + rows + 1,"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, tmp_path):
    mutant = kernel_cases.mutate("expert_up", *MUTANTS[name], tmp_path)
    with killed(name):
        check(POINTERS, torch.float16, mutant)
