"""Gradients of both weights of the experts, into fp32 buffers that the caller owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.grouped_gemm_wgrad import add_outer
from relibra_kernels.reference.weight_products import paired, stored_matrices
from relibra_kernels.tables import HOME, REPLICA, STATIC, slot_bases

if TYPE_CHECKING:
    import torch

    from relibra_kernels.weights import WeightSet


def expert_wgrad(
    x: torch.Tensor,
    dy: torch.Tensor,
    dh: torch.Tensor,
    scored_a: torch.Tensor,
    row_to_token_R: torch.Tensor | None,
    slot_rows_n: torch.Tensor,
    block_rows: int,
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    accumulate_home: bool,
) -> None:
    """``dW13 = sum over a slot's rows of outer(dh, x)``, ``dW2 = ... of outer(dy, scored_a)``.

    Args:
        x: ``[U, D]`` with ``row_to_token_R``, else ``[R, D]``.
        dy: gradient of the experts' outputs, likewise.
        dh: ``[R, halves * F]``.
        scored_a: ``[R, F]``: score * a.
        row_to_token_R: int32 ``[R]``, -1 on padding rows, which are not read.
        slot_rows_n: int32 ``[n]``, rows of each slot; home slots first, then static, replica.
        block_rows: rows to which every slot is padded.
        grad13: ``[slots, halves * F, D]`` fp32 (fp64 for fp64) of every family; None: not wanted.
        grad2: ``[slots, D, F]``, likewise.
        accumulate_home: add to the home gradients (empty slots keep their bits) instead of
            overwriting them (empty slots get zeros). Copies are always overwritten.

    Example:
        >>> import torch
        >>> from relibra_kernels.weights import WeightSet
        >>> grad2 = WeightSet(torch.full((1, 1, 1), 100.0))
        >>> two = torch.full((1, 1), 2.0)
        >>> expert_wgrad(two, two, two, two, None, torch.tensor([1]), 1, None, grad2, True)
        >>> grad2.home.item()
        104.0
    """
    base = slot_bases(slot_rows_n, block_rows).tolist()
    if grad13 is not None and grad13.interleaved:
        dh = paired(dh)
    for slot, num_rows in enumerate(slot_rows_n.tolist()):
        rows = slice(base[slot], base[slot] + num_rows)
        source = rows if row_to_token_R is None else row_to_token_R[rows].long()
        operands = ((grad13, dh[rows], x[source]), (grad2, dy[source], scored_a[rows]))
        for grads, left, right in operands:
            if grads is None:
                continue
            family, index = family_of(grads, slot)
            adds = family == HOME and accumulate_home
            if family == HOME and grads.halves_apart:
                for half, part in zip(grads.home, left.chunk(2, dim=1), strict=True):
                    out = half[index].t() if grads.transposed else half[index]
                    add_outer(out, (part, right), accumulate=adds)
            else:
                add_outer(stored_matrices(grads)[family][index], (left, right), accumulate=adds)


def family_of(field: WeightSet, slot: int) -> tuple[int, int]:
    """Family of a slot of this rank, and the slot inside it.

    Args:
        field: weights or gradients of every family.
        slot: 0..n-1: home, then static, then replica slots.
    """
    num_static = 0 if field.static is None else len(field.static)
    if slot < field.num_home:
        return HOME, slot
    if slot < field.num_home + num_static:
        return STATIC, slot - field.num_home
    return REPLICA, slot - field.num_home - num_static
