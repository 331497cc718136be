"""Comparing results: the metrics, and the factors that every test uses, written once."""

from __future__ import annotations

import torch

from relibra_kernels.checks import describe

# Largest calc_diff of a GEMM-like result against the wide oracle, by dtype of the result. The
# fp64 and fp32 factors are those of the CPU bodies; bf16 and fp16 hold for every device.
MAX_CALC_DIFF = {
    torch.float64: 1e-24,
    torch.float32: 1e-12,
    torch.float16: 1e-6,
    torch.bfloat16: 1e-5,
}
# Largest |error| over the rms of the oracle.
MAX_ERR_OVER_RMS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative squared distance ``1 - 2<x, y> / (|x|^2 + |y|^2)``, in fp64.

    Derived: equals ``|x - y|^2 / (|x|^2 + |y|^2)``, which is what is computed, since the other
    form loses everything below 1e-16.

    Args:
        x: any float tensor.
        y: likewise, same shape.

    Returns:
        0 for equal tensors (two zeros or two empty ones included), NaN if either holds a NaN.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> calc_diff(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
        0.0
        >>> calc_diff(torch.tensor([1.0]), torch.tensor([0.0]))
        1.0
        >>> calc_diff(torch.zeros(2), torch.zeros(2))
        0.0
    """
    if x.shape != y.shape:
        raise ValueError(f"y: need shape {list(x.shape)} like x, got {describe(y)}")
    x64, y64 = x.detach().double(), y.detach().double()
    size = float((x64 * x64).sum() + (y64 * y64).sum())
    distance = float(((x64 - y64) ** 2).sum())
    return 0.0 if size == 0 else distance / size


def max_err_over_rms(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """Largest absolute error over the root mean square of the oracle, in fp64.

    Args:
        x: any float tensor.
        oracle: same shape.

    Returns:
        0 for equal tensors; inf for a non-zero error against an oracle of zeros; NaN for NaN.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> max_err_over_rms(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) < 0.32
        True
        >>> max_err_over_rms(torch.tensor([1.0]), torch.tensor([0.0]))
        inf
    """
    if x.shape != oracle.shape:
        raise ValueError(f"oracle: need shape {list(x.shape)} like x, got {describe(oracle)}")
    if x.numel() == 0:
        return 0.0
    oracle64 = oracle.detach().double()
    error = float((x.detach().double() - oracle64).abs().max())
    rms = float(oracle64.square().mean().sqrt())
    if error == 0:
        return 0.0
    return error / rms if rms else float("inf") if error == error else error


def assert_close_gemm(
    name: str,
    x: torch.Tensor,
    oracle: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Asserts that a GEMM-like result equals its oracle up to rounding.

    Args:
        name: what is compared, for the message.
        x: the result.
        oracle: same shape, computed in fp32 or fp64.
        dtype: precision to hold it to; None is the dtype of ``x``.

    Raises:
        AssertionError: `calc_diff` or `max_err_over_rms` above the factor of the dtype, or NaN.

    Example:
        >>> assert_close_gemm("y", torch.ones(2), torch.ones(2, dtype=torch.float64))
        >>> assert_close_gemm("y", torch.ones(2), torch.tensor([1.0, 1.1]))
        Traceback (most recent call last):
        AssertionError: y: calc_diff 2.38e-03 (limit 1e-12), max|err|/rms 9.51e-02 (limit 1e-05)
    """
    used = dtype or x.dtype
    diff, peak = calc_diff(x, oracle), max_err_over_rms(x, oracle)
    limit = MAX_CALC_DIFF[used]
    if not (diff <= limit and peak <= MAX_ERR_OVER_RMS[used]):
        raise AssertionError(
            f"{name}: calc_diff {diff:.2e} (limit {limit:.0e}), "
            f"max|err|/rms {peak:.2e} (limit {MAX_ERR_OVER_RMS[used]:.0e})"
        )


def assert_equal_bits(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Asserts that two tensors hold the same bits; NaNs and signed zeros count.

    Args:
        name: what is compared, for the message.
        x: any tensor.
        y: likewise.

    Raises:
        AssertionError: shape, dtype or a bit differs; names the first place.

    Example:
        >>> assert_equal_bits("y", torch.tensor([0.0]), torch.tensor([-0.0]))
        Traceback (most recent call last):
        AssertionError: y: first difference at [0]: 0.0 and -0.0
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise AssertionError(f"{name}: got {describe(x)} and {describe(y)}")
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    different = x.detach().contiguous().view(view) != y.detach().contiguous().view(view)
    if different.any():
        place = torch.nonzero(different)[0].tolist()
        left, right = x[tuple(place)].item(), y[tuple(place)].item()
        raise AssertionError(f"{name}: first difference at {place}: {left} and {right}")
