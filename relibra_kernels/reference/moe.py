"""The dense reference of a whole layer: one loop over experts, no tables, plain autograd."""

from __future__ import annotations

import torch


def dense_moe(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    scores_TK: torch.Tensor,
    w13_E2FD: torch.Tensor,
    w2_EDF: torch.Tensor,
) -> torch.Tensor:
    """``y[t] = sum_k scores[t, k] * w2[e] @ (silu(w1[e] @ x[t]) * (w3[e] @ x[t]))``, e = ids[t, k].

    The oracle of tests: run it in fp32 or fp64. Choices of one token are summed in ascending
    expert order, so compare with a tolerance.

    Args:
        x_TD: ``[T, D]``.
        ids_TK: integers ``[T, K]``, -1 takes no part.
        scores_TK: ``[T, K]``.
        w13_E2FD: ``[E, 2F, D]``, gate rows, then up rows.
        w2_EDF: ``[E, D, F]``.

    Returns:
        ``[T, D]`` in the dtype of ``x``. Differentiable in x, scores, w13 and w2.

    Raises:
        IndexError: an id of E or more.

    Example:
        >>> one = torch.ones(1, 1)
        >>> y = dense_moe(one, torch.tensor([[0]]), 3 * one, torch.ones(1, 2, 1), one[None])
        >>> round(y.item(), 4)
        2.1932
    """
    out = torch.zeros_like(x_TD)
    for expert in torch.unique(ids_TK[ids_TK >= 0]).tolist():
        token, choice = torch.nonzero(ids_TK == expert, as_tuple=True)
        gate, up = (x_TD[token] @ w13_E2FD[expert].t()).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ w2_EDF[expert].t()
        out = out.index_add(0, token, y * scores_TK[token, choice, None])
    return out
