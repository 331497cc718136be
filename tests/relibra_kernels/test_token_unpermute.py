import pytest
import torch

import relibra_kernels  # noqa: F401  registers the ops

relibra = torch.ops.relibra

INDEX = torch.tensor([[5, -1], [-1, 2], [3, 0]], dtype=torch.int32)


def test_undoes_token_permute():
    row_to_token = torch.tensor([2, -1, 1, 2, -1, 0], dtype=torch.int32)
    x = torch.randn(3, 4)
    back = relibra.token_unpermute(relibra.token_permute(x, row_to_token, INDEX), INDEX)
    assert torch.equal(back, torch.where(INDEX[:, :, None] >= 0, x[:, None], 0.0))


def test_gradients():
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda rows: relibra.token_unpermute(rows, INDEX), rows)


def test_kernel_05_expanded_gradients():
    rows = torch.randn(6, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(relibra.token_unpermute(rows, INDEX).sum(), rows)
    assert torch.equal(grad[:, 0], torch.tensor([1.0, 0, 1, 1, 0, 1]))


def test_no_rows_and_no_tokens():
    none = torch.full((2, 2), -1, dtype=torch.int32)
    assert torch.equal(relibra.token_unpermute(torch.empty(0, 3), none), torch.zeros(2, 2, 3))
    assert relibra.token_unpermute(torch.ones(6, 3), INDEX[:0]).shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("rows", "index", "error", "message"),
    [
        (torch.ones(6), INDEX, ValueError, "rows_RD: need 2 dimensions"),
        (
            torch.ones(6, 3),
            INDEX.long(),
            TypeError,
            "token_choice_to_row_UK: need dtype torch.int32",
        ),
        (torch.ones(5, 3), INDEX, ValueError, r"need -1 <= index < 5, got 5 at \[0, 0\]"),
    ],
)
def test_wrong_arguments_are_refused(rows, index, error, message):
    with pytest.raises(error, match=message):
        relibra.token_unpermute(rows, index)


def test_opcheck():
    rows = torch.randn(6, 3, requires_grad=True)
    torch.library.opcheck(relibra.token_unpermute, (rows, INDEX))
