"""Tokens to the ranks that compute their rows, and everything that travels back.

The collectives of one use of one layer, in the order in which every rank calls them. Tables with
`hops` send rows over two hops (`relibra.hop_tables` says what is summed and rounded there).

Letters: T tokens here, K choices, V tokens sent, U tokens received, R rows computed here, D model
dim, N rows returned one by one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from relibra_kernels.ops import direct_ops

if TYPE_CHECKING:
    import torch

    from relibra.balanced_moe import MoEHandle
    from relibra.hop_tables import ExactReturn
    from relibra.rank_tables import LayerTables
    from relibra_kernels.transport.dispatch import Arrival

_REDUCED = 'tables: built for combine="reduced", used for combine="exact"'


def _start_out(x_TD: torch.Tensor, handle: MoEHandle, name: str, channel: str) -> Arrival:
    """Sent tokens on their way to their destinations; ``x`` has one row a sent token."""
    tables, what = handle.tables, f"{handle.what}: {name}"
    if tables.hops is not None:
        return handle.movers.start_relay(x_TD, tables.hops.out, what)
    splits = tables.send_splits, tables.recv_splits
    return handle.movers.start_exchange(x_TD, *splits, what, channel)


def _start_back(x_UD: torch.Tensor, handle: MoEHandle, name: str, channel: str) -> Arrival:
    """One row a received token on its way back; one row a sent token arrives.

    Over two hops the relay rank adds the ranks of its node.
    """
    tables, what = handle.tables, f"{handle.what}: {name}"
    if tables.hops is not None:
        return handle.movers.start_relay(x_UD, tables.hops.back, what)
    splits = tables.recv_splits, tables.send_splits
    return handle.movers.start_exchange(x_UD, *splits, what, channel)


def _start_tokens(x_TD: torch.Tensor, handle: MoEHandle, name: str, channel: str) -> Arrival:
    return _start_out(x_TD.index_select(0, handle.tables.send_token_V), handle, name, channel)


@dataclasses.dataclass(slots=True)
class PendingTokens:
    """Tokens and their scores on their way; `start_tokens` makes it."""

    x_UD: Arrival
    scores_UK: Arrival

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``[U, D]`` received tokens and ``[U, K]`` their scores."""
        return self.x_UD.wait(), self.scores_UK.wait()


def start_tokens(x_TD: torch.Tensor, scores_TK: torch.Tensor, handle: MoEHandle) -> PendingTokens:
    """Sends each token once to every rank that computes a row of it, with its scores.

    All K scores of a token travel; only those of the choices computed there are read.

    Args:
        x_TD: ``[T, D]``.
        scores_TK: ``[T, K]`` in the accumulation dtype.
        handle: of the use.
    """
    if handle.virtual is not None:
        return handle.virtual.start_tokens(x_TD, scores_TK)
    x_UD = _start_tokens(x_TD, handle, "tokens", "x")
    return PendingTokens(x_UD, _start_tokens(scores_TK, handle, "scores", "scores"))


def dispatch_again(x_TD: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """The tokens of `start_tokens` once more, for a backward that did not keep them."""
    return _start_tokens(x_TD, handle, "tokens again", "x").wait()


def dispatch_grads(dy_TD: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """Output gradients of the sent tokens, where their rows were computed."""
    return _start_tokens(dy_TD, handle, "output gradients", "dy").wait()


def _combine(
    rows: torch.Tensor, index: torch.Tensor, scores: torch.Tensor | None, handle: MoEHandle
) -> torch.Tensor:
    out: torch.Tensor = direct_ops.combine(rows, index, scores, handle.kernels)
    return out


@dataclasses.dataclass(slots=True)
class PendingSum:
    """Rows on their way back to the tokens that they are summed for.

    Attributes:
        rows: what arrives.
        index_TJ: int32 ``[T, J]``, the arriving rows of each token in the order of the sum.
        scores_TJ: ``[T, J]`` factors, None for ones.
        kernels: as in the handle.
    """

    rows: Arrival
    index_TJ: torch.Tensor
    scores_TJ: torch.Tensor | None
    kernels: str

    def wait(self) -> torch.Tensor:
        """``[T, D]`` sums."""
        total: torch.Tensor = direct_ops.combine(
            self.rows.wait(), self.index_TJ, self.scores_TJ, self.kernels
        )
        return total


def start_output(
    y_RD: torch.Tensor,
    scores_TK: torch.Tensor | None,
    scores_UK: torch.Tensor | None,
    handle: MoEHandle,
) -> PendingSum:
    """Outputs of the rows, times scores if given, on their way to be summed for each token.

    In ``reduced`` they are summed at each destination, then over destinations (nodes, over two
    hops) by ascending rank. In ``exact`` they return one by one, and the source multiplies and
    sums in the order of the choices.

    Args:
        y_RD: ``[R, D]``.
        scores_TK: ``[T, K]`` of the tokens here; None where the rows are scaled already.
        scores_UK: ``[U, K]`` of the received tokens, likewise.
        handle: of the use.
    """
    tables, movers = handle.tables, handle.movers
    if not handle.is_exact:
        part_UD = _combine(y_RD, tables.token_choice_to_row_UK, scores_UK, handle)
        rows = _start_back(part_UD, handle, "partial outputs", "y")
        return PendingSum(rows, tables.token_to_return_TJ, None, handle.kernels)
    if tables.return_row_N is None or tables.choice_to_return_TK is None:
        raise RuntimeError(_REDUCED)
    y_ND, what = y_RD.index_select(0, tables.return_row_N), f"{handle.what}: output rows"
    if tables.hops is None:
        rows = movers.start_exchange(y_ND, tables.recv_rows_G, tables.send_rows_G, what, "y")
    else:
        rows = movers.start_relay(y_ND, _exact_ways(tables).rows, what)
    return PendingSum(rows, tables.choice_to_return_TK, scores_TK, handle.kernels)


def _exact_ways(tables: LayerTables) -> ExactReturn:
    assert tables.hops is not None
    if tables.hops.exact is None:
        raise RuntimeError(_REDUCED)
    return tables.hops.exact


def start_dx(dx_RD: torch.Tensor, handle: MoEHandle) -> PendingSum:
    """Sums the gradients of the rows at each destination and sends them on their way back.

    In ``exact`` a relay rank adds nothing: the sum of each destination reaches the source.

    Args:
        dx_RD: ``[R, D]``.
        handle: of the use.
    """
    tables, name = handle.tables, "input gradients"
    dx_UD = _combine(dx_RD, tables.token_choice_to_row_UK, None, handle)
    if tables.hops is not None and handle.is_exact:
        ways = _exact_ways(tables)
        rows = handle.movers.start_relay(dx_UD, ways.pairs, f"{handle.what}: {name}")
        return PendingSum(rows, ways.pair_to_return_TJ, None, handle.kernels)
    rows = _start_back(dx_UD, handle, name, "dx")
    return PendingSum(rows, tables.token_to_return_TJ, None, handle.kernels)


def start_dscores(dscore_R: torch.Tensor, handle: MoEHandle) -> PendingSum:
    """``<dy, expert(x)> = <W2^T dy, a>``, so the second GEMM's output is not needed again.

    Exactly one destination holds each choice, so all sums on the way add zeros: they are exact.

    Args:
        dscore_R: ``[R]`` in the accumulation dtype.
        handle: of the use.
    """
    tables = handle.tables
    dscores_UK = direct_ops.row_scores(
        dscore_R, tables.token_choice_to_row_UK, tables.row_to_choice_R, handle.kernels
    )
    rows = _start_back(dscores_UK, handle, "score gradients", "dscores")
    return PendingSum(rows, tables.token_to_return_TJ, None, handle.kernels)
