"""Samples onto source ranks: which rank sends a sample's tokens, so that few leave their node.

Source: ReLibra, section 4 (the second round of reordering). Inside a micro-batch, so rows of
experts and optimizer steps do not change, only who sends the rows. With samples of equal size the
result is optimal (a transportation problem); else it is the better of two searches whose budgets
hold: exchanges from the places given, and the optimum for equal sizes, repaired by exchanges.

Letters: S samples, N nodes, G ranks, T tokens of a sample, L MoE layers, K choices, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.layout import ExpertLayout, Int32Array, Int64Array, frozen_ints
from relibra_kernels import native
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra.topology import Topology

_AXES = ("tokens", "attention")
# Costs are scaled so that staying decides between equal ones; sums stay far below 2^63.
_MOST_COST = 1 << 32


def sample_costs(
    ids: Sequence[npt.NDArray[np.signedinteger]],
    layouts: Sequence[ExpertLayout],
    topology: Topology,
    static_slot_expert_LGX: Int32Array | None = None,
) -> Int64Array:
    """Copies of tokens that leave the node, for every sample on every node.

    Args:
        ids: for each sample integers `[T, L, K]`, expert ids, -1 = none; a subsample of its tokens
            does when it is the same share of each.
        layouts: one a layer, as planned.
        topology: nodes of the ranks.
        static_slot_expert_LGX: int32 `[L, G, X]`, static copies: a node that has one does not send
            the expert's rows away.

    Returns:
        int64 `[S, N]`.

    Raises:
        PlanError: ids that do not fit the layouts.

    Example:
        >>> from relibra.topology import Topology
        >>> ids = [np.array([[[0, 1]], [[0, 1]]]), np.array([[[0, 3]]])]
        >>> sample_costs(ids, [ExpertLayout([[0, 1], [2, 3]])], Topology(2, 1)).tolist()
        [[0, 2], [1, 1]]
    """
    node_G, num_nodes = topology.rank_to_node_G, topology.num_nodes
    num_experts = layouts[0].num_experts
    held_LNE = np.zeros((len(layouts), num_nodes, num_experts + 1), np.bool_)
    for index, layout in enumerate(layouts):
        held_LNE[index, node_G[layout.home_rank_E], np.arange(num_experts)] = True
    home_LE = held_LNE.argmax(1)
    if static_slot_expert_LGX is not None:
        layer, rank, slot = np.nonzero(static_slot_expert_LGX >= 0)
        held_LNE[layer, node_G[rank], static_slot_expert_LGX[layer, rank, slot]] = True
    costs = np.zeros((len(ids), num_nodes), np.int64)
    for sample, raw in enumerate(ids):
        checked = frozen_ints(
            f"ids[{sample}]",
            raw,
            np.int64,
            shape=(None, len(layouts), None),
            minimum=-1,
            maximum=num_experts - 1,
        )
        for index in range(len(layouts)):
            costs[sample] += _layer_costs(checked[:, index], home_LE[index], held_LNE[index])
    return costs


def _layer_costs(
    ids_TK: npt.NDArray[np.signedinteger],
    home_E: npt.NDArray[np.signedinteger],
    held_NE: npt.NDArray[np.bool_],
) -> Int64Array:
    """int64 `[N]`; id -1 is the last column, which no node needs."""
    num_tokens, num_nodes = len(ids_TK), len(held_NE)
    token = np.arange(num_tokens)[:, None]
    costs = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes):
        visits = np.zeros((num_tokens, num_nodes), np.bool_)
        leaves = (ids_TK >= 0) & ~held_NE[node][ids_TK]
        visits[np.broadcast_to(token, ids_TK.shape)[leaves], home_E[ids_TK][leaves]] = True
        costs[node] = np.count_nonzero(visits)
    return costs


def place_samples(
    cost_SN: Int64Array,
    rank_S: Int32Array,
    topology: Topology,
    *,
    tokens_S: Int64Array,
    token_budget: int | None = None,
    attention_S: Int64Array | None = None,
    attention_budget: int | None = None,
    micro_batch_S: Int32Array | None = None,
) -> Int32Array:
    """Ranks of the samples with few copies between nodes; samples stay in their micro-batch.

    Every rank keeps the number of samples that it has.

    Args:
        cost_SN: int64 `[S, N]`, from `sample_costs`.
        rank_S: int32 `[S]`, ranks that send the samples now.
        topology: of the G ranks.
        tokens_S: int64 `[S]`, tokens of each sample.
        token_budget: most tokens of a rank in a micro-batch; None = what the fullest rank of that
            micro-batch has now.
        attention_S: int64 `[S]`, attention cost of each sample in any unit; None = none.
        attention_budget: as `token_budget`.
        micro_batch_S: int32 `[S]`; None = all in one.

    Returns:
        int32 `[S]`.

    Raises:
        TypeError, PlanError: wrong arrays, or a rank above a budget already; names the micro-batch,
            the rank and the excess.

    Example:
        >>> from relibra.topology import Topology
        >>> cost, rank, tokens = np.array([[9, 1], [2, 8]]), np.array([0, 1]), np.array([5, 5])
        >>> place_samples(cost, rank, Topology(2, 1), tokens_S=tokens).tolist()
        [1, 0]
    """
    num_samples = len(np.asarray(rank_S))
    cost = frozen_ints(
        "cost_SN",
        cost_SN,
        np.int64,
        shape=(num_samples, topology.num_nodes),
        minimum=0,
        maximum=_MOST_COST,
    )
    ranks = frozen_ints(
        "rank_S",
        rank_S,
        np.int32,
        shape=(num_samples,),
        minimum=0,
        maximum=topology.num_ranks - 1,
    )
    sizes = [_sizes("tokens_S", tokens_S, num_samples)]
    budgets = [token_budget]
    if attention_S is not None:
        sizes.append(_sizes("attention_S", attention_S, num_samples))
        budgets.append(attention_budget)
    elif attention_budget is not None:
        raise PlanError("attention_S: need the costs of samples with attention_budget, got none")
    micro_batch = np.zeros(num_samples, np.int64)
    if micro_batch_S is not None:
        micro_batch = _sizes("micro_batch_S", micro_batch_S, num_samples)
    placed = ranks.copy()
    for number in np.unique(micro_batch):
        members = np.flatnonzero(micro_batch == number)
        one = _MicroBatch(
            int(number),
            cost[members][:, topology.rank_to_node_G],
            ranks[members],
            np.stack([size[members] for size in sizes]),
            budgets,
        )
        placed[members] = one.place()
    return placed


def _sizes(name: str, value: object, num_samples: int) -> npt.NDArray[np.signedinteger]:
    return frozen_ints(name, value, np.int64, shape=(num_samples,), minimum=0, maximum=_MOST_COST)


class _MicroBatch:
    """Samples of one micro-batch; sizes are int64 `[budgets, S]`, costs int64 `[S, G]`."""

    def __init__(
        self,
        number: int,
        cost_SG: Int64Array,
        rank_S: Int32Array,
        sizes_BS: Int64Array,
        budgets: list[int | None],
    ) -> None:
        self.cost_SG, self.rank_S, self.sizes_BS = cost_SG, rank_S, sizes_BS
        now_BG = self._sums(rank_S)
        self.budget_B = np.array(
            [
                now.max() if budget is None else budget
                for now, budget in zip(now_BG, budgets, strict=True)
            ]
        )
        over = np.argwhere(now_BG > self.budget_B[:, None])
        if len(over):
            which, rank = over[0]
            excess = now_BG[which, rank] - self.budget_B[which]
            raise PlanError(
                f"{('token_budget', 'attention_budget')[which]}: need at least "
                f"{now_BG[which, rank]} {_AXES[which]} for rank {rank} in micro-batch {number}, "
                f"got {self.budget_B[which]}: {excess} too few"
            )

    def place(self) -> Int32Array:
        """The better of both searches; no move without a gain."""
        matched_S = self._matched()
        if (self.sizes_BS == self.sizes_BS[:, :1]).all():
            return matched_S
        found = [self._exchanged(self.rank_S)]
        repaired_S = self._repaired(matched_S)
        if repaired_S is not None:
            found.append(self._exchanged(repaired_S))
        return min(found, key=self._cost)

    def _sums(self, rank_S: Int32Array) -> Int64Array:
        num_ranks = self.cost_SG.shape[1]
        sums = np.zeros((len(self.sizes_BS), num_ranks), np.int64)
        for total, size in zip(sums, self.sizes_BS, strict=True):
            np.add.at(total, rank_S, size)
        return sums

    def _cost(self, rank_S: Int32Array) -> int:
        return int(self.cost_SG[np.arange(len(rank_S)), rank_S].sum())

    def _matched(self) -> Int32Array:
        """The optimum when every sample may take every place."""
        count = len(self.rank_S)
        stays = self.rank_S[:, None] == self.rank_S
        weight = -self.cost_SG[:, self.rank_S] * (count + 1) + stays
        matched_S: Int32Array = self.rank_S[native.planner().match(np.ascontiguousarray(weight))]
        return matched_S

    def _exchange_gains(self, rank_S: Int32Array) -> Int64Array:
        """What exchanging two samples saves, int64 `[S, S]`."""
        here_S = self.cost_SG[np.arange(len(rank_S)), rank_S]
        there_SS = self.cost_SG[:, rank_S]
        gains: Int64Array = here_S[:, None] + here_S - there_SS - there_SS.T
        return gains

    def _excess_after(self, rank_S: Int32Array) -> Int64Array:
        """Sum over budgets and both ranks of the excess after an exchange, int64 `[S, S]`."""
        sums_BS = self._sums(rank_S)[:, rank_S]
        total = np.zeros((len(rank_S), len(rank_S)), np.int64)
        for size, held, budget in zip(self.sizes_BS, sums_BS, self.budget_B, strict=True):
            mine = held[:, None] - size[:, None] + size[None]
            total += np.maximum(mine - budget, 0) + np.maximum(mine.T - budget, 0)
        total[rank_S[:, None] == rank_S] = np.iinfo(np.int64).max
        return total

    def _exchanged(self, rank_S: Int32Array) -> Int32Array:
        """Best exchange first until none gains within the budgets."""
        rank_S = rank_S.copy()
        while len(rank_S):
            gains = np.where(self._excess_after(rank_S) == 0, self._exchange_gains(rank_S), 0)
            first, second = np.unravel_index(int(gains.argmax()), gains.shape)
            if gains[first, second] <= 0:
                break
            rank_S[[first, second]] = rank_S[[second, first]]
        return rank_S

    def _repaired(self, rank_S: Int32Array) -> Int32Array | None:
        """Exchanges until all budgets hold, the most for its cost first; None when that fails."""
        rank_S = rank_S.copy()
        for _ in range(4 * len(rank_S)):
            sums_BG = self._sums(rank_S)
            excess_BG = np.maximum(sums_BG - self.budget_B[:, None], 0)
            if not excess_BG.any():
                return rank_S
            excess_S = excess_BG.sum(0)[rank_S]
            saved = excess_S[:, None] + excess_S - np.minimum(self._excess_after(rank_S), 1 << 40)
            cost = np.maximum(-self._exchange_gains(rank_S), 0) + 1
            value = np.where(saved > 0, saved / cost, 0)
            first, second = np.unravel_index(int(value.argmax()), value.shape)
            if value[first, second] <= 0:
                return None
            rank_S[[first, second]] = rank_S[[second, first]]
        return None
