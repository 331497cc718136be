"""Replicas for counts that become known only while a layer runs.

Letters: E experts, G ranks, H home slots, S replica slots a rank, n = H + S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra_kernels import native

if TYPE_CHECKING:
    from relibra.layout import ExpertLayout, Int32Array, Int64Array
    from relibra.plan import ReplicaPlan
    from relibra.topology import Topology


def replicate_now(
    total_E: Int64Array, layout: ExpertLayout, topology: Topology, replica_slots: int
) -> tuple[Int32Array, Int64Array]:
    """Replicas and rows of every slot for one use of one layer, by the planner's own solver.

    Deterministic, so that every rank finds the same without a message.

    Args:
        total_E: int64 ``[E]``, rows of each expert over all source ranks.
        layout: home of every expert.
        topology: nodes of the G ranks.
        replica_slots: S.

    Returns:
        int32 ``[G, S]`` expert of each replica slot, -1 free, and int64 ``[G, n]`` rows.

    Example:
        >>> from relibra.layout import ExpertLayout
        >>> from relibra.topology import Topology
        >>> _, rows = replicate_now(
        ...     np.array([90, 10], np.int64), ExpertLayout([[0], [1]]), Topology(1, 2), 1)
        >>> rows.sum(1).tolist()
        [50, 50]
    """
    replicas, rows, _ = native.planner().replicate(
        np.ascontiguousarray(total_E, np.int64)[None, None],
        np.ascontiguousarray(layout.home_slot_expert_GH)[None],
        topology.rank_to_node_G,
        replica_slots,
        num_threads=1,
    )
    return replicas[0, 0], rows[0, 0]


def share_as_planned(total_E: Int64Array, planned: ReplicaPlan) -> Int64Array:
    """Live rows of each expert shared over its slots in proportion to the planned rows.

    Floors, then one row more for the largest remainders, lower slot first; an expert without
    planned rows stays at home.

    Args:
        total_E: int64 ``[E]``, live rows of each expert.
        planned: copies and rows of the plan.

    Returns:
        int64 ``[G, n]``.

    Example:
        Planned 6 and 3 rows for the two copies of expert 0; 4 rows come.

        >>> from relibra.layout import ExpertLayout
        >>> from relibra.plan import ReplicaPlan
        >>> plan = ReplicaPlan(ExpertLayout([[0], [1]]), [[-1], [0]], [[6, 0], [1, 3]])
        >>> share_as_planned(np.array([4, 0], np.int64), plan).tolist()
        [[3, 0], [0, 1]]
    """
    slot_expert, weight = planned.slot_expert_Gn.reshape(-1), planned.slot_rows_Gn.reshape(-1)
    num_slots, num_home = planned.slot_expert_Gn.shape[1], planned.layout.slots_per_rank
    held = np.flatnonzero(slot_expert >= 0)
    expert = slot_expert[held]
    planned_E = np.bincount(expert, weight[held], minlength=len(total_E)).astype(np.int64)
    share = np.where(planned_E[expert] > 0, weight[held], held % num_slots < num_home)
    whole = np.maximum(planned_E, 1)[expert]
    # Products of two counts below 2^31 fit in 62 bits.
    floor, remainder = np.divmod(total_E[expert] * share, whole)
    missing_E = total_E - np.bincount(expert, floor, minlength=len(total_E)).astype(np.int64)
    order = np.lexsort((held, -remainder, expert))
    first_E = np.searchsorted(expert[order], np.arange(len(total_E)))
    rank_in_expert = np.arange(len(order)) - first_E[expert[order]]
    rows = np.zeros(slot_expert.shape, np.int64)
    rows[held] = floor
    rows[held[order]] += rank_in_expert < missing_E[expert[order]]
    return rows.reshape(planned.slot_rows_Gn.shape)
