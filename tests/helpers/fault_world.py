"""Ranks of which one is killed, stopped or late in a given operation, and what the others see."""

import dataclasses
import datetime
import gc
import os
import signal
import tempfile
import time
import traceback
from multiprocessing import connection, get_context
from pathlib import Path

import torch
import torch.distributed as dist
from late_rank import Told
from moe_world import Result, World, collect_weight_grads, compare, reference
from replica_training import make, run_step

from relibra import layer_passes
from relibra.runtime import Runtime
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.replica_sync import ReplicaSync

WORLD = World(
    1, 4, num_experts=12, top_k=2, num_layers=2, micro_batches=2, tokens=9, replica_slots=2,
    dtype=torch.float64,
)  # fmt: skip
POINTS = {  # operation -> what the victim does first: owner, method
    "push": (ReplicaSync, "submit_push"),
    "compute": (ReplicaSync, "retire"),
    "publish": (ReplicaSync, "publish_grads"),
    "reduce": (ReplicaSync, "home_reduce"),
    "step end": (Runtime, "replica_fault"),
    "dispatch": (layer_passes, "start_tokens"),
    "combine": (layer_passes, "start_output"),
}
ROW_POINTS = ("dispatch", "combine")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to whom, and when.

    Attributes:
        kind: ``kill``, ``stop`` or ``slow``.
        point: one of `POINTS`.
        victim: rank.
        call: of the operation, counted from 0; -1 is the last of the step.
        timeout_s: of the runtime.
        dispatch: how rows travel.
    """

    kind: str
    point: str
    victim: int = 2
    call: int = 3
    timeout_s: float = 4.0
    dispatch: str = "flat"


def strike(fault, when, told):
    """The victim's method fails at a call; one that is slow goes on when its peers gave it up."""
    owner, name = POINTS[fault.point]
    original, calls = getattr(owner, name), [0]

    def method(*args, **kwargs):
        if calls[0] == fault.call:
            when.value = time.monotonic()
            if fault.kind == "slow":
                told.wait_for(3)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        calls[0] += 1
        return original(*args, **kwargs)

    setattr(owner, name, method)
    return lambda: setattr(owner, name, original)


def run_rank(rank, fault, when, told):
    """What a rank saw: its error, how long after the fault, and the training that followed."""
    options = {"transport": "cpu_shm", "dispatch": fault.dispatch}
    runtime, model = make(WORLD, rank, timeout_s=fault.timeout_s, **options)
    if fault.dispatch == "peer":  # as without gloo: the waits for rows are the first to notice
        runtime.checks_order = False
    before = []

    def entered():
        before.extend(param.detach().clone() for param in model.parameters())

    restore = strike(fault, when, told) if rank == fault.victim else lambda: None
    error = None
    try:
        run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0), entered=entered)
    except ReplicaSyncError as caught:
        error = str(caught)
    seconds = time.monotonic() - when.value
    told.say()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.close()
    del runtime  # holds the error, whose traceback holds views of the memory
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/dev/shm/relibra-")
    restore()
    train_again(rank, fault, options)
    return error, seconds, same, maps


def train_again(rank, fault, options):
    """A new runtime over the ranks that are left equals the dense reference."""
    world, group = WORLD, dist.group.WORLD
    if fault.kind != "slow":
        left = [r for r in range(4) if r != fault.victim]
        world = dataclasses.replace(WORLD, ranks_per_node=3)
        group = dist.new_group(left, use_local_synchronization=True)
        rank = left.index(rank)
    runtime, model = make(world, rank, timeout_s=60.0, group=group, **options)
    result = run_step(world, rank, runtime, model, world.random_plan(fill=1.0))
    collect_weight_grads(world, runtime, model, result)
    compare(result, reference(world, rank), "after the fault")
    assert isinstance(result, Result)
    runtime.close()


def run_fault(fault, timeout=90.0):
    """Result of `run_rank` by rank; None where the victim never answered."""
    context = get_context("fork")
    when, told = context.Value("d", 0.0), Told()
    with tempfile.TemporaryDirectory(prefix="relibra_fault_") as folder:
        readers, processes = [], []
        for rank in range(4):
            reader, writer = context.Pipe(duplex=False)
            processes.append(
                context.Process(target=_main, args=(rank, fault, (when, told), folder, writer))
            )
            processes[-1].start()
            writer.close()
            readers.append(reader)
        try:
            return _results(fault, readers, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(fault, readers, deadline):
    found = [None] * 4
    wanted = {r for r in range(4) if fault.kind == "slow" or r != fault.victim}
    while wanted:
        ready = connection.wait([readers[r] for r in wanted], deadline - time.monotonic())
        assert ready, f"ranks {sorted(wanted)} gave no answer"
        for rank in [r for r in wanted if readers[r] in ready]:
            found[rank] = readers[rank].recv()
            wanted.discard(rank)
    return found


def _main(rank, fault, shared, folder, writer):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=4,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        writer.send(run_rank(rank, fault, *shared))
    except BaseException:
        writer.send(traceback.format_exc())
    signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.alarm(120)  # where the parent is gone
    signal.pause()  # peers may still need this rank's connections; the parent ends all
