"""Native core of the planner.

Arrays are C-contiguous and of exactly the type given; nothing is converted. ValueError: a value out
of range; TypeError: another type or shape.

Letters: M micro-batches, C columns, L layers, E experts, G ranks, B bins, H home and S replica
slots a rank, n = H + S. num_threads 0 = all; results do not depend on it.
"""

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

def split_rows(
    rows_GE: _Int32, slot_expert_Gn: _Int32, slot_rows_Gn: _Int64, rank_to_rail_G: _Int32
) -> _Int32:
    """Rows of each source rank for each slot, int32 `[G, G*n]`."""

def split_copied(
    rows_MLGE: _Int32,
    slot_expert_MLGn: _Int32,
    slot_rows_MLGn: _Int64,
    rank_to_rail_G: _Int32,
    num_threads: int = 0,
) -> _Int32:
    """(micro-batch, layer, source rank, slot id, rows) of experts with a copy, int32 `[nnz, 5]`."""

def count_traffic(
    rows_MLGE: _Int32,
    slot_expert_MLGn: _Int32,
    slot_rows_MLGn: _Int64,
    rank_to_node_G: _Int32,
    rank_to_rail_G: _Int32,
    num_threads: int = 0,
) -> _Int64:
    """Rows executed at their source rank, elsewhere in its node, in another node: int64 `[3]`."""

def assign_bins(
    load_LEC: _Int64,
    capacity_B: _Int32,
    scale_B: _Int32,
    start_LE: _Int32 | None = None,
    proposals: int = 100_000,
    seed: int = 0,
    check: bool = False,
    num_threads: int = 0,
) -> tuple[_Int32, _Int64, _Int64]:
    """Experts onto bins of fixed cardinality: smallest sum over columns of the largest scaled bin.

    Without `start_LE` an annealing search, seeded by `seed` and the loads; with it, improving swaps
    until none is left. `check` rescores everything after each accepted swap.

    Returns:
        bin of each expert `[L, E]`, objective `[L]`, swaps evaluated `[L]`.
    """

def place_in_nodes(
    load_LEC: _Int64,
    node_of_LE: _Int32,
    rank_to_node_G: _Int32,
    home_slots: int,
    replica_slots: int,
    proposals: int,
    solver_calls: int,
    seed: int = 0,
    num_threads: int = 0,
) -> _Int32:
    """Experts of each node onto its ranks, int32 `[L, G, H]`, -1 = filler."""

def rank_capacities(rank_to_node_G: _Int32, num_experts: int, home_slots: int) -> _Int32:
    """Home slots in use of every rank when filler slots are spread evenly, int32 `[G]`."""

def relabel(
    home_LGH: _Int32,
    base_LGH: _Int32,
    rank_to_node_G: _Int32,
    num_experts: int,
    across_nodes: bool = False,
    num_threads: int = 0,
) -> _Int32:
    """Nodes and ranks inside nodes renamed so that few experts leave their base rank."""

def match(weight_nn: _Int64) -> _Int32:
    """Column of each row in a perfect matching of largest weight, int32 `[n]`."""

def replicate(
    totals_CLE: _Int64,
    home_LGH: _Int32,
    rank_to_node_G: _Int32,
    replica_slots: int,
    tolerance: float = 0.0,
    num_threads: int = 0,
) -> tuple[_Int32, _Int64, _Int64]:
    """Replicas of every column and layer.

    Returns:
        replica slots `[C, L, G, S]`, rows of slots `[C, L, G, n]`, rows of the fullest rank
        `[C, L]`.
    """
