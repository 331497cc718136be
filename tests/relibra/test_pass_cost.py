"""Seconds and memory of whole passes."""

import numpy as np
import pytest

from relibra.cost_model import CostModel
from relibra.load_matrix import LoadMatrix
from relibra.pass_cost import (
    PassCost,
    memory_forecast,
    pass_cost,
    pipeline_seconds,
    stage_layers,
)
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.presets import HARDWARE, MODELS, Hardware
from relibra.shape import ModelShape
from relibra.token_copies import plan_copies
from relibra.topology import Topology

HARD = Hardware("test", 1.0, 2.0, 1000.0, 100.0, 10.0, 50.0, 5.0, 2.0, 80.0, 2)
TOPOLOGY = Topology(2, 2)
SHAPE = ModelShape(8, 2, (0, 1), 64, 32)
RNG = np.random.default_rng(0)
ROWS = (RNG.integers(0, 200, (3, 2, 4, 8)) * np.linspace(2, 0.1, 8)).astype(np.int32) * 2
COST = CostModel(HARD, SHAPE, TOPOLOGY, overlap=0.5, block_rows=16)


def make(strategy: str = "relibra", **config: object) -> StepPlan:
    settings = PlannerConfig(proposals=300, num_threads=1, **config)
    return plan_step(
        {"train": LoadMatrix(ROWS)}, TOPOLOGY, model=SHAPE, config=settings, strategy=strategy
    )


def cost_of(plan: StepPlan, cost: CostModel = COST, dense: float = 1e-4, **more) -> PassCost:
    copies = plan_copies(plan, "train", dispatch=cost.dispatch)
    dense_MG = dense * (1 + np.arange(12).reshape(3, 4) / 10)
    return pass_cost(plan, "train", cost, copies, dense_MG=dense_MG, **more)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("has_backward", [False, True])
def test_layers_follow_the_formula(recompute: str, has_backward: bool) -> None:
    """T(l, m), worked rank by rank for every use of a plan with replicas."""
    plan = make()
    assert plan.report.replicas > 0
    cost = COST.with_values(recompute=recompute)
    copies = plan_copies(plan, "train")
    dense_MG = 1e-5 * (1 + np.arange(12).reshape(3, 4))
    seconds = pass_cost(
        plan, "train", cost, copies, dense_MG=dense_MG, has_backward=has_backward
    ).layer_seconds()
    a, b = (2 if recompute == "full" and has_backward else 1), int(has_backward)
    home = 12 * 64 * 32 / 1000e9  # an fp32 gradient through memory
    for m, layer in np.ndindex(3, 2):
        view = plan.replica_plan("train", m, layer)
        replicas = view.replica_slot_expert_GS
        gemm, extra, sent, got, links = [], [], [0] * 4, [0] * 4, []
        for rank in range(4):
            got[rank] = int((replicas[rank] >= 0).sum())
            for expert in replicas[rank][replicas[rank] >= 0]:
                sent[view.layout.home_rank_E[expert]] += 1
        for rank in range(4):
            rows = view.slot_rows_Gn[rank]
            compute = 2e-6 * (rows > 0).sum() + 6 * 64 * 32 / 1e12 * (-(-rows // 16) * 16).sum()
            gemm.append(max(compute, (rows > 0).sum() * 6 * 64 * 32 / 1000e9))
            extra.append((3 * sent[rank] + got[rank]) * home)
            far = copies.rdma_G[m, layer, rank] * 128 / 10e9
            near = copies.nvlink_G[m, layer, rank] * 128 / 100e9
            links.append(0.5 * max(far, near) + 0.5 * (far + near))
        most = max(*sent, *got)
        push = 5e-6 + most * 6 * 64 * 32 / 50e9 if most else 0.0
        back = 5e-6 + most * 12 * 64 * 32 / 50e9 if most else 0.0
        window = dense_MG[m].max()
        forward = 2 * max(links) + max(gemm) + max(0, push - window)
        backward = 2 * max(links) + max(2 * g + e for g, e in zip(gemm, extra, strict=True))
        backward += max(0, push + back - 2 * window)
        expected = (a + 2 * b) * window + a * forward + b * backward
        assert seconds[m, layer] == pytest.approx(expected)


def test_parts_add_up() -> None:
    one = cost_of(make())
    assert sum(one.parts().values()) == pytest.approx(one.seconds())
    assert one.seconds(net=False) < one.seconds()
    assert one.seconds(dense="mean") < one.seconds()


def test_no_replicas_cost_nothing() -> None:
    one = cost_of(make("none"))
    assert one.seconds(net=False) == one.seconds()
    assert not one.push.any()
    assert not one.replica.any()


def test_exact_combine_returns_more() -> None:
    plan, exact = make(), COST.with_values(combine="exact")
    rows = plan_copies(plan, "train", distinct=False)
    assert cost_of(plan, exact, rows_copies=rows).all_to_all.sum() > cost_of(plan).all_to_all.sum()


def test_rest_of_the_model_is_scaled_to_the_simulated_layers() -> None:
    preset = MODELS["DeepSeek-V3"]
    cost = COST.with_values(
        hardware=HARDWARE["H100"], model=preset, shape=preset.shape(2, num_experts=8)
    )
    one = cost_of(make(), cost, dense=0.0)
    tokens = ROWS[:, 0].sum(-1).max(1) / 2
    flops = 6 * 7168 * 18432 * 3 + 2 * 7168 * 129280
    np.testing.assert_allclose(one.rest_M, 2 / 58 * flops * tokens / 600e12)


def test_pipeline() -> None:
    equal = [np.full(4, 2.0)] * 3
    assert pipeline_seconds(equal) == pytest.approx(4 * 2 + 2 * 2)  # (M + stages - 1) * 2
    assert pipeline_seconds([np.array([1.0, 5.0])]) == 6


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (4, 2), (5, 2), (94, 4), (7, 7)])
def test_stages_have_all_layers_once(layers: int, stages: int) -> None:
    parts = [range(layers)[one] for one in stage_layers(layers, stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seconds_of_stages() -> None:
    one = cost_of(make())
    layer = one.layer_seconds()
    assert one.seconds() == pytest.approx(sum(one.parts().values()))
    by_stage = [layer[:, 0], layer[:, 1]]
    assert one.seconds(stages=2) == pytest.approx(pipeline_seconds(by_stage) + 0)
    assert layer.max(1).sum() < one.seconds(stages=2) < one.seconds()


class TestMemory:
    def forecast(self, plan: StepPlan, cost: CostModel = COST, **more):
        return memory_forecast(plan, "train", cost, plan_copies(plan, "train"), **more)

    def test_by_hand(self) -> None:
        plan = make("none")
        one = self.forecast(plan)
        rows = plan.passes["train"].slot_rows_MLGn
        received = plan_copies(plan, "train").received_G
        padded = (-(-rows // 16) * 16).sum(3)
        saved = received * 64 + padded * 64 + ROWS.sum(3) / 2 * 64
        per_rank = saved.sum(1).max(0) * 2
        assert one.activation_bytes == int(per_rank[one.rank])
        assert one.rows_padded == padded.max()
        assert one.rows == rows.sum(3).max()
        assert one.expert_bytes == 2 * 2 * 3 * 64 * 32 * (2 + 4 + 12)
        assert one.replica_bytes == 3 * 64 * 32 * 6

    def test_more_layers_than_are_planned(self) -> None:
        plan = make("none")
        one, three = self.forecast(plan), self.forecast(plan, num_layers=6)
        assert three.activation_bytes == pytest.approx(3 * one.activation_bytes, abs=3)
        assert three.expert_bytes == 3 * one.expert_bytes
        assert three.working_bytes == one.working_bytes

    def test_balance_lowers_the_peak(self) -> None:
        assert self.forecast(make()).rows < self.forecast(make("none")).rows

    def test_in_flight_and_recompute(self) -> None:
        plan = make("none")
        one, two = (self.forecast(plan, COST.with_values(in_flight=n)) for n in (1, 2))
        assert one.activation_bytes < two.activation_bytes <= 2 * one.activation_bytes
        full = self.forecast(plan, COST.with_values(recompute="full"))
        assert full.activation_bytes < one.activation_bytes
        assert full.working_bytes > one.working_bytes
        many = self.forecast(plan, COST.with_values(in_flight=99))
        assert many.activation_bytes >= two.activation_bytes

    def test_forecast_of_running_out(self) -> None:
        plan = make("none")
        small = COST.with_values(hardware=HARD.with_values(memory_gb=1e-4))
        assert self.forecast(plan).fits
        assert not self.forecast(plan, small).fits
        assert self.forecast(plan, small).as_dict()["fits"] is False
