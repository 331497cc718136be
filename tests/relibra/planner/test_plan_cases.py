"""Problems reported by users of other planners, and loads at the edge."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import STRATEGIES, PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

EXECUTABLE = ("none", "lpt", "reorder_only", "replicate_only", "relibra")


def plan_rows(
    rows: np.ndarray, topology: Topology, strategy: str = "relibra", **settings: object
) -> StepPlan:
    """Plans rows `[M, L, G, E]`."""
    shape = ModelShape(rows.shape[3], 1, range(rows.shape[1]))
    layout = settings.pop("layout", None)
    config = PlannerConfig(**({"proposals": 1000} | settings))  # type: ignore[arg-type]
    loads = {"train": LoadMatrix(rows.astype(np.int32))}
    return plan_step(
        loads,
        topology,
        model=shape,
        layout=layout,  # type: ignore[arg-type]
        config=config,
        strategy=strategy,
        previous=loads,
    )


def from_totals(totals: list[int] | np.ndarray, ranks: int, micro_batches: int = 1) -> np.ndarray:
    """Rows `[M, 1, G, E]` of experts, spread over the sources as evenly as integers allow."""
    total = np.asarray(totals)
    share = total // ranks + (np.arange(ranks)[:, None] < total % ranks)
    return np.broadcast_to(share, (micro_batches, 1, ranks, len(total)))


def generator_states() -> list[object]:
    return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_07_no_global_random_state_is_read_or_changed(strategy: str) -> None:
    rng = np.random.default_rng(7)
    rows = rng.poisson(20, (2, 2, 4, 8))
    before = generator_states()
    first = plan_rows(rows, Topology(2, 2), strategy)
    assert generator_states() == before
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert plan_rows(rows, Topology(2, 2), strategy).hash == first.hash


@pytest.mark.parametrize("strategy", EXECUTABLE)
def test_plan_02_experts_that_do_not_divide_by_ranks(strategy: str) -> None:
    rows = np.zeros((1, 1, 8, 60), np.int64)
    rows[:, :, 0] = 100
    plan = plan_rows(rows, Topology(1, 8), strategy)
    layout = plan.layouts[0]
    fillers = layout.home_slot_expert_GH < 0
    assert layout.slots_per_rank == 8
    assert fillers.sum() == 4
    assert (fillers.sum(1) <= 1).all()
    view = plan.replica_plan("train", 0, 0)
    assert (view.slot_rows_Gn[:, :8][fillers] == 0).all()
    assert view.rank_rows_G.max() <= 800
    maps = plan.placement_maps("train", 0)
    assert (maps.expert_count >= 1).all()
    empty = np.flatnonzero(maps.physical_to_logical_map[0] < 0)
    assert not np.isin(empty, maps.logical_to_physical_map).any()
    quota = plan.source_quota("train", 0, 0)
    assert quota[0].sum() == 6000
    assert not quota[:, empty].any()


def test_plan_02_filler_slots_can_be_refused() -> None:
    rows = np.ones((1, 1, 8, 60), np.int64)
    with pytest.raises(PlanError, match="num_experts: need a multiple of 8 ranks .* got 60"):
        plan_rows(rows, Topology(1, 8), allow_filler=False)


def test_plan_03_ranks_that_do_not_fit_the_topology() -> None:
    rows = np.ones((1, 1, 12, 24), np.int64)
    with pytest.raises(PlanError, match=r"loads\['train'\]: need 10 .*\(5 x 2\), got 12"):
        plan_rows(rows, Topology(num_nodes=5, ranks_per_node=2))


def test_plan_04_gathered_counts_are_planned_and_own_counts_refused() -> None:
    rows = np.zeros((1, 1, 4, 16), np.int64)
    for rank in range(4):
        rows[0, 0, rank, 4 * rank : 4 * rank + 4] = 100 * (rank + 1)
    own = [
        LoadMatrix(
            rows[:, :, rank : rank + 1].astype(np.int32), is_gathered=False, source_rank=rank
        )
        for rank in range(4)
    ]
    shape, topology = ModelShape(16, 4, (0,)), Topology(2, 2)
    gathered = {"train": LoadMatrix.stack(own)}
    plan = plan_step(gathered, topology, model=shape, strategy="none")
    assert plan.replica_plan("train", 0, 0).rank_rows_G.tolist() == [400, 800, 1200, 1600]
    assert plan.report.imbalance_mean == pytest.approx(1.6)
    better = plan_step(gathered, topology, model=shape)
    assert better.report.imbalance_mean == pytest.approx(1.0)
    with pytest.raises(
        PlanError, match=r"loads\['train'\]: need a gathered .* rows of rank 2 only"
    ):
        plan_step({"train": own[2]}, topology, model=shape)


def test_plan_05_layers_without_routing(shared_dir: Path) -> None:
    counts = np.load(shared_dir / "cases" / "plan_05_logical_count_int32.npy")
    rows = np.stack([from_totals(layer, 8)[0, 0] for step in counts for layer in step])
    rows = rows.reshape(2, 43, 8, 256)
    plan = plan_rows(rows, Topology(1, 8), proposals=5000)
    busy = counts.any((0, 2))
    assert busy.sum() == 40
    identity = ExpertLayout.identity(256, 8)
    one = plan.passes["train"]
    for layer in np.flatnonzero(~busy):
        assert plan.layouts[layer] == identity
        assert (one.replica_slot_expert_MLGS[:, layer] == -1).all()
    assert plan.report.num_instances == 80
    without = plan_rows(rows[:, busy], Topology(1, 8), proposals=5000).report
    assert plan.report.imbalance_mean == without.imbalance_mean
    assert plan.report.imbalance_p99 == without.imbalance_p99
    assert (
        plan.report.imbalance_mean < plan_rows(rows, Topology(1, 8), "none").report.imbalance_mean
    )


def test_plan_08_one_hot_node() -> None:
    rows = from_totals([600, 560, 120, 120, 20, 10, 10, 10], 8)
    plan = plan_rows(rows, Topology(1, 8))
    assert plan.replica_plan("train", 0, 0).rank_rows_G.max() <= 182
    eplb = plan_rows(rows, Topology(1, 8), "eplb_oracle", replica_slots=1)
    assert eplb.report.worst_rank_rows > 182


def test_plan_09_a_first_plan_has_no_predecessor() -> None:
    rows = from_totals([70, 10, 20, 20, 30, 30, 10, 10], 4)
    plan = plan_rows(rows, Topology(2, 2), layout=None)
    assert plan.base_layouts == (ExpertLayout.identity(8, 4),)


def test_plan_12_equal_loads_move_nothing_and_two_exchanged_experts_at_most_two() -> None:
    totals = [70, 10, 20, 20, 30, 30, 10, 10]
    topology = Topology(2, 2)
    first = plan_rows(from_totals(totals, 4, micro_batches=3), topology)
    again = plan_rows(from_totals(totals, 4, micro_batches=3), topology, layout=first.layouts)
    assert again.report.moved_experts == 0
    assert again.layouts == first.layouts
    totals[0], totals[1] = totals[1], totals[0]
    rows = from_totals(totals, 4, micro_batches=3)
    exchanged = plan_rows(rows, topology, layout=first.layouts)
    assert exchanged.report.moved_experts <= 2
    fresh = plan_rows(rows, topology)
    assert exchanged.report.imbalance_mean <= fresh.report.imbalance_mean


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_14_a_rank_without_tokens_and_an_empty_micro_batch(strategy: str) -> None:
    rng = np.random.default_rng(14)
    rows = rng.poisson(20 * np.exp(rng.normal(size=16)), (3, 2, 4, 16))
    rows[:, :, 3] = 0
    rows[1] = 0
    plan = plan_rows(rows, Topology(2, 2), strategy)
    assert plan.report.num_instances == 4
    if plan.is_executable:
        assert not plan.source_quota("train", 0, 0)[3].any()
        assert not plan.source_quota("train", 1, 1).any()
        assert (plan.passes["train"].replica_slot_expert_MLGS[1] == -1).all()


def test_all_tokens_on_one_expert() -> None:
    rows = np.zeros((1, 1, 4, 8), np.int64)
    rows[..., 5] = 1000
    plan = plan_rows(rows, Topology(2, 2), replica_slots=1)
    view = plan.replica_plan("train", 0, 0)
    assert sorted(view.rank_rows_G.tolist()) == [0, 0, 2000, 2000]
    assert view.num_replicas == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_without_rows_keep_a_home_and_are_never_copied(strategy: str) -> None:
    rng = np.random.default_rng(1)
    rows = rng.poisson(20 * np.exp(rng.normal(size=16)), (3, 2, 4, 16))
    idle = [1, 2, 7, 15]
    rows[..., idle] = 0
    plan = plan_rows(rows, Topology(2, 2), strategy, replica_slots=2)
    if not plan.is_executable:
        return
    for layer, layout in enumerate(plan.layouts):
        assert layout.num_experts == 16
        for micro_batch in range(3):
            view = plan.replica_plan("train", micro_batch, layer)
            assert not np.isin(view.replica_slot_expert_GS, idle).any()
            assert not view.slot_rows_Gn[np.isin(view.slot_expert_Gn, idle)].any()


def test_counts_up_to_the_limit_of_int32() -> None:
    rows = np.full((2, 1, 4, 8), 2**31 - 1, np.int64)
    rows[:, :, :, :2] = 0
    plan = plan_rows(rows, Topology(2, 2))
    assert plan.report.gap_total == 1.0
    quota = plan.source_quota("train", 1, 0)
    assert quota.sum(dtype=np.int64) == 4 * 6 * (2**31 - 1)
