import pytest
import torch

import relibra_kernels  # noqa: F401  registers the ops

relibra = torch.ops.relibra


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_inverts_the_rows_for_random_tables():
    for seed in range(10):
        torch.manual_seed(seed)
        num_rows, shape = 40, (11, 3)
        rows = torch.randperm(num_rows)[:33].reshape(shape).to(torch.int32)
        rows[torch.rand(shape) < 0.3] = -1
        row_to_token, row_to_choice = relibra.build_rows(rows, num_rows)
        token, choice = torch.nonzero(rows >= 0, as_tuple=True)
        used = rows[token, choice].long()
        assert torch.equal(row_to_token[used].long(), token)
        assert torch.equal(row_to_choice[used].long(), token * 3 + choice)
        padding = torch.ones(num_rows, dtype=torch.bool)
        padding[used] = False
        assert (row_to_token[padding] == -1).all()
        assert (row_to_choice[padding] == -1).all()


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_nothing_received(shape):
    tables = relibra.build_rows(torch.empty(shape, dtype=torch.int32), 4)
    assert [table.tolist() for table in tables] == [[-1] * 4] * 2
    assert relibra.build_rows(torch.empty(shape, dtype=torch.int32), 0)[0].shape == (0,)


@pytest.mark.parametrize(
    ("rows", "num_rows", "error", "message"),
    [
        (int32([[0, 1], [-1, 4]]), 4, ValueError, "need -1 <= row < 4, got 4 at token 1, choice 1"),
        (int32([[-2, 1]]), 4, ValueError, "need -1 <= row < 4, got -2 at token 0, choice 0"),
        (int32([[2**31 - 1, 1]]), 4, ValueError, "got 2147483647 at token 0, choice 0"),
        (
            int32([[0, 1], [1, 2]]),
            4,
            ValueError,
            "every row at most once, got row 1 for choices 1 and 2",
        ),
        (torch.zeros(1, 1), 4, TypeError, "token_choice_to_row_UK: need dtype torch.int32"),
        (int32([0]), 4, ValueError, "token_choice_to_row_UK: need 2 dimensions"),
        (int32([[0]]), -1, ValueError, "num_rows: need at least 0, got -1"),
    ],
)
def test_kernel_11_rows_out_of_range_or_served_twice_are_refused(rows, num_rows, error, message):
    with pytest.raises(error, match=message):
        relibra.build_rows(rows, num_rows)


def test_opcheck():
    torch.library.opcheck(relibra.build_rows, (int32([[4, 0], [-1, 1]]), 6))
