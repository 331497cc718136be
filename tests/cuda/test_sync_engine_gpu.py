"""Several ranks of one process on one GPU: the engine of GPUs and its kernels against references.

    TRITON_INTERPRET=0 python -m pytest -m gpu tests/cuda/test_sync_engine_gpu.py

Each rank has streams of its own. The caller gives work to one rank after the other, and a wait only
after what it waits for was given to a stream, so that one thread can drive all ranks. What these
tests call runs here on fake GPUs too.
"""

import dataclasses
import time

import pytest
import torch
from fake_cuda import FakeLibrary, FakeStreams
from sync_world import FIELDS, NUM_LAYERS, Schedule, arena_layout, zero_grads

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_items import Copy
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.sync_types import ErrorCode, SyncOp

FORMS = [("copy_engine", "stream"), ("sm", "kernel"), ("tma", "stream")]
KEY = UseKey("actor", 3, "train", 2, 7, "forward")
LAYER = 0


def ranks_on(device, num_ranks, timeout_s, **options):
    """Heaps and protocols of all ranks; on the CPU over fake GPUs."""
    layout, heaps = arena_layout(num_ranks), LocalHeap.ranks(num_ranks, device)
    arenas, syncs = [heap.alloc(layout.nbytes, 1) for heap in heaps], []
    for rank, arena in enumerate(arenas):
        fakes = {}
        if device == "cpu":
            fakes = {"library": FakeLibrary(), "streams": FakeStreams(is_late=True)}
        engine = CudaEngine(
            arena, layout, timeout_s=timeout_s, options=CudaOptions(**options), **fakes
        )
        syncs.append(
            ReplicaSync(arena, layout, range(num_ranks), rank, engine, timeout_s=timeout_s)
        )
    return heaps, syncs


def end(heaps, syncs):
    for sync in syncs:
        sync.close()
    for heap in heaps:
        heap.close()


def later(sync, call):
    """Work of the compute stream: at once on a GPU, in the thread of a fake stream."""
    streams = sync.engine._streams
    if isinstance(streams, FakeStreams):
        streams.streams["compute"].submit(call)
    else:
        call()


def run_in_turn(schedule, syncs, device):
    """All uses of all ranks; what each rank found in its replica slots, and the home gradients."""
    num_ranks, found = schedule.num_ranks, []
    total = [[moved(zero_grads(), device) for _ in syncs] for _ in range(NUM_LAYERS)]
    grads = {}
    for n, key in enumerate(schedule.keys()):
        pushes, pulls = schedule.lists(n)
        home = [moved(schedule.weights(key.layer, rank), device) for rank in range(num_ranks)]
        uses = [
            sync.submit_push(key, home[rank], pushes[rank], pulls[rank], plan_hash="p")
            for rank, sync in enumerate(syncs)
        ]
        for rank, sync in enumerate(syncs):
            slots = sync.weights(uses[rank])
            copy = {name: torch.empty_like(slot) for name, slot in slots.items()}
            later(sync, lambda copy=copy, slots=slots: [copy[x].copy_(slots[x]) for x in slots])
            found.append((key.layer, pulls[rank], copy))
        for rank, sync in enumerate(syncs):
            sync.retire(uses[rank])
        if key.direction == "forward":
            continue
        for rank, sync in enumerate(syncs):
            one = grads[n, rank] = moved(schedule.grads(n, rank), device)
            slots = sync.grad_slots(uses[rank])
            later(sync, lambda one=one, slots=slots: [slots[x].copy_(one[x]) for x in slots])
        for rank, sync in enumerate(syncs):
            sync.publish_grads(uses[rank])
        for rank, sync in enumerate(syncs):
            sync.wait_event(sync.home_reduce(uses[rank], total[key.layer][rank]))
    for sync in syncs:
        sync.join()
    return found, total


def moved(tensors, device):
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def check_results(device, num_ranks, num_uses, **options):
    schedule = Schedule(num_ranks, num_uses, seed=40)
    heaps, syncs = ranks_on(device, num_ranks, 20.0, **options)
    found, total = run_in_turn(schedule, syncs, device)
    end(heaps, syncs)
    for layer, pulls, copy in found:
        for slot, home_rank, home_slot in pulls.tolist():
            need = schedule.weights(layer, home_rank)
            for name, held in copy.items():
                assert_equal_bits(
                    f"{name} of layer {layer}", held[slot].cpu(), need[name][home_slot]
                )
    expected = schedule.sums()
    for layer in range(NUM_LAYERS):
        for rank in range(num_ranks):
            for name in FIELDS:
                got, need = total[layer][rank][name].cpu(), expected[layer][rank][name]
                assert_equal_bits(f"layer {layer} rank {rank} {name}", got, need)
    return [sync.engine.push_form for sync in syncs]


def check_time_out(device, push):
    """Nobody pushes to rank 1: it says so, rank 0 is told, and nothing more is done."""
    heaps, syncs = ranks_on(device, 2, 0.5, push=push)
    home = moved(Schedule(1, 1).weights(LAYER, 0), device)
    lists = [torch.zeros(0, 3, dtype=torch.int32), torch.tensor([[0, 0, 1]], dtype=torch.int32)]
    start = time.monotonic()
    use = syncs[1].submit_push(KEY, home, *lists)
    syncs[1].weights(use)
    with pytest.raises(ReplicaSyncError, match="waited 0.5 s in vain for rank 0") as caught:
        syncs[1].join()
    assert (caught.value.details.code, caught.value.details.slot) == (ErrorCode.TIMEOUT, 0)
    assert caught.value.details.operation == SyncOp.WEIGHTS
    assert time.monotonic() - start < 20
    assert syncs[0].is_aborted()
    with pytest.raises(ReplicaSyncError, match="stopped, since rank 1 failed first"):
        syncs[0].check()
    before = syncs[1].arena.base.clone()
    late = dataclasses.replace(use, pushes=(Copy(slot=0, peer=1, home_slot=0, expert=0),))
    items, keep = syncs[0]._items.pushed(late, home)
    assert len(items) == len(FIELDS)
    syncs[0].engine.push("push", items, keep)
    syncs[0].engine.settle()
    assert torch.equal(syncs[1].arena.base, before)
    end(heaps, syncs)


@pytest.mark.gpu
@pytest.mark.parametrize(("push", "waits"), FORMS)
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_ranks_on_one_gpu(num_ranks, push, waits):
    if push == "tma" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA needs compute capability 9.0")
    device = torch.device("cuda", torch.cuda.current_device())
    forms = check_results(device, num_ranks, 12, push=push, waits=waits)
    assert forms == [push] * num_ranks, "no form was fallen back from"


@pytest.mark.gpu
@pytest.mark.parametrize("push", ["copy_engine", "sm"])
def test_a_time_out_on_a_gpu(push):
    check_time_out(torch.device("cuda", torch.cuda.current_device()), push)


@pytest.mark.parametrize(("push", "waits"), FORMS)
def test_what_the_gpu_tests_call(push, waits):
    check_results("cpu", 4, 12, push=push, waits=waits)


def test_what_the_time_out_test_calls():
    check_time_out("cpu", "copy_engine")
