"""Candidate layouts: what each guarantees before replication."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.layout import ExpertLayout, Int32Array
from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.problem import Problem, make_problem
from relibra.planner.reorder import Reorder
from relibra.planner.replicate import replicate
from relibra.shape import ModelShape
from relibra.topology import Topology


def make(
    seed: int, topology: Topology, experts: int, *, layers: int = 2, base: bool = True
) -> Problem:
    """Skewed loads and random base layouts."""
    rng = np.random.default_rng(seed)
    ranks = topology.num_ranks
    popularity = np.exp(rng.normal(size=(1, layers, 1, experts)))
    rows = rng.poisson(20 * np.broadcast_to(popularity, (4, layers, ranks, experts)))
    table = np.full(ranks * -(-experts // ranks), -1)
    table[:experts] = np.arange(experts)
    layouts = [ExpertLayout(rng.permutation(table).reshape(ranks, -1)) for _ in range(layers)]
    return make_problem(
        {"train": LoadMatrix(rows.astype(np.int32))},
        topology,
        ModelShape(experts, 1, range(layers)),
        layouts if base else None,
        PlannerConfig(proposals=4000),
    )


def fullest_node(problem: Problem, home_LGH: Int32Array) -> np.ndarray:
    """Sum over columns of the fullest node, in rows a rank, `[L]`."""
    rows = problem.rank_rows(home_LGH)
    node = problem.topology.rank_to_node_G
    sizes = problem.topology.node_sizes
    by_node = np.stack([rows[:, :, node == n].sum(2) / size for n, size in enumerate(sizes)])
    return by_node.max(0).sum(0)


TOPOLOGIES = [Topology(4, 2), Topology(rank_to_node=[0, 1, 1, 0, 2, 2, 2, 1])]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["even", "uneven"])
@pytest.mark.parametrize("experts", [16, 29])
def test_improving_swaps_only_exchange_places(topology: Topology, experts: int) -> None:
    problem = make(0, topology, experts)
    home_LGH, changed_L = Reorder(problem, by_rank=False).warm()
    before = fullest_node(problem, problem.base_LGH)
    after = fullest_node(problem, home_LGH)
    assert changed_L.any()
    assert (after[changed_L] < before[changed_L]).all()
    for new, old in zip(home_LGH, problem.base_LGH, strict=True):
        stayed = ExpertLayout(new).home_rank_E == ExpertLayout(old).home_rank_E
        slots = [ExpertLayout(home).expert_to_slot[stayed] for home in (new, old)]
        assert np.array_equal(*slots)
        assert stayed.any()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["even", "uneven"])
def test_swaps_start_only_from_layouts_near_the_search_from_scratch(topology: Topology) -> None:
    problem = make(0, topology, 16, layers=3)
    reorder = Reorder(problem, by_rank=False)
    free_LGH, free_L = reorder.warm()
    assert free_L.all()
    base_L = fullest_node(problem, problem.base_LGH) * np.lcm.reduce(topology.node_sizes)
    cold_L = np.rint(base_L / [1.11, 1.09, 1.11]).astype(np.int64)
    home_LGH, changed_L = reorder.warm(cold_L)
    assert changed_L.tolist() == [False, True, False]
    assert np.array_equal(home_LGH[1], free_LGH[1])
    assert np.array_equal(home_LGH[[0, 2]], problem.base_LGH[[0, 2]])


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_result_is_its_own_local_optimum(by_rank: bool) -> None:
    problem = make(1, TOPOLOGIES[0], 16)
    found = Reorder(problem, by_rank=by_rank).cold()
    again = make_problem(
        problem.loads,
        problem.topology,
        problem.shape,
        [ExpertLayout(home) for home in found],
        problem.config,
    )
    reorder = Reorder(again, by_rank=by_rank)
    home_LGH, changed_L = reorder.warm()
    assert not changed_L.any()
    assert np.array_equal(home_LGH, found)
    assert np.array_equal(reorder.cold(), found)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_names_of_nodes_and_of_ranks_in_a_node_change_no_load(seed: int) -> None:
    """Relabelled layouts have the same rows on the renamed nodes, and the search the same gain."""
    rng = np.random.default_rng(seed)
    problem = make(seed % 1000, Topology(4, 2), 16, base=True)
    node_G = rng.permutation(problem.topology.rank_to_node_G)
    renamed = replace(problem, topology=Topology(rank_to_node=node_G.tolist()))
    before, after = (Reorder(one, by_rank=False).cold_bins()[1] for one in (problem, renamed))
    assert np.array_equal(before, after)
    order = np.argsort(node_G, kind="stable")  # rank of the renamed topology for each old rank
    home_LGH = np.empty_like(problem.base_LGH)
    home_LGH[:, order] = problem.base_LGH
    assert np.array_equal(
        problem.rank_rows(problem.base_LGH), renamed.rank_rows(home_LGH)[:, :, order]
    )
    slots = problem.home_slots  # enough for every node to be flat: S >= H
    largest = [
        replicate(one.with_config(replace(one.config, replica_slots=slots)), home).largest_CL
        for one, home in ((problem, problem.base_LGH), (renamed, home_LGH))
    ]
    assert np.array_equal(*largest)


def test_the_node_objective_beats_the_rank_objective_on_nodes() -> None:
    problem = make(2, Topology(4, 4), 32, layers=4, base=False)
    by_node, by_rank = (Reorder(problem, by_rank=flag).cold() for flag in (False, True))
    assert (fullest_node(problem, by_node) <= fullest_node(problem, by_rank)).all()
    by_rank_rows = problem.rank_rows(by_rank).max(2).sum(0)
    assert (by_rank_rows <= problem.rank_rows(by_node).max(2).sum(0)).all()


def test_it_falls_back_to_experts_in_order_where_nothing_else_is_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every candidate puts the two hot experts on one rank; in order they are apart."""
    rows = np.zeros((1, 1, 4, 4), np.int32)
    rows[..., [0, 3]] = 100
    base = [ExpertLayout([[0, 3], [1, 2]])]
    monkeypatch.setattr(Reorder, "layouts_of", lambda self, _: self.problem.base_LGH)
    monkeypatch.setattr(
        Reorder, "warm", lambda self, *_: (self.problem.base_LGH, np.zeros(1, np.bool_))
    )
    plan = plan_step(
        {"train": LoadMatrix(rows[:, :, :2])},
        Topology(2, 1),
        model=ModelShape(4, 1, (0,)),
        layout=base,
    )
    assert plan.layouts == (ExpertLayout.identity(4, 2),)
    assert plan.report.gap_total == 1.0
