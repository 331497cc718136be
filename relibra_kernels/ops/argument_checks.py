"""Checks that several ops share."""

from __future__ import annotations

import torch

from relibra_kernels.checks import check_tensor, describe
from relibra_kernels.ops.backend import checks_values
from relibra_kernels.reference.combine import accumulation_dtype

INT32_MAX = 2**31 - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IDS = (torch.int32, torch.int64)


def check_float_matrix(name: str, value: torch.Tensor) -> None:
    """A matrix of one of the supported float dtypes."""
    check_tensor(name, value, dtype=FLOATS, ndim=2)


def check_table(name: str, table: torch.Tensor, shape: tuple[int | None, ...], limit: int) -> None:
    """An int32 index table of the shape, every entry in [-1, limit) (`checks_values` permitting).

    Raises:
        TypeError: not int32.
        ValueError: another shape, or an entry out of range; names the first place.
    """
    check_tensor(name, table, dtype=torch.int32, shape=shape)
    if table.numel() > INT32_MAX:
        raise ValueError(f"{name}: need at most {INT32_MAX} entries, got {describe(table)}")
    if not table.numel() or not checks_values(table):
        return
    low, high = torch.aminmax(table)
    if int(low) < -1 or int(high) >= limit:
        place = torch.nonzero((table < -1) | (table >= limit))[0].tolist()
        raise ValueError(
            f"{name}: need -1 <= index < {limit}, got {int(table[tuple(place)])} at {place}"
        )


def check_output(name: str, value: torch.Tensor) -> None:
    """Memory that an op writes to: no element lies where another does."""
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{name}: need memory of its own for every element, got strides "
                f"{list(value.stride())} for {describe(value)}"
            )


def check_wide(name: str, value: torch.Tensor, rows: torch.Tensor, why: str) -> None:
    """A tensor in the accumulation dtype of ``rows``: fp32, fp64 for fp64."""
    need = accumulation_dtype(rows.dtype)
    if value.dtype != need:
        raise TypeError(f"{name}: need dtype {need} ({why}), got {describe(value)}")
