"""Routing that no plan knows in advance: counts are gathered while the layer runs.

Modes of a micro-batch, the same on all ranks:

* ``exact``: replayed ids, everything known before the step (not in this module);
* ``fraction``: the plan's copies, each expert's live rows shared as the plan shared its own;
* ``online``: copies chosen for the live counts, by the same solver on every rank;
* ``home``: no copies, every row goes to the home of its expert.

Results are those of the unbalanced layer in every mode. No row is dropped: buffers follow the live
counts. Letters: T tokens here, K choices, E experts, G ranks, H home slots, S replica slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra.planner.online import replicate_now, share_as_planned
from relibra.rank_tables import LayerTables, SourceRoute
from relibra.source_split import split_rows

if TYPE_CHECKING:
    from relibra.layout import ExpertLayout, Int64Array
    from relibra.movers import GroupMovers
    from relibra.plan import ReplicaPlan
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
    if mode == "home" or runtime.replica_slots == 0:
        return SourceRoute.live(
            counts_GE, layout, runtime.replica_slots, runtime.rank, runtime.block_rows
        )
    total_E = counts_GE.sum(0)
    if mode == "fraction" and planned is not None:
        replicas = planned.replica_slot_expert_GS
        slot_rows = share_as_planned(total_E, planned)
    else:
        replicas, slot_rows = replicate_now(
            total_E, layout, runtime.topology, runtime.replica_slots
        )
    slot_expert = np.concatenate([layout.home_slot_expert_GH, replicas], 1)
    quota = split_rows(
        np.ascontiguousarray(counts_GE, np.int32),
        np.ascontiguousarray(slot_expert, np.int32),
        np.ascontiguousarray(slot_rows, np.int64),
        runtime.topology.rank_to_rail_G,
    )
    return SourceRoute.build(layout, replicas, quota, runtime.rank, runtime.block_rows)


def live_tables(
    runtime: Runtime,
    movers: GroupMovers,
    mode: str,
    ids_TK: torch.Tensor,
    layout: ExpertLayout,
    counts_E: torch.Tensor,
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
        counts_E: int64 ``[E]``, rows of this rank's ids.
        what: names the use in errors.
        planned: the plan of this use, for ``fraction``.
    """
    counts_GE = torch.stack(runtime.gather(counts_E, f"{what}: counts")).cpu().numpy()
    source = live_source(runtime, mode, counts_GE, layout, planned)
    sends = source.count_sends(ids_TK, runtime.num_ranks, runtime.kernels)
    sends_GG = torch.stack(runtime.gather(sends, f"{what}: token counts"))

    def exchange(x: torch.Tensor, send: list[int], recv: list[int]) -> torch.Tensor:
        return movers.exchange(x, send, recv, f"{what}: rows")

    return LayerTables.build(
        ids_TK,
        source,
        sends_GG[runtime.rank].tolist(),
        sends_GG[:, runtime.rank].tolist(),
        exchange,
        num_home=layout.slots_per_rank,
        block_rows=runtime.block_rows,
        backend=runtime.kernels,
    )
