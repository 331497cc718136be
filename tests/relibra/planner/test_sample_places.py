"""Samples onto source ranks: costs recounted, optimality against a solver, budgets kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from relibra.layout import ExpertLayout
from relibra.planner.sample_places import place_samples, sample_costs
from relibra.testing.plans import random_layout
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

TOPOLOGY = Topology(3, 2)


def test_costs_are_copies_that_leave_the_node() -> None:
    rng = np.random.default_rng(0)
    layouts = [random_layout(rng, 12, 6) for _ in range(2)]
    static = np.full((2, 6, 1), -1, np.int32)
    static[0, 3, 0] = layouts[0].home_slot_expert_GH[0, 0]
    ids = [rng.integers(-1, 12, (count, 2, 3)) for count in (5, 0, 9)]
    for copies in (None, static):
        costs = sample_costs(ids, layouts, TOPOLOGY, copies)
        for sample, node in np.ndindex(3, 3):
            expected = 0
            for token, layer in np.ndindex(len(ids[sample]), 2):
                visited = set()
                for expert in ids[sample][token, layer]:
                    if expert < 0:
                        continue
                    own_ranks = [2 * node, 2 * node + 1]
                    if copies is not None and expert in copies[layer, own_ranks]:
                        continue
                    visited.add(int(layouts[layer].home_rank_E[expert]) // 2)
                expected += len(visited - {node})
            assert costs[sample, node] == expected


@given(st.integers(0, 10_000), st.integers(1, 14))
@settings(max_examples=60)
def test_equal_sizes_are_optimal_and_ranks_keep_their_number_of_samples(
    seed: int, samples: int
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 9, (samples, 3))
    rank = rng.integers(0, 6, samples)
    placed = place_samples(cost, rank, TOPOLOGY, tokens_S=np.full(samples, 7))
    assert np.array_equal(np.sort(placed), np.sort(rank))
    node = np.arange(6) // 2
    rows, columns = linear_sum_assignment(cost[:, node[rank]])
    best = cost[rows, node[rank][columns]].sum()
    assert cost[np.arange(samples), node[placed]].sum() == best
    again = place_samples(cost, placed, TOPOLOGY, tokens_S=np.full(samples, 7))
    assert np.array_equal(again, placed)


@given(st.integers(0, 10_000), st.integers(1, 14), st.booleans())
@settings(max_examples=60)
def test_other_sizes_keep_budgets_and_never_cost_more(
    seed: int, samples: int, with_attention: bool
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 50, (samples, 3))
    rank = rng.integers(0, 6, samples)
    micro_batch = rng.integers(0, 2, samples)
    sizes = {"tokens_S": rng.integers(1, 40, samples)}
    if with_attention:
        sizes["attention_S"] = sizes["tokens_S"] ** 2
    placed = place_samples(cost, rank, TOPOLOGY, micro_batch_S=micro_batch, **sizes)
    node = np.arange(6) // 2
    number = np.arange(samples)
    for m in range(2):
        here = micro_batch == m
        assert np.array_equal(np.sort(placed[here]), np.sort(rank[here]))
        before = cost[number[here], node[rank[here]]].sum()
        assert cost[number[here], node[placed[here]]].sum() <= before
        for size in sizes.values():
            fullest = np.bincount(rank[here], size[here], minlength=6).max()
            assert np.bincount(placed[here], size[here], minlength=6).max() <= fullest


def test_repair_finds_what_exchanges_one_by_one_do_not() -> None:
    """Three nodes of a rank: only the turn of all three samples gains, each exchange loses."""
    cost = np.array([[5, 0, 12], [12, 5, 0], [0, 12, 5]])
    sizes = np.array([10, 10, 9])
    placed = place_samples(cost, np.arange(3), Topology(3, 1), tokens_S=sizes)
    assert placed.tolist() == [1, 2, 0]


def test_nothing_moves_without_a_gain() -> None:
    cost = np.full((6, 3), 4)
    rank = np.array([5, 0, 1, 3, 2, 4])
    for tokens in (np.full(6, 3), np.arange(6)):
        assert np.array_equal(place_samples(cost, rank, TOPOLOGY, tokens_S=tokens), rank)


def test_wrong_input_is_refused() -> None:
    cost, rank, tokens = np.zeros((2, 3), np.int64), np.array([0, 0]), np.array([5, 7])
    with pytest.raises(
        PlanError,
        match="token_budget: need at least 12 tokens for rank 0 in micro-batch 4, got 11: 1 too",
    ):
        place_samples(
            cost, rank, TOPOLOGY, tokens_S=tokens, token_budget=11, micro_batch_S=np.array([4, 4])
        )
    with pytest.raises(PlanError, match="attention_budget: need at least 74 attention for rank 0"):
        place_samples(
            cost, rank, TOPOLOGY, tokens_S=tokens, attention_S=tokens**2, attention_budget=73
        )
    with pytest.raises(PlanError, match="attention_S: need the costs of samples"):
        place_samples(cost, rank, TOPOLOGY, tokens_S=tokens, attention_budget=9)
    with pytest.raises(PlanError, match="rank_S: need"):
        place_samples(cost, np.array([0, 6]), TOPOLOGY, tokens_S=tokens)
    with pytest.raises(PlanError, match="cost_SN: need shape"):
        place_samples(cost[:, :2], rank, TOPOLOGY, tokens_S=tokens)
    with pytest.raises(PlanError, match=r"ids\[0\]: need"):
        sample_costs([np.zeros((1, 1, 2), int)], [ExpertLayout([[0], [1]])] * 2, Topology(2, 1))
