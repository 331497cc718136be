"""A runtime sleeps between steps, and goes on over new process groups without leaking anything."""

import dataclasses
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_world import World, check, compare, reference
from replica_training import make, run_step

from relibra import runtime_groups
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.sync_engine import PUSH
from relibra_kernels.transport.sync_types import SyncOp

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=2, tokens=9, replica_slots=1, dtype=torch.float64
)


def held():
    """Descriptors, threads, mappings of shared memory and process groups of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/dev/shm/relibra-")
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, groups


def run_cycles(rank, num_ranks, cycles, transport, timeout_s):
    dispatch = "peer" if transport == "cpu_shm" else "flat"
    runtime, model = make(WORLD, rank, transport=transport, timeout_s=timeout_s, dispatch=dispatch)
    plan, seen = WORLD.random_plan(fill=1.0), []
    for cycle in range(cycles):
        if cycle % 3 == 1:
            runtime.reserve_rows({"x": 4096}, "cycle")
        runtime.suspend()
        if (
            cycle % 20 == 19 or cycle == cycles - 1 or cycle < 2
        ):  # garbage collection takes longer than a cycle
            seen.append(held())
        runtime.resume(dist.group.WORLD)
        if cycle % 25 == 0:
            run_step(WORLD, rank, runtime, model, plan)
    runtime.close()
    return seen


@pytest.mark.parametrize(
    ("transport", "cycles", "timeout_s"),
    [("cpu_shm", 100, 20.0), ("dist", 10, None)],
)
def test_cycles_leak_nothing(transport, cycles, timeout_s):
    for seen in run_ranks(2, run_cycles, cycles, transport, timeout_s):
        assert seen[-1][0] <= seen[1][0], "descriptors"
        assert {one[2] for one in seen} == {0}
        assert len({one[1] for one in seen[1:]}) == 1, "threads"
        assert len({one[3] for one in seen}) == 1, "process groups"


def run_trained(rank, num_ranks):
    """A step before and one after a sleep equal dense training, and the moved layout stays."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    first = run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    weights = [runtime.gather_experts(moe.w13, moe.layer) for moe in model.layers]
    before = reference(WORLD, rank)
    check(first.y[0], before.y[0], "before")
    for param in model.parameters():
        param.grad = None
    runtime.suspend()
    for refused in (runtime.suspend, lambda: runtime.step(None, {}), runtime.attachment):
        with pytest.raises(RuntimeError, match="the runtime is suspended"):
            refused()
    x, scores, _ = WORLD.batch(rank, 0)
    with pytest.raises(RuntimeError, match="the runtime is suspended"):
        model(x, scores, torch.from_numpy(WORLD.ids(rank, 0)).long())
    with pytest.raises(ValueError, match="group: need rank"):
        runtime.resume(None)
    runtime.resume(dist.group.WORLD)
    with pytest.raises(RuntimeError, match="need a suspended runtime"):
        runtime.resume(dist.group.WORLD)
    other = dataclasses.replace(WORLD, seed=9)
    plan = other.random_plan(fill=1.0, base=runtime.layout)
    result = run_step(other, rank, runtime, model, plan)
    pairs = [[w13, runtime.gather_experts(moe.w2, moe.layer)] for w13, moe in zip(
        weights, model.layers, strict=True)]  # fmt: skip
    need = reference(other, rank, weights=pairs)
    for moe, dw13, dw2 in zip(model.layers, need.dw13, need.dw2, strict=True):
        result.dw13.append(runtime.gather_experts(moe.w13.grad, moe.layer))
        result.dw2.append(runtime.gather_experts(moe.w2.grad, moe.layer))
        assert dw13.shape[0] == dw2.shape[0] == 4
    compare(result, need, "after")
    runtime.close()
    with pytest.raises(RuntimeError, match="need a suspended runtime"):
        runtime.resume(dist.group.WORLD)
    return True


def test_training_goes_on_after_a_sleep():
    assert all(run_ranks(2, run_trained))


def run_inside(rank, num_ranks):
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    plan = WORLD.random_plan()
    with (
        runtime.step(plan, {"train": WORLD.routes(rank)}),
        pytest.raises(Exception, match="is in a training step"),
    ):
        runtime.suspend()
    return True


def test_a_step_is_not_suspended():
    assert all(run_ranks(2, run_inside))


def run_after_left_step(rank, num_ranks):
    """All ranks leave a step by an error, with a push under way whose buffer none gives back."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=60.0)
    plan, routes = WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}
    (kind,) = runtime.domain_sync._kinds.values()

    def leave():
        with runtime.step(plan, routes) as step:
            with step.forward(micro_batch=0):
                model(*WORLD.batch(rank, 0)[:2])
            places = [kind.sync.layout.retired(peer) for peer in range(2)]
            items = kind.sync._items.credits(places, 1 << 20, [1 - rank])
            kind.sync.engine.wait(PUSH, items, 0, SyncOp.WEIGHT_CREDIT)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    ended, freed, free = [], [], kind.heap._free
    runtime.domain_sync.on_abort._abort = lambda: ended.append(rank)
    kind.heap._free = lambda peers_alive: freed.append(peers_alive) or free(peers_alive)
    if rank == 1:  # its watchdog looks around before its arena is closed
        kind.watchdog._pause_s, meet = 0.01, runtime.domain_sync.meet
        time.sleep(1.2)  # its long pause is over
        runtime.domain_sync.meet = lambda: time.sleep(0.3) or meet()
    since = time.monotonic()
    runtime.suspend()
    seconds = time.monotonic() - since
    runtime.resume(dist.group.WORLD)
    run_step(WORLD, rank, runtime, model, plan)
    runtime.close()
    return ended, freed, seconds


def test_a_sleep_after_a_step_that_was_left_frees_memory_and_ends_no_collective():
    for ended, freed, seconds in run_ranks(2, run_after_left_step):
        assert (ended, freed) == ([], [True])
        assert seconds < 30, "no wait of the left step lasts until its time-out"


def run_failed_resume(rank, num_ranks):
    """What a runtime does after a `resume` that failed."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    runtime.set_layer_hooks(2, starts_stage=True)
    hooks = dict(runtime.domain_sync.hooks)
    original = runtime_groups.make_domain_sync
    for error in (ValueError("refused"), ReplicaSyncError("a rank did not come")):

        def fail(*_, error=error, **options):
            raise error

        runtime.suspend()
        runtime_groups.make_domain_sync = fail
        with pytest.raises(type(error), match=str(error)):
            runtime.resume(dist.group.WORLD)
        runtime_groups.make_domain_sync = original
        after = "is suspended" if isinstance(error, ValueError) else "failed before"
        with pytest.raises(RuntimeError, match=after):
            runtime.attachment()
        if isinstance(error, ValueError):
            runtime.resume(dist.group.WORLD)
            assert runtime.domain_sync.hooks == hooks
            run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    with pytest.raises(RuntimeError, match="failed before"):
        runtime.resume(dist.group.WORLD)
    runtime.close()
    return True


def test_a_runtime_whose_resume_failed_does_not_work_on_half_a_connection():
    assert all(run_ranks(2, run_failed_resume))
