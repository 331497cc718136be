"""Which source rank sends how many of an expert's rows to which of its copies.

Part of the plan file format: a pure function of the counts and the rows of each slot, so a plan
need not store it. For each expert with copies, with c[g] = rows of source g that are left and
x[s] = rows of slot s that are left, slots in ascending id:

1. rank-local: source g keeps min(c[g], x[s]) rows for the copy on its own rank;
   an expert whose copies lie on several nodes (static copies): then, for each slot, min(x[s], sum
   of c over the sources on the slot's node) rows are dealt to those sources in proportion to c;
2. same rail: for each slot, min(x[s], sum of c over the sources on the slot's rail) rows are dealt
   to those sources in proportion to c;
3. the rest: for each slot, x[s] rows are dealt to all sources in proportion to c.

Dealing n rows in proportion to c: floor(n * c / sum c) each, then one more for the largest
remainders, lower rank first. Every number is an integer, and both marginals are exact.

Letters: G ranks, E experts, n slots a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra_kernels import native

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array


def split_rows(
    rows_GE: Int32Array,
    slot_expert_Gn: Int32Array,
    slot_rows_Gn: Int64Array,
    rank_to_rail_G: Int32Array,
    rank_to_node_G: Int32Array | None = None,
) -> Int32Array:
    """Rows that each source rank sends to each slot in one use of a layer (native).

    Source: the module's text. `split_rows_reference` is the readable twin.

    Args:
        rows_GE: int32 `[G, E]`, rows that source rank g has for expert e.
        slot_expert_Gn: int32 `[G, n]`, expert of each slot, -1 = none.
        slot_rows_Gn: int64 `[G, n]`, rows executed in each slot; those of an expert add up to its
            column of `rows_GE`.
        rank_to_rail_G: int32 `[G]`.
        rank_to_node_G: int32 `[G]`; may be left out when no expert has copies on several nodes.

    Returns:
        int32 `[G, G*n]`.

    Example:
        >>> rows = np.array([[4, 0], [2, 1]], np.int32)
        >>> slots = np.array([[0, -1], [1, 0]], np.int32)
        >>> slot_rows = np.array([[3, 0], [1, 3]], np.int64)
        >>> split_rows(rows, slots, slot_rows, np.array([0, 1], np.int32)).tolist()
        [[3, 0, 0, 1], [0, 0, 1, 2]]
    """
    quota: Int32Array = native.planner().split_rows(
        rows_GE, slot_expert_Gn, slot_rows_Gn, rank_to_rail_G, rank_to_node_G
    )
    return quota


def split_rows_reference(
    rows_GE: Int32Array,
    slot_expert_Gn: Int32Array,
    slot_rows_Gn: Int64Array,
    rank_to_rail_G: Int32Array,
    rank_to_node_G: Int32Array | None = None,
) -> Int32Array:
    """Twin of `split_rows` in NumPy; equal exactly."""
    num_ranks, slots_per_rank = slot_expert_Gn.shape
    quota = np.zeros((num_ranks, num_ranks * slots_per_rank), np.int32)
    for expert in range(rows_GE.shape[1]):
        slots = np.flatnonzero(slot_expert_Gn.reshape(-1) == expert)
        ranks = slots // slots_per_rank
        count = rows_GE[:, expert].astype(object)  # Python integers: products do not overflow
        room = slot_rows_Gn.reshape(-1)[slots].astype(object)
        dealt = np.zeros((num_ranks, len(slots)), object)
        for i, rank in enumerate(ranks):
            dealt[rank, i] = min(count[rank], room[i])
        count -= dealt.sum(1)
        room -= dealt.sum(0)
        on_rail = rank_to_rail_G[ranks][:, None] == rank_to_rail_G[None]
        near = [on_rail, np.ones_like(on_rail)]
        if rank_to_node_G is not None and len(set(rank_to_node_G[ranks])) > 1:
            near.insert(0, rank_to_node_G[ranks][:, None] == rank_to_node_G[None])
        for allowed in near:
            for i in range(len(slots)):
                weight = np.where(allowed[i], count, 0)
                share = _deal(min(room[i], weight.sum()), weight)
                dealt[:, i] += share
                count -= share
                room[i] -= share.sum()
        quota[:, slots] = dealt.astype(np.int32)
    return quota


def _deal(rows: int, weight: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    """`rows` in proportion to `weight` by largest remainder."""
    if rows == 0:
        return np.zeros_like(weight)
    share: npt.NDArray[np.object_] = rows * weight // weight.sum()
    rest = rows * weight % weight.sum()
    largest_first = np.argsort(-rest, kind="stable")
    share[largest_first[: rows - share.sum()]] += 1
    return share
