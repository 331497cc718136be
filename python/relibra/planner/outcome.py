"""What a strategy returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from relibra.pass_plan import PassPlan, ReportSlots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relibra.layout import ExpertLayout, Int32Array, Int64Array
    from relibra.planner.problem import Problem


@dataclass(frozen=True)
class Outcome:
    """Layouts and passes of a strategy.

    Args:
        layouts: one a layer.
        passes: `PassPlan` of every distinct pass.
        is_executable: False when the passes hold rows of ranks only.
        report_slots: slots of every distinct pass, where such a strategy knows them.
        static_LGX: int32 `[L, G, X]`, static slots; None is X = 0.
    """

    layouts: tuple[ExpertLayout, ...]
    passes: Mapping[str, PassPlan]
    is_executable: bool = True
    report_slots: Mapping[str, ReportSlots] = field(default_factory=dict)
    static_LGX: Int32Array | None = None


def split_columns(
    problem: Problem, replica_CLGS: Int32Array, rows_CLGn: Int64Array
) -> dict[str, PassPlan]:
    """Columns back into the distinct passes that they came from."""
    passes, first = {}, 0
    for name in problem.distinct_passes:
        columns = slice(first, first + problem.loads[name].num_micro_batches)
        passes[name] = PassPlan(replica_CLGS[columns], rows_CLGn[columns])
        first = columns.stop
    return passes


def join_layers(parts: Sequence[Outcome]) -> Outcome:
    """One outcome of all layers from outcomes of some layers each, in order."""
    layouts = tuple(layout for part in parts for layout in part.layouts)
    passes = {
        name: PassPlan(
            np.concatenate([part.passes[name].replica_slot_expert_MLGS for part in parts], axis=1),
            np.concatenate([part.passes[name].slot_rows_MLGn for part in parts], axis=1),
        )
        for name in parts[0].passes
    }
    slots = {
        name: ReportSlots(
            np.concatenate([part.report_slots[name].slot_expert_MLGn for part in parts], axis=1),
            np.concatenate([part.report_slots[name].slot_rows_MLGn for part in parts], axis=1),
        )
        for name in parts[0].report_slots
    }
    static = [part.static_LGX for part in parts if part.static_LGX is not None]
    static_LGX = np.concatenate(static) if static else None
    return Outcome(layouts, passes, parts[0].is_executable, slots, static_LGX)
