"""Strategies to compare with that copy experts but do not move them: layouts stay the base layouts.

Letters as in `relibra.planner.replicate`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relibra.planner.outcome import Outcome, split_columns
from relibra.planner.replicate import replicate
from relibra_kernels import native

if TYPE_CHECKING:
    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem

# Bits of a weight when rows are shared out in proportion: products with 2^44 rows fit int64.
_SHARE_BITS = 18


def plan_history(problem: Problem) -> Outcome:
    """Replicas and shares planned on the micro-batch before, in the manner of PopFetcher.

    Our own solver plans on the loads of the previous micro-batch of the same pass (for the first
    one, of the last micro-batch of the same pass of `previous`; without it there are no replicas).
    Every copy then takes that share of the rows that really come; what is left over is for the
    home.
    """
    expected = np.zeros_like(problem.totals_CLE)
    first = 0
    for name in problem.distinct_passes:
        last = first + problem.loads[name].num_micro_batches
        expected[first + 1 : last] = problem.totals_CLE[first : last - 1]
        before = problem.previous.get(name)
        if before is not None and before.num_micro_batches and last > first:
            expected[first] = before.totals_MLE[-1]
        first = last
    expected[problem.totals_CLE.sum(2) == 0] = 0  # nothing runs, nothing is copied
    replicas, planned, _ = _native_replicate(problem, expected)
    slots = _slot_experts(problem, replicas)
    return _outcome(problem, replicas, _share_out(problem, slots, planned))


def plan_donor_only(problem: Problem) -> Outcome:
    """Replicas by quota with donors that only give, in the manner of UltraEP.

    The smallest maximum, by bisection, that ranks above it reach by giving what they have too much
    to ranks below it; a donor is never drained below it to be refilled from its own slot.
    """
    replicas, rows, _ = _native_replicate(problem, problem.totals_CLE, donor_only=True)
    return _outcome(problem, replicas, rows)


def plan_split_only(problem: Problem) -> Outcome:
    """One set of replicas for the whole batch, rows split exactly in every micro-batch.

    Source: the variant ReLibra-Splitting of ReLibra, section 6. The places come from our solver on
    the summed loads of the batch.
    """
    totals = problem.totals_CLE
    batch = (totals * problem.weight_C[:, None, None]).sum(0, keepdims=True)
    replicas, _, _ = _native_replicate(problem, batch)
    everywhere = np.broadcast_to(replicas, (len(totals), *replicas.shape[1:]))
    empty_CL = totals.sum(2) == 0
    replicas = np.where(empty_CL[..., None, None], np.int32(-1), everywhere)
    slots = _slot_experts(problem, replicas)
    rows, _ = native.planner().split_sites(totals, slots, problem.config.num_threads)
    return _outcome(problem, replicas, rows)


def plan_place_only(problem: Problem) -> Outcome:
    """The replicas of `replicate_only`, with an even split over the copies of an expert."""
    without = problem.with_config(replace(problem.config, static_copies=0))
    planned = replicate(without, problem.base_LGH)
    slots = _slot_experts(problem, planned.replica_CLGS)
    one_each = (slots >= 0).astype(np.int64)
    return _outcome(problem, planned.replica_CLGS, _share_out(problem, slots, one_each))


def _native_replicate(
    problem: Problem, totals_CLE: Int64Array, *, donor_only: bool = False
) -> tuple[Int32Array, Int64Array, Int64Array]:
    config = problem.config
    planned: tuple[Int32Array, Int64Array, Int64Array] = native.planner().replicate(
        np.ascontiguousarray(totals_CLE),
        problem.base_LGH,
        problem.topology.rank_to_node_G,
        config.replica_slots,
        config.tolerance,
        config.num_threads,
        donor_only,
    )
    return planned


def _slot_experts(problem: Problem, replica_CLGS: Int32Array) -> Int32Array:
    """int32 `[C, L, G, n]`, home slots first."""
    home = np.broadcast_to(problem.base_LGH, (len(replica_CLGS), *problem.base_LGH.shape))
    # In C order whatever the parts' order: broadcast parts would give another one.
    return np.ascontiguousarray(np.concatenate([home, replica_CLGS], axis=3))


def _share_out(problem: Problem, slots_CLGn: Int32Array, weight_CLGn: Int64Array) -> Int64Array:
    """Rows of every slot in proportion to weights; the home takes what is left over."""
    num_experts = problem.shape.num_experts
    shape = slots_CLGn.shape
    slots = slots_CLGn.reshape(shape[0] * shape[1], -1)
    weight = weight_CLGn.reshape(slots.shape)
    cells = np.arange(len(slots))[:, None] * num_experts + np.maximum(slots, 0)
    largest = np.zeros(len(slots) * num_experts, np.int64)
    np.maximum.at(largest, cells, np.where(slots >= 0, weight, 0))
    shift = np.maximum(np.ceil(np.log2(largest + 1.0)).astype(np.int64) - _SHARE_BITS, 0)
    weight = np.where(slots >= 0, weight >> shift[cells], 0)
    sums = np.bincount(cells.ravel(), weight.ravel(), len(largest)).astype(np.int64)
    total = problem.totals_CLE.reshape(-1)
    rows = total[cells] * weight // np.maximum(sums[cells], 1)
    given = np.bincount(cells.ravel(), rows.ravel(), len(largest)).astype(np.int64)
    at_home = np.zeros(shape, np.bool_)
    at_home[..., : problem.home_slots] = slots_CLGn[..., : problem.home_slots] >= 0
    at_home = at_home.reshape(slots.shape)
    rows[at_home] += (total - given)[cells[at_home]]
    return rows.reshape(shape)


def _outcome(problem: Problem, replicas: Int32Array, rows: Int64Array) -> Outcome:
    return Outcome(problem.base_layouts, split_columns(problem, replicas, rows))
