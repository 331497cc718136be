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
    rows_GE: _Int32,
    slot_expert_Gn: _Int32,
    slot_rows_Gn: _Int64,
    rank_to_rail_G: _Int32,
    rank_to_node_G: _Int32 | None = None,
) -> _Int32:
    """Rows of each source rank for each slot, int32 `[G, G*n]`."""

def split_copied(
    rows_MLGE: _Int32,
    slot_expert_MLGn: _Int32,
    slot_rows_MLGn: _Int64,
    rank_to_rail_G: _Int32,
    num_threads: int = 0,
    rank_to_node_G: _Int32 | None = None,
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
    donor_only: bool = False,
) -> tuple[_Int32, _Int64, _Int64]:
    """Replicas of every column and layer; `donor_only` plans the baseline of that name.

    Returns:
        replica slots `[C, L, G, S]`, rows of slots `[C, L, G, n]`, rows of the fullest rank
        `[C, L]`.
    """

def split_sites(
    totals_CLE: _Int64, slot_expert_CLGn: _Int32, num_threads: int = 0
) -> tuple[_Int64, _Int64]:
    """The exact split over given copies: the smallest maximum over all ranks.

    Returns:
        rows of slots `[C, L, G, n]`, rows of the fullest rank `[C, L]`.
    """

def expected_copies(
    rows_MLGE: _Int32,
    slot_expert_MLGn: _Int32,
    slot_rows_MLGn: _Int64,
    rank_to_node_G: _Int32,
    rank_to_rail_G: _Int32,
    gateway_GN: _Int32 | None = None,
    top_k: int = 1,
    distinct: bool = True,
    num_threads: int = 0,
) -> npt.NDArray[np.float64]:
    """Expected token copies on every link, float64 `[M, L, 5, G]`.

    Links: RDMA out and in, NVLink out and in, tokens held. With `gateway_GN` `[G, N]` a token goes
    once to every other node and is forwarded there, else once to every rank.
    """

def count_copies(
    ids_TLK: npt.NDArray[np.int16],
    first_MG: _Int64,
    rows_MLGE: _Int32,
    slot_expert_MLGn: _Int32,
    slot_rows_MLGn: _Int64,
    rank_to_node_G: _Int32,
    rank_to_rail_G: _Int32,
    gateway_GN: _Int32 | None = None,
    repeat: int = 1,
    num_threads: int = 0,
) -> npt.NDArray[np.float64]:
    """Exact token copies on every link, as `expected_copies`.

    `first_MG` is `[M, G+1]`: source g of micro-batch m has tokens first[m, g]..first[m, g+1]-1,
    each `repeat` times in a row.
    """

def compose(
    rows_JW: _Int32,
    tokens_J: _Int64,
    attention_J: _Int64,
    unit_J: _Int32,
    group_C: _Int32,
    budget_C4: _Int64,
    num_micro_batches: int,
    start_J: _Int32 | None,
    num_features: int,
    feature_W: _Int32 | None,
    max_passes: int,
    least_gain: float,
    block: int,
    seed: int,
    check: bool = False,
    num_threads: int = 0,
) -> tuple[_Int32, tuple[int, int, int, int], tuple[float, float, int, int, int]]:
    """Samples of one optimizer step onto micro-batches and cells (J samples, C cells here).

    Samples of one unit move together. budget_C4: most tokens, attention and samples, fewest
    samples. `feature_W` sums (layer, expert) to features; without it `num_features` below W folds
    them with random signs. `check` rescores everything after each pass.

    Returns:
        bin (micro-batch * C + cell) of each sample, empty where they do not fit; misfit (limit 1..4
        as in budget_C4 or 0, sample or -1, bin, excess); spread before and after, swaps, moves,
        passes.
    """

def choose_static(
    load_LEC: _Int64,
    home_LGH: _Int32,
    rank_to_node_G: _Int32,
    copies_per_node: int,
    static_slots: int,
    min_gain: int = 0,
    proposals: int = 2000,
    seed: int = 0,
    num_threads: int = 0,
) -> _Int32:
    """Experts of the static slots, int32 `[L, G, X]`, -1 = free.

    A copy must lower the summed rows of the fullest rank by `min_gain`.
    """

def split_static(
    totals_CLE: _Int64,
    home_LGH: _Int32,
    static_LGX: _Int32,
    rank_to_node_G: _Int32,
    near_CLNE: _Int64 | None = None,
    num_threads: int = 0,
) -> tuple[_Int64, _Int64]:
    """Exact split of every column between nodes; starts with rows of sources near the copies.

    Returns:
        rows of home and static slots `[C, L, G, H+X]`, rows a rank of the fullest node `[C, L]`.
    """

def replicate_slots(
    rows_CLGb: _Int64,
    slot_expert_LGb: _Int32,
    rank_to_node_G: _Int32,
    replica_slots: int,
    tolerance: float = 0.0,
    num_threads: int = 0,
) -> tuple[_Int32, _Int64, _Int64]:
    """As `replicate`, from the rows of b home and static slots a rank; n = b + S.

    Where replicas leave a rank above the average, rows are split again over all copies together.
    """

def warm_layouts(
    load_LEC: _Int64,
    base_LGH: _Int32,
    rank_to_node_G: _Int32,
    move_cost_L: _Int64,
    replica_slots: int,
    proposals: int,
    solver_calls: int,
    seed: int = 0,
    num_threads: int = 0,
) -> _Int32:
    """Layouts near `base_LGH` when each moved expert costs rows of the fullest rank, as there."""

def replicate_limited(
    rows_CLGb: _Int64,
    fixed_CLG: _Int64,
    slot_expert_LGb: _Int32,
    rank_to_node_G: _Int32,
    replica_slots: int,
    tolerance: float,
    min_rows: int,
    max_fan_out: int,
    max_pushes: int,
    num_threads: int = 0,
) -> tuple[_Int32, _Int64, _Int64]:
    """Replicas under limits, from the rows of every base slot; `fixed_CLG` rows stay on their rank.

    Returns:
        replica slots `[C, L, G, S]`, rows of slots `[C, L, G, b+S]` without fixed ones, rows of the
        fullest rank with them `[C, L]`.
    """

def place_static(
    load_LEC: _Int64,
    home_LGH: _Int32,
    rank_to_node_G: _Int32,
    copies_LNX: _Int32,
    static_slots: int,
    num_threads: int = 0,
) -> _Int32:
    """Static slots for given experts of every node, -1 = none; int32 `[L, G, X]`."""

def group_bins(
    load_LEC: _Int64,
    scale_B: _Int32,
    start_LE: _Int32,
    limit_L: _Int64,
    ids_LTK: _Int32,
    source_bin_T: _Int32 | None = None,
    proposals: int = 100_000,
    seed: int = 0,
    check: bool = False,
    num_threads: int = 0,
) -> tuple[_Int32, _Int64, _Int64]:
    """Annealing swaps for few (token, bin) pairs, with loads as in `assign_bins` under a limit.

    Returns:
        bin of each expert `[L, E]`, objective of loads `[L]`, pairs outside the token's own bin
        `[L]`.
    """
