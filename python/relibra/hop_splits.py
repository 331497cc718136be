"""Where a rank stands in a two-hop dispatch, and the split sizes of its hops: host integers only.

Letters: G ranks, N nodes, P ranks of a node.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.layout import Int64Array
    from relibra.rank_tables import SourceRoute
    from relibra.topology import Topology


@dataclasses.dataclass(frozen=True)
class HopRanks:
    """The ranks as a grid of nodes and local indices, and one rank's place in it.

    The local index of a rank is its place among the ranks of its node by (rail, rank).

    Attributes:
        grid_NP: int64 ``[N, P]``, rank of each (node, local index).
        node_G, local_G: int64 ``[G]``, place of each rank in the grid.
        rank: this rank.

    Example:
        >>> from relibra.topology import Topology
        >>> topology = Topology(rank_to_node=[1, 0, 0, 1], rank_to_rail=[1, 1, 0, 0])
        >>> hops = HopRanks.of(topology, 3)
        >>> hops.grid_NP.tolist(), hops.rail_ranks.tolist(), hops.node_ranks.tolist()
        ([[2, 1], [3, 0]], [2, 3], [3, 0])
    """

    grid_NP: Int64Array
    node_G: Int64Array
    local_G: Int64Array
    rank: int

    @classmethod
    def of(cls, topology: Topology, rank: int) -> HopRanks:
        """Lay the ranks of a topology out.

        Args:
            topology: of the ranks.
            rank: this rank.

        Raises:
            PlanError: its nodes have different sizes.
        """
        sizes = topology.node_sizes
        if len(set(sizes)) != 1:
            raise PlanError(
                f'dispatch: "two_hop" needs nodes of one size, got {list(sizes)} ranks; use "flat"'
            )
        node_G = topology.rank_to_node_G.astype(np.int64)
        order = np.lexsort((np.arange(node_G.size), topology.rank_to_rail_G, node_G))
        local_G = np.empty_like(node_G)
        local_G[order] = np.arange(node_G.size) % sizes[0]
        return cls(order.reshape(-1, sizes[0]).astype(np.int64), node_G, local_G, rank)

    @property
    def node(self) -> int:
        """Node of this rank."""
        return int(self.node_G[self.rank])

    @property
    def local(self) -> int:
        """Local index of this rank."""
        return int(self.local_G[self.rank])

    @property
    def rail_ranks(self) -> Int64Array:
        """Ranks with this rank's local index, by node."""
        return np.asarray(self.grid_NP[:, self.local], np.int64)

    @property
    def node_ranks(self) -> Int64Array:
        """Ranks of this rank's node, by local index."""
        return np.asarray(self.grid_NP[self.node], np.int64)

    @property
    def is_flat(self) -> bool:
        """Whether one of the hops would move nothing, so that the other does it all."""
        return 1 in self.grid_NP.shape

    def through_here(self, by_pair_GG: Int64Array) -> Int64Array:
        """``[N, P]``: what ranks of this rail (by node) send to ranks of this node.

        Args:
            by_pair_GG: ``[source, destination]`` counts.
        """
        pairs = np.ix_(self.rail_ranks, self.node_ranks)
        return np.asarray(by_pair_GG[pairs], np.int64)


@dataclasses.dataclass(frozen=True)
class HopSplits:
    """Split sizes of every path of one use; lists over the rail have N entries, others P.

    Attributes:
        rail_send, rail_recv: tokens out, first hop: one a (token, node).
        node_send, node_recv: tokens out, second hop: one a (token, rank).
        pairs_send, pairs_recv: (token, rank) pairs back over the rail, one by one: by the relay
            rank, at the source.
        rows_to_relay, rows_at_relay: output rows back inside the node: by the destination, at the
            relay rank.
        rows_send, rows_recv: output rows back over the rail: by the relay rank, at the source.

    Example:
        Two nodes of two ranks; every rank sends one token, which has a row on each rank of the
        other node, so it crosses once instead of twice.

        >>> from relibra.topology import Topology
        >>> pairs = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
        >>> counts = np.concatenate([pairs, [[0, 1], [0, 1], [1, 0], [1, 0]]], 1)
        >>> ranks = HopRanks.of(Topology(2, 2), 0)
        >>> splits = HopSplits.of(ranks, counts, pairs[0], pairs[:, 0], ranks.through_here(pairs))
        >>> splits.rail_send, splits.rail_recv, splits.node_send, splits.node_recv
        ([0, 1], [0, 1], [1, 1], [1, 1])
        >>> cross_node_tokens(counts, Topology(2, 2))
        (8, 4)
    """

    rail_send: list[int]
    rail_recv: list[int]
    node_send: list[int]
    node_recv: list[int]
    pairs_send: list[int]
    pairs_recv: list[int]
    rows_to_relay: list[int]
    rows_at_relay: list[int]
    rows_send: list[int]
    rows_recv: list[int]

    @classmethod
    def of(
        cls,
        ranks: HopRanks,
        counts: Int64Array,
        send_rows_G: Int64Array,
        recv_rows_G: Int64Array,
        relay_rows_NP: Int64Array,
    ) -> HopSplits:
        """Splits of one rank, from counts that it holds before the use.

        Args:
            ranks: where it stands.
            counts: ``[G, G + N]``, distinct tokens of each source for each rank, then each node.
            send_rows_G: rows to each rank.
            recv_rows_G: rows from each rank.
            relay_rows_NP: rows that pass here, see `HopRanks.through_here`.
        """
        num_ranks, rank, grid = len(ranks.node_G), ranks.rank, ranks.grid_NP
        pairs_GG, to_node_GN = counts[:, :num_ranks], counts[:, num_ranks:]
        relay_NP = ranks.through_here(pairs_GG)
        send_rows, recv_rows = np.asarray(send_rows_G), np.asarray(recv_rows_G)
        return cls(
            rail_send=to_node_GN[rank].tolist(),
            rail_recv=to_node_GN[ranks.rail_ranks, ranks.node].tolist(),
            node_send=relay_NP.sum(0).tolist(),
            node_recv=pairs_GG[:, rank][grid].sum(0).tolist(),
            pairs_send=relay_NP.sum(1).tolist(),
            pairs_recv=pairs_GG[rank][grid].sum(1).tolist(),
            rows_to_relay=recv_rows[grid].sum(0).tolist(),
            rows_at_relay=relay_rows_NP.sum(0).tolist(),
            rows_send=relay_rows_NP.sum(1).tolist(),
            rows_recv=send_rows[grid].sum(1).tolist(),
        )


@dataclasses.dataclass(frozen=True)
class Splits:
    """Split sizes of the tokens of one use.

    Attributes:
        send, recv: tokens to and from each rank, ``[G]``.
        hops: those of a two-hop dispatch, None where tokens travel directly.
        send_first: place of this rank's first token among those that each rank receives, ``[G]``.
        return_first: place of the first token that this rank returns to each rank, among all that
            are returned to that rank, ``[G]``.

    Example:
        >>> from relibra.layout import ExpertLayout
        >>> from relibra.rank_tables import SourceRoute
        >>> counts = np.array([[1, 2], [3, 4]])
        >>> source = SourceRoute.live(counts, ExpertLayout.identity(2, 2), 0, 1, 1)
        >>> splits = Splits.of(counts, 1, source, None)
        >>> splits.send, splits.recv, splits.send_first, splits.return_first
        ([3, 4], [2, 4], [1, 2], [1, 3])
    """

    send: list[int]
    recv: list[int]
    hops: HopSplits | None = None
    send_first: list[int] = dataclasses.field(default_factory=list)
    return_first: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls, counts: Int64Array, rank: int, source: SourceRoute, ranks: HopRanks | None
    ) -> Splits:
        """Splits of one rank.

        Args:
            counts: ``[G, G (+ N)]``, what `count_tokens` gave on every rank.
            rank: this rank.
            source: of this rank, built with the same ``ranks``.
            ranks: place in a two-hop dispatch, None without one.
        """
        num_ranks = len(counts)
        pairs_GG = counts[:, :num_ranks]
        send, recv = pairs_GG[rank].tolist(), pairs_GG[:, rank].tolist()
        if ranks is None or source.relay_rows_NP is None:
            before = pairs_GG[:rank].sum(0).tolist(), pairs_GG[:, :rank].sum(1).tolist()
            return cls(send, recv, None, *before)
        rows = np.asarray(source.send_rows_G), np.asarray(source.recv_rows_G)
        return cls(send, recv, HopSplits.of(ranks, counts, *rows, source.relay_rows_NP))


def count_tokens(
    source: SourceRoute,
    ids_TK: torch.Tensor,
    num_ranks: int,
    ranks: HopRanks | None,
    backend: str = "auto",
) -> torch.Tensor:
    """Distinct tokens of this rank for each rank and, in a two-hop dispatch, for each node.

    Args:
        source: of this rank.
        ids_TK: int32 ``[T, K]``.
        num_ranks: G.
        ranks: place in a two-hop dispatch, None without one.
        backend: who counts, see `relibra_kernels.ops`.

    Returns:
        int64 ``[G]`` or ``[G + N]``.
    """
    sends = source.count_sends(ids_TK, num_ranks, backend)
    if ranks is None:
        return sends
    first, nodes, quota, _ = node_quota(source, ranks, ids_TK.device)
    to_node: torch.Tensor = torch.ops.relibra.count_sends(
        ids_TK, first, nodes, quota, 1, len(ranks.grid_NP), backend
    )
    return torch.cat([sends, to_node])


def node_quota(
    source: SourceRoute, ranks: HopRanks, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The source's slot lists with every slot replaced by its node: one "slot" a "rank".

    The routing ops then count and route to nodes, while rows stay rows of the real slots.

    Args:
        source: of this rank.
        ranks: where it stands.
        device: of the result.

    Returns:
        Expert offsets, nodes, quotas and first rows: arguments of the op ``build_route``.
    """
    expert_first, slot_id, slot_quota, slot_first_row = source.quota.tensors()
    node_of_slot = torch.from_numpy(ranks.node_G)[slot_id // source.slot_rows_n.numel()]
    lists = expert_first, node_of_slot.to(torch.int32), slot_quota, slot_first_row
    first, nodes, quota, rows = (x.to(device, non_blocking=True) for x in lists)
    return first, nodes, quota, rows


def cross_node_tokens(counts: Int64Array, topology: Topology) -> tuple[int, int]:
    """Tokens that cross between nodes in one dispatch: flat, and over two hops.

    Times D and the bytes of a number, these are the bytes on the network of one way of the layer;
    the way back is the same, but for ``combine="exact"``, which returns (token, choice) rows.

    Args:
        counts: ``[..., G, G + N]``, what `count_tokens` gave on every rank; summed over uses.
        topology: of the ranks.
    """
    node_G, num_ranks = topology.rank_to_node_G, topology.num_ranks
    across_GG = node_G[:, None] != node_G[None]
    across_GN = node_G[:, None] != np.arange(topology.num_nodes)[None]
    flat = counts[..., :num_ranks][..., across_GG].sum(dtype=np.int64)
    return int(flat), int(counts[..., num_ranks:][..., across_GN].sum(dtype=np.int64))
