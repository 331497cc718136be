"""Routing that no plan knows in advance: counts are gathered while the layer runs.

Modes of a micro-batch, the same on all ranks:

* ``exact``: replayed ids, everything known before the step (not in this module);
* ``fraction``: the plan's copies, each expert's live rows shared as the plan shared its own;
* ``online``: copies chosen for the live counts, by the same solver on every rank;
* ``home``: no copies, every row goes to the home of its expert.

Static copies of the plan take rows in ``exact`` and ``fraction``, none in the other two.

Results are those of the unbalanced layer in every mode. No row is dropped: buffers follow the live
counts. Letters: T tokens here, K choices, E experts, G ranks, H home slots, S replica slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra.hop_splits import Splits, count_tokens
from relibra.hop_tables import build_tables
from relibra.local_use import count_ids
from relibra.pass_plan import ReplicaPlan
from relibra.planner.online import replicate_now, share_as_planned
from relibra.rank_tables import SourceRoute
from relibra.source_split import split_rows
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.layout import ExpertLayout, Int64Array
    from relibra.movers import GroupMovers
    from relibra.rank_tables import LayerTables
    from relibra.runtime import Runtime

LIVE_MODES = ("fraction", "online", "home")


def live_source(
    runtime: Runtime,
    mode: str,
    counts_GE: Int64Array,
    layout: ExpertLayout,
    planned: ReplicaPlan | None = None,
) -> SourceRoute:
    """This rank's route for live counts; a pure function of what all ranks hold.

    Args:
        runtime: topology, S and tile size.
        mode: one of `LIVE_MODES`.
        counts_GE: int64 ``[G, E]``, rows of each source rank for each expert.
        layout: home of every expert.
        planned: the plan of this use, needed by ``fraction``.
    """
    hops, total_E = runtime.dispatcher.ranks, counts_GE.sum(0)
    if mode == "fraction" and planned is not None:
        view, slot_rows = planned, share_as_planned(total_E, planned)
    elif mode == "home" or runtime.replica_slots == 0:
        sizes = (runtime.replica_slots, runtime.rank, runtime.block_rows)
        return SourceRoute.live(counts_GE, layout, *sizes, hops)
    else:
        replicas, slot_rows = replicate_now(
            total_E, layout, runtime.topology, runtime.replica_slots
        )
        view = ReplicaPlan(layout, replicas, slot_rows)
    quota = split_rows(
        np.ascontiguousarray(counts_GE, np.int32),
        np.ascontiguousarray(view.slot_expert_Gn, np.int32),
        np.ascontiguousarray(slot_rows, np.int64),
        runtime.topology.rank_to_rail_G,
        runtime.topology.rank_to_node_G,
    )
    return SourceRoute.build(
        layout,
        view.replica_slot_expert_GS,
        quota,
        runtime.rank,
        runtime.block_rows,
        hops,
        static_slot_expert_GX=view.static_slot_expert_GX,
        rank_to_node_G=runtime.topology.rank_to_node_G,
    )


def gather_counts(
    runtime: Runtime, expert_ids: torch.Tensor, num_experts: int, what: str
) -> Int64Array:
    """Rows of every expert on every rank, int64 ``[G, E]``; collective.

    A rank whose ids are wrong sends counts that nobody can have, so that its peers do not wait.

    Args:
        runtime: of the group.
        expert_ids: ``[T, K]``.
        num_experts: E.
        what: names the use in errors.

    Raises:
        TypeError, ValueError: wrong ids on this rank, see `relibra.local_use.count_ids`.
        PlanError: wrong ids on another rank.
    """
    fault: Exception | None = None
    try:
        counts_E = count_ids(expert_ids, num_experts)
    except (TypeError, ValueError) as error:
        fault = error
        device = getattr(expert_ids, "device", None)
        counts_E = torch.full((num_experts,), -1, dtype=torch.int64, device=device)
    counts_GE: Int64Array = torch.stack(runtime.gather(counts_E, f"{what}: counts")).cpu().numpy()
    if fault is not None:
        raise fault
    refused = np.flatnonzero((counts_GE < 0).any(1)).tolist()
    if refused:
        raise PlanError(f"{what}: expert_ids: refused by rank(s) {refused}, see their errors")
    return counts_GE


def live_tables(
    runtime: Runtime,
    movers: GroupMovers,
    mode: str,
    ids_TK: torch.Tensor,
    layout: ExpertLayout,
    expert_ids: torch.Tensor,
    what: str,
    planned: ReplicaPlan | None = None,
) -> LayerTables:
    """Tables for live ids; collective: counts, token counts, rows.

    Args:
        runtime: of the group.
        movers: of this use.
        mode: one of `LIVE_MODES`.
        ids_TK: int32 ``[T, K]``, -1 takes no part.
        layout: home of every expert.
        expert_ids: integer ``[T, K]``, the same as the host gave them.
        what: names the use in errors.
        planned: the plan of this use, for ``fraction``.

    Raises:
        TypeError, ValueError: ids that are none; on other ranks PlanError.
    """
    counts_GE = gather_counts(runtime, expert_ids, layout.num_experts, what)
    source = live_source(runtime, mode, counts_GE, layout, planned)
    ranks = runtime.dispatcher.ranks
    sends = count_tokens(source, ids_TK, runtime.num_ranks, ranks, runtime.kernels)
    sends_GX = torch.stack(runtime.gather(sends, f"{what}: token counts")).cpu().numpy()
    splits = Splits.of(sends_GX, runtime.rank, source, ranks)
    num_home = layout.slots_per_rank
    return build_tables(runtime, movers, ids_TK, source, splits, what, num_home=num_home)
