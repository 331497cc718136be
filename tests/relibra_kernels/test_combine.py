import pytest
import torch

from relibra_kernels.testing.op_checks import check_combine

relibra = torch.ops.relibra

INDEX = torch.tensor([[3, 1, -1], [-1, 2, 0], [-1, -1, -1]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_gradients_and_order(dtype):
    check_combine(dtype)


def test_kernel_17_eight_bf16_outputs_sum_without_loss():
    rows = torch.full((8, 3), 1.015625, dtype=torch.bfloat16)
    index = torch.arange(8, dtype=torch.int32)[None]
    for scores in (torch.ones(1, 8), None):
        assert (relibra.combine(rows, index, scores) == 8.125).all()
    running = torch.zeros(3, dtype=torch.bfloat16)
    for row in rows:
        running += row
    assert (running == 8.0625).all(), "what a bf16 running sum gives"


def test_kernel_09_score_gradients_of_bf16_rows_with_nan_padding():
    rows = torch.randn(6, 5).bfloat16()
    rows[[0, 4]] = float("nan")
    rows.requires_grad_()
    index = torch.tensor([[1, 3], [5, -1], [-1, 2]], dtype=torch.int32)
    scores = torch.rand(3, 2, requires_grad=True)
    out = relibra.combine(rows, index, scores)
    grad = torch.randn(3, 5).bfloat16()
    d_rows, d_scores = torch.autograd.grad(out, (rows, scores), grad)
    assert d_scores.dtype == torch.float32
    assert d_rows.isfinite().all()
    picked = rows.detach().double()[index.clamp_min(1).long()]
    expected = (picked * grad.double()[:, None]).sum(2) * (index >= 0)
    torch.testing.assert_close(d_scores.double(), expected, rtol=1e-6, atol=1e-6)


def test_gradients():
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda r, s: relibra.combine(r, INDEX, s), (rows, scores))
    torch.autograd.gradcheck(lambda r: relibra.combine(r, INDEX, None), rows)


def test_rows_used_twice_get_both_gradients():
    rows = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    scores = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda r, s: relibra.combine(r, index, s), (rows, scores))


def test_kernel_05_expanded_gradients():
    rows = torch.randn(4, 3, requires_grad=True)
    scores = torch.rand(3, 3, requires_grad=True)
    out = relibra.combine(rows, INDEX, scores)
    expanded = torch.autograd.grad(out.sum(), (rows, scores), retain_graph=True)
    dense = torch.autograd.grad(out, (rows, scores), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_sums(shape):
    index = torch.empty(shape, dtype=torch.int32)
    rows = torch.randn(4, 5, requires_grad=True)
    scores = torch.empty(shape, requires_grad=True)
    out = relibra.combine(rows, index, scores)
    assert torch.equal(out, torch.zeros(shape[0], 5))
    d_rows, d_scores = torch.autograd.grad(out.sum(), (rows, scores))
    assert torch.equal(d_rows, torch.zeros(4, 5))
    assert d_scores.shape == shape


def test_no_rows():
    none = torch.full((2, 2), -1, dtype=torch.int32)
    assert torch.equal(relibra.combine(torch.empty(0, 3), none, None), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("rows", "index", "scores", "error", "message"),
    [
        (
            torch.ones(3, 2),
            INDEX,
            None,
            ValueError,
            r"index_TJ: need -1 <= index < 3, got 3 at \[0, 0\]",
        ),
        (torch.ones(4, 2), INDEX.long(), None, TypeError, "index_TJ: need dtype torch.int32"),
        (torch.ones(4, 2), INDEX, torch.ones(3, 2), ValueError, r"scores_TJ: need shape \[3, 3\]"),
        (
            torch.ones(4, 2),
            INDEX,
            torch.ones(3, 3).bfloat16(),
            TypeError,
            "scores_TJ: need dtype torch.float32 .rows_ND is torch.float32",
        ),
        (torch.ones(4, 2).double(), INDEX, torch.ones(3, 3), TypeError, "need dtype torch.float64"),
        (torch.ones(4, 2, 1), INDEX, None, ValueError, "rows_ND: need 2 dimensions"),
    ],
)
def test_kernel_11_wrong_arguments_are_refused(rows, index, scores, error, message):
    with pytest.raises(error, match=message):
        relibra.combine(rows, index, scores)


def test_a_wrong_gradient_is_refused():
    with pytest.raises(ValueError, match=r"grad_TD: need shape \[3, 2\]"):
        relibra.combine_backward(torch.ones(2, 2), torch.ones(4, 2), INDEX, None)


def test_opcheck():
    rows, scores = torch.randn(4, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    torch.library.opcheck(relibra.combine, (rows, INDEX, scores))
    torch.library.opcheck(relibra.combine, (rows, INDEX, None))
    grad = torch.randn(3, 3)
    for given in (scores.detach(), None):
        torch.library.opcheck(relibra.combine_backward, (grad, rows.detach(), INDEX, given))
