import pytest
import torch

from relibra_kernels.reference.activation import (
    CLAMPED_SWIGLU,
    GELU,
    SQUARED_RELU,
    SWIGLU,
    activate,
)
from relibra_kernels.reference.swiglu import swiglu
from relibra_kernels.testing.op_checks import check_swiglu

relibra = torch.ops.relibra


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_and_gradient(dtype):
    check_swiglu(dtype)


def test_large_gates_stay_finite():
    h = torch.tensor([[-200.0, 200.0, 3.0, 3.0]])
    assert relibra.swiglu(h).tolist() == [[-0.0, 600.0]]
    grad = relibra.swiglu_backward(torch.ones(1, 2), h)
    assert grad.isfinite().all()


def test_gradients():
    h = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(relibra.swiglu, h)


def test_a_second_derivative_is_refused():
    h = torch.randn(2, 4, requires_grad=True)
    (dh,) = torch.autograd.grad(relibra.swiglu(h).sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="backward through relibra.swiglu_backward"):
        dh.sum().backward()


def test_kernel_05_expanded_gradients_and_no_rows():
    h = torch.randn(5, 6, requires_grad=True)
    out = relibra.swiglu(h)
    (expanded,) = torch.autograd.grad(out.sum(), h, retain_graph=True)
    (dense,) = torch.autograd.grad(out, h, torch.ones_like(out))
    assert torch.equal(expanded, dense)
    assert relibra.swiglu(h[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: relibra.swiglu(torch.ones(2, 3)), ValueError, "h_R2F: need 2F columns"),
        (lambda: relibra.swiglu(torch.ones(2)), ValueError, "h_R2F: need 2 dimensions"),
        (lambda: relibra.swiglu(torch.ones(2, 2).int()), TypeError, "h_R2F: need dtype"),
        (
            lambda: relibra.swiglu_backward(torch.ones(2, 2), torch.ones(2, 2)),
            ValueError,
            r"da_RF: need shape \[2, 1\]",
        ),
        (
            lambda: relibra.swiglu_backward(torch.ones(2, 1).double(), torch.ones(2, 2)),
            TypeError,
            "da_RF: need dtype torch.float32",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_opcheck():
    h = torch.randn(5, 6, requires_grad=True)
    torch.library.opcheck(relibra.swiglu, (h,))
    torch.library.opcheck(relibra.swiglu_backward, (torch.randn(5, 3), h.detach()))


@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED_SWIGLU, GELU, SQUARED_RELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_a_row_do_not_depend_on_its_place(activation, dtype):
    h = 4 * torch.randn(300, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = activate(h, activation, 1.702, 7.0)
    alone = torch.cat([activate(row[None], activation, 1.702, 7.0) for row in h])
    assert torch.equal(together, alone)
    if activation == SWIGLU:
        assert torch.equal(swiglu(h), torch.cat([swiglu(row[None]) for row in h]))


def test_bits_do_not_depend_on_the_number_of_threads():
    """Threads share out elements, not rows, so that a share may begin inside a row."""
    h = 4 * torch.randn(20000, 80, generator=torch.Generator().manual_seed(2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            found.append(swiglu(h))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
