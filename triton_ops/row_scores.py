"""Scores by row, and gradients by row back to (token, choice): one gather of single numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK = 1024


@triton.jit(do_not_specialize=["values_ptr", "index_ptr", "num_values", "num_places"])
def _row_scores_kernel(
    values_ptr,  # [num_values]
    index_ptr,  # [num_places] int32, -1 = zero
    out_ptr,  # [num_places]
    num_values,
    num_places,
    BLOCK: tl.constexpr,
):
    """out[i] = values[index[i]], zero where the index is -1."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_places
    index = tl.load(index_ptr + place, mask=inside, other=-1)
    taken = (index >= 0) & (index < num_values)
    tl.store(out_ptr + place, tl.load(values_ptr + index, mask=taken, other=0.0), mask=inside)


def row_scores(scores_UK: torch.Tensor, row_to_choice_R: torch.Tensor) -> torch.Tensor:
    """``out[r] = scores.flat[row_to_choice[r]]``, zero on padding rows.

    With ``token_choice_to_row_UK`` in place of ``row_to_choice`` it is its own gradient:
    ``dscores[u, k] = drow[token_choice_to_row[u, k]]``.

    Args:
        scores_UK: ``[U, K]`` or ``[R]``, any float dtype.
        row_to_choice_R: int32 of any shape, -1 = none.

    Returns:
        The shape of the index, the dtype of the scores.
    """
    scores, index = scores_UK.contiguous(), row_to_choice_R.contiguous()
    out = scores.new_empty(index.shape)
    if index.numel():
        grid = (-(-index.numel() // BLOCK),)
        _row_scores_kernel[grid](scores, index, out, scores.numel(), index.numel(), BLOCK=BLOCK)
    return out
