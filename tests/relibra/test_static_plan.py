"""Plans with static copies: rules, file, split by source, and when copies are refreshed."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.pass_plan import ReplicaPlan
from relibra.plan import PassPlan, StepPlan
from relibra.shape import ModelShape
from relibra.source_split import split_rows_reference
from relibra.testing.plans import make_plan
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

TOPOLOGY = Topology(2, 4)
SHAPE = ModelShape(22, 2, (1, 2), hidden_size=8, expert_size=16)
STEPS = np.array([4, 4, 5, 7, 7])  # optimizer steps of the micro-batches


def random_plan(seed: int, static_slots: int = 2) -> StepPlan:
    rng = np.random.default_rng(seed)
    loads = {
        "logprob": LoadMatrix(rng.integers(0, 30, (2, 2, 8, 22)).astype(np.int32)),
        "train": LoadMatrix(rng.integers(0, 30, (5, 2, 8, 22)).astype(np.int32), STEPS),
    }
    return make_plan(rng, loads, TOPOLOGY, SHAPE, replica_slots=1, static_slots=static_slots)


def tiny(static: list[list[int]], replicas: list[list[int]], rows: list[list[int]]) -> StepPlan:
    """Two nodes of two ranks, one home slot and one expert a rank, 8 rows an expert."""
    loads = {"train": LoadMatrix(np.full((1, 1, 4, 4), 2, np.int32))}
    return StepPlan.from_arrays(
        Topology(2, 2),
        ModelShape(4, 1, (0,)),
        [ExpertLayout([[0], [1], [2], [3]])],
        {"train": PassPlan([[replicas]], [[rows]])},
        loads,
        static_slot_expert_LGX=np.array([static], np.int32),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_keep_the_rules_and_split_by_source(seed: int) -> None:
    plan = random_plan(seed)
    assert plan.static_slot_expert_LGX.shape == (2, 8, 2)
    assert plan.slots_per_rank == 3 + 2 + 1
    node = TOPOLOGY.rank_to_node_G
    several = 0
    for m, layer in np.ndindex(5, 2):
        view = plan.replica_plan("train", m, layer)
        rows = plan.loads["train"].rows_MLGE[m, layer]
        assert np.array_equal(view.slot_expert_Gn[:, 3:5], plan.static_slot_expert_LGX[layer])
        quota = plan.source_quota("train", m, layer)
        arguments = (rows, view.slot_expert_Gn, view.slot_rows_Gn, TOPOLOGY.rank_to_rail_G)
        assert np.array_equal(quota, split_rows_reference(*arguments, node))
        assert np.array_equal(quota.sum(0), view.slot_rows_Gn.reshape(-1))
        slot_expert, slot_node = view.slot_expert_Gn.reshape(-1), np.repeat(node, 6)
        for expert in range(22):
            slots = slot_expert == expert
            assert np.array_equal(quota[:, slots].sum(1), rows[:, expert])
            # As many rows as possible stay in the node of their source.
            near = [
                min(rows[node == n, expert].sum(), view.slot_rows_Gn.reshape(-1)[here].sum())
                for n in range(2)
                for here in [slots & (slot_node == n)]
            ]
            stayed = sum(quota[np.ix_(node == n, slots & (slot_node == n))].sum() for n in range(2))
            assert stayed == sum(near)
            several += len(set(slot_node[slots])) > 1
    assert several > 20


def test_rows_stay_in_the_node_before_they_stay_on_the_rail() -> None:
    """Source 0 has a copy of expert 3 next to it in its node, and the home on its rail abroad."""
    rows = np.zeros((4, 4), np.int32)
    rows[0, 3] = 4
    slots = np.array([[0, -1], [1, 3], [2, -1], [3, -1]], np.int32)
    slot_rows = np.array([[0, 0], [0, 3], [0, 0], [1, 0]], np.int64)
    rail, node = np.array([0, 1, 1, 0], np.int32), np.array([0, 0, 1, 1], np.int32)
    quota = split_rows_reference(rows, slots, slot_rows, rail, node)
    assert quota[0].tolist() == [0, 0, 0, 3, 0, 0, 1, 0]


@pytest.fixture(scope="module")
def check_plan(shared_dir: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", shared_dir / "tools" / "check_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_quota", [False, True])
def test_file_round_trip_and_the_independent_checker(
    check_plan: ModuleType, tmp_path: Path, with_quota: bool
) -> None:
    plan, path = random_plan(3), tmp_path / "plan.npz"
    plan.save(path, with_quota=with_quota)
    for again in (StepPlan.load(path, plan.loads), StepPlan.load(path)):
        assert again.hash == plan.hash
        assert np.array_equal(again.static_slot_expert_LGX, plan.static_slot_expert_LGX)
        assert again.report == plan.report
    found = check_plan.rescore(path, plan.loads["train"].rows_MLGE, 2, 4)
    assert found["meta"]["hash"] == plan.hash
    with np.load(path) as file:
        assert file["static_slot_expert"].dtype == np.int32
        assert file["slot_rows"].shape == (5, 2, 8, 6)


def test_the_hash_covers_static_slots_and_ignores_that_there_are_none() -> None:
    free, replicas = [[-1], [-1], [-1], [-1]], [[-1]] * 4
    rows = [[8, 0, 0]] * 4
    one = [[1], [-1], [-1], [-1]]
    other = [[2], [-1], [-1], [-1]]
    hashes = {tiny(static, replicas, rows).hash for static in (free, one, other)}
    assert len(hashes) == 3
    without = random_plan(0, static_slots=0)
    none = np.zeros((2, 8, 0), np.int32)
    assert dataclasses.replace(without, static_slot_expert_LGX=none).hash == without.hash


def test_a_static_copy_may_lie_on_another_node_and_have_replicas_there() -> None:
    plan = tiny([[-1], [-1], [1], [-1]], [[-1], [-1], [-1], [1]],
                [[8, 0, 0], [2, 0, 0], [8, 3, 0], [8, 0, 3]])  # fmt: skip
    assert plan.report.static_copies == 1
    assert plan.report.replicas == 1
    maps = plan.placement_maps("train", 0)
    assert maps.expert_count.tolist() == [[1, 3, 1, 1]]
    assert maps.logical_to_physical_map[0, 1].tolist() == [3, 7, 11]
    assert plan.report.gap_total == pytest.approx(11 / 8)


@pytest.mark.parametrize(
    ("static", "replicas", "message"),
    [
        ([[0], [-1], [-1], [-1]], [[-1]] * 4, "static copy at its home rank: expert 0 at layer 0, "
         "rank 0"),
        ([[4], [-1], [-1], [-1]], [[-1]] * 4, r"need experts 0\.\.3 or -1, got 4 at layer 0, "
         "rank 0"),
        ([[2, 2], [-1, -1], [-1, -1], [-1, -1]], [[-1]] * 4, "expert 2 twice on one rank at layer "
         "0, rank 0"),
        ([[1], [-1], [-1], [-1]], [[1], [-1], [-1], [-1]], "a replica beside a static copy: expert "
         "1 at micro-batch 0, layer 0, rank 0"),
        ([[3], [-1], [-1], [-1]], [[-1], [2], [-1], [-1]], "a replica in another node: expert 2"),
    ],
)  # fmt: skip
def test_wrong_static_slots_are_refused(
    static: list[list[int]], replicas: list[list[int]], message: str
) -> None:
    rows = [[8, *([0] * (len(static[0]) + 1))] for _ in range(4)]
    with pytest.raises(PlanError, match=message):
        tiny(static, replicas, rows)


def test_sizes_of_static_slots_are_checked() -> None:
    plan = random_plan(1)
    with pytest.raises(PlanError, match=r"static_slot_expert_LGX: need \[L, G\] = \[2, 8\], got"):
        dataclasses.replace(plan, static_slot_expert_LGX=np.zeros((1, 8, 2), np.int32))
    with pytest.raises(PlanError, match="with 1 static and 1 replica slots, got"):
        dataclasses.replace(plan, static_slot_expert_LGX=plan.static_slot_expert_LGX[..., :1])
    with pytest.raises(PlanError, match="static_slot_expert_GX: need 2 ranks, got 1"):
        ReplicaPlan(ExpertLayout([[0], [1]]), [[-1], [-1]], [[1, 0], [1, 0]], [[-1]])


def test_copies_are_refreshed_at_the_first_micro_batch_of_every_optimizer_step() -> None:
    plan = random_plan(2)
    assert plan.static_refresh_M("train").tolist() == [True, False, True, True, False]
    assert plan.static_refresh_M("logprob").tolist() == [True, False]
    copies = int((plan.static_slot_expert_LGX >= 0).sum())
    parameters = 3 * 8 * 16
    report = plan.report
    assert (report.static_copies, report.static_refreshes) == (copies, 4)
    assert report.static_push_bytes == copies * parameters * 2  # bfloat16 weights
    assert report.static_return_bytes == copies * parameters * 4  # fp32 gradients
    # Of two layers with two slots: weights and sums of gradients; gradients of one layer.
    assert report.static_memory_bytes == 2 * parameters * (2 * (2 + 4) + 4)
    without = random_plan(2, static_slots=0)
    assert not without.static_refresh_M("train").any()
    assert without.report.static_refreshes == without.report.static_push_bytes == 0
    assert without.report.static_memory_bytes == 0


def test_the_steps_of_a_plan_without_loads_are_unknown(tmp_path: Path) -> None:
    random_plan(2).save(tmp_path / "plan.npz")
    with pytest.raises(PlanError, match="loads: need those of pass 'train'"):
        StepPlan.load(tmp_path / "plan.npz").static_refresh_M("train")
