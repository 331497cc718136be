"""A whole EP group in one process: every rank's tables, and one layer run rank after rank.

The lockstep twin of a distributed layer, made of the ops only: exchanges are slices and
concatenations. Tests compare it with `relibra_kernels.reference.moe.dense_moe`.

Letters as in `relibra_kernels.tables`; ``N = G * n`` slots in the group.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

import relibra_kernels.ops  # noqa: F401  registers torch.ops.relibra
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.home_reduce import home_reduce
from relibra_kernels.tables import SlotQuota, m_tiles, slot_bases

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_relibra = torch.ops.relibra


@dataclasses.dataclass(frozen=True)
class VirtualRank:
    """The tables of one rank; fields as in `relibra_kernels.validate.RankTables`."""

    ids_TK: torch.Tensor
    choice_to_dest_row_TK: torch.Tensor
    send_token_V: torch.Tensor
    send_rows_VK: torch.Tensor
    token_to_return_TJ: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    token_choice_to_row_UK: torch.Tensor
    row_to_token_R: torch.Tensor
    row_to_choice_R: torch.Tensor
    slot_rows_n: torch.Tensor
    mtile_B4: torch.Tensor


@dataclasses.dataclass(frozen=True)
class VirtualGroup:
    """Slots and tables of a group.

    Attributes:
        slot_expert_Gn: int ``[G, n]``, expert of each slot, -1 for none; home slots first.
        quota_GN: int ``[G, G*n]``, rows that each source sends to each slot.
        num_home: H.
        num_experts: E.
        block_rows: rows of a tile.
        ranks: the tables of every rank.
    """

    slot_expert_Gn: npt.NDArray[np.int64]
    quota_GN: npt.NDArray[np.int64]
    num_home: int
    num_experts: int
    block_rows: int
    ranks: tuple[VirtualRank, ...]

    @classmethod
    def build(
        cls,
        ids_G: Sequence[torch.Tensor],
        slot_expert_Gn: npt.NDArray[np.int64],
        quota_GN: npt.NDArray[np.int64],
        *,
        num_home: int,
        num_experts: int,
        block_rows: int,
    ) -> VirtualGroup:
        """Builds every rank's tables with the routing ops.

        Args:
            ids_G: for every rank, integers ``[T, K]``.
            slot_expert_Gn: ``[G, n]``.
            quota_GN: ``[G, G*n]``, rows that each source sends to each slot.
            num_home: H.
            num_experts: E.
            block_rows: rows of a tile.
        """
        num_ranks, slots = slot_expert_Gn.shape
        slot_rows_Gn = quota_GN.sum(0).reshape(num_ranks, slots)
        base_N = np.concatenate(
            [slot_bases(rows, block_rows).numpy()[:-1] for rows in slot_rows_Gn]
        )
        first_GN = base_N + np.cumsum(quota_GN, 0) - quota_GN
        routes, sends = [], []
        for ids, quota_N, first_N in zip(ids_G, quota_GN, first_GN, strict=True):
            quota = slot_quota(slot_expert_Gn.reshape(-1), quota_N, first_N, num_experts)
            lists = quota.tensors()
            sends.append(_relibra.count_sends(ids, *lists[:3], slots, num_ranks).tolist())
            routes.append(_relibra.build_route(ids, *lists, slots, num_ranks, sum(sends[-1])))
        ranks = []
        for rank, (ids, route) in enumerate(zip(ids_G, routes, strict=True)):
            receive = [send[rank] for send in sends]
            pieces = [
                torch.split(one[2], send)[rank] for one, send in zip(routes, sends, strict=True)
            ]
            rows_UK = torch.cat(pieces)
            num_rows = int(slot_bases(slot_rows_Gn[rank], block_rows)[-1])
            row_to_token, row_to_choice = _relibra.build_rows(rows_UK, num_rows)
            choice_to_row, send_token, send_rows, to_return = route
            slot_rows = torch.from_numpy(slot_rows_Gn[rank].astype(np.int32))
            tiles = m_tiles(slot_rows, num_home, block_rows)
            ranks.append(
                VirtualRank(
                    ids_TK=ids,
                    choice_to_dest_row_TK=choice_to_row,
                    send_token_V=send_token,
                    send_rows_VK=send_rows,
                    token_to_return_TJ=to_return,
                    send_splits=sends[rank],
                    recv_splits=receive,
                    token_choice_to_row_UK=rows_UK,
                    row_to_token_R=row_to_token,
                    row_to_choice_R=row_to_choice,
                    slot_rows_n=slot_rows,
                    mtile_B4=tiles,
                )
            )
        return cls(slot_expert_Gn, quota_GN, num_home, num_experts, block_rows, tuple(ranks))

    def exchange(self, x_G: Sequence[torch.Tensor], *, back: bool = False) -> list[torch.Tensor]:
        """All-to-all of the sent tokens' rows, or of the received tokens' rows back."""
        splits = [rank.recv_splits if back else rank.send_splits for rank in self.ranks]
        pieces = [torch.split(x, split) for x, split in zip(x_G, splits, strict=True)]
        return [torch.cat([piece[rank] for piece in pieces]) for rank in range(len(self.ranks))]

    def weights(self, w_E: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Home and replica weights of a rank; slots without an expert hold NaN."""
        expert = torch.from_numpy(self.slot_expert_Gn[rank])
        w = torch.where(expert.view(-1, 1, 1) >= 0, w_E[expert.clamp_min(0)], float("nan"))
        return w[: self.num_home], w[self.num_home :]

    def push_lists(self) -> list[torch.Tensor]:
        """For every rank, (home slot, replica's rank, replica slot) of its experts' replicas."""
        home = {
            int(expert): (rank, slot)
            for (rank, slot), expert in np.ndenumerate(self.slot_expert_Gn[:, : self.num_home])
        }
        lists: list[list[list[int]]] = [[] for _ in self.ranks]
        for (rank, slot), expert in np.ndenumerate(self.slot_expert_Gn[:, self.num_home :]):
            if expert >= 0:
                lists[home[int(expert)][0]].append([home[int(expert)][1], rank, slot])
        return [torch.tensor(one, dtype=torch.int32).reshape(-1, 3) for one in lists]


def slot_quota(
    slot_expert_N: npt.NDArray[np.int64],
    quota_N: npt.NDArray[np.int64],
    first_row_N: npt.NDArray[np.int64],
    num_experts: int,
) -> SlotQuota:
    """The slot quota of one source from dense lists over all slots.

    Args:
        slot_expert_N: expert of each slot, -1 for none.
        quota_N: this source's rows for each slot.
        first_row_N: this source's first row in each slot.
        num_experts: E.

    Example:
        >>> quota = slot_quota(np.array([0, 1, -1, 0]), np.array([2, 1, 0, 3]), np.arange(4), 2)
        >>> quota.slot_id.tolist(), quota.slot_quota.tolist(), quota.expert_first.tolist()
        ([0, 3, 1], [2, 3, 1], [0, 2, 3])
    """
    held = np.flatnonzero(slot_expert_N >= 0)
    slot = held[np.argsort(slot_expert_N[held], kind="stable")]
    count_E = np.bincount(slot_expert_N[slot], minlength=num_experts)
    lists = (np.append(0, np.cumsum(count_E)), slot, quota_N[slot], first_row_N[slot])
    return SlotQuota(*(torch.from_numpy(values.astype(np.int32)) for values in lists))


def random_group(
    rng: np.random.Generator,
    *,
    num_ranks: int = 2,
    num_home: int = 3,
    num_replica: int = 1,
    num_choices: int = 2,
    tokens_G: Sequence[int] = (20, 13),
    block_rows: int = 4,
    skip: float = 0.1,
    num_experts: int | None = None,
) -> VirtualGroup:
    """A group with random ids, random homes and replicas, and a random split of every expert.

    Args:
        rng: source of everything random.
        num_ranks: G.
        num_home: H.
        num_replica: S.
        num_choices: K.
        tokens_G: tokens of each rank.
        block_rows: rows of a tile.
        skip: fraction of choices that are -1.
        num_experts: E; None is ``G * H``, fewer leaves home slots without an expert.
    """
    experts = num_ranks * num_home if num_experts is None else num_experts
    slot_expert = np.full((num_ranks, num_home + num_replica), -1, np.int64)
    homes = rng.permutation(np.append(np.arange(experts), [-1] * (num_ranks * num_home - experts)))
    slot_expert[:, :num_home] = homes.reshape(num_ranks, num_home)
    for rank in range(num_ranks):
        others = np.setdiff1d(np.arange(experts), slot_expert[rank, :num_home])
        chosen = rng.permutation(others)[:num_replica]
        slot_expert[rank, num_home : num_home + len(chosen)] = chosen
    popularity = rng.dirichlet(np.ones(experts))
    ids_G = []
    for num_tokens in tokens_G:
        noise = np.log(popularity + 1e-3) + rng.gumbel(size=(num_tokens, experts))
        ids = np.argsort(-noise, axis=1)[:, :num_choices]
        ids_G.append(np.where(rng.random(ids.shape) < skip, -1, ids).astype(np.int32))
    quota = random_quota(rng, ids_G, slot_expert.reshape(-1))
    return VirtualGroup.build(
        [torch.from_numpy(ids) for ids in ids_G],
        slot_expert,
        quota,
        num_home=num_home,
        num_experts=experts,
        block_rows=block_rows,
    )


def random_quota(
    rng: np.random.Generator,
    ids_G: Sequence[npt.NDArray[np.int32]],
    slot_expert_N: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Splits each source's rows of each expert over the expert's slots at random, ``[G, N]``."""
    quota = np.zeros((len(ids_G), slot_expert_N.size), np.int64)
    for source, ids in enumerate(ids_G):
        for expert, count in zip(*np.unique(ids[ids >= 0], return_counts=True), strict=True):
            slots = np.flatnonzero(slot_expert_N == expert)
            quota[source, slots] = rng.multinomial(count, rng.dirichlet(np.full(slots.size, 0.5)))
    return quota


class LayerResult(NamedTuple):
    """Outputs and gradients of a layer; lists by rank, weights by expert."""

    y_G: list[torch.Tensor]
    dx_G: list[torch.Tensor]
    dscores_G: list[torch.Tensor]
    dw13_E: torch.Tensor
    dw2_E: torch.Tensor


def run_layer(
    group: VirtualGroup,
    x_G: Sequence[torch.Tensor],
    scores_G: Sequence[torch.Tensor],
    w13_E: torch.Tensor,
    w2_E: torch.Tensor,
    dy_G: Sequence[torch.Tensor],
    *,
    exact: bool = False,
) -> LayerResult:
    """One layer, forward and backward, with the ops in the order of a training step.

    Args:
        group: slots and tables.
        x_G: for every rank, ``[T, D]``.
        scores_G: for every rank, fp32 (fp64 with fp64 ``x``) ``[T, K]``.
        w13_E: ``[E, 2F, D]``.
        w2_E: ``[E, D, F]``.
        dy_G: gradients of the outputs, ``[T, D]``.
        exact: the GEMMs multiply fixed tiles.

    Returns:
        Outputs and gradients; weight gradients in the accumulation dtype.
    """
    ranks = group.ranks
    x_UD = group.exchange([x[one.send_token_V] for x, one in zip(x_G, ranks, strict=True)])
    scores_UK = group.exchange(
        [
            torch.where(one.send_rows_VK >= 0, scores[one.send_token_V], 0.0)
            for scores, one in zip(scores_G, ranks, strict=True)
        ]
    )
    dy_UD = group.exchange([dy[one.send_token_V] for dy, one in zip(dy_G, ranks, strict=True)])
    parts: list[_RankPart] = [
        _run_rank(group, g, x_UD[g], scores_UK[g], dy_UD[g], (w13_E, w2_E), exact)
        for g in range(len(ranks))
    ]
    y_G, dx_G, dscores_G = (
        [
            _relibra.combine(back, one.token_to_return_TJ, None)
            for back, one in zip(group.exchange(tensors, back=True), ranks, strict=True)
        ]
        for tensors in (
            [part.y_UD for part in parts],
            [part.dx_UD for part in parts],
            [part.dscores_UK for part in parts],
        )
    )
    dw13 = _reduce_home(group, [part.dw13 for part in parts])
    dw2 = _reduce_home(group, [part.dw2 for part in parts])
    return LayerResult(y_G, dx_G, dscores_G, dw13, dw2)


class _RankPart(NamedTuple):
    y_UD: torch.Tensor
    dx_UD: torch.Tensor
    dscores_UK: torch.Tensor
    dw13: tuple[torch.Tensor, torch.Tensor]
    dw2: tuple[torch.Tensor, torch.Tensor]


def scaled(a_RF: torch.Tensor, score_R: torch.Tensor) -> torch.Tensor:
    """Rows times their score: ``a'`` for dW2, and the gradient that enters SwiGLU."""
    return (a_RF.to(score_R.dtype) * score_R[:, None]).to(a_RF.dtype)


def _run_rank(
    group: VirtualGroup,
    rank: int,
    x_UD: torch.Tensor,
    scores_UK: torch.Tensor,
    dy_UD: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    exact: bool,
) -> _RankPart:
    one, block = group.ranks[rank], group.block_rows
    w13, w2 = (group.weights(w, rank) for w in weights)
    index = one.token_choice_to_row_UK
    rows = _relibra.token_permute(x_UD, one.row_to_token_R, index)
    h = _relibra.grouped_gemm(rows, *w13, one.mtile_B4, block, exact)
    a = _relibra.swiglu(h)
    y = _relibra.grouped_gemm(a, *w2, one.mtile_B4, block, exact)

    dy = _relibra.token_permute(dy_UD, one.row_to_token_R, index)
    da = _relibra.grouped_gemm_dgrad(dy, *w2, one.mtile_B4, block, exact)
    flat = torch.cat([scores_UK.reshape(-1), scores_UK.new_zeros(1)])
    score_R = flat[torch.where(one.row_to_choice_R >= 0, one.row_to_choice_R, len(flat) - 1)]
    dh = _relibra.swiglu_backward(scaled(da, score_R), h)
    dx = _relibra.grouped_gemm_dgrad(dh, *w13, one.mtile_B4, block, exact)
    wide = accumulation_dtype(x_UD.dtype)
    dscore = (da.to(wide) * a.to(wide)).sum(1, keepdim=True)
    dscores = _relibra.token_unpermute(dscore, index).squeeze(2)
    grads = []
    for (home, replica), grad, operand in ((w13, dh, rows), (w2, dy, scaled(a, score_R))):
        buffers = tuple(torch.full_like(w, float("nan"), dtype=wide) for w in (home, replica))
        _relibra.grouped_gemm_wgrad(grad, operand, one.slot_rows_n, block, *buffers, False)
        grads.append((buffers[0], buffers[1]))
    return _RankPart(
        _relibra.combine(y, index, scores_UK), _relibra.combine(dx, index, None), dscores, *grads
    )


def _reduce_home(
    group: VirtualGroup, grads_G: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Replica gradients home, then by expert."""
    home_G = [home for home, _ in grads_G]
    home_reduce([replica for _, replica in grads_G], home_G, group.push_lists())
    expert_GH = torch.from_numpy(group.slot_expert_Gn[:, : group.num_home])
    by_slot = torch.stack(home_G)
    out = by_slot.new_zeros(group.num_experts, *by_slot.shape[2:])
    out[expert_GH[expert_GH >= 0]] = by_slot[expert_GH >= 0]
    return out
