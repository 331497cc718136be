"""Inter-batch stage: layouts of all layers from the loads of the whole batch.

Objective: sum over columns of the fullest node, since replication makes a node flat inside. Without
replicas a node cannot be made flat, and the sum over columns of the fullest rank is used instead.

Letters: C columns (micro-batches of all different passes), L layers, E experts, N nodes, G ranks,
H home slots a rank, B bins (nodes or ranks).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from relibra.planner import static_copies
from relibra_kernels import native

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem

# Part of the proposals that is spent again for copies of tokens.
_GROUPING_SHARE = 0.6
# Part of the proposals that is spent again inside nodes.
_INSIDE_SHARE = 5
# Solver calls of the last touch inside nodes: one for so many proposals, about a tenth of the time.
_PROPOSALS_PER_SOLVE = 250
# Base layouts further above the search from scratch are no start for swaps.
_NEAR = 1.1


class Reorder:
    """Candidate layouts of a problem, each int32 `[L, G, H]`.

    Args:
        problem: the input.
        by_rank: use the rank objective (no replicas follow).
    """

    def __init__(self, problem: Problem, *, by_rank: bool) -> None:
        self.problem = problem
        self.by_rank = by_rank
        config = problem.config
        self.load_LEC = _weighted_loads(problem)
        self._capacity_G = home_capacities(problem)
        if by_rank:
            self._bin_of_rank_G = np.arange(problem.topology.num_ranks, dtype=np.int32)
            sizes = np.ones(problem.topology.num_ranks, np.int64)
        else:
            self._bin_of_rank_G = problem.topology.rank_to_node_G
            sizes = np.asarray(problem.topology.node_sizes)
        common = math.lcm(*(int(size) for size in sizes))
        self._scale_B = (common // sizes).astype(np.int32)
        self._seed, self._threads = config.seed, config.num_threads

    def cold(self) -> Int32Array:
        """A search that knows nothing of the base layouts, relabelled to move few experts."""
        return self.layouts_of(self.cold_bins()[0])

    def cold_bins(self) -> tuple[Int32Array, Int64Array]:
        """Bin of each expert from that search, int32 `[L, E]`, and its objective, int64 `[L]`."""
        capacity_B = np.bincount(self._bin_of_rank_G, self._capacity_G).astype(np.int32)
        bin_LE, objective_L, _ = native.planner().assign_bins(
            self.load_LEC,
            capacity_B,
            self._scale_B,
            None,
            self.problem.config.proposals,
            self._seed,
            False,
            self._threads,
        )
        return bin_LE, objective_L

    def grouped_bins(
        self, bin_LE: Int32Array, limit_L: Int64Array, ids_LTK: Int32Array
    ) -> Int32Array:
        """A search from some nodes of the experts for few copies of the sampled tokens.

        Args:
            bin_LE: int32 `[L, E]`, where it starts.
            limit_L: int64 `[L]`, objective of loads that is not to be exceeded by much.
            ids_LTK: int32 `[L, T, K]`, choices of the sampled tokens that count, -1 = none.
        """
        problem = self.problem
        grouped: tuple[Int32Array, Int64Array, Int64Array] = native.planner().group_bins(
            self.load_LEC,
            self._scale_B,
            bin_LE,
            limit_L,
            ids_LTK,
            problem.sample_node_T,
            int(problem.config.proposals * _GROUPING_SHARE),
            self._seed,
            False,
            self._threads,
        )
        return grouped[0]

    def layouts_of(self, bin_LE: Int32Array) -> Int32Array:
        """Experts of each bin onto its ranks, relabelled to move few from the base layouts."""
        problem = self.problem
        if self.by_rank:
            home_LGH = _list_by_rank(bin_LE, problem)
        else:
            load_LEC = self.load_LEC
            if problem.static_slots:
                rough_LGH = self._place_in_nodes(load_LEC, bin_LE, 0)
                load_LEC = static_copies.loads_at_home(problem, rough_LGH)
            home_LGH = self._place_in_nodes(load_LEC, bin_LE, problem.config.proposals)
        return self._relabel(home_LGH)

    def _place_in_nodes(
        self, load_LEC: Int64Array, node_LE: Int32Array, proposals: int
    ) -> Int32Array:
        home_LGH: Int32Array = native.planner().place_in_nodes(
            load_LEC,
            node_LE,
            self.problem.topology.rank_to_node_G,
            self.problem.home_slots,
            self.problem.config.replica_slots,
            proposals // _INSIDE_SHARE,
            proposals // _PROPOSALS_PER_SOLVE,
            self._seed,
            self._threads,
        )
        return home_LGH

    def warm(self, cold_L: Int64Array | None = None) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """Improving swaps from the base layouts.

        Args:
            cold_L: int64 `[L]`, objective of a search from scratch; base layouts far above it stay
                as they are, since swaps from there hardly ever reach it. None searches everywhere.

        Returns:
            The layouts, and bool `[L]`, layers that changed. A layer changes only when a swap of
            two experts lowers the objective, so a layout that this or `cold` made is kept.
        """
        problem = self.problem
        base_LGH = problem.base_LGH
        layers, ranks, slots = np.nonzero(base_LGH >= 0)
        before_LE = np.empty(self.load_LEC.shape[:2], np.int32)
        before_LE[layers, base_LGH[layers, ranks, slots]] = self._bin_of_rank_G[ranks]
        after_LE = before_LE.copy()
        is_near_L = np.ones(len(before_LE), np.bool_)
        if cold_L is not None:
            is_near_L = self._objective_of(before_LE) <= _NEAR * cold_L
        for group, capacity_B in self._equal_capacities(before_LE):
            members = group[is_near_L[group]]
            if len(members) == 0:
                continue
            after_LE[members], _, _ = native.planner().assign_bins(
                self.load_LEC[members],
                capacity_B,
                self._scale_B,
                before_LE[members],
                problem.config.proposals,
                self._seed,
                False,
                self._threads,
            )
        changed_L = (before_LE != after_LE).any(1)
        if self.by_rank:
            home_LGH = _list_by_rank(after_LE, problem)
        else:
            home_LGH = _swap_places(base_LGH, before_LE, after_LE)
        return self._relabel(home_LGH), changed_L

    def _objective_of(self, bin_LE: Int32Array) -> npt.NDArray[np.float64]:
        """Sum over columns of the fullest bin, as of `cold_bins`, float64 `[L]`, exact."""
        in_bin_LBE = bin_LE[:, None] == np.arange(len(self._scale_B))[:, None]
        rows_LBC = np.matmul(in_bin_LBE.astype(np.float64), self.load_LEC.astype(np.float64))
        largest: npt.NDArray[np.float64] = (rows_LBC * self._scale_B[:, None]).max(1).sum(1)
        return largest

    def near(
        self, home_LGH: Int32Array, layers: npt.NDArray[np.int64], price_rows: int
    ) -> Int32Array:
        """Layouts near some others, for moves that cost something.

        Args:
            home_LGH: int32 `[L', G, H]`, where the search starts and moves are free.
            layers: int64 `[L']`, indices of the layers.
            price_rows: rows of the objective that a moved expert must save.
        """
        problem = self.problem
        ranks_alone_G = np.arange(problem.topology.num_ranks, dtype=np.int32)
        found: Int32Array = native.planner().warm_layouts(
            np.ascontiguousarray(self.load_LEC[layers]),
            np.ascontiguousarray(home_LGH),
            ranks_alone_G if self.by_rank else problem.topology.rank_to_node_G,
            np.full(len(layers), price_rows, np.int64),
            0 if self.by_rank else problem.config.replica_slots,
            problem.config.proposals // _INSIDE_SHARE,
            problem.config.proposals // _PROPOSALS_PER_SOLVE,
            self._seed,
            self._threads,
        )
        return found

    def _relabel(self, home_LGH: Int32Array) -> Int32Array:
        problem = self.problem
        renamed: Int32Array = native.planner().relabel(
            home_LGH,
            problem.base_LGH,
            problem.topology.rank_to_node_G,
            problem.shape.num_experts,
            self.by_rank,
            self._threads,
        )
        return renamed

    def _equal_capacities(
        self, bin_LE: Int32Array
    ) -> list[tuple[npt.NDArray[np.int64], Int32Array]]:
        """Layers grouped by the experts of each bin: base layouts may place fillers freely."""
        num_bins = len(self._scale_B)
        cells = bin_LE + num_bins * np.arange(len(bin_LE))[:, None]
        capacity_LB = np.bincount(cells.reshape(-1), minlength=len(bin_LE) * num_bins)
        capacity_LB = capacity_LB.reshape(-1, num_bins).astype(np.int32)
        kinds, kind_of_L = np.unique(capacity_LB, axis=0, return_inverse=True)
        members = [np.flatnonzero(kind_of_L.reshape(-1) == kind) for kind in range(len(kinds))]
        return list(zip(members, kinds, strict=True))


def home_capacities(problem: Problem) -> Int32Array:
    """Home slots in use of every rank, int32 `[G]`: H, or H - 1 where a filler slot lies."""
    capacity: Int32Array = native.planner().rank_capacities(
        problem.topology.rank_to_node_G, problem.shape.num_experts, problem.home_slots
    )
    return capacity


def _weighted_loads(problem: Problem) -> Int64Array:
    """int64 `[L, E, C]`."""
    weighted = problem.totals_CLE * problem.weight_C[:, None, None]
    return np.ascontiguousarray(weighted.transpose(1, 2, 0))


def _list_by_rank(rank_LE: Int32Array, problem: Problem) -> Int32Array:
    """Home slots of each rank with its experts ascending, then fillers, int32 `[L, G, H]`."""
    num_layers, num_experts = rank_LE.shape
    order_LE = np.argsort(rank_LE, axis=1, kind="stable")
    sorted_LE = np.take_along_axis(rank_LE, order_LE, 1)
    num_ranks = problem.topology.num_ranks
    first_LG = (sorted_LE[:, :, None] < np.arange(num_ranks)).sum(1)
    slot_LE = np.arange(num_experts) - np.take_along_axis(first_LG, sorted_LE.astype(np.int64), 1)
    home_LGH = np.full((num_layers, num_ranks, problem.home_slots), -1, np.int32)
    home_LGH[np.arange(num_layers)[:, None], sorted_LE, slot_LE] = order_LE
    return home_LGH


def _swap_places(base_LGH: Int32Array, before_LE: Int32Array, after_LE: Int32Array) -> Int32Array:
    """Experts that changed their bin take the places of those that left it, in ascending order."""
    home_LGH = base_LGH.copy()
    flat_LS = home_LGH.reshape(len(home_LGH), -1)
    layers, slots = np.nonzero(flat_LS >= 0)
    experts = flat_LS[layers, slots]
    moved = before_LE[layers, experts] != after_LE[layers, experts]
    layers, slots, experts = layers[moved], slots[moved], experts[moved]
    leaving = np.lexsort((slots, before_LE[layers, experts], layers))
    arriving = np.lexsort((experts, after_LE[layers, experts], layers))
    flat_LS[layers[leaving], slots[leaving]] = experts[arriving]
    return home_LGH
