"""Gradients of both biases of the experts, into fp32 buffers that the caller owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.expert_wgrad import family_of
from relibra_kernels.reference.token_permute import take_rows
from relibra_kernels.reference.weight_products import slot_view
from relibra_kernels.tables import HOME, slot_bases

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet


def expert_bias_grad(
    dy: torch.Tensor,
    dh: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    score_R: torch.Tensor | None,
    slot_rows_n: torch.Tensor,
    block_rows: int,
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    accumulate_home: bool,
) -> None:
    """``db13 = sum over a slot's rows of dh``, ``db2 = ... of score * dy``.

    Args:
        dy: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``.
        dh: ``[R, halves * F]``, gate | up.
        row_to_token_R: int32 ``[R]``, -1 on padding rows, which are not read.
        score_R: ``[R]``; None where the score multiplies the activation and not the bias.
        slot_rows_n: int32 ``[n]``, rows of each slot; home slots first, then static, replica.
        block_rows: rows to which every slot is padded.
        grad13: ``[slots, halves * F, 1]`` fp32 (fp64 for fp64) of every family; None: not wanted.
        grad2: ``[slots, D, 1]``, likewise.
        accumulate_home: add to the home gradients (empty slots keep their bits) instead of
            overwriting them (empty slots get zeros). Copies are always overwritten.

    Example:
        >>> import torch
        >>> from relibra_kernels.weights import WeightSet
        >>> grad2 = WeightSet(torch.full((1, 1, 1), 100.0))
        >>> two = torch.full((2, 1), 2.0)
        >>> expert_bias_grad(two, two, None, torch.tensor([0.5, 3.0]), torch.tensor([2]), 2,
        ...                  None, grad2, True)
        >>> grad2.home.item()
        107.0
    """
    base = slot_bases(slot_rows_n, block_rows).tolist()
    for slot, num_rows in enumerate(slot_rows_n.tolist()):
        rows = slice(base[slot], base[slot] + num_rows)
        for grads, by_row in ((grad13, False), (grad2, True)):
            if grads is None:
                continue
            where = family_of(grads, slot)
            out = slot_view(grads, where)
            terms = dh[rows].to(out.dtype)
            if by_row:
                taken = dy[rows] if row_to_token_R is None else take_rows(dy, row_to_token_R[rows])
                terms = taken.to(out.dtype)
                terms = terms if score_R is None else terms * score_R[rows, None]
            total = terms.sum(0).view(out.shape)
            if where[0] == HOME and accumulate_home:
                if num_rows:
                    out += total
            else:
                out.copy_(total)
