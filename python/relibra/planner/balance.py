"""The strategy `relibra` and its two halves, `reorder_only` and `replicate_only`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.plan import PassPlan
from relibra.planner.outcome import Outcome
from relibra.planner.reorder import Reorder
from relibra.planner.replicate import Replicated, replicate

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array
    from relibra.planner.problem import Problem


def plan_relibra(problem: Problem) -> Outcome:
    """Reordering between batches and replication inside them."""
    return _best_layouts(problem, replica_slots=problem.config.replica_slots)


def plan_reorder_only(problem: Problem) -> Outcome:
    """Reordering by rank loads, no replicas."""
    return _best_layouts(problem, replica_slots=0)


def plan_replicate_only(problem: Problem) -> Outcome:
    """Replicas for the base layouts; nothing moves."""
    return outcome_of(problem, replicate(problem, problem.base_LGH))


def _best_layouts(problem: Problem, *, replica_slots: int) -> Outcome:
    """The best of three candidates for each layer, compared after replication.

    A search from scratch; improving swaps from the base layout; the base layout itself, which wins
    ties, so nothing moves without a gain. Since swaps are searched to a local optimum and the
    search from scratch depends on the loads only, the same loads planned again on the result change
    nothing.
    """
    reorder = Reorder(problem, by_rank=replica_slots == 0)
    best = replicate(problem, reorder.cold(), replica_slots=replica_slots)
    warm_LGH, changed_L = reorder.warm()
    best = _take_as_good(problem, best, warm_LGH, changed_L, replica_slots)
    everywhere_L = np.ones(len(best.home_LGH), np.bool_)
    best = _take_as_good(problem, best, problem.base_LGH, everywhere_L, replica_slots)
    if problem.has_base:
        # Else the base is the layout of `none`, and nothing worse was taken.
        in_order_LGH = np.broadcast_to(problem.identity.home_slot_expert_GH, best.home_LGH.shape)
        none_L = problem.weigh(problem.rank_rows(in_order_LGH).max(2))
        worse_L = best.objective_L(problem) > none_L
        best = _take_as_good(problem, best, in_order_LGH, worse_L, replica_slots)
    return outcome_of(problem, best)


def _take_as_good(
    problem: Problem,
    best: Replicated,
    home_LGH: Int32Array,
    allowed_L: npt.NDArray[np.bool_],
    replica_slots: int,
) -> Replicated:
    """`best` with another layout where that is allowed and not worse."""
    best_L = best.objective_L(problem)
    bound_L = problem.weigh(problem.least_largest(home_LGH, replica_slots))
    layers = np.flatnonzero(allowed_L & (bound_L <= best_L))
    if len(layers) == 0:
        return best
    other = replicate(problem, home_LGH[layers], layers, replica_slots=replica_slots)
    as_good = other.objective_L(problem) <= best_L[layers]
    return best.replace(layers[as_good], other.select(as_good))


def outcome_of(problem: Problem, planned: Replicated) -> Outcome:
    """Splits the columns into passes."""
    layouts = tuple(ExpertLayout(home_GH) for home_GH in planned.home_LGH)
    passes, first = {}, 0
    for name in problem.distinct_passes:
        columns = slice(first, first + problem.loads[name].num_micro_batches)
        passes[name] = PassPlan(planned.replica_CLGS[columns], planned.rows_CLGn[columns])
        first = columns.stop
    return Outcome(layouts, passes)
