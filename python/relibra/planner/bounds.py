"""What plans are compared with that nothing can execute: bounds, and a router that is forced."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from relibra.plan import PassPlan
from relibra.planner.balance import plan_relibra
from relibra.planner.outcome import Outcome
from relibra_kernels.checks import check_int

if TYPE_CHECKING:
    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem


def plan_ideal(problem: Problem) -> Outcome:
    """ceil(total / G) rows on every rank: the bound of every plan."""
    total_CL = problem.totals_CLE.sum(2)
    share_CL = -(-total_CL // problem.topology.num_ranks)
    shape = (*share_CL.shape, problem.topology.num_ranks)
    return rank_rows_outcome(problem, np.broadcast_to(share_CL[..., None], shape))


def plan_node_ideal(problem: Problem) -> Outcome:
    """The layouts of `relibra` with every node flat inside: what replication cannot beat."""
    outcome = plan_relibra(problem)
    home_LGH = np.stack([layout.home_slot_expert_GH for layout in outcome.layouts])
    rank_CLG = problem.rank_rows(home_LGH)
    flat_CLG = np.empty_like(rank_CLG)
    for node in range(problem.topology.num_nodes):
        ranks = list(problem.topology.ranks_of_node(node))
        flat_CLG[:, :, ranks] = -(-rank_CLG[:, :, ranks].sum(2, keepdims=True) // len(ranks))
    return rank_rows_outcome(problem, flat_CLG)


def plan_force_balanced(problem: Problem) -> Outcome:
    """Rows of ranks under a router that is forced to use all experts equally often.

    Experts are in order over the ranks; what is left when E does not divide the rows of a
    micro-batch goes to experts drawn as by `force_balanced_ids`.
    """
    total_CL = problem.totals_CLE.sum(2)
    num_experts = problem.shape.num_experts
    rows_CLE = np.broadcast_to((total_CL // num_experts)[..., None], problem.totals_CLE.shape)
    in_order_CE = np.broadcast_to(np.arange(num_experts), (len(rows_CLE), num_experts))
    # A stream for each layer, so that layers planned apart are those planned together.
    layers = problem.shape.moe_layers
    order = [_stream(problem.config.seed, one).permuted(in_order_CE, axis=1) for one in layers]
    rows_CLE = rows_CLE + (np.stack(order, axis=1) < (total_CL % num_experts)[..., None])
    home_GH = problem.identity.home_slot_expert_GH
    held_CLGH = np.where(home_GH >= 0, rows_CLE[..., np.maximum(home_GH, 0)], 0)
    return rank_rows_outcome(problem, held_CLGH.sum(3))


def force_balanced_ids(
    num_tokens: int, top_k: int, num_experts: int, *, first_token: int = 0, seed: int = 0
) -> Int32Array:
    """Expert ids of tokens when a random router is forced to be balanced.

    All tokens of all ranks take K experts each from one endless line of random permutations of the
    experts, so that any E / K tokens in a row use every expert once, whoever sends them.

    Args:
        num_tokens: T, tokens of this rank.
        top_k: K.
        num_experts: E, at least K.
        first_token: number of this rank's first token among those of all ranks: ranks that all
            started at 0 would share one prefix, and half of 64 ranks stay idle for short batches.
        seed: of the permutations.

    Returns:
        int32 `[T, K]`, the K experts of a token distinct.

    Raises:
        ValueError, TypeError: a number is out of range.

    Example:
        >>> ids = force_balanced_ids(8, 2, 4)
        >>> np.bincount(ids.reshape(-1)).tolist()
        [4, 4, 4, 4]
    """
    num_experts = check_int("num_experts", num_experts, minimum=1)
    top_k = check_int("top_k", top_k, minimum=1)
    if top_k > num_experts:
        raise ValueError(f"top_k: need at most {num_experts} experts, got {top_k}")
    num_tokens = check_int("num_tokens", num_tokens, minimum=0)
    first = check_int("first_token", first_token, minimum=0) * top_k
    last = first + num_tokens * top_k
    # Tokens and permutations begin together once in a while; from there nothing earlier matters.
    period = math.lcm(num_experts, top_k)
    parts = [
        _permutations(period, top_k, num_experts, i, seed) for i in _blocks(first, last, period)
    ]
    begin = first // period * period
    line = np.concatenate([np.zeros(0, np.int32), *parts])
    return line[first - begin : last - begin].reshape(num_tokens, top_k)


def _blocks(first: int, last: int, period: int) -> range:
    return range(first // period, -(-last // period))


def _permutations(period: int, top_k: int, num_experts: int, block: int, seed: int) -> Int32Array:
    """One period of the line: a token that needs two permutations gets no expert twice."""
    rng = _stream(seed, block)
    line = np.empty(period, np.int32)
    for begin in range(0, period, num_experts):
        order = rng.permutation(num_experts).astype(np.int32)
        taken = line[begin - begin % top_k : begin]  # by the token that is not complete yet
        if len(taken):
            order = order[np.argsort(np.isin(order, taken), kind="stable")]
            rest = top_k - len(taken)
            order[rest:] = rng.permutation(order[rest:])
        line[begin : begin + num_experts] = order
    return line


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, number]))


def rank_rows_outcome(problem: Problem, rank_rows_CLG: Int64Array) -> Outcome:
    """A plan for reports: rows of ranks, no experts."""
    replica_slots = problem.config.replica_slots
    rows = np.zeros((*rank_rows_CLG.shape, problem.home_slots + replica_slots), np.int64)
    rows[..., 0] = rank_rows_CLG
    passes, first = {}, 0
    for name in problem.distinct_passes:
        one = rows[first : first + problem.loads[name].num_micro_batches]
        first += len(one)
        passes[name] = PassPlan(np.full((*one.shape[:3], replica_slots), -1, np.int32), one)
    return Outcome(problem.base_layouts, passes, is_executable=False)
