import math

import pytest
import torch

from relibra_kernels.testing.compare import (
    assert_close_gemm,
    assert_equal_bits,
    calc_diff,
    max_err_over_rms,
)


def test_calc_diff_is_the_published_metric_and_sees_small_differences():
    torch.manual_seed(0)
    x, y = torch.randn(50), torch.randn(50)
    by_formula = 1 - 2 * float(x.double() @ y.double()) / float(
        x.double() @ x.double() + y.double() @ y.double()
    )
    assert calc_diff(x, y) == pytest.approx(by_formula, rel=1e-12)
    near = x.double() * (1 + 1e-10)
    assert calc_diff(x, near) == pytest.approx(5e-21, rel=1e-3), "lost by the formula"


def test_zeros_empties_and_nans():
    zero, one = torch.zeros(3), torch.ones(3)
    assert calc_diff(zero, zero) == calc_diff(zero[:0], zero[:0]) == 0.0
    assert calc_diff(zero, one) == 1.0
    assert math.isnan(calc_diff(zero * float("nan"), one))
    assert max_err_over_rms(zero, zero) == max_err_over_rms(zero[:0], zero[:0]) == 0.0
    assert max_err_over_rms(one, zero) == math.inf
    assert math.isnan(max_err_over_rms(one * float("nan"), zero))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gemm_factors_accept_rounding_and_refuse_a_wrong_element(dtype):
    torch.manual_seed(0)
    oracle = torch.randn(64, 64, dtype=torch.float64)
    rounded = oracle.to(dtype)
    assert_close_gemm("x", rounded, oracle)
    wrong = rounded.clone()
    wrong[3, 5] += 0.5
    with pytest.raises(AssertionError, match="x: calc_diff .* max.err./rms"):
        assert_close_gemm("x", wrong, oracle)
    wrong[3, 5] = float("nan")
    with pytest.raises(AssertionError):
        assert_close_gemm("x", wrong, oracle)


def test_bits():
    nan = torch.tensor([1.0, float("nan")])
    assert_equal_bits("x", nan, nan.clone())
    for other, message in (
        (nan.double(), "x: got torch.float32 tensor"),
        (nan[:1], "x: got torch.float32 tensor"),
        (torch.tensor([1.0, 2.0]), r"first difference at \[1\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_equal_bits("x", nan, other)


def test_shapes_that_differ():
    for metric in (calc_diff, max_err_over_rms):
        with pytest.raises(ValueError, match=r"need shape \[2\] like x"):
            metric(torch.ones(2), torch.ones(3))
