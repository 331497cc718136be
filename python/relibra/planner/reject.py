"""Last check of time mode: layers that the whole cost model says are slower than `none`.

Plans are searched by GEMM and exposed pushes, which replicas can change. The dispatch that runs is
added here: a layout may cost more in the all-to-all than it saves.

Letters as in `relibra.planner.replicate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.pass_cost import pass_cost
from relibra.plan import StepPlan
from relibra.planner.outcome import split_columns
from relibra.planner.replicate import Replicated, replicate
from relibra.token_copies import plan_copies

if TYPE_CHECKING:
    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem

_PICOSECONDS = 1e12


def take_none_where_faster(
    problem: Problem, planned: Replicated, in_order_LGH: Int32Array
) -> Replicated:
    """`planned` with experts in order and no replicas in layers where that is modelled faster.

    Args:
        problem: the input; nothing is done in rows mode.
        planned: of all layers.
        in_order_LGH: int32 `[L, G, H]`, the layouts of `none`.
    """
    if problem.cost_model is None:
        return planned
    none = _with_static_slots(replicate(problem, in_order_LGH, replica_slots=0), planned)
    slower_L = modelled_picoseconds(problem, planned) > modelled_picoseconds(problem, none)
    if problem.config.max_rows_per_rank is not None:
        slower_L &= none.objective_L <= planned.objective_L  # memory comes before time
    return planned.replace(np.flatnonzero(slower_L), none.select(slower_L))


def modelled_picoseconds(problem: Problem, planned: Replicated) -> Int64Array:
    """Dense part, all-to-all, GEMM and pushes of all passes, int64 `[L]`.

    Args:
        problem: the input, with a cost model.
        planned: of all layers.
    """
    cost = problem.cost_model
    assert cost is not None
    names = problem.distinct_passes
    plan = StepPlan(
        topology=problem.topology,
        shape=problem.shape,
        layouts=tuple(ExpertLayout(home_GH) for home_GH in planned.home_LGH),
        passes=split_columns(problem, planned.replica_CLGS, planned.rows_CLGn),
        loads={name: problem.loads[name] for name in names},
        config=problem.config,
        static_slot_expert_LGX=planned.static_LGX,
    )
    total_L, first = np.zeros(len(plan.layouts), np.int64), 0
    for name in names:
        copies = plan_copies(plan, name, dispatch=cost.dispatch)
        exact = cost.combine == "exact"
        rows = plan_copies(plan, name, dispatch=cost.dispatch, distinct=False) if exact else None
        loads = problem.loads[name]
        tokens_MG = loads.rows_MLGE[:, 0].sum(2, dtype=np.int64) / problem.shape.top_k
        dense_MG = cost.dense_seconds(tokens_MG)
        for has_backward, count_C in zip((False, True), problem.passes_2C, strict=True):
            count_M = count_C[first : first + loads.num_micro_batches]
            if not count_M.any():
                continue
            one = pass_cost(
                plan,
                name,
                cost,
                copies,
                dense_MG=dense_MG,
                rows_copies=rows,
                has_backward=has_backward,
            )
            picoseconds_ML = np.rint(one.layer_seconds() * _PICOSECONDS).astype(np.int64)
            total_L += (picoseconds_ML * count_M[:, None]).sum(0)
        first += loads.num_micro_batches
    return total_L


def _with_static_slots(none: Replicated, like: Replicated) -> Replicated:
    """The same plan with the static slots of another, all free."""
    static_slots = like.static_LGX.shape[2]
    home_slots = none.home_LGH.shape[2]
    rows = np.insert(none.rows_CLGn, [home_slots] * static_slots, 0, axis=3)
    return Replicated(
        none.home_LGH,
        none.replica_CLGS,
        rows,
        none.largest_CL,
        none.objective_CL,
        np.full_like(like.static_LGX, -1),
    )
