"""The destination's row tables: the inverse of the rows that came with the tokens.

A wrong entry sets a bit of the error word of :mod:`relibra_kernels.triton_ops.device_errors` and
takes no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from relibra_kernels.triton_ops.device_errors import BAD_ROW, ROW_TWICE, report

if TYPE_CHECKING:
    import torch

BLOCK = 1024


@triton.jit(do_not_specialize=["rows_ptr", "error_ptr", "num_entries", "num_rows", "num_choices"])
def _build_rows_kernel(
    rows_ptr,  # [U, K] int32, -1 = elsewhere
    row_to_token_ptr,  # [R] int32, filled with -1
    row_to_choice_ptr,  # [R] int32, filled with -1
    error_ptr,
    num_entries,  # U * K
    num_rows,  # R
    num_choices,  # K
    BLOCK: tl.constexpr,
):
    """Scatters u and u * K + k. Maxima, so that even a wrong table gives the same result twice."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + entry, mask=entry < num_entries, other=-1)
    served = (row >= 0) & (row < num_rows)
    before = tl.atomic_max(row_to_choice_ptr + row, entry, mask=served, sem="relaxed")
    tl.atomic_max(row_to_token_ptr + row, entry // num_choices, mask=served, sem="relaxed")
    report(error_ptr, (row < -1) | (row >= num_rows), BAD_ROW)
    report(error_ptr, served & (before >= 0), ROW_TWICE)


def build_rows(
    token_choice_to_row_UK: torch.Tensor, num_rows: int, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``row_to_token`` and ``row_to_choice``; contract in ``reference/build_rows.py``.

    Args:
        token_choice_to_row_UK: int32 ``[U, K]``.
        num_rows: R.
        error: int32 ``[1]``, error bits are added to it.
    """
    table = token_choice_to_row_UK.contiguous()
    row_to_token_R = table.new_empty(num_rows).fill_(-1)
    row_to_choice_R = table.new_empty(num_rows).fill_(-1)
    if table.numel():
        grid = (-(-table.numel() // BLOCK),)
        sizes = table.numel(), num_rows, table.shape[1]
        _build_rows_kernel[grid](table, row_to_token_R, row_to_choice_R, error, *sizes, BLOCK=BLOCK)
    return row_to_token_R, row_to_choice_R
