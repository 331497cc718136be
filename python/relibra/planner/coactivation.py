"""Layouts that keep experts which tokens choose together on one node, from a sample of tokens.

A token is sent once to every other node that has one of its experts, so experts that are chosen
together should share a node. Counts of rows cannot show that; a sample of tokens can. Loads stay
within `PlannerConfig.grouping_slack` of the plan that knows loads only.

Letters as in `relibra.planner.reorder`; X static slots a rank, T sampled tokens, K choices a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.planner import static_copies
from relibra.planner.objective import MovePrice
from relibra.planner.replicate import Replicated, replicate

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem
    from relibra.planner.reorder import Reorder

# Loads above their limit by some part cost as many copies as this multiple of that part of all:
# a thousandth too much is as bad as a fifth more copies.
_OVERWEIGHT = 200.0
# With static copies, which repair what grouping unbalances: looser limits that are tried as well.
_LOOSER = (3.0, 8.0, 20.0)


def grouped_layouts(problem: Problem, reorder: Reorder) -> Replicated:
    """The layouts with the fewest copies of tokens whose loads are within the limit.

    Candidates of each layer: those of a plan by loads alone, the best of which sets the limit;
    searches on copies; the base layout, which wins ties, so nothing moves without a gain.

    Args:
        problem: the input, with a token sample and more than one node.
        reorder: of the problem, by nodes.
    """
    bin_LE, load_L = reorder.cold_bins()
    chooser = _Chooser(problem)
    base = list(_with_copies(problem, problem.base_LGH))
    for planned in _with_copies(problem, reorder.layouts_of(bin_LE)):
        chooser.offer(planned)
    chooser.offer(replicate(problem, reorder.warm()[0]))
    for planned in base:
        chooser.offer(planned, wins_ties=True)
    chooser.set_limit()
    slack = problem.config.grouping_slack
    for factor in (1.0, *(_LOOSER if problem.static_slots else ())):
        limit_L = (load_L * (1 + factor * slack)).astype(np.int64)
        grouped_LE = reorder.grouped_bins(bin_LE, limit_L, problem.sample_ids_LTK)
        home_LGH = reorder.layouts_of(grouped_LE)
        for planned in _with_copies(problem, home_LGH):
            chooser.offer(planned)
        if problem.static_slots and problem.has_sample_sources:
            # Once more without the choices that static copies serve.
            ids_LTK = _travelling_ids(problem, local_copies(problem, home_LGH))
            grouped_LE = reorder.grouped_bins(grouped_LE, limit_L, ids_LTK)
            for planned in _with_copies(problem, reorder.layouts_of(grouped_LE)):
                chooser.offer(planned)
    for planned in base:
        chooser.offer(planned, wins_ties=True)
    return chooser.best


def count_copies(problem: Problem, home_LGH: Int32Array, static_LGX: Int32Array) -> Int64Array:
    """Copies of the sampled tokens that leave their node, int64 `[L]`.

    A choice whose expert has a static copy on the token's own node does not leave it.

    Args:
        problem: the input, with a token sample.
        home_LGH: int32 `[L, G, H]`.
        static_LGX: int32 `[L, G, X]`.
    """
    node_LE = node_of_experts(problem, home_LGH)
    held_LNE = _held(problem, static_LGX)
    copies = [
        int(np.count_nonzero(_remote_choices(problem, index, node_E, held_NE) > 0))
        for index, (node_E, held_NE) in enumerate(zip(node_LE, held_LNE, strict=True))
    ]
    return np.asarray(copies, np.int64)


def local_copies(problem: Problem, home_LGH: Int32Array) -> Int32Array:
    """Static copies that keep as many sampled tokens as possible from travelling.

    For each node, one after another, the expert that is most often the only reason to visit its
    home node. All slots are used.

    Args:
        problem: the input, with a token sample that has sources.
        home_LGH: int32 `[L, G, H]`.

    Returns:
        int32 `[L, G, X]`, -1 free.
    """
    node_LE = node_of_experts(problem, home_LGH)
    per_node = problem.config.static_copies
    chosen_LNX = np.full((len(node_LE), problem.topology.num_nodes, per_node), -1, np.int32)
    for index, node_E in enumerate(node_LE):
        held_NE = np.zeros((problem.topology.num_nodes, len(node_E)), np.bool_)
        for copy in range(per_node):
            gain_NE = _gains(problem, index, node_E, held_NE)
            best_N = gain_NE.argmax(1)
            for node in np.flatnonzero(gain_NE.max(1) > 0):
                chosen_LNX[index, node, copy] = best_N[node]
                held_NE[node, best_N[node]] = True
    return static_copies.place_copies(problem, home_LGH, chosen_LNX)


def node_of_experts(problem: Problem, home_LGH: Int32Array) -> Int32Array:
    """Node of each expert's home, int32 `[L, E]`."""
    layer, rank, slot = np.nonzero(home_LGH >= 0)
    node_LE = np.empty((len(home_LGH), problem.shape.num_experts), np.int32)
    node_LE[layer, home_LGH[layer, rank, slot]] = problem.topology.rank_to_node_G[rank]
    return node_LE


class _Chooser:
    """Keeps the best layout of every layer among those that are offered."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._price = MovePrice(problem)
        self._best: Replicated | None = None
        self._load_L = self._copies_L = np.zeros(0, np.int64)
        self._limit_L: npt.NDArray[np.float64] | None = None

    @property
    def best(self) -> Replicated:
        """The choice so far."""
        assert self._best is not None
        return self._best

    def set_limit(self) -> None:
        """Loads may exceed the best so far by `PlannerConfig.grouping_slack`."""
        slack = self.problem.config.grouping_slack
        limit_L: npt.NDArray[np.float64] = self._load_L * np.float64(1 + slack)
        self._unit_L = np.maximum(self._copies_L, 1) * _OVERWEIGHT / np.maximum(limit_L, 1)
        self._limit_L = limit_L

    def offer(self, planned: Replicated, *, wins_ties: bool = False) -> None:
        """Takes the layers of a candidate that are better; by loads alone before `set_limit`."""
        problem = self.problem
        load_L = planned.objective_L
        if problem.has_base and not self._price.is_free:
            load_L = load_L + self._price.of_moves(problem.base_LGH, planned.home_LGH)
        copies_L = count_copies(problem, planned.home_LGH, planned.static_LGX)
        if self._best is None:
            self._best, self._load_L, self._copies_L = planned, load_L, copies_L
            return
        new_L, old_L = self._energy(load_L, copies_L), self._energy(self._load_L, self._copies_L)
        better_L = new_L <= old_L if wins_ties else new_L < old_L
        self._best = self._best.replace(np.flatnonzero(better_L), planned.select(better_L))
        self._load_L = np.where(better_L, load_L, self._load_L)
        self._copies_L = np.where(better_L, copies_L, self._copies_L)

    def _energy(self, load_L: Int64Array, copies_L: Int64Array) -> npt.NDArray[np.float64]:
        if self._limit_L is None:
            return load_L.astype(np.float64)
        over: npt.NDArray[np.float64] = np.maximum(load_L - self._limit_L, 0) * self._unit_L
        return copies_L + over


def _with_copies(problem: Problem, home_LGH: Int32Array) -> Iterator[Replicated]:
    """Plans for some layouts: with static copies chosen by loads, and by copies of tokens."""
    yield replicate(problem, home_LGH)
    if problem.static_slots and problem.has_sample_sources:
        yield replicate(problem, home_LGH, static_LGX=local_copies(problem, home_LGH))


def _held(problem: Problem, static_LGX: Int32Array) -> npt.NDArray[np.bool_]:
    """Whether a node has a static copy of an expert, bool `[L, N, E]`."""
    node_G, num_nodes = problem.topology.rank_to_node_G, problem.topology.num_nodes
    held_LNE = np.zeros((len(static_LGX), num_nodes, problem.shape.num_experts), np.bool_)
    layer, rank, slot = np.nonzero(static_LGX >= 0)
    held_LNE[layer, node_G[rank], static_LGX[layer, rank, slot]] = True
    return held_LNE


def _travelling_ids(problem: Problem, static_LGX: Int32Array) -> Int32Array:
    """Ids of the sample without the choices that a static copy serves, int32 `[L, T, K]`."""
    held_LNE = _held(problem, static_LGX)
    source_T = problem.sample_node_T
    ids_LTK = problem.sample_ids_LTK.copy()
    for ids_TK, held_NE in zip(ids_LTK, held_LNE, strict=True):
        ids_TK[held_NE[source_T[:, None], ids_TK] & (source_T >= 0)[:, None]] = -1
    return ids_LTK


def _remote_choices(
    problem: Problem, layer: int, node_E: Int32Array, held_NE: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Choices of each sampled token on each node that is not its own, int64 `[T, N]`."""
    ids_TK, source_T = problem.sample_ids_LTK[layer], problem.sample_node_T
    num_nodes = problem.topology.num_nodes
    node_TK = node_E[ids_TK]
    remote_TK = (ids_TK >= 0) & (node_TK != source_T[:, None])
    remote_TK &= ~held_NE[source_T[:, None], ids_TK] | (source_T < 0)[:, None]
    token, choice = np.nonzero(remote_TK)
    cells = token * num_nodes + node_TK[token, choice]
    return np.bincount(cells, minlength=len(ids_TK) * num_nodes).reshape(-1, num_nodes)


def _gains(
    problem: Problem, layer: int, node_E: Int32Array, held_NE: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Sampled tokens of a node that would not visit an expert's node with a copy, `[N, E]`."""
    ids_TK, source_T = problem.sample_ids_LTK[layer], problem.sample_node_T
    count_TN = _remote_choices(problem, layer, node_E, held_NE)
    node_TK = node_E[ids_TK]
    alone_TK = np.take_along_axis(count_TN, node_TK.astype(np.int64), 1) == 1
    alone_TK &= (ids_TK >= 0) & (node_TK != source_T[:, None]) & (source_T >= 0)[:, None]
    alone_TK &= ~held_NE[source_T[:, None], ids_TK]
    token, choice = np.nonzero(alone_TK)
    cells = source_T[token] * len(node_E) + ids_TK[token, choice]
    return np.bincount(cells, minlength=held_NE.size).reshape(held_NE.shape)
