"""Rows more than 2^31 elements behind the first one, in memory of which few pages exist."""

import kernel_mutants
import numpy as np
import pytest
import torch

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.triton_ops import combine, permute

STRIDE, WIDTH = 2**29, 8
FAR = 5  # first row whose offset, 5 * 2^29, does not fit 32 bits: there it is -3 * 2^29


@pytest.fixture
def far():
    """Rows 0 and 5 of a matrix in 10 GiB of address space; NumPy leaves its pages untouched."""
    try:
        memory = torch.from_numpy(np.empty(10 * STRIDE, np.float16))
    except MemoryError:
        pytest.skip("needs 10 GiB of address space, which this machine refuses")
    matrix = memory.as_strided((FAR + 1, WIDTH), (STRIDE, 1), 4 * STRIDE)
    matrix[[0, FAR]] = torch.arange(1.0, 2 * WIDTH + 1).reshape(2, WIDTH).half()
    return matrix


INDEX = torch.tensor([[FAR, 0], [-1, FAR]], dtype=torch.int32)


def check_copy(kernels, far):
    near = far[[0, FAR]].contiguous()
    assert near.count_nonzero() == near.numel()
    copied = kernels.copy_rows(far, INDEX[:, 0])
    assert_equal_bits("copied", copied, torch.stack([near[1], torch.zeros_like(near[1])]))
    far[FAR].zero_()
    kernels.copy_rows(near, torch.tensor([0, -1, -1, -1, -1, 1], dtype=torch.int32), out=far)
    assert_equal_bits("written", far[[0, FAR]], near)


def check_combine(kernels, far):
    near = far[[0, FAR]].contiguous()
    table, scores = torch.tensor([[1, 0], [-1, 1]], dtype=torch.int32), torch.rand(2, 2)
    out = kernels.combine(far, INDEX, scores)
    assert_equal_bits("sums", out, combine.combine(near, table, scores))
    _, d_scores = kernels.combine_backward(near, far, INDEX, scores)
    assert_equal_bits("d_scores", d_scores, combine.combine_backward(near, near, table, scores)[1])
    six, none = torch.full((6, 2), -1, dtype=torch.int32), torch.zeros(6, 2)
    six[[0, FAR]] = table
    d_rows, d_scores = kernels.combine_backward(far, near, six, none + 1)
    expected = combine.combine_backward(near, near, table, none[:2] + 1)
    assert_equal_bits("d_rows", d_rows, expected[0])
    assert_equal_bits("d_scores", d_scores[[0, FAR]], expected[1])


def test_kernel_02_copies(far):
    check_copy(permute, far)


def test_kernel_02_sums(far):
    check_combine(combine, far)


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("permute", "row.to(tl.int64) * stride_row", "row * stride_row"),
        ("permute", "place.to(tl.int64) * stride_out", "place * stride_out"),
        (
            "combine",
            "term = tl.load(rows_ptr + row.to(tl.int64) * stride_row",
            "term = tl.load(rows_ptr + row * stride_row",
        ),
        (
            "combine",
            "value = tl.load(rows_ptr + row.to(tl.int64) * stride_row",
            "value = tl.load(rows_ptr + row * stride_row",
        ),
        ("combine", "token = (term % num_tokens).to(tl.int64)", "token = term % num_tokens"),
    ],
)
def test_a_product_in_32_bits_is_found(tmp_path, far, module, before, after):
    check = {"permute": check_copy, "combine": check_combine}[module]
    with pytest.raises(AssertionError):
        check(kernel_mutants.mutated(module, before, after, tmp_path), far)
