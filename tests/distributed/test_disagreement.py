"""Ranks that do not agree: an error on every rank in time, never a hang."""

import time

import pytest
import torch
import torch.distributed as dist
from late_rank import Told
from moe_world import Model, World

import relibra
from relibra_kernels.testing.launch import run_ranks

WORLD = World(2, 2, num_experts=8, top_k=2, micro_batches=2)


PLENTY_S = 60.0  # where nobody waits in vain, however busy the machine is
TIMEOUT_S = 4.0  # where somebody does


def enter_step(rank, num_ranks, fault, timeout_s, told=None):
    """Enter a step with a fault on rank 1; returns the error and the seconds it took."""
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, timeout_s=timeout_s)
    model = Model(WORLD, rank, num_ranks)
    runtime.attach(model)
    plan, routes = WORLD.random_plan(), WORLD.routes(rank)
    if rank == 1:
        plan, routes = fault(plan, routes) if told is None else fault(plan, routes, told)
    start = time.perf_counter()
    try:
        with runtime.step(plan, {"train": routes}):
            return "entered", 0.0
    except Exception as error:
        if told is not None:
            told.say()
        return f"{type(error).__name__}: {error}", time.perf_counter() - start


def other_hash(plan, routes):
    return WORLD.random_plan(fill=0.0), routes


def fewer_micro_batches(plan, routes):
    return plan, routes[:1]


def other_routes(plan, routes):
    return plan, [routes[1], routes[0]]


def other_layout(plan, routes):
    return WORLD.random_plan(base=WORLD.random_plan().layouts), routes


def late(plan, routes, told):
    told.wait_for(3)
    return plan, routes


FAULTS = {
    "other-plan": (other_hash, "same plan hash on all ranks", "same plan hash on all ranks"),
    "fewer-micro-batches": (
        fewer_micro_batches,
        "need 2 micro-batches, got 1",
        "refused by rank\\(s\\) \\[1\\].*need 2 micro-batches, got 1",
    ),
    "other-routes": (other_routes, "the routes hold", "refused by rank\\(s\\) \\[1\\]"),
    "other-base-layout": (other_layout, "base layout differs", "refused by rank\\(s\\) \\[1\\]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_raises(name):
    import re

    fault, on_its_rank, elsewhere = FAULTS[name]
    for rank, (message, seconds) in enumerate(run_ranks(4, enter_step, fault, PLENTY_S)):
        assert message.startswith("PlanError"), message
        assert re.search(on_its_rank if rank == 1 else elsewhere, message), message
        assert seconds < PLENTY_S / 2


def test_a_rank_that_does_not_come_is_named():
    results = run_ranks(4, enter_step, late, TIMEOUT_S, Told())
    for rank, (message, seconds) in enumerate(results):
        assert message.startswith("ReplicaSyncError"), message
        assert f"rank {rank} of 4" in message
        assert rank == 1 or seconds < 2 * TIMEOUT_S, "and others may take to speak"
    assert "1" in results[0][0].split("waited in vain")[1]


def gather_different(rank, num_ranks):
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, timeout_s=PLENTY_S)
    routes = WORLD.routes(rank)[: 1 if rank == 2 else 2]
    with pytest.raises(relibra.PlanError, match="number of micro-batches.*rank 2: 1"):
        runtime.gather_loads(relibra.LoadMatrix.from_rows(routes))
    with pytest.raises(relibra.PlanError, match="own counts"):
        runtime.gather_loads(WORLD.loads())
    return True


def test_gather_loads_refuses_different_numbers_of_micro_batches():
    assert all(run_ranks(4, gather_different))


def fail_in_forward(rank, num_ranks, told):
    """Rank 1 leaves in the middle: its peers get an error that names the use, within the time."""
    world = World(1, 2, num_experts=8, top_k=2)
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, timeout_s=TIMEOUT_S)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    x, scores, _ = world.batch(rank, 0)
    start = time.perf_counter()
    try:
        with runtime.step(world.random_plan(), {"train": world.routes(rank)}) as step:
            if rank == 1:
                raise KeyError("left")
            with step.forward(micro_batch=0):
                model(x, scores)
    except (KeyError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    if rank == 0:
        with pytest.raises(RuntimeError, match="failed before"):
            runtime.step(world.random_plan(), {"train": world.routes(rank)})
        runtime.close()
        told.say()
    else:
        told.wait_for(1)
    return message, seconds


def test_a_rank_that_leaves_a_step():
    (waiting, seconds), (left, _) = run_ranks(2, fail_in_forward, Told())
    assert left.startswith("KeyError")
    assert waiting.startswith("ReplicaSyncError"), waiting
    assert "train, micro-batch 0, layer 1" in waiting
    assert seconds < 2 * TIMEOUT_S


def test_parameters_of_the_runtime_are_checked():
    for options, message in (
        (
            {"transport": "nccl"},
            "transport: need one of 'auto', 'dist', 'cpu_shm', 'torch_symm', .*, got 'nccl'",
        ),
        ({"combine": "sum"}, "combine: need one of"),
        ({"grad_mode": "bf16"}, "grad_mode: need one of"),
        ({"topology": relibra.Topology(2, 4)}, "topology: need 1 ranks"),
        ({"replica_slots": -1}, "replica_slots: need at least 0, got -1"),
        ({"block_rows": 0}, "block_rows: need 1 to 65536, got 0"),
        ({"timeout_s": 0}, "timeout_s: need more than 0 and up to .* s, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s: need more than 0 and up to .* s, got nan"),
        ({"timeout_s": float("inf")}, "timeout_s: need more than 0 and up to .* s, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            relibra.Runtime(**options)


def test_attach_is_checked():
    runtime = relibra.Runtime()
    with pytest.raises(ValueError, match="at least one BalancedMoE"):
        runtime.attach(torch.nn.Linear(2, 2))
    twice = torch.nn.ModuleList([relibra.BalancedMoE(4, 8, 8, layer=3) for _ in range(2)])
    with pytest.raises(ValueError, match="layer number 3 appears twice"):
        runtime.attach(twice)
    sharded = relibra.BalancedMoE(4, 8, 8, layer=0, num_ranks=2, rank=1)
    with pytest.raises(ValueError, match="is shard 1 of 2, this is rank 0 of 1"):
        runtime.attach(sharded)
    moe = relibra.BalancedMoE(4, 8, 8, layer=0)
    runtime.attach(moe)
    with pytest.raises(ValueError, match="'actor' is attached already"):
        runtime.attach(moe)
    with pytest.raises(ValueError, match="need one of the attached \\['actor'\\], got 'ref'"):
        runtime.attachment("ref")
