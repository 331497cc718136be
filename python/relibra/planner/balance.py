"""The strategy `relibra` and its two halves, `reorder_only` and `replicate_only`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.planner.coactivation import grouped_layouts
from relibra.planner.objective import MovePrice, check_rows_fit
from relibra.planner.outcome import Outcome, split_columns
from relibra.planner.reject import take_none_where_faster
from relibra.planner.reorder import Reorder
from relibra.planner.replicate import Replicated, replicate

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
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
    """The best candidate for each layer, compared after replication.

    With free moves: a search from scratch; improving swaps from the base layout; the base layout
    itself, which wins ties, so nothing moves without a gain. Since swaps are searched to a local
    optimum and the search from scratch depends on the loads only, the same loads planned again on
    the result change nothing. With priced moves see `_priced_layouts`.
    """
    reorder = Reorder(problem, by_rank=replica_slots == 0)
    if replica_slots and problem.token_sample is not None and problem.topology.num_nodes > 1:
        best = grouped_layouts(problem, reorder)
        worse_L = best.objective_L > _objective_of_none(problem)
        best = _take_as_good(problem, best, _in_order(problem), worse_L, replica_slots)
        return outcome_of(problem, take_none_where_faster(problem, best, _in_order(problem)))
    bin_LE, cold_L = reorder.cold_bins()
    best = replicate(problem, reorder.layouts_of(bin_LE), replica_slots=replica_slots)
    price = MovePrice(problem)
    if problem.has_base and not price.is_free:
        best = _priced_layouts(problem, reorder, price, best, replica_slots)
        return outcome_of(problem, take_none_where_faster(problem, best, _in_order(problem)))
    warm_LGH, changed_L = reorder.warm(cold_L if replica_slots else None)
    best = _take_as_good(problem, best, warm_LGH, changed_L, replica_slots)
    everywhere_L = np.ones(len(best.home_LGH), np.bool_)
    best = _take_as_good(problem, best, problem.base_LGH, everywhere_L, replica_slots)
    if problem.has_base:
        # Else the base is the layout of `none`, and nothing worse was taken.
        worse_L = best.objective_L > _objective_of_none(problem)
        best = _take_as_good(problem, best, _in_order(problem), worse_L, replica_slots)
    return outcome_of(problem, take_none_where_faster(problem, best, _in_order(problem)))


def _priced_layouts(
    problem: Problem,
    reorder: Reorder,
    price: MovePrice,
    cold: Replicated,
    replica_slots: int,
) -> Replicated:
    """Layouts near the base, or those from scratch where they pay for their moves.

    Each is searched on from until nothing pays any more, and prices keep the triangle inequality,
    so the same loads planned again on the result change nothing. Where the result is worse than
    `none` the price does not count.
    """
    everywhere = np.arange(len(cold.home_LGH))
    base = replicate(problem, problem.base_LGH, replica_slots=replica_slots)
    best = _search_on(reorder, price, base, everywhere, replica_slots)
    none_L = _objective_of_none(problem)
    cold_L = cold.objective_L + price.of_moves(base.home_LGH, cold.home_LGH)
    best_L = best.objective_L + price.of_moves(base.home_LGH, best.home_LGH)
    is_worse_L = best.objective_L > none_L
    taken = np.where(is_worse_L, cold.objective_L < best.objective_L, cold_L < best_L)
    taken &= is_worse_L | (cold.objective_L <= none_L)
    best = best.replace(everywhere[taken], cold.select(taken))
    still_L = best.objective_L > none_L
    best = _take_as_good(problem, best, _in_order(problem), still_L, replica_slots)
    return _search_on(reorder, price, best, everywhere[taken | still_L], replica_slots)


def _search_on(
    reorder: Reorder,
    price: MovePrice,
    best: Replicated,
    layers: npt.NDArray[np.int64],
    replica_slots: int,
) -> Replicated:
    """Some layers of `best` changed step by step while the gain is more than the moves cost."""
    problem = reorder.problem
    while len(layers):
        near_LGH = reorder.near(best.home_LGH[layers], layers, price.rows)
        changed = (near_LGH != best.home_LGH[layers]).any((1, 2))
        layers, near_LGH = layers[changed], near_LGH[changed]
        if len(layers) == 0:
            break
        other = replicate(problem, near_LGH, layers, replica_slots=replica_slots)
        cost_L = other.objective_L + price.of_moves(best.home_LGH[layers], near_LGH)
        pays = cost_L < best.objective_L[layers]
        layers = layers[pays]
        best = best.replace(layers, other.select(pays))
    return best


def _in_order(problem: Problem) -> Int32Array:
    """The layouts of `none`, int32 `[L, G, H]`."""
    in_order_GH = problem.identity.home_slot_expert_GH
    return np.broadcast_to(in_order_GH, (problem.shape.num_layers, *in_order_GH.shape))


def _objective_of_none(problem: Problem) -> Int64Array:
    """Experts in order without replicas, int64 `[L]`."""
    if problem.cost_model is None:
        return problem.weigh(problem.rank_rows(_in_order(problem)).max(2))
    return replicate(problem, _in_order(problem), replica_slots=0).objective_L


def _take_as_good(
    problem: Problem,
    best: Replicated,
    home_LGH: Int32Array,
    allowed_L: npt.NDArray[np.bool_],
    replica_slots: int,
) -> Replicated:
    """`best` with another layout where that is allowed and not worse."""
    best_L = best.objective_L
    if problem.cost_model is None:
        bound_L = problem.weigh(problem.least_largest(home_LGH, replica_slots))
        allowed_L = allowed_L & (bound_L <= best_L)
    layers = np.flatnonzero(allowed_L)
    if len(layers) == 0:
        return best
    other = replicate(problem, home_LGH[layers], layers, replica_slots=replica_slots)
    as_good = other.objective_L <= best_L[layers]
    return best.replace(layers[as_good], other.select(as_good))


def outcome_of(problem: Problem, planned: Replicated) -> Outcome:
    """Splits the columns into passes.

    Raises:
        PlanError: a rank has no memory for its rows.
    """
    check_rows_fit(problem, planned.rows_CLGn)
    layouts = tuple(ExpertLayout(home_GH) for home_GH in planned.home_LGH)
    passes = split_columns(problem, planned.replica_CLGS, planned.rows_CLGn)
    return Outcome(layouts, passes, static_LGX=planned.static_LGX)
