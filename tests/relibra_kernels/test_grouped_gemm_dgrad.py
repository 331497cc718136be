"""Values of `grouped_gemm_dgrad`; its refusals are tested with those of `grouped_gemm`."""

import pytest
import torch

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.op_checks import GemmCase, check_grouped_gemm_dgrad

relibra = torch.ops.relibra


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values(dtype, exact):
    check_grouped_gemm_dgrad(GemmCase(dtype), exact=exact)
    check_grouped_gemm_dgrad(GemmCase(dtype, (500, 33), block_rows=16), exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
def test_expanded_gradients_and_strided_weights(exact):
    """`sum()` gives gradients of stride (0, 0)."""
    case = GemmCase()
    arguments = (case.mtile, case.block_rows, exact)
    ones = torch.ones(1, 1).expand(case.grad.shape)
    dense = relibra.grouped_gemm_dgrad(
        torch.ones(case.grad.shape), case.home, case.replica, *arguments
    )
    wide = torch.cat([case.home, case.home], 2)[:, :, : case.home.shape[2]]
    assert_equal_bits(
        "dgrad", relibra.grouped_gemm_dgrad(ones, wide, case.replica, *arguments), dense
    )


def test_opcheck():
    case = GemmCase(slot_rows=(3, 2), num_home=1)
    torch.library.opcheck(
        relibra.grouped_gemm_dgrad,
        (case.grad.nan_to_num(), case.home, case.replica, case.mtile, case.block_rows, False),
    )
