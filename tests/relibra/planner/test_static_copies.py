"""Static copies: the split between nodes against an exact solver, the choice, and whole plans."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels import native
from relibra_kernels.errors import PlanError

EIGHT_NODES = Topology(8, 4)
CONFIG = PlannerConfig(static_copies=2, proposals=20_000)


def load_tool(shared_dir: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, shared_dir / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def skewed(
    seed: int, topology: Topology, *, micro_batches: int = 12, layers: int = 2
) -> LoadMatrix:
    """Loads that change between micro-batches, 2 experts a rank."""
    rng = np.random.default_rng(seed)
    shape = (micro_batches, layers, topology.num_ranks, 2 * topology.num_ranks)
    log = 0.9 * rng.normal(size=(1, layers, 1, shape[3]))
    log = log + 0.7 * rng.normal(size=(micro_batches, layers, 1, shape[3]))
    share = np.exp(log + 0.2 * rng.normal(size=shape))
    rows = rng.poisson(share * (4096 / share.sum(3, keepdims=True))).astype(np.int32)
    return LoadMatrix(rows, np.arange(micro_batches) * 3 // micro_batches)


def plan_of(loads: LoadMatrix, topology: Topology, **arguments: object) -> StepPlan:
    shape = ModelShape(loads.num_experts, 4, range(loads.num_layers), 64, 64)
    arguments = {"config": CONFIG} | arguments
    return plan_step({"train": loads}, topology, model=shape, **arguments)  # type: ignore[arg-type]


def least_by_solver(
    total_E: np.ndarray, host_NE: np.ndarray, size_N: np.ndarray
) -> int:  # test oracle
    """Smallest whole C with rows of every expert on its hosts and at most C * size on a node."""
    places = np.argwhere(host_NE)
    cost = np.zeros(len(places) + 1)
    cost[-1] = 1
    serve = np.zeros((len(total_E), len(cost)))
    fit = np.zeros((len(size_N), len(cost)))
    for i, (node, expert) in enumerate(places):
        serve[expert, i] = fit[node, i] = 1
    fit[:, -1] = -size_N
    found = milp(
        cost,
        constraints=[
            LinearConstraint(serve, total_E, total_E),
            LinearConstraint(fit, -np.inf, 0),
        ],
        integrality=np.ones(len(cost)),
    )
    assert found.success
    return round(found.fun)


@pytest.mark.parametrize("seed", range(60))
def test_the_split_between_nodes_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, rng.integers(2, 9)) if seed % 3 == 0 else np.full(8, 2)
    node_G = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    ranks, slots, columns = len(node_G), int(rng.integers(1, 3)), 3
    experts = 2 * ranks
    home = rng.permutation(experts).reshape(1, ranks, 2).astype(np.int32)
    home_node = np.empty(experts, np.int64)
    home_node[home[0]] = node_G[:, None]
    static = np.full((1, ranks, slots), -1, np.int32)
    host = home_node == np.arange(len(sizes))[:, None]
    for rank, slot in np.ndindex(ranks, slots):
        free = np.flatnonzero(~host[node_G[rank]])
        if rng.random() < 0.4 and len(free):
            static[0, rank, slot] = rng.choice(free)
            host[node_G[rank], static[0, rank, slot]] = True
    total = np.floor(20 * np.exp(1.5 * rng.normal(size=(columns, 1, experts)))).astype(np.int64)
    near = rng.multinomial(total, np.full(len(sizes), 1 / len(sizes)))  # [C, 1, E, N]
    near = np.ascontiguousarray(near.transpose(0, 1, 3, 2))
    for start in (None, near):
        rows, largest = native.planner().split_static(total, home, static, node_G, start)
        slot_expert = np.concatenate([home, static], 2)[0].reshape(-1)
        for c in range(columns):
            flat = rows[c, 0].reshape(-1)
            assert (flat >= 0).all()
            assert not flat[slot_expert < 0].any()
            served = np.bincount(slot_expert[slot_expert >= 0], flat[slot_expert >= 0], experts)
            assert np.array_equal(served, total[c, 0])
            node_rows = np.bincount(node_G, rows[c, 0].sum(1))
            assert (-(-node_rows // sizes)).max() <= largest[c, 0]
            assert largest[c, 0] == least_by_solver(total[c, 0], host, sizes)


def test_rows_of_near_sources_stay_at_their_copy_where_balance_allows() -> None:
    """Two nodes of one rank; node 1 sends 6 of the 10 rows of expert 0, which has a copy there."""
    home, static = np.array([[[0], [1]]], np.int32), np.array([[[-1], [0]]], np.int32)
    total = np.array([[[10, 4]]], np.int64)
    near = np.array([[[[4, 2], [6, 2]]]], np.int64)
    node_G = np.array([0, 1], np.int32)
    rows, largest = native.planner().split_static(total, home, static, node_G, near)
    assert rows.tolist() == [[[[7, 0], [4, 3]]]]  # 6 would leave node 1 with 10 of 14
    assert largest.tolist() == [[7]]
    total[0, 0, 1] = 0
    near[..., 1] = 0
    near[0, 0, :, 0] = 5
    rows, _ = native.planner().split_static(total, home, static, node_G, near)
    assert rows[0, 0, 1, 1] == 5


def test_wrong_copies_are_refused() -> None:
    home, total = np.array([[[0], [1]]], np.int32), np.array([[[10, 4]]], np.int64)
    same = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="an expert on the node of its home"):
        native.planner().split_static(total, home, np.array([[[-1], [0]]], np.int32), same)
    three = np.array([[[0], [1], [2]]], np.int32)
    node = np.array([0, 1, 1], np.int32)
    twice = np.array([[[-1], [0], [0]]], np.int32)
    with pytest.raises(ValueError, match="an expert has two static copies on a node"):
        native.planner().split_static(np.ones((1, 1, 3), np.int64), three, twice, node)


def test_a_choice_done_by_hand() -> None:
    """Expert 0 is hot in one column, expert 1 in the other: each needs a copy with the other."""
    load = np.array([[[90, 10], [10, 90]]], np.int64)
    home, node = np.array([[[0], [1]]], np.int32), np.array([0, 1], np.int32)
    static = native.planner().choose_static(load, home, node, 1, 1)
    assert static.tolist() == [[[1], [0]]]
    # Each saves 40 rows of the fullest rank.
    assert (native.planner().choose_static(load, home, node, 1, 1, 41) == -1).all()
    assert (native.planner().choose_static(load, home, node, 1, 1, 40) >= 0).all()


@pytest.mark.parametrize("topology", [Topology(2, 4), Topology(4, 2), EIGHT_NODES, Topology(10, 2)])
def test_two_copies_a_node_make_nodes_equal(topology: Topology) -> None:
    loads = skewed(1, topology)
    plan = plan_of(loads, topology)
    without = plan_of(loads, topology, config=replace(CONFIG, static_copies=0))
    counts = (plan.static_slot_expert_LGX >= 0).reshape(2, topology.num_nodes, -1).sum(2)
    assert counts.max() <= 2
    assert without.report.imbalance_node_mean > 1.01
    assert plan.report.imbalance_node_mean - 1 < 0.2 * (without.report.imbalance_node_mean - 1)
    assert plan.report.imbalance_mean - 1 < 0.5 * (without.report.imbalance_mean - 1)
    home = np.stack([layout.home_rank_E for layout in plan.layouts])
    layer, rank, slot = np.nonzero(plan.static_slot_expert_LGX >= 0)
    experts = plan.static_slot_expert_LGX[layer, rank, slot]
    node = topology.rank_to_node_G
    assert (node[home[layer, experts]] != node[rank]).all()


def test_nodes_of_different_size() -> None:
    topology = Topology(rank_to_node=[0, 0, 0, 1, 1, 2, 2, 2, 2])
    loads = skewed(5, topology)
    plan = plan_of(loads, topology, config=replace(CONFIG, static_copies=3))
    without = plan_of(loads, topology, config=replace(CONFIG, static_copies=0))
    assert plan.static_slot_expert_LGX.shape == (2, 9, 2)
    assert plan.report.imbalance_node_mean < without.report.imbalance_node_mean


def test_never_worse_than_none_and_the_same_for_any_number_of_threads() -> None:
    for seed in range(3):
        loads = skewed(seed, EIGHT_NODES)
        plan = plan_of(loads, EIGHT_NODES)
        again = plan_of(loads, EIGHT_NODES, config=replace(CONFIG, num_threads=1))
        assert plan.hash == again.hash
        worst = [
            one.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0)
            for one in (plan, plan_of(loads, EIGHT_NODES, strategy="none"))
        ]
        assert (worst[0] <= worst[1]).all()


def test_the_same_loads_again_move_nothing() -> None:
    loads = skewed(7, EIGHT_NODES)
    first = plan_of(loads, EIGHT_NODES)
    second = plan_of(loads, EIGHT_NODES, layout=first.layouts)
    assert second.report.moved_experts == 0
    assert second.layouts == first.layouts


def test_two_rollout_batches_of_three_steps_refresh_their_copies_in_every_step() -> None:
    layout, chosen = None, []
    for batch in range(2):
        loads = skewed(20 + batch, EIGHT_NODES)
        plan = plan_of(loads, EIGHT_NODES, layout=layout)
        layout = plan.layouts
        chosen.append(plan.static_slot_expert_LGX)
        first = plan.static_refresh_M("train")
        assert np.flatnonzero(first).tolist() == [0, 4, 8]
        assert np.array_equal(loads.optimizer_step_M[first], [0, 1, 2])
        report = plan.report
        copies = int((plan.static_slot_expert_LGX >= 0).sum())
        assert copies > 0
        assert report.static_refreshes == 3
        assert report.static_push_bytes == copies * 3 * 64 * 64 * 2
        assert report.static_return_bytes == copies * 3 * 64 * 64 * 4
        for m in range(12):  # the copies serve every step with the counts of that step
            served = plan.passes["train"].slot_rows_MLGn[m].sum((1, 2))
            assert np.array_equal(served, loads.totals_MLE[m].sum(1))
    assert not np.array_equal(*chosen)


def test_a_copy_must_save_its_cost_in_every_optimizer_step() -> None:
    loads = skewed(2, EIGHT_NODES)
    cheap = plan_of(loads, EIGHT_NODES).report.static_copies
    dear = plan_of(loads, EIGHT_NODES, config=replace(CONFIG, min_rows_per_static_copy=20))
    never = plan_of(loads, EIGHT_NODES, config=replace(CONFIG, min_rows_per_static_copy=10**6))
    assert 0 < dear.report.static_copies < cheap
    assert never.report.static_copies == 0
    # Gains are per step: a batch of one optimizer step keeps at least as many copies.
    one_step = LoadMatrix(loads.rows_MLGE)
    config = replace(CONFIG, min_rows_per_static_copy=20)
    kept = plan_of(one_step, EIGHT_NODES, config=config).report.static_copies
    assert kept > dear.report.static_copies


def test_one_node_and_reports_have_no_static_slots() -> None:
    one_node = Topology(1, 8)
    assert plan_of(skewed(0, one_node), one_node).static_slot_expert_LGX.shape[2] == 0
    for strategy in ("reorder_only", "ideal"):
        plan = plan_of(skewed(0, EIGHT_NODES), EIGHT_NODES, strategy=strategy)
        assert plan.static_slot_expert_LGX.shape[2] == 0


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(PlanError, match="static_copies: need replica_slots >= 1, .* got 2 with"):
        PlannerConfig(static_copies=2, replica_slots=0)
    with pytest.raises(PlanError, match="static_copies: need an integer 0"):
        PlannerConfig(static_copies=-1)


def test_empty_micro_batches_and_layers_need_no_copies() -> None:
    loads = skewed(3, EIGHT_NODES)
    rows = loads.rows_MLGE.copy()
    rows[:, 1] = 0
    rows[5] = 0
    plan = plan_of(LoadMatrix(rows), EIGHT_NODES)
    assert (plan.static_slot_expert_LGX[1] == -1).all()
    assert not plan.passes["train"].slot_rows_MLGn[5].any()


def test_static_copies_on_the_synthetic_batch(shared_dir: Path, tmp_path: Path) -> None:
    """EP64 without composition: asked for with composition is 1.005, reached without is 1.0001."""
    tools = {name: load_tool(shared_dir, name) for name in ("workloads", "check_plan")}
    work = tools["workloads"].make_workload("medium", ep=64, layers=2)
    rows = np.ascontiguousarray(work.rows)
    plan = plan_of(LoadMatrix(rows), Topology(8, 8), config=PlannerConfig(static_copies=2))
    plan.save(tmp_path / "plan.npz", with_quota=True)
    found = tools["check_plan"].rescore(tmp_path / "plan.npz", rows, 8, 8)
    assert found["mean"] == pytest.approx(plan.report.imbalance_mean, rel=1e-12)
    assert found["mean"] <= 1.002
    assert found["p99"] <= 1.025
