"""Cases of other projects' communication faults, by their ids, over both transports of replicas."""

import json
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_world import World, collect_weight_grads, compare, reference
from replica_training import make, run_step

import relibra
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 4, num_experts=8, top_k=2, num_layers=2, tokens=9, replica_slots=1, dtype=torch.float64
)
TRANSPORTS = ("dist", "cpu_shm")
TIMEOUT_S = 4.0


def collective(*_):
    dist.all_reduce(torch.ones(1))


def run_comm_01(rank, num_ranks, transport, shuffled):
    """A collective of the user's own behind every layer; on rank 1 before it if shuffled."""
    timeout_s = TIMEOUT_S if shuffled else 20.0
    runtime, model = make(WORLD, rank, transport=transport, timeout_s=timeout_s)
    for moe in model.layers:
        if shuffled and rank == 1:
            moe.register_forward_pre_hook(collective)
        else:
            moe.register_forward_hook(collective)
    start = time.monotonic()
    try:
        result = run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    except RuntimeError as error:
        return isinstance(error, ReplicaSyncError), str(error), time.monotonic() - start
    collect_weight_grads(WORLD, runtime, model, result)
    compare(result, reference(WORLD, rank), transport)
    runtime.close()
    return None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_comm_01_collectives_between_layers(transport):
    assert run_ranks(4, run_comm_01, transport, False) == [None] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_comm_01_collectives_in_different_orders_end_in_time(transport):
    found = run_ranks(4, run_comm_01, transport, True, group_timeout=2 * TIMEOUT_S)
    for rank in (0, 2, 3):
        is_ours, message, seconds = found[rank]
        assert is_ours, message
        assert "optimizer step 0, train, micro-batch 0, layer 1" in message
        assert seconds < 2 * TIMEOUT_S
    assert found[1] is not None, "stuck in the user's own collective until its time-out"


def run_comm_03(rank, num_ranks, transport):
    for _ in range(2):
        runtime, _ = make(WORLD, rank, transport=transport, timeout_s=20.0)
        runtime.close()
        runtime.close()
    with pytest.raises(KeyError), make(WORLD, rank, transport=transport)[0]:
        raise KeyError
    runtime, model = make(WORLD, rank, transport=transport, timeout_s=20.0)
    result = run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    collect_weight_grads(WORLD, runtime, model, result)
    compare(result, reference(WORLD, rank), transport)
    return True  # exits without close


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_comm_03_open_and_close_in_any_order(transport):
    assert all(run_ranks(4, run_comm_03, transport))


def run_comm_09(rank, num_ranks):
    """Expert r, on rank r, gets 10 (r + 1) rows of source r; in step 1 rank 0 pads 30 more."""

    def rows(padding):
        count = 10 * (rank + 1)
        kind = np.array([relibra.DispatchRows.KIND_ROUTED] * count)
        kind = np.append(kind, [relibra.DispatchRows.KIND_PADDING] * padding).astype(np.uint8)
        ids = np.full((len(kind), 1, 1), rank, np.int32)
        return relibra.DispatchRows(ids, kind, num_experts=4, moe_layers=(1,))

    world = World(1, 4, num_experts=4, top_k=1)
    runtime, _ = make(world, rank, transport="cpu_shm", timeout_s=20.0)
    routes = [rows(0), rows(0), rows(30 if rank == 0 else 0)]
    loads = runtime.gather_loads(relibra.LoadMatrix.from_rows(routes, [0, 1, 1]))
    plan = runtime.plan_step({"train": loads}, world.shape, strategy="none")
    reports = []
    for optimizer_step in range(2):
        with runtime.step(plan, {"train": routes}, optimizer_step=optimizer_step) as step:
            pass
        reports.append(step.report())
    runtime.close()
    return reports


def test_comm_09_the_report_of_a_step():
    for first, second in run_ranks(4, run_comm_09):
        assert json.loads(json.dumps(first)) == first, "a plain dict for loggers"
        layer = {
            name.removeprefix("train/layer_1/"): value
            for name, value in first.items()
            if name.startswith("train/layer_1/")
        }
        assert {name: layer[name] for name in ("imbalance", "max_vio", "min_vio")} == {
            "imbalance": 1.6, "max_vio": 0.6, "min_vio": -0.6,
        }  # fmt: skip
        assert layer["balancedness"] == 0.625
        for name in ("imbalance_mean", "imbalance_p99", "imbalance_max"):
            assert layer[name] == layer[f"{name}_routed"] == pytest.approx(1.6)
        assert layer["imbalance_routed"] == 1.6
        padded = 40 * 4 / 130
        assert second["train/layer_1/imbalance"] == pytest.approx(80 * 4 / 230)
        assert second["train/layer_1/imbalance_routed"] == 1.6
        assert second["train/layer_1/imbalance_mean"] == pytest.approx((40 + 40) / (230 / 4))
        assert second["train/layer_1/imbalance_max"] == pytest.approx(1.6)
        assert second["train/layer_1/imbalance_p99"] == pytest.approx(1.6 - 0.01 * (1.6 - padded))
        assert second["train/layer_1/imbalance_max_routed"] == pytest.approx(1.6)
