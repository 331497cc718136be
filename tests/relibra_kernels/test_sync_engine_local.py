"""The engine of virtual ranks over that of GPUs: one hardware queue is enough for all of them."""

import functools

import numpy as np
import pytest
import torch
from fake_cuda import HANDLES, FakeLibrary, FakeStream, FakeStreams
from sync_world import FIELDS, NUM_LAYERS, Schedule, arena_layout, run_schedule

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.lockstep import Lockstep
from relibra_kernels.transport.lockstep_group import LocalGroup
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_engine_local import InlineEngine, LocalEngine
from relibra_kernels.transport.sync_types import PUBLISH_ITEM, WAIT_ITEM, SyncOp


class QueuedStreams(FakeStreams):
    """Streams of a rank whose work goes through a queue that all ranks share."""

    def __init__(self, queue):
        super().__init__(is_late=True)
        for name, own in self.streams.items():
            own.close()
            self.streams[name] = queue
            HANDLES[self.handles[name]] = queue


class FlushedSync(ReplicaSync):
    """Reads memory where the streams have got, through the engine of a virtual rank."""

    def _drained(self, found):
        self.engine._inner._streams.drain()
        return found

    def weights(self, use):
        return self._drained(super().weights(use))

    def grad_slots(self, use):
        return self._drained(super().grad_slots(use))


@pytest.mark.parametrize("order", ["forward-backward", "1f1b"])
@pytest.mark.parametrize("push", ["copy_engine", "sm"])
def test_all_streams_of_all_ranks_in_one_queue(order, push):
    """A wait ahead of what it waits for would hold up everything until its time-out."""
    num_ranks, queue = 4, FakeStream(0.0)
    schedule = Schedule(num_ranks, 40, order=order, seed=21)
    layout, lockstep, words = arena_layout(num_ranks), Lockstep(num_ranks), {}
    heaps, syncs = LocalHeap.ranks(num_ranks), []
    for rank, heap in enumerate(heaps):
        arena = heap.alloc(layout.nbytes, 1)
        inner = CudaEngine(
            arena, layout, timeout_s=20.0, options=CudaOptions(push=push),
            library=FakeLibrary(), streams=QueuedStreams(queue),
        )  # fmt: skip
        engine = LocalEngine(inner, lockstep, words, range(num_ranks))
        syncs.append(FlushedSync(arena, layout, range(num_ranks), rank, engine, timeout_s=20.0))
    group = LocalGroup(lockstep)

    def run(rank):
        barrier = functools.partial(group.gather, rank, None, "barrier")
        return run_schedule(schedule, syncs[rank], rank, barrier=barrier)

    found, expected = lockstep.run(run), schedule.sums()
    for rank, total in enumerate(found):
        for layer in range(NUM_LAYERS):
            for field in FIELDS:
                need = expected[layer][rank][field]
                assert_equal_bits(f"rank {rank} layer {layer}", total[layer][field], need)
    for sync, heap in zip(syncs, heaps, strict=True):
        sync.close()
        heap.close()
    lockstep.close()
    queue.close()
    assert queue.errors == []


def test_lists_keep_their_order_and_wait_for_words_of_others():
    layout, lockstep, words = arena_layout(2), Lockstep(2), {}
    arenas = [heap.alloc(layout.nbytes, 1) for heap in LocalHeap.ranks(2)]
    said = []

    class Noted(InlineEngine):
        def wait(self, stream, items, use, op):
            said.append(f"wait {stream}")
            super().wait(stream, items, use, op)

    engines = [
        LocalEngine(Noted(arena, layout, timeout_s=5.0), lockstep, words, (4, 7))
        for arena in arenas
    ]
    word = arenas[0].peers[0] + layout.full(0, 0)
    item = np.array([(word, 1 << 48 | 5, 0, 1, 0)], WAIT_ITEM)
    engines[0].wait(PUSH, np.zeros(0, WAIT_ITEM), 0, SyncOp.WEIGHTS)  # nothing to wait for
    engines[0].wait(PUSH, item, 3, SyncOp.WEIGHTS)
    event = engines[0].record(PUSH)
    engines[0].wait_event(REDUCE, event)
    last = engines[0].record(REDUCE)
    assert not event.is_submitted
    assert not last.is_submitted
    assert said == []
    text = r"nobody can go on: the caller waits for WEIGHTS of use 3 from ranks \[7\]"
    with pytest.raises(RuntimeError, match=text):
        engines[0].wait_event(COMPUTE, event)
    engines[1].publish(COMPUTE, np.array([(word, 1 << 48 | 4)], PUBLISH_ITEM))
    assert not lockstep.pump()  # too low
    engines[1].publish(COMPUTE, np.array([(word, 1 << 48 | 5)], PUBLISH_ITEM))
    engines[0].wait_event(COMPUTE, last)
    assert said == ["wait push"]
    assert event.is_submitted
    engines[0].wait_event(COMPUTE, None)
    assert engines[0].pending() == []
    assert torch.isnan(torch.tensor(engines[0].seconds(None, None)))
    engines[0].wait(PUSH, np.array([(word, 1 << 48 | 9, 0, 1, 0)], WAIT_ITEM), 4, SyncOp.WEIGHTS)
    for engine in engines:
        engine.close()
        engine.close()
    assert lockstep.background == []
    assert said == ["wait push"]  # what was not submitted is forgotten
    lockstep.close()
