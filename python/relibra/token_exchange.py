"""Tokens to the ranks that compute their rows, and everything that travels back.

The collectives of one use of one layer, in the order in which every rank calls them. What moves the
rows (one hop or two) is the business of `handle.movers`.

Letters: T tokens here, K choices, V tokens sent, U tokens received, R rows computed here, D model
dim, N rows returned one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from relibra.balanced_moe import MoEHandle

_relibra = torch.ops.relibra


def _exchange(x: torch.Tensor, handle: MoEHandle, name: str) -> torch.Tensor:
    """Source -> destination, one row a sent token."""
    tables = handle.tables
    return handle.movers.exchange(
        x, tables.send_splits, tables.recv_splits, f"{handle.what}: {name}"
    )


def _exchange_back(x: torch.Tensor, handle: MoEHandle, name: str) -> torch.Tensor:
    """Destination -> source, one row a received token."""
    tables = handle.tables
    return handle.movers.exchange(
        x, tables.recv_splits, tables.send_splits, f"{handle.what}: {name}"
    )


def dispatch_tokens(
    x_TD: torch.Tensor, scores_TK: torch.Tensor, handle: MoEHandle
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends each token once to every rank that computes a row of it, with its scores there."""
    tables = handle.tables
    x_UD = _exchange(x_TD.index_select(0, tables.send_token_V), handle, "tokens")
    scores_VK = torch.where(
        tables.send_rows_VK >= 0, scores_TK.index_select(0, tables.send_token_V), 0.0
    )
    return x_UD, _exchange(scores_VK, handle, "scores")


def dispatch_grads(dy_TD: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """Output gradients of the sent tokens, where their rows were computed."""
    return _exchange(dy_TD.index_select(0, handle.tables.send_token_V), handle, "output gradients")


def _combine(
    rows: torch.Tensor, index: torch.Tensor, scores: torch.Tensor | None, handle: MoEHandle
) -> torch.Tensor:
    out: torch.Tensor = _relibra.combine(rows, index, scores, handle.kernels)
    return out


def combine_reduced(
    y_RD: torch.Tensor, scores_TK: torch.Tensor, scores_UK: torch.Tensor, handle: MoEHandle
) -> torch.Tensor:
    """Scores applied and summed at each destination, then over destinations by ascending rank."""
    tables = handle.tables
    part_UD = _combine(y_RD, tables.token_choice_to_row_UK, scores_UK, handle)
    part_VD = _exchange_back(part_UD, handle, "partial outputs")
    return _combine(part_VD, tables.token_to_return_TJ, None, handle)


def combine_exact(
    y_RD: torch.Tensor, scores_TK: torch.Tensor, scores_UK: torch.Tensor, handle: MoEHandle
) -> torch.Tensor:
    """Unscaled rows return; the source multiplies and sums in choice order."""
    tables = handle.tables
    back_ND = handle.movers.exchange(
        y_RD.index_select(0, tables.return_row_N),
        tables.recv_rows_G,
        tables.send_rows_G,
        f"{handle.what}: output rows",
    )
    return _combine(back_ND, tables.choice_to_return_TK, scores_TK, handle)


def return_dx(dx_RD: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """Gradients of the rows -> ``[T, D]``, summed at each destination, then by ascending rank."""
    tables = handle.tables
    dx_UD = _combine(dx_RD, tables.token_choice_to_row_UK, None, handle)
    dx_VD = _exchange_back(dx_UD, handle, "input gradients")
    return _combine(dx_VD, tables.token_to_return_TJ, None, handle)


def return_dscores(dscore_R: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """``<dy, expert(x)> = <W2^T dy, a>``, so the second GEMM's output is not needed again."""
    tables = handle.tables
    dscores_UK = _relibra.row_scores(
        dscore_R, tables.token_choice_to_row_UK, tables.row_to_choice_R, handle.kernels
    )
    dscores_VK = _exchange_back(dscores_UK, handle, "score gradients")
    # Exactly one destination holds each choice, so the sum adds zeros: it is exact.
    return _combine(dscores_VK, tables.token_to_return_TJ, None, handle)
