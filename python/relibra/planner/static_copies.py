"""Static copies: experts with a second place on another node for a whole rollout batch.

Reordering leaves nodes unequal in single micro-batches. Copies of a few experts on other nodes,
chosen once, let every micro-batch be split exactly between nodes; replication then makes each node
flat inside. Between optimizer steps the weights of a copy are old, so its home sends them before
the first micro-batch of every optimizer step and receives the gradients after the last.

Letters as in `relibra.planner.replicate`; N nodes, X static slots a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra_kernels import native

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem

# Changes of a copy that are tried for a layer, of the proposals of its layout search.
_PROPOSALS_SHARE = 100


def choose_copies(
    problem: Problem, home_LGH: Int32Array, layers: npt.NDArray[np.int64] | None = None
) -> Int32Array:
    """Experts of the static slots for some layouts.

    A copy that saves too little is left out, see `PlannerConfig.min_rows_per_static_copy`.

    Args:
        problem: the input.
        home_LGH: int32 `[L', G, H]`, layouts of `layers`.
        layers: int64 `[L']`, indices of the layers; None is all.

    Returns:
        int32 `[L', G, X]`, -1 free.
    """
    config = problem.config
    load_CLE = _select(problem.totals_CLE, layers) * problem.weight_C[:, None, None]
    static: Int32Array = native.planner().choose_static(
        np.ascontiguousarray(load_CLE.transpose(1, 2, 0)),
        np.ascontiguousarray(home_LGH),
        problem.topology.rank_to_node_G,
        config.static_copies,
        problem.static_slots,
        config.min_rows_per_static_copy * problem.num_refreshes,
        config.proposals // _PROPOSALS_SHARE,
        config.seed,
        config.num_threads,
    )
    return static


def place_copies(problem: Problem, home_LGH: Int32Array, copies_LNX: Int32Array) -> Int32Array:
    """Static slots for given copies of every node, on the ranks that they fill least.

    Args:
        problem: the input.
        home_LGH: int32 `[L, G, H]`.
        copies_LNX: int32 `[L, N, copies]`, experts that no home of the node has, -1 = none.

    Returns:
        int32 `[L, G, X]`, -1 free.
    """
    load_CLE = problem.totals_CLE * problem.weight_C[:, None, None]
    static: Int32Array = native.planner().place_static(
        np.ascontiguousarray(load_CLE.transpose(1, 2, 0)),
        np.ascontiguousarray(home_LGH),
        problem.topology.rank_to_node_G,
        copies_LNX,
        problem.static_slots,
        problem.config.num_threads,
    )
    return static


def split_between_nodes(
    problem: Problem,
    home_LGH: Int32Array,
    static_LGX: Int32Array,
    layers: npt.NDArray[np.int64] | None = None,
) -> Int64Array:
    """Rows of every home and static slot, with the smallest fullest node that the copies allow.

    The split starts with the rows that a copy's own node sends, so that they need not travel, and
    moves what is above the exact minimum of rows a rank of the fullest node.

    Args:
        problem: the input.
        home_LGH: int32 `[L', G, H]`, layouts of `layers`.
        static_LGX: int32 `[L', G, X]`, from `choose_copies`.
        layers: int64 `[L']`, indices of the layers; None is all.

    Returns:
        int64 `[C, L', G, H+X]`.
    """
    split: tuple[Int64Array, Int64Array] = native.planner().split_static(
        np.ascontiguousarray(_select(problem.totals_CLE, layers)),
        np.ascontiguousarray(home_LGH),
        static_LGX,
        problem.topology.rank_to_node_G,
        np.ascontiguousarray(_select(problem.node_rows_CLNE, layers)),
        problem.config.num_threads,
    )
    return split[0]


def loads_at_home(problem: Problem, home_LGH: Int32Array) -> Int64Array:
    """Weighted rows that stay at home when static copies take the rest, int64 `[L, E, C]`.

    What the placement inside nodes should make flat.

    Args:
        problem: the input.
        home_LGH: int32 `[L, G, H]`; only the nodes of the experts matter.
    """
    static_LGX = choose_copies(problem, home_LGH)
    rows_CLGb = split_between_nodes(problem, home_LGH, static_LGX)
    rows_CLGH = rows_CLGb[..., : home_LGH.shape[2]] * problem.weight_C[:, None, None, None]
    layer, rank, slot = np.nonzero(home_LGH >= 0)
    load_LEC: Int64Array = np.zeros(
        (len(home_LGH), problem.shape.num_experts, len(rows_CLGH)), np.int64
    )
    load_LEC[layer, home_LGH[layer, rank, slot]] = rows_CLGH[:, layer, rank, slot].T
    return load_LEC


def _select(array_CL: Int64Array, layers: npt.NDArray[np.int64] | None) -> Int64Array:
    return array_CL if layers is None else array_CL[:, layers]
