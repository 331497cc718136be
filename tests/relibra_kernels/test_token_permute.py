import pytest
import torch

from relibra_kernels.testing.op_checks import check_permute

relibra = torch.ops.relibra


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


ROW_TO_TOKEN = int32([2, -1, 1, 2, -1, 0])
INDEX = int32([[5, -1], [-1, 2], [3, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values(dtype):
    check_permute(dtype)


def test_kernel_06_a_row_stride_that_is_no_multiple_of_16_bytes():
    storage = torch.randn(3, 196).half()
    x = storage[:, :192]
    assert x.stride(0) * x.element_size() % 16
    strided = relibra.token_permute(x, ROW_TO_TOKEN, INDEX)
    assert torch.equal(strided, relibra.token_permute(x.contiguous(), ROW_TO_TOKEN, INDEX))


def test_gradients():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: relibra.token_permute(x, ROW_TO_TOKEN, INDEX), x)


def test_kernel_05_expanded_gradients():
    x = torch.randn(3, 4, requires_grad=True)
    (summed,) = torch.autograd.grad(relibra.token_permute(x, ROW_TO_TOKEN, INDEX).sum(), x)
    assert torch.equal(summed, torch.tensor([1.0, 1.0, 2.0])[:, None].expand(3, 4))


def test_no_tokens():
    x = torch.empty(0, 4, requires_grad=True)
    rows = relibra.token_permute(x, int32([-1, -1]), torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(rows, torch.zeros(2, 4))
    assert torch.autograd.grad(rows.sum(), x)[0].shape == (0, 4)
    nothing = relibra.token_permute(torch.ones(3, 4), int32([]), torch.full((3, 2), -1).int())
    assert nothing.shape == (0, 4)


@pytest.mark.parametrize(
    ("x", "row_to_token", "index", "error", "message"),
    [
        (torch.ones(3), ROW_TO_TOKEN, INDEX, ValueError, "x_UD: need 2 dimensions"),
        (torch.ones(3, 4).int(), ROW_TO_TOKEN, INDEX, TypeError, "x_UD: need dtype torch.float32"),
        (torch.ones(3, 4), ROW_TO_TOKEN.long(), INDEX, TypeError, "row_to_token_R: need dtype"),
        (torch.ones(3, 4), ROW_TO_TOKEN[None], INDEX, ValueError, "row_to_token_R: need shape"),
        (
            torch.ones(3, 4),
            int32([0, 3]),
            INDEX,
            ValueError,
            r"row_to_token_R: need -1 <= index < 3, got 3 at \[1\]",
        ),
        (
            torch.ones(3, 4),
            ROW_TO_TOKEN,
            INDEX + 1,
            ValueError,
            r"token_choice_to_row_UK: need -1 <= index < 6, got 6 at \[0, 0\]",
        ),
        (
            torch.ones(2, 4),
            int32([0]),
            INDEX,
            ValueError,
            r"token_choice_to_row_UK: need shape \[2",
        ),
    ],
)
def test_kernel_11_wrong_arguments_are_refused(x, row_to_token, index, error, message):
    with pytest.raises(error, match=message):
        relibra.token_permute(x, row_to_token, index)


def test_opcheck():
    x = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(relibra.token_permute, (x, ROW_TO_TOKEN, INDEX))
