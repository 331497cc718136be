"""From a plan to what one rank needs for one use of one layer: quotas, splits, index tables.

Two stages. ``SourceRoute`` holds host integers only: it follows from the plan and the counts that
every rank knows, without communication. ``LayerTables`` adds the index tables that depend on this
rank's own expert ids and on the rows that travel with the tokens.

Letters: T tokens here, K choices a token, V tokens sent, U tokens received, R rows computed here,
E experts, G ranks, n slots a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra.copy_lists import copy_lists
from relibra.places import by_choice, compact, numbered
from relibra_kernels.ops import direct_ops
from relibra_kernels.ops.launch_data import LaunchData, uploaded
from relibra_kernels.tables import SlotQuota, m_tiles

if TYPE_CHECKING:
    from relibra.hop_splits import HopRanks
    from relibra.hop_tables import HopPaths, HopTables
    from relibra.plan import ExpertLayout
    from relibra_kernels.ops.launch_data import WeightCache

Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


def slot_quota_of(
    slot_expert_S: np.ndarray,
    quota_GS: np.ndarray,
    rank: int,
    *,
    num_experts: int,
    num_ranks: int,
    block_rows: int,
) -> SlotQuota:
    """Rows of one source rank by slot, ordered by expert: the input of ``build_route``.

    Args:
        slot_expert_S: int32 ``[G*n]``, expert of every slot, -1 for none.
        quota_GS: int32 ``[G, G*n]``, rows that each source rank sends to each slot.
        rank: the source rank.
        num_experts: E.
        num_ranks: G.
        block_rows: rows of a GEMM tile; every slot's rows start at a multiple of it.

    Returns:
        Slots in (expert, slot id) order with this source's rows and its first row in each.

    Example:
        Two ranks with one home slot and one replica slot each; rank 1 also holds a copy of
        expert 0 and source 1 sends it 3 rows.

        >>> quota = slot_quota_of(
        ...     np.array([0, -1, 1, 0], np.int32),
        ...     np.array([[2, 0, 1, 0], [1, 0, 4, 3]], np.int32),
        ...     1, num_experts=2, num_ranks=2, block_rows=4)
        >>> quota.expert_first.tolist(), quota.slot_id.tolist()
        ([0, 2, 3], [0, 3, 2])
        >>> quota.slot_quota.tolist(), quota.slot_first_row.tolist()
        ([1, 3, 4], [2, 8, 1])
    """
    slots_per_rank = slot_expert_S.size // num_ranks
    slot_rows_Gn = quota_GS.sum(0, dtype=np.int64).reshape(num_ranks, slots_per_rank)
    padded_Gn = -(-slot_rows_Gn // block_rows) * block_rows
    base_S = (np.cumsum(padded_Gn, axis=1) - padded_Gn).reshape(-1)
    first_S = base_S + quota_GS[:rank].sum(0, dtype=np.int64)
    held = np.flatnonzero(slot_expert_S >= 0)
    slots = held[np.argsort(slot_expert_S[held], kind="stable")]
    count_E = np.bincount(slot_expert_S[slots], minlength=num_experts)
    expert_first = np.concatenate([[0], np.cumsum(count_E)]).astype(np.int32)
    return SlotQuota(
        expert_first=torch.from_numpy(expert_first),
        slot_id=torch.from_numpy(slots.astype(np.int32)),
        slot_quota=torch.from_numpy(quota_GS[rank, slots].astype(np.int32)),
        slot_first_row=torch.from_numpy(first_S[slots].astype(np.int32)),
    )


@dataclasses.dataclass(frozen=True)
class SourceRoute:
    """Host integers of one (pass, micro-batch, layer) on one rank.

    Attributes:
        quota: this source's rows by slot, in expert order.
        slot_rows_n: int32 ``[n]``, rows of each slot of this rank.
        send_rows_G, recv_rows_G: rows (not tokens) to and from each rank.
        push_list, pull_list: see :func:`copy_lists`.
        relay_rows_NP: rows that pass this rank in a two-hop dispatch, None without one; see
            `relibra.hop_splits`.
        num_static: X, static slots among the n.
        return_first_G: place of the first row that this rank returns to each rank, among all rows
            that are returned to that rank.
        most_rows: rows of the rank that sends the most.
    """

    quota: SlotQuota
    slot_rows_n: torch.Tensor
    send_rows_G: list[int]
    recv_rows_G: list[int]
    push_list: torch.Tensor
    pull_list: torch.Tensor
    relay_rows_NP: np.ndarray | None = None
    num_static: int = 0
    return_first_G: list[int] = dataclasses.field(default_factory=list)
    most_rows: int = 0

    @classmethod
    def build(
        cls,
        layout: ExpertLayout,
        replica_slot_expert_GS: np.ndarray,
        quota_GS: np.ndarray,
        rank: int,
        block_rows: int,
        hops: HopRanks | None = None,
        *,
        static_slot_expert_GX: np.ndarray | None = None,
        rank_to_node_G: np.ndarray | None = None,
    ) -> SourceRoute:
        """Derive one rank's view from quotas that every rank holds.

        Args:
            layout: home of every expert.
            replica_slot_expert_GS: int32 ``[G, S]``, -1 for a free slot.
            quota_GS: int32 ``[G, G*(H+X+S)]``, rows of each source rank in each slot.
            rank: this rank.
            block_rows: rows of a GEMM tile.
            hops: place in a two-hop dispatch, None without one.
            static_slot_expert_GX: int32 ``[G, X]``, -1 for a free slot; None without.
            rank_to_node_G: int32 ``[G]``, needed with static slots.
        """
        num_ranks, num_home = layout.home_slot_expert_GH.shape
        if static_slot_expert_GX is None:
            static_slot_expert_GX = np.zeros((num_ranks, 0), np.int32)
        num_static = static_slot_expert_GX.shape[1]
        families = layout.home_slot_expert_GH, static_slot_expert_GX, replica_slot_expert_GS
        slot_expert = np.concatenate(families, 1)
        quota = slot_quota_of(
            slot_expert.reshape(-1),
            quota_GS,
            rank,
            num_experts=layout.num_experts,
            num_ranks=num_ranks,
            block_rows=block_rows,
        )
        by_rank_GG = quota_GS.reshape(num_ranks, num_ranks, -1).sum(2)
        slot_rows_Gn = quota_GS.sum(0, dtype=np.int64).reshape(num_ranks, -1)
        push_list, pull_list = copy_lists(
            layout.home_slot_expert_GH,
            replica_slot_expert_GS,
            slot_rows_Gn[:, num_home + num_static :],
            rank,
            static_slot_expert_GX,
            rank_to_node_G,
        )
        return cls(
            quota=quota,
            slot_rows_n=torch.from_numpy(slot_rows_Gn[rank].astype(np.int32)),
            send_rows_G=by_rank_GG[rank].tolist(),
            recv_rows_G=by_rank_GG[:, rank].tolist(),
            push_list=push_list,
            pull_list=pull_list,
            relay_rows_NP=None if hops is None else hops.through_here(by_rank_GG),
            num_static=num_static,
            return_first_G=by_rank_GG[:, :rank].sum(1).tolist(),
            most_rows=int(by_rank_GG.sum(1).max()),
        )

    @classmethod
    def live(
        cls,
        counts_GE: np.ndarray,
        layout: ExpertLayout,
        num_replica: int,
        rank: int,
        block: int,
        hops: HopRanks | None = None,
    ) -> SourceRoute:
        """Every row to the home of its expert: for routing that no plan knows.

        Args:
            counts_GE: int64 ``[G, E]``, rows that each source rank sends to each expert.
            layout: home of every expert.
            num_replica: S, replica slots a rank (they stay empty).
            rank: this rank.
            block: rows of a GEMM tile.
            hops: place in a two-hop dispatch, None without one.
        """
        home_GH = layout.home_slot_expert_GH
        num_ranks, num_home = home_GH.shape
        quota = np.zeros((num_ranks, num_ranks, num_home + num_replica), np.int32)
        held = home_GH >= 0
        quota[:, :, :num_home][:, held] = counts_GE[:, home_GH[held]]
        empty = np.full((num_ranks, num_replica), -1, np.int32)
        return cls.build(layout, empty, quota.reshape(num_ranks, -1), rank, block, hops)

    def count_sends(
        self, ids_TK: torch.Tensor, num_ranks: int, backend: str = "auto"
    ) -> torch.Tensor:
        """Distinct tokens of this rank for each destination rank, int64 ``[G]``."""
        lists = [x.to(ids_TK.device, non_blocking=True) for x in self.quota.tensors()[:3]]
        sends: torch.Tensor = torch.ops.relibra.count_sends(
            ids_TK, *lists, self.slot_rows_n.numel(), num_ranks, backend
        )
        return sends


@dataclasses.dataclass(frozen=True)
class LayerTables:
    """Index tables of one use of one layer on one rank; a token is sent once per rank.

    In a two-hop dispatch it is sent once per node (`relibra.hop_tables`): then V and the tables
    over it are those of the first hop, and received tokens lie by relay rank.

    Attributes:
        num_tokens: T, tokens of this rank.
        num_home: H, home slots that the tiles were made for.
        ids_TK: int32 ``[T, K]``, the expert ids that are executed; -1 takes no part.
        send_token_V: int32 ``[V]``, token of each sent row, by destination rank, then token.
        send_rows_VK: int32 ``[V, K]``, row at the destination of each choice, -1 elsewhere.
        token_to_return_TJ: int32 ``[T, min(K, G)]``, sent rows of a token by ascending rank.
        choice_to_return_TK: int32 ``[T, K]``, place of a choice among the returned rows; None in
            tables for ``combine="reduced"``.
        send_splits, recv_splits: distinct tokens to and from each rank.
        send_rows_G, recv_rows_G: rows to and from each rank.
        token_choice_to_row_UK: int32 ``[U, K]``, row of each choice of a received token.
        return_row_N: int32, received choices in (token, choice) order -> row; likewise.
        row_to_token_R: int32 ``[R]``, received token of each row, -1 for padding.
        row_to_choice_R: int32 ``[R]``, ``u*K + k`` of each row, -1 for padding.
        slot_rows_n: int32 ``[n]``.
        mtile_B4: int32 ``[B, 4]``, tiles of the grouped GEMM.
        push_list, pull_list: see :func:`copy_lists`.
        hops: of a two-hop dispatch, None where tokens travel directly.
        num_static: X, static slots that the tiles were made for.
        launch: what launches take besides, until a `relibra.table_ring` has placed the tables.
    """

    num_tokens: int
    num_home: int
    ids_TK: torch.Tensor
    send_token_V: torch.Tensor
    send_rows_VK: torch.Tensor
    token_to_return_TJ: torch.Tensor
    choice_to_return_TK: torch.Tensor | None
    send_splits: list[int]
    recv_splits: list[int]
    send_rows_G: list[int]
    recv_rows_G: list[int]
    token_choice_to_row_UK: torch.Tensor
    return_row_N: torch.Tensor | None
    row_to_token_R: torch.Tensor
    row_to_choice_R: torch.Tensor
    slot_rows_n: torch.Tensor
    mtile_B4: torch.Tensor
    push_list: torch.Tensor
    pull_list: torch.Tensor
    hops: HopPaths | None = None
    num_static: int = 0
    launch: LaunchData | None = None

    @property
    def num_rows(self) -> int:
        """R, rows computed here including padding."""
        return self.row_to_token_R.numel()

    @classmethod
    def build(
        cls,
        ids_TK: torch.Tensor,
        source: SourceRoute,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        exchange: Exchange,
        *,
        num_home: int,
        block_rows: int,
        device: torch.device | None = None,
        backend: str = "auto",
        hops: HopTables | None = None,
        exact: bool = True,
        weights: WeightCache | None = None,
    ) -> LayerTables:
        """Build the tables; the rows of the sent tokens travel to their destinations here.

        Args:
            ids_TK: int32 ``[T, K]``, on any device.
            source: host integers of this use.
            send_splits: tokens to each rank.
            recv_splits: tokens from each rank.
            exchange: all-to-all of rows ``(tensor, send_splits, recv_splits) -> tensor``.
            num_home: H.
            block_rows: rows of a GEMM tile.
            device: of the index tables, where the tokens are; None takes that of the ids.
            backend: who builds them, see `relibra_kernels.ops`.
            hops: of a two-hop dispatch, whose rows travelled already; None for a flat one.
            exact: build the tables of rows that return one by one, for ``combine="exact"``.
            weights: what the launches of the layer remember; None makes no launch data here.
        """
        send, receive = list(send_splits), list(recv_splits)
        tiles = m_tiles(source.slot_rows_n, num_home, block_rows, source.num_static)
        launch = None
        if weights is not None:
            launch = LaunchData(tiles, source.slot_rows_n, weights, block_rows)
        host = (ids_TK, tiles, *(source.quota.tensors() if hops is None else ()))
        ids_TK, tiles, *quota = _on_device(host, launch, device or ids_TK.device)
        if hops is None:
            sizes = source.slot_rows_n.numel(), len(send), sum(send)
            route = direct_ops.build_route(ids_TK, *quota, *sizes, backend)[1:]
            token_choice_to_row = exchange(route[1], send, receive)
        else:
            route = (hops.send_token_A, hops.send_rows_AK, hops.token_to_return_TJ)
            token_choice_to_row = hops.token_choice_to_row_UK
        send_token, send_rows, token_to_return = route
        rows = direct_ops.build_rows(token_choice_to_row, len(tiles) * block_rows, backend)
        to_return = return_row = None
        if exact:
            to_return = by_choice(numbered(send_rows >= 0), send_token, len(ids_TK))
            return_row = compact(token_choice_to_row, sum(source.recv_rows_G))
        return cls(
            num_tokens=ids_TK.shape[0],
            num_home=num_home,
            ids_TK=ids_TK,
            send_token_V=send_token,
            send_rows_VK=send_rows,
            token_to_return_TJ=token_to_return,
            choice_to_return_TK=to_return,
            send_splits=send,
            recv_splits=receive,
            send_rows_G=source.send_rows_G,
            recv_rows_G=source.recv_rows_G,
            token_choice_to_row_UK=token_choice_to_row,
            return_row_N=return_row,
            row_to_token_R=rows[0],
            row_to_choice_R=rows[1],
            slot_rows_n=source.slot_rows_n,
            mtile_B4=tiles,
            push_list=source.push_list,
            pull_list=source.pull_list,
            hops=None if hops is None else hops.paths,
            num_static=source.num_static,
            launch=launch,
        )


def _on_device(
    tensors: Sequence[torch.Tensor], launch: LaunchData | None, device: torch.device
) -> list[torch.Tensor]:
    """The tensors on a device, and launch data moved there, in one copy."""
    numbers = [] if launch is None else launch.tensors()
    found = uploaded([*tensors, *numbers], device)
    if launch is not None:
        launch.move(found[len(tensors) :])
    return found[: len(tensors)]
