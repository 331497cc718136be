"""Gradient of the weights of a grouped GEMM, into fp32 buffers that the caller owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relibra_kernels.tables import slot_bases

if TYPE_CHECKING:
    from collections.abc import Iterable


def grouped_gemm_wgrad(
    grad_RN: torch.Tensor,
    rows_RD: torch.Tensor,
    slot_rows_n: torch.Tensor,
    block_rows: int,
    home_grad_HND: torch.Tensor,
    replica_grad_SND: torch.Tensor,
    accumulate_home: bool,
) -> None:
    """``d_w[slot] = sum over the slot's rows r of outer(grad[r], rows[r])``; padding is not read.

    Args:
        grad_RN: ``[R, N]``, gradient of the output of ``grouped_gemm``.
        rows_RD: ``[R, D]``, its input, dtype of ``grad``.
        slot_rows_n: int32 or int64 ``[H + S]``, rows of each slot; slots lie in the rows as
            `relibra_kernels.tables.slot_bases` says.
        block_rows: rows of a tile, to which every slot's rows are padded.
        home_grad_HND: fp32 ``[H, N, D]`` (fp64 with fp64 rows), written here.
        replica_grad_SND: fp32 ``[S, N, D]``, overwritten here: it held another layer's gradients.
        accumulate_home: add to ``home_grad`` (``main_grad``; empty slots keep their bits) instead
            of overwriting it (empty slots get exact zeros).

    Raises:
        TypeError, ValueError: an argument breaks the contract above; bf16 gradients are refused.

    Example:
        >>> import relibra_kernels
        >>> home, replica = torch.full((2, 1, 1), 100.0), torch.full((1, 1, 1), float("nan"))
        >>> torch.ops.relibra.grouped_gemm_wgrad(
        ...     torch.tensor([[1.0], [2.0], [4.0], [float("nan")]]),
        ...     torch.tensor([[10.0], [10.0], [1.0], [float("nan")]]),
        ...     torch.tensor([2, 0, 1]), 2, home, replica, True)
        >>> home.flatten().tolist(), replica.flatten().tolist()
        ([130.0, 100.0], [4.0])
    """
    num_home = home_grad_HND.shape[0]
    base = slot_bases(slot_rows_n, block_rows).tolist()
    for slot, num_rows in enumerate(slot_rows_n.tolist()):
        here = slice(base[slot], base[slot] + num_rows)
        operands = (grad_RN[here], rows_RD[here])
        if slot >= num_home:
            add_outer(replica_grad_SND[slot - num_home], operands, accumulate=False)
        else:
            add_outer(home_grad_HND[slot], operands, accumulate=accumulate_home)


def add_outer(out_ND: torch.Tensor, operands: Iterable[torch.Tensor], *, accumulate: bool) -> None:
    """``out (+)= grad.T @ rows`` in the dtype of ``out``; without rows: nothing, or zeros."""
    grad, rows = (operand.to(out_ND.dtype) for operand in operands)
    if not accumulate:
        torch.mm(grad.t(), rows, out=out_ND) if len(rows) else out_ND.zero_()
    elif len(rows):
        out_ND.addmm_(grad.t(), rows)
