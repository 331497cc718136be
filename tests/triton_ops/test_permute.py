"""Copies of rows and scores in the interpreter: exact bits, zeros on padding, nothing outside."""

import functools
import types

import kernel_cases
import kernel_mutants
import pytest
import torch

from relibra_kernels.reference.row_scores import row_scores as scores_reference
from relibra_kernels.reference.token_permute import token_permute as permute_reference
from relibra_kernels.reference.token_unpermute import token_unpermute as unpermute_reference
from relibra_kernels.reference.token_unpermute import token_unpermute_backward
from relibra_kernels.testing import op_checks
from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.triton_ops import permute, row_scores

relibra = torch.ops.relibra
WIDTH, BLOCK = 40, 16  # three blocks of columns, the last one ragged
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SMALL = kernel_cases.KernelCase("small", (5, 0, 3), num_home=2, block_rows=4, spare_tokens=1)
SOME = [kernel_cases.CASE[name] for name in ("three_families", "one_expert", "no_rows")]


def error_word():
    return torch.zeros(1, dtype=torch.int32)


def run(kernels, case, dtype=torch.float32):
    """Tokens to rows, rows to choices, gradient of the rows; what must not be read is NaN."""
    x = case.tokens(WIDTH, dtype)
    x[(case.token_choice_to_row < 0).all(1)] = torch.nan
    rows = case.rows(WIDTH, dtype)  # NaN on padding
    grad = kernel_cases.normal((case.num_tokens, case.num_choices, WIDTH), dtype, 5)
    grad[case.token_choice_to_row < 0] = torch.nan
    table, word = case.token_choice_to_row, error_word()
    with kernel_cases.guarded_allocations():
        there = kernels.token_permute(x, case.row_to_token, block=BLOCK)
        back = kernels.token_unpermute(rows, table, block=BLOCK)
        d_rows = kernels.token_unpermute_backward(grad, table, case.num_rows, word, block=BLOCK)
    assert_equal_bits("rows", there, permute_reference(x, case.row_to_token, table))
    assert_equal_bits("choices", back, unpermute_reference(rows, table))
    expected = token_unpermute_backward(grad, table, case.num_rows)
    assert_equal_bits("gradient of the rows", d_rows, expected)
    assert word.item() == 0
    return there, back, d_rows


@pytest.mark.parametrize("case", [*SOME, kernel_cases.CASE["one_home_no_replica"]], ids=str)
def test_the_bits_of_the_reference(case):
    run(permute, case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype(dtype):
    run(permute, SMALL, dtype)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_programs(seed):
    expected = run(permute, SMALL)
    with kernel_cases.shuffled_programs(seed):
        kernel_cases.assert_same_bits(run(permute, SMALL), expected)


def test_no_tokens():
    none = torch.full((5,), -1, dtype=torch.int32)
    assert_equal_bits("pads", permute.copy_rows(torch.empty(0, 3), none), torch.zeros(5, 3))
    assert permute.copy_rows(torch.empty(4, 3), none[:0]).shape == (0, 3)
    empty = torch.empty(0, 2, dtype=torch.int32)
    assert permute.token_unpermute(torch.empty(4, 3), empty).shape == (0, 2, 3)
    grad = permute.token_unpermute_backward(torch.empty(0, 2, 3), empty, 4, error_word())
    assert_equal_bits("gradient", grad, torch.zeros(4, 3))
    assert row_scores.row_scores(torch.empty(0, 2), none[:0]).shape == (0,)
    assert_equal_bits("scores", row_scores.row_scores(torch.empty(0, 2), none), torch.zeros(5))


def test_indices_outside_of_the_rows_give_zeros():
    guard = kernel_cases.guarded((4, WIDTH), torch.float32)
    guard.tensor.normal_()
    index = torch.tensor([4, 2**31 - 1, -(2**31), 3], dtype=torch.int32)
    out = permute.copy_rows(guard.tensor, index, block=BLOCK)
    assert_equal_bits("zeros", out[:3], torch.zeros(3, WIDTH))
    assert_equal_bits("row", out[3], guard.tensor[3])
    scores = row_scores.row_scores(guard.tensor[:, 0], index)
    assert scores.tolist() == [0, 0, 0, guard.tensor[3, 0].item()]


@pytest.mark.parametrize("stride", [196, 256])
def test_kernel_06_strided_inputs_and_outputs(stride):
    """Rows 392 bytes apart, which is no multiple of 16, give the bits of a contiguous copy."""
    buffer = torch.full((7, stride), torch.nan).half()
    x = buffer[:, :192]
    x.copy_(torch.randn(7, 192))
    index = torch.tensor([6, -1, 0, 3], dtype=torch.int32)
    out = torch.full((4, 256), 7.0).half()
    permute.token_permute(x, index, out=out[:, :192], block=64)
    expected = permute_reference(x.contiguous(), index, index[:, None])
    assert_equal_bits("out", out[:, :192].contiguous(), expected)
    assert (out[:, 192:] == 7).all(), "wrote between the rows"


def test_kernel_05_expanded_gradients():
    table = torch.tensor([[2, -1], [-1, 0]], dtype=torch.int32)
    flat = torch.ones(()).expand(2, 2, 5)
    for given in (flat, flat.contiguous(), torch.ones(5).expand(2, 2, 5)):
        grad = permute.token_unpermute_backward(given, table, 3, error_word())
        assert grad.sum(1).tolist() == [5, 0, 5]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_scores_by_row_and_back(case, dtype):
    choices = case.choice_scores.to(dtype)
    table = case.token_choice_to_row
    rows = kernel_cases.normal((case.num_rows,), dtype, 6)
    choices[table < 0] = torch.nan
    rows[case.row_to_choice < 0] = torch.nan
    with kernel_cases.guarded_allocations():
        there = row_scores.row_scores(choices, case.row_to_choice)
        back = row_scores.row_scores(rows, table)
    expected = scores_reference(choices, case.row_to_choice, table)
    assert_equal_bits("by row", there, expected)
    assert_equal_bits("by choice", back, scores_reference(rows, table, case.row_to_choice))


def test_scores_of_more_rows_than_a_program_takes():
    index = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).int() - 1
    values = torch.randn(3000)
    expected = torch.where(index >= 0, values[index.long()], 0.0)
    assert_equal_bits("scores", row_scores.row_scores(values, index), expected)


# ---- through the ops -----------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gradients_of_the_ops(backend):
    case = SMALL
    table, gen = case.token_choice_to_row, torch.Generator().manual_seed(0)
    x = torch.randn(case.num_tokens, 3, generator=gen, requires_grad=True)
    weight = torch.randn(case.num_rows, 3, generator=gen)
    rows = relibra.token_permute(x, case.row_to_token, table, backend)
    (dx,) = torch.autograd.grad(rows, x, weight)
    expected = torch.zeros_like(x).index_add(
        0, case.row_to_token.clamp_min(0), weight * (case.row_to_token >= 0)[:, None]
    )
    torch.testing.assert_close(dx, expected)
    rows = torch.randn(case.num_rows, 3, generator=gen, requires_grad=True)
    weight = torch.randn(case.num_tokens, case.num_choices, 3, generator=gen)
    (d_rows,) = torch.autograd.grad(relibra.token_unpermute(rows, table, backend), rows, weight)
    flat = weight.reshape(-1, 3)[case.row_to_choice.clamp_min(0)]
    assert torch.equal(d_rows, flat * (case.row_to_choice >= 0)[:, None])
    scores = case.choice_scores.requires_grad_()
    weight = torch.randn(case.num_rows, generator=gen)
    by_row = relibra.row_scores(scores, case.row_to_choice, table, backend)
    (d_scores,) = torch.autograd.grad(by_row, scores, weight)
    assert torch.equal(d_scores, weight[table.clamp_min(0)] * (table >= 0))


def test_kernel_11_the_ops_refuse_on_the_cpu():
    one = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    x, message = torch.ones(1, 2), r"need -1 <= index < .*, got 2147483647 at"
    with pytest.raises(ValueError, match=f"row_to_token_R: {message}"):
        relibra.token_permute(x, one[0], one, "triton")
    with pytest.raises(ValueError, match=f"token_choice_to_row_UK: {message}"):
        relibra.token_unpermute(x, one, "triton")
    with pytest.raises(ValueError, match=f"index: {message}"):
        relibra.row_scores(x, one[0], one, "triton")


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_opcheck(backend):
    index = torch.tensor([2, -1, 1, 0], dtype=torch.int32)
    table = torch.tensor([[3, -1], [2, 0]], dtype=torch.int32)
    x = torch.randn(3, 2, requires_grad=True)
    scores = torch.rand(2, 2, requires_grad=True)
    inverse = torch.tensor([3, -1, 2, 0], dtype=torch.int32)
    torch.library.opcheck(relibra.row_scores, (scores, inverse, table, backend))
    grad = torch.randn(2, 2, 2)
    torch.library.opcheck(relibra.token_unpermute_backward, (grad, table, 4, backend))
    if backend == "triton":  # the others are checked with their references
        padded = torch.tensor([[3, -1], [2, -1], [0, -1]], dtype=torch.int32)
        torch.library.opcheck(relibra.token_permute, (x, index, padded, backend))
        rows = torch.randn(4, 2, requires_grad=True)
        torch.library.opcheck(relibra.token_unpermute, (rows, table, backend))


# ---- mutants -------------------------------------------------------------------------------------
def test_the_checks_of_the_reference_hold(monkeypatch):
    check_permute(monkeypatch, permute)


def check_permute(monkeypatch, kernels):
    """Runs `op_checks.check_permute` on a module of kernels."""
    copy = functools.partial(kernels.copy_rows, block=BLOCK)
    ops = types.SimpleNamespace(
        token_permute=lambda x, index, _: copy(x, index), token_unpermute=kernels.token_unpermute
    )
    monkeypatch.setattr(op_checks, "_relibra", ops)
    op_checks.check_permute()


MUTANTS = {
    "pad_select_removed": (
        "    mask = cols < tl.where(row >= 0, num_columns, 0)",
        "    mask = cols < num_columns\n    row = tl.maximum(row, 0)",
    ),
    "pads_not_written": (
        "value, mask=cols < num_columns)",
        "value, mask=mask)",
    ),
    "tail_columns_unmasked": ("value, mask=cols < num_columns)", "value)"),
    "neighbouring_row": ("index_ptr + place)", "index_ptr + place * 0)"),
    "row_to_choice_off_by_one": (
        "return copy_rows(grad_UKD.reshape(-1, grad_UKD.shape[2]), row_to_choice_R, block=block)",
        "return copy_rows(grad_UKD.reshape(-1, grad_UKD.shape[2]), row_to_choice_R + 1,"
        " block=block)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(tmp_path, name):
    mutant = kernel_mutants.mutated("permute", *MUTANTS[name], tmp_path)
    with kernel_mutants.killed(name):
        run(mutant, SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gpu_equals_the_reference(dtype):
    gen = torch.Generator().manual_seed(0)
    row = torch.randperm(9000, generator=gen)[:8000].int().reshape(1000, 8)
    row[torch.rand(row.shape, generator=gen) < 0.3] = -1
    row_to_token, row_to_choice = relibra.build_rows(row, 9000)
    x, rows = torch.randn(1000, 136).to(dtype), torch.randn(9000, 136).to(dtype)
    there = relibra.token_permute(x.cuda(), row_to_token.cuda(), row.cuda())
    assert_equal_bits("rows", there.cpu(), permute_reference(x, row_to_token, row))
    back = relibra.token_unpermute(rows.cuda(), row.cuda())
    assert_equal_bits("choices", back.cpu(), unpermute_reference(rows, row))
    scores = torch.rand(1000, 8).to(dtype)
    found = relibra.row_scores(scores.cuda(), row_to_choice.cuda(), row.cuda())
    assert_equal_bits("scores", found.cpu(), scores_reference(scores, row_to_choice, row))
