"""Index tables of a two-hop dispatch, and the tables of a use over either transport.

A token is sent once to each node, to its relay rank there (`relibra.hop_splits`), which passes it
on to the ranks of its node that compute rows of it. Received tokens lie by (relay rank, source
node, token) and not by source rank; nothing but the index tables depends on that order.

What is rounded where. ``combine="reduced"``: a destination sums a token's rows in fp32 and rounds
to the dtype of x; the relay rank adds the partial sums of its node, by ascending local index, in
fp32 and rounds once more to that dtype, which is what crosses the network; the source adds the
nodes in fp32 and rounds the result. So it is for y and dx; fp64 stays fp64. ``combine="exact"``:
the relay rank adds nothing, rows of y and sums of dx of each rank reach the source as they were and
are added in the order of a flat dispatch, so every bit is that of ``dispatch="flat"``. Score
gradients are fp32 on every hop, and their sums add zeros: exact.

Letters: T tokens here, K choices, A tokens sent over the rail (one a token and node), W tokens
received over it, B tokens passed on inside the node, U tokens received; G ranks, N nodes, P ranks
of a node.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from relibra.hop_splits import node_quota
from relibra.places import by_choice, by_rank, compact, numbered
from relibra.rank_tables import LayerTables
from relibra_kernels.transport.two_hop import Relay

if TYPE_CHECKING:
    from relibra.hop_splits import HopRanks, HopSplits, Splits
    from relibra.movers import GroupMovers
    from relibra.rank_tables import Exchange, SourceRoute
    from relibra.runtime import Runtime
    from relibra_kernels.ops.launch_data import WeightCache


@dataclasses.dataclass(frozen=True)
class HopPaths:
    """How rows travel over both hops in one use, as one rank sees it.

    Attributes:
        out: tokens to their destinations.
        back: the way back with a sum over the ranks of a node.
        exact: the ways back without a sum, None unless ``combine="exact"``.
    """

    out: Relay
    back: Relay
    exact: ExactReturn | None = None


@dataclasses.dataclass(frozen=True)
class HopTables:
    """Tables of both hops of one use on one rank, for `LayerTables`.

    Attributes:
        send_token_A: int32 ``[A]``, token of each row sent over the rail, by node, then token.
        send_rows_AK: int32 ``[A, K]``, row of each choice at its destination, -1 where that is in
            another node.
        token_to_return_TJ: int32 ``[T, min(K, N)]``, sent rows of a token by ascending node.
        token_choice_to_row_UK: int32 ``[U, K]``, row of each choice of a received token.
        paths: of all rows of the use.
    """

    send_token_A: torch.Tensor
    send_rows_AK: torch.Tensor
    token_to_return_TJ: torch.Tensor
    token_choice_to_row_UK: torch.Tensor
    paths: HopPaths

    @classmethod
    def build(
        cls,
        ids_TK: torch.Tensor,
        source: SourceRoute,
        splits: HopSplits,
        ranks: HopRanks,
        exchanges: tuple[Exchange, Exchange],
        *,
        exact: bool,
        backend: str = "auto",
    ) -> HopTables:
        """Build the tables; the rows of the sent tokens travel over both hops here.

        Args:
            ids_TK: int32 ``[T, K]``, where the tables shall be.
            source: host integers of this use, built with ``ranks``.
            splits: of this use.
            ranks: where this rank stands.
            exchanges: all-to-all over the rail group and over the node group.
            exact: build `ExactReturn` too.
            backend: who builds, see `relibra_kernels.ops`.
        """
        over_rail, inside_node = exchanges
        num_nodes, num_local = ranks.grid_NP.shape
        rail_send, rail_recv = splits.rail_send, splits.rail_recv
        node_send, node_recv = splits.node_send, splits.node_recv
        lists = node_quota(source, ranks, ids_TK.device)
        _, send_token, send_rows, to_return = torch.ops.relibra.build_route(
            ids_TK, *lists, 1, num_nodes, sum(rail_send), backend
        )
        rank_TK = _rank_of_choices(ids_TK, source, backend)
        local_G = torch.from_numpy(ranks.local_G).to(rank_TK.device, torch.int32, non_blocking=True)
        local_TK = local_G[rank_TK.clamp_min(0)]  # -1 is masked with the rows
        locals_AK = torch.where(send_rows >= 0, local_TK.index_select(0, send_token), -1)
        arrived = over_rail(torch.cat([send_rows, locals_AK], 1), rail_send, rail_recv)
        rows_WK, locals_WK = arrived.chunk(2, 1)
        passed = PassedOn.of(rows_WK, locals_WK, num_local, sum(node_send))
        ways = None
        if exact:
            ways = ExactReturn.of(passed, splits, send_token, locals_AK, rank_TK, len(local_G))
        return cls(
            send_token_A=send_token,
            send_rows_AK=send_rows,
            token_to_return_TJ=to_return,
            token_choice_to_row_UK=inside_node(passed.rows_BK, node_send, node_recv),
            paths=HopPaths(
                out=Relay(True, rail_send, rail_recv, passed.token_B, node_send, node_recv),
                back=Relay(False, node_recv, node_send, passed.place_WP, rail_recv, rail_send),
                exact=ways,
            ),
        )


@dataclasses.dataclass(frozen=True)
class PassedOn:
    """What a relay rank passes on, by destination, then received token.

    Attributes:
        token_B: int32 ``[B]``, received token of each.
        rows_BK: int32 ``[B, K]``, row of each choice at that destination, -1 elsewhere.
        place_WP: int32 ``[W, P]``, place among the B of each (token, destination), -1 for none.

    Example:
        Two tokens with two choices each: token 0 goes to local ranks 1 and 0, token 1 to rank 1.

        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> passed = PassedOn.of(int32([[7, 3], [8, -1]]), int32([[1, 0], [1, -1]]), 2, 3)
        >>> passed.token_B.tolist(), passed.rows_BK.tolist()
        ([0, 0, 1], [[-1, 3], [7, -1], [8, -1]])
        >>> passed.place_WP.tolist()
        [[0, 1], [-1, 2]]
    """

    token_B: torch.Tensor
    rows_BK: torch.Tensor
    place_WP: torch.Tensor

    @classmethod
    def of(
        cls, rows_WK: torch.Tensor, locals_WK: torch.Tensor, num_local: int, count: int
    ) -> PassedOn:
        """From what arrived over the rail.

        Args:
            rows_WK: int32 ``[W, K]``, row of each choice at its destination, -1 for none.
            locals_WK: int32 ``[W, K]``, local index of that destination, -1 for none.
            num_local: P.
            count: B, known on the host.
        """
        place_PW = numbered(_present(locals_WK, num_local).T)
        num_tokens = len(rows_WK)
        cells = torch.arange(place_PW.numel(), dtype=torch.int32, device=rows_WK.device)
        cell_B = compact(torch.where(place_PW >= 0, cells.view(place_PW.shape), -1), count)
        token_B = cell_B % max(num_tokens, 1)
        local_B = cell_B // max(num_tokens, 1)
        here = locals_WK.index_select(0, token_B) == local_B[:, None]
        rows_BK = torch.where(here, rows_WK.index_select(0, token_B), -1)
        return cls(token_B, rows_BK, place_PW.T.contiguous())


@dataclasses.dataclass(frozen=True)
class ExactReturn:
    """Ways back on which a relay rank reorders rows and adds nothing.

    Attributes:
        rows: output rows, one a choice; at the source in (sent token, choice) order.
        pairs: one row a (sent token, destination); at the source in (sent token, local index)
            order.
        pair_to_return_TJ: int32 ``[T, min(K, G)]``, pairs of a token by ascending rank, -1 for
            none.
    """

    rows: Relay
    pairs: Relay
    pair_to_return_TJ: torch.Tensor

    @classmethod
    def of(
        cls,
        passed: PassedOn,
        splits: HopSplits,
        send_token_A: torch.Tensor,
        locals_AK: torch.Tensor,
        rank_TK: torch.Tensor,
        num_ranks: int,
    ) -> ExactReturn:
        """Build them; arguments as in `HopTables.build`.

        Args:
            passed: of the tokens that pass here.
            splits: of this use.
            send_token_A: int32 ``[A]``.
            locals_AK: int32 ``[A, K]``, local index of each choice's destination, -1 elsewhere.
            rank_TK: int32 ``[T, K]``, destination of each choice, -1 for none.
            num_ranks: G.
        """
        num_relayed, num_local = passed.place_WP.shape
        row_WK = by_choice(numbered(passed.rows_BK >= 0), passed.token_B, num_relayed)
        pair_AP = numbered(_present(locals_AK, num_local))
        pair_AK = pair_AP.gather(1, locals_AK.clamp_min(0).long())
        pair_AK = torch.where(locals_AK >= 0, pair_AK, -1)
        pair_TK = by_choice(pair_AK, send_token_A, len(rank_TK))
        return cls(
            rows=Relay(
                False,
                splits.rows_to_relay,
                splits.rows_at_relay,
                compact(row_WK, sum(splits.rows_send)),
                splits.rows_send,
                splits.rows_recv,
            ),
            pairs=Relay(
                False,
                splits.node_recv,
                splits.node_send,
                compact(passed.place_WP, sum(splits.pairs_send)),
                splits.pairs_send,
                splits.pairs_recv,
            ),
            pair_to_return_TJ=by_rank(pair_TK, rank_TK, min(rank_TK.shape[1], num_ranks)),
        )


def build_tables(
    runtime: Runtime,
    movers: GroupMovers,
    ids_TK: torch.Tensor,
    source: SourceRoute,
    splits: Splits,
    what: str,
    *,
    num_home: int,
    device: torch.device | None = None,
    weights: WeightCache | None = None,
) -> LayerTables:
    """Tables of one use over the transport of a runtime; collective: the rows travel.

    Args:
        runtime: tile size, kernels and transport.
        movers: of this use.
        ids_TK: int32 ``[T, K]``, on any device.
        source: host integers of this use.
        splits: of this use.
        what: names the use in errors.
        num_home: H.
        device: of the tables, None takes that of the ids.
        weights: what the launches of the layer remember; None makes no launch data here.
    """
    hops, ranks, exact = None, runtime.dispatcher.ranks, runtime.combine == "exact"
    if ranks is not None and splits.hops is not None:
        ids_TK = ids_TK.to(ids_TK.device if device is None else device, non_blocking=True)
        exchanges = movers.hop_exchanges(f"{what}: rows")
        hops = HopTables.build(
            ids_TK, source, splits.hops, ranks, exchanges, exact=exact, backend=runtime.kernels
        )

    def exchange(x: torch.Tensor, send: list[int], recv: list[int]) -> torch.Tensor:
        return movers.exchange(x, send, recv, f"{what}: rows")

    return LayerTables.build(
        ids_TK,
        source,
        splits.send,
        splits.recv,
        exchange,
        num_home=num_home,
        block_rows=runtime.block_rows,
        device=device,
        backend=runtime.kernels,
        hops=hops,
        exact=exact,
        weights=weights,
    )


def _rank_of_choices(ids_TK: torch.Tensor, source: SourceRoute, backend: str) -> torch.Tensor:
    """Rank that computes each choice, int32 ``[T, K]``, -1 for none."""
    lists = [x.to(ids_TK.device, non_blocking=True) for x in source.quota.tensors()[:3]]
    slots: torch.Tensor = torch.ops.relibra.route_to_slots(ids_TK, *lists, backend)
    return torch.div(slots, source.slot_rows_n.numel(), rounding_mode="floor")


def _present(locals_XK: torch.Tensor, num_local: int) -> torch.Tensor:
    """Whether any choice names a local index, bool ``[X, P]``."""
    local_P = torch.arange(num_local, dtype=locals_XK.dtype, device=locals_XK.device)
    return (locals_XK[:, :, None] == local_P).any(1)
