"""F3, F4, B4, B5 in the interpreter: the bits of the reference, in any order of programs."""

import functools
import types

import kernel_cases
import kernel_mutants
import pytest
import torch

from relibra_kernels.ops import backend
from relibra_kernels.reference import combine as reference
from relibra_kernels.testing import op_checks
from relibra_kernels.testing.compare import assert_close_gemm, assert_equal_bits
from relibra_kernels.triton_ops import combine as product

relibra = torch.ops.relibra
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
WIDTH, BLOCK = 40, 16  # three blocks of columns, the last one ragged


def problem(
    num_sums, num_terms, num_rows, dtype=torch.float32, *, unique=False, seed=0, width=WIDTH
):
    """Rows, index, scores and gradient; NaN in rows that no term uses."""
    gen = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, num_rows, (num_sums, num_terms), generator=gen)
    if unique:
        order = torch.randperm(num_rows, generator=gen)[: num_sums * num_terms]
        index = order.reshape(num_sums, num_terms)
        index[torch.rand(index.shape, generator=gen) < 0.3] = -1
    rows = torch.randn(num_rows, width, generator=gen).to(dtype)
    unused = torch.ones(num_rows, dtype=torch.bool)
    unused[index[index >= 0]] = False
    rows[unused] = torch.nan
    scores = torch.rand(index.shape, generator=gen).to(reference.accumulation_dtype(dtype))
    grad = torch.randn(num_sums, width, generator=gen).to(dtype)
    return rows, index.int(), scores, grad


def check(kernels, rows, index, scores, grad):
    """Forward and gradients of the rows bit for bit, gradients of the scores up to rounding.

    Scores of terms without a row are NaN for the kernels.
    """
    dirty = None if scores is None else scores.masked_fill(index < 0, torch.nan)
    with kernel_cases.guarded_allocations():
        out = kernels.combine(rows, index, dirty, block=BLOCK)
        d_rows, d_scores = kernels.combine_backward(grad, rows, index, dirty, block=BLOCK)
    assert_equal_bits("out", out, reference.combine(rows, index, scores))
    expected = reference.combine_backward(grad, rows, index, scores)
    assert_equal_bits("d_rows", d_rows, expected[0])
    assert d_scores.dtype == expected[1].dtype
    assert_close_gemm("d_scores", d_scores, expected[1])
    return out, d_rows, d_scores


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scored", [True, False])
def test_the_bits_of_the_reference(dtype, scored):
    rows, index, scores, grad = problem(5, 3, 21, dtype, unique=True)
    check(product, rows, index, scores if scored else None, grad)


@pytest.mark.parametrize("num_terms", range(9))
def test_any_number_of_terms(num_terms):
    check(product, *problem(3, num_terms, 40, unique=True, seed=num_terms))


@pytest.mark.parametrize("shape", [(0, 3, 5), (4, 0, 5), (0, 3, 0), (1, 1, 1)])
def test_empty_and_single_sums(shape):
    check(product, *problem(*shape))


def test_no_rows_and_no_columns():
    none = torch.full((2, 2), -1, dtype=torch.int32)
    zeros = product.combine(torch.empty(0, 3), none, None)
    assert_equal_bits("no rows", zeros, torch.zeros(2, 3))
    assert product.combine(torch.empty(3, 0), none, None).shape == (2, 0)
    d_rows, d_scores = product.combine_backward(
        torch.empty(2, 0), torch.empty(3, 0), none, torch.ones(2, 2)
    )
    assert d_rows.shape == (3, 0)
    assert_equal_bits("d_scores", d_scores, torch.zeros(2, 2))


@pytest.mark.parametrize("scored", [True, False])
def test_rows_used_many_times_add_up_in_the_order_of_the_reference(scored):
    rows, index, scores, grad = problem(5, 3, 3, seed=2, width=9)
    check(product, rows, index, scores if scored else None, grad)


def test_uses_of_a_row_that_lie_several_search_blocks_apart():
    far = torch.full((400, 2), -1, dtype=torch.int32)
    far[[0, 3, 299, 399], [0, 1, 0, 1]] = 1
    rows, _, _, grad = problem(400, 2, 2, width=5)
    d_rows, _ = product.combine_backward(grad, rows, far, None, block=64)
    expected, _ = reference.combine_backward(grad, rows, far, None)
    assert_equal_bits("d_rows", d_rows, expected)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_programs(seed):
    given = problem(4, 3, 14, torch.bfloat16, unique=True)
    expected = check(product, *given)
    with kernel_cases.shuffled_programs(seed):
        kernel_cases.assert_same_bits(check(product, *given), expected)


def test_indices_outside_of_the_rows_take_no_part():
    rows, index, scores, grad = problem(4, 3, 14, unique=True)
    wrong = index.clone()
    wrong[0, 0], wrong[1, 1], wrong[2, 2] = 14, 2**31 - 1, -(2**31)
    index[0, 0] = index[1, 1] = index[2, 2] = -1
    guard = kernel_cases.guarded((14, WIDTH), torch.float32)
    guard.tensor.copy_(rows)
    out = product.combine(guard.tensor, wrong, scores, block=BLOCK)
    assert_equal_bits("out", out, reference.combine(rows, index, scores))
    found = product.combine_backward(grad, guard.tensor, wrong, scores, block=BLOCK)
    expected = product.combine_backward(grad, rows, index, scores, block=BLOCK)
    kernel_cases.assert_same_bits(found, expected)


@pytest.mark.parametrize("stride", [196, 256])
def test_kernel_06_strided_inputs_and_outputs(stride):
    """Rows 392 bytes apart, which is no multiple of 16, give the bits of a contiguous copy."""
    torch.manual_seed(0)
    buffer = torch.full((7, stride), torch.nan).half()
    rows = buffer[:, :192]
    rows.copy_(torch.randn(7, 192))
    index = torch.tensor([[6, 0, -1], [3, 2, 5]], dtype=torch.int32)
    scores = torch.rand(3, 2).t()
    out = torch.full((2, 256), 7.0).half()
    product.combine(rows, index, scores, out=out[:, :192], block=64)
    expected = reference.combine(rows.contiguous(), index, scores)
    assert_equal_bits("out", out[:, :192].contiguous(), expected)
    assert (out[:, 192:] == 7).all(), "wrote between the rows"
    turned = torch.randn(7, 192).half().t().contiguous().t()
    assert_equal_bits(
        "columns apart",
        product.combine(turned, index, None),
        reference.combine(turned, index, None),
    )


def test_kernel_05_expanded_gradients():
    rows, index, scores, _ = problem(5, 3, 21, unique=True)
    flat = torch.ones(()).expand(5, WIDTH)
    assert flat.stride() == (0, 0)
    found = product.combine_backward(flat, rows, index, scores, block=BLOCK)
    expected = product.combine_backward(flat.contiguous(), rows, index, scores, block=BLOCK)
    kernel_cases.assert_same_bits(found, expected)


def test_kernel_17_eight_bf16_outputs_sum_without_loss():
    rows = torch.full((8, 3), 1.015625, dtype=torch.bfloat16)
    index = torch.arange(8, dtype=torch.int32)[None]
    for scores in (torch.ones(1, 8), None):
        assert (product.combine(rows, index, scores) == 8.125).all()


# ---- through the op ------------------------------------------------------------------------------
def test_the_op_runs_the_kernels_and_their_gradients():
    rows, index, scores, grad = problem(5, 3, 21, unique=True)
    results = []
    for name in ("triton", "reference"):
        leaves = rows.clone().requires_grad_(), scores.clone().requires_grad_()
        out = relibra.combine(leaves[0], index, leaves[1], name)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    for ours, theirs in zip(*results, strict=True):
        assert_close_gemm("op", ours, theirs)
    assert_equal_bits("out", results[0][0], results[1][0])


def test_kernel_11_the_op_refuses_on_the_cpu():
    index = torch.tensor([[3, 2**31 - 1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"index_TJ: need -1 <= index < 4, got 2147483647 at"):
        relibra.combine(torch.ones(4, 2), index, None, "triton")


def test_a_backend_without_a_body_is_refused(monkeypatch):
    rows, index = torch.ones(4, 2), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="backend: need one of 'auto', 'triton', 'reference'"):
        relibra.combine(rows, index, None, "cutlass")
    monkeypatch.setattr(backend, "_is_interpreter", lambda: False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Triton is imported"):
        relibra.combine(rows, index, None, "triton")


def test_opcheck():
    rows, index, scores, grad = problem(2, 2, 5, unique=True, width=3)
    leaves = torch.nan_to_num(rows).requires_grad_(), scores.requires_grad_()
    torch.library.opcheck(relibra.combine, (leaves[0], index, leaves[1], "triton"))
    given = grad, leaves[0].detach(), index, leaves[1].detach(), "triton"
    torch.library.opcheck(relibra.combine_backward, given)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_checks_of_the_reference_hold(monkeypatch, dtype):
    use_kernels(monkeypatch, product)
    op_checks.check_combine(dtype)


# ---- mutants -------------------------------------------------------------------------------------
def use_kernels(monkeypatch, kernels):
    """Runs `op_checks.check_combine` on a module of kernels."""
    run = functools.partial(kernels.combine, block=BLOCK)
    ops = types.SimpleNamespace(combine=run, combine_backward=kernels.combine_backward)
    monkeypatch.setattr(op_checks, "_relibra", ops)


MUTANTS = {
    "order_reversed": ("in tl.static_range(J):", "in tl.static_range(J - 1, -1, -1):"),
    "score_omitted": (
        "term *= tl.load(scores_ptr + token * J + j, mask=row >= 0, other=0.0)",
        "term *= 1.0",
    ),
    "score_of_the_next_term": (
        "tl.load(scores_ptr + token * J + j, mask=row >= 0",
        "tl.load(scores_ptr + token * J + (j + 1) % J, mask=row >= 0",
    ),
    "score_of_no_row_read": (", mask=row >= 0, other=0.0)", ")"),
    "pad_select_removed": (
        "        mask = cols < tl.where(row >= 0, num_columns, 0)",
        "        mask = cols < num_columns\n        row = tl.maximum(row, 0)",
    ),
    "rounded_after_each_term": (
        "total += term\n",
        "total = (total + term).to(rows_ptr.dtype.element_ty).to(WIDE)\n",
    ),
    "tail_columns_unmasked": (
        "tl.store(out_ptr + token * stride_out + cols, out, mask=cols < num_columns)",
        "tl.store(out_ptr + token * stride_out + cols, out)",
    ),
    "score_omitted_in_d_rows": ("value *= tl.load(scores_ptr + token * J + j)", "value *= 1.0"),
    "second_use_lost": ("while begin <= last:", "while begin < 0:"),
    "order_of_d_rows": (
        "place = (lane % num_tokens).to(tl.int64) * J + lane // num_tokens",
        "place = lane.to(tl.int64)",
    ),
    "d_scores_without_the_last_block": (
        "for first in range(0, end, BLOCK)",
        "for first in range(0, end - BLOCK, BLOCK)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(monkeypatch, tmp_path, name):
    before, after = MUTANTS[name]
    mutant = kernel_mutants.mutated("combine", before, after, tmp_path)
    with kernel_mutants.killed(name):  # either check may find it
        check(mutant, *problem(3, 3, 14, torch.bfloat16, unique=True))
        check(mutant, *problem(3, 3, 4))
        use_kernels(monkeypatch, mutant)
        op_checks.check_combine()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gpu_equals_the_reference(dtype):
    given = problem(500, 8, 5000, dtype, unique=True)
    rows, index, scores, grad = (one.cuda() for one in given)
    out = relibra.combine(rows, index, scores)
    assert_equal_bits("out", out.cpu(), reference.combine(*given[:3]))
    d_rows, d_scores = relibra.combine_backward(grad, rows, index, scores)
    expected = reference.combine_backward(given[3], *given[:3])
    assert_equal_bits("d_rows", d_rows.cpu(), expected[0])
    assert_close_gemm("d_scores", d_scores.cpu(), expected[1])
