"""Errors of the engine of GPUs: who waited for whom, in time, and what is submitted after them."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from cuda_world import World, one_replica
from fake_cuda import FakeEvent, FakeLibrary, FakeStreams
from forked import told_in_fork
from sync_world import FIELDS, NUM_HOME, arena_layout

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport import cuda_self_test
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_types import (
    PUBLISH_ITEM,
    WAIT_ITEM,
    ErrorCode,
    SyncOp,
    pack_credit,
    pack_word,
)
from relibra_kernels.transport.watchdog import Watchdog

TIMEOUT_S = 3.0  # where somebody waits in vain
PLENTY_S = 60.0  # where nobody does, however busy the machine is


@contextlib.contextmanager
def watched(world):
    dogs = [Watchdog(sync) for sync in world.syncs]
    try:
        yield
    finally:
        for dog in dogs:
            dog.close()


def told(world, body):
    """Errors of the ranks, and the seconds until the last one."""
    start = time.monotonic()
    with watched(world):
        found = world.run(body)
    assert all(isinstance(one, ReplicaSyncError) for one in found), found
    return [str(one) for one in found], [one.details for one in found], time.monotonic() - start


def until_failure(sync):
    while True:
        sync.check()
        time.sleep(0.005)


@pytest.mark.parametrize("waits", ["stream", "kernel"])
def test_a_credit_that_never_comes(waits):
    """Rank 1 does not retire: the third push of rank 0 waits in its stream, without an SM."""

    def body(rank, sync):
        uses = [one_replica(sync, rank), one_replica(sync, rank)]
        if rank == 1:
            until_failure(sync)
        for use in uses:
            sync.weights(use), sync.retire(use)
        one_replica(sync, rank)
        sync.join()

    with World(2, timeout_s=TIMEOUT_S, waits=waits) as world:
        (first, second), details, seconds = told(world, body)
        assert "replica push (until the buffer may be overwritten)" in first
        assert "waited 3 s in vain for rank 1" in first
        assert "stopped, since rank 0 failed first" in second
        one = details[0]
        assert (one.code, one.operation, one.peer) == (1, SyncOp.WEIGHT_CREDIT, 1)
        assert (one.expected, one.observed) == (pack_credit(1, 1), 0)
        assert seconds < 5 * TIMEOUT_S
        assert world.streams[0].errors == []
        start = time.monotonic()
    assert time.monotonic() - start < PLENTY_S / 2, "streams that waited have come to rest"


def test_weights_that_never_come():
    def body(rank, sync):
        if rank == 0:
            until_failure(sync)
        sync.weights(one_replica(sync, rank))

    with World(2, timeout_s=TIMEOUT_S) as world:
        (first, second), details, _ = told(world, body)
    assert "use of replica weights" in second
    assert "waited 3 s in vain for rank 0" in second
    assert "stopped, since rank 1 failed first" in first
    assert details[1].slot == 0


def test_another_plan_is_a_mismatch():
    def body(rank, sync):
        use = one_replica(sync, rank, plan_hash=f"plan {rank}")
        sync.weights(use)
        until_failure(sync)

    with World(2, timeout_s=PLENTY_S) as world:
        (_, second), details, _ = told(world, body)
    assert "met another plan, layer, use or expert of rank 0" in second
    assert details[1].code == ErrorCode.MISMATCH
    assert details[1].expected != details[1].observed


def test_a_stream_that_waits_looks_at_what_came():
    """The stream itself compares no hash; the kernel behind its wait does."""
    with World(2, timeout_s=PLENTY_S) as world:
        engine, (place, value) = world.engines[0], (world.layout.full(0, 0), pack_word(1, 4, 7))
        engine._arena.base[place : place + 8].view(torch.int64)[0] = value
        word = engine._arena.peers[0] + place
        items = np.array([(word, pack_word(1, 4, 0), pack_word(1, 4, 8), 1, 0)], WAIT_ITEM)
        engine.wait(REDUCE, items, 4, SyncOp.GRADS)
        engine.settle()
        found = engine.failure()[0]
        assert (found["code"], found["op"]) == (ErrorCode.MISMATCH, SyncOp.GRADS)
        assert (found["expected"], found["observed"]) == (pack_word(1, 4, 8), value)


def test_gradients_that_never_come_end_a_stream_that_waits():
    def body(rank, sync):
        use = one_replica(sync, rank)
        sync.weights(use), sync.retire(use), sync.grad_slots(use)
        if rank == 1:
            until_failure(sync)
        grads = {n: torch.zeros(NUM_HOME, *shape) for n, (_, shape) in FIELDS.items()}
        sync.publish_grads(use), sync.home_reduce(use, grads)
        try:
            sync.join()
        finally:
            assert all(not grad.any() for grad in grads.values())

    with World(2, timeout_s=TIMEOUT_S) as world:
        (first, _), details, _ = told(world, body)
    assert "home reduce" in first
    assert details[0].operation == SyncOp.GRADS


def test_the_host_reads_an_error_without_waiting_and_then_submits_nothing():
    with World(2, timeout_s=PLENTY_S) as world:
        (engine, peer), (sync, _) = world.engines, world.syncs
        sync.abort()
        world.streams[0].drain()
        abort = world.engines[1]._arena.peers[1] + world.layout.abort
        assert peer.load_words([abort])[0] >> 48 == 1, "the peer was told"
        assert peer.failure() is None
        assert world.syncs[1].is_aborted()
        assert int(peer.failure()["code"][0]) == ErrorCode.PEER_ABORTED
        before = list(world.libraries[0].calls)
        items = np.array([(0, 0, 0, 0, 0)], WAIT_ITEM)
        engine.wait(PUSH, items, 0, SyncOp.WEIGHTS)
        engine.push(PUSH, items, None), engine.publish(REDUCE, items)
        engine.reduce(REDUCE, items, None)
        assert world.libraries[0].calls == before
        with pytest.raises(ReplicaSyncError, match="this rank failed elsewhere"):
            sync.check()


@pytest.mark.parametrize("waits", ["stream", "kernel"])
def test_a_rank_that_ends_its_own_waits_runs_nothing_behind_them_and_tells_nobody(waits):
    """As before a collective close of ranks that left a step: kernels see the abort word alone."""
    with World(2, timeout_s=PLENTY_S, is_late=True, waits=waits) as world:
        engine, layout = world.engines[1], world.layout
        here, there = (world.engines[rank]._arena.peers[rank] for rank in (1, 0))
        items = np.array([(here + layout.full(0, 0), pack_word(1, 0, 0), 0, 0, 0)], WAIT_ITEM)
        credit = np.array([(there + layout.retired(1), pack_credit(1, 1))], PUBLISH_ITEM)
        for stream in (COMPUTE, PUSH):
            engine.wait(stream, items, 0, SyncOp.WEIGHTS)
            engine.publish(stream, credit)
        start = time.monotonic()
        world.syncs[1].end_waits()
        engine.settle()
        assert time.monotonic() - start < PLENTY_S / 2, "waits have no need of their time-out"
        assert int(engine.failure()["code"][0]) == ErrorCode.PEER_ABORTED
        words = [there + layout.retired(1), there + layout.abort]
        assert world.engines[0].load_words(words) == [0, 0]
        assert not world.syncs[0].is_aborted()


def test_a_forked_child_touches_no_stream_and_ends_no_wait_of_its_parent():
    need = (
        "the engine of replica synchronisation: need process PARENT, which made it and runs its "
        "threads, got process CHILD, a fork of it"
    )
    with World(2, timeout_s=PLENTY_S) as world:
        sync = world.syncs[0]
        one_replica(sync, 0)
        assert need in told_in_fork(lambda: one_replica(sync, 0))
        assert need in told_in_fork(sync.join)
        assert need in told_in_fork(lambda: sync.engine.record(PUSH))
        assert told_in_fork(sync.abort) == told_in_fork(sync.close) == "nothing"
        sync.join()


def test_a_call_that_the_driver_refuses_is_told_to_all():
    with World(2, timeout_s=PLENTY_S) as world:
        world.libraries[0].refuses.add("push_copy_engine")

        def body(rank, sync):
            use = one_replica(sync, rank)
            sync.weights(use)

        (first, second), _, seconds = told(world, body)
        assert "stream 'push': rs_push_copy_engine returned 801: not supported here" in first
        assert "stopped, since rank 0 failed first" in second
        assert seconds < PLENTY_S / 2
        with pytest.raises(ReplicaSyncError, match="a call failed: rs_push_copy_engine"):
            world.engines[0].failure()


def test_an_error_of_the_device_ends_the_run(monkeypatch):
    """As after an illegal access: nothing of the device answers any more."""
    aborted = threading.Event()
    with World(2, timeout_s=PLENTY_S) as world:
        engine, sync = world.engines[0], world.syncs[0]
        word = engine._arena.peers[0] + world.layout.retired(0)
        assert engine.load_words([word]) == [0]

        def fail(*_):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(world.streams[0], "record", fail)
        dog = Watchdog(sync, aborted.set)
        assert engine.load_words([word]) == [0], "as last seen"
        assert engine.pending() == []
        with pytest.raises(
            ReplicaSyncError, match="a call failed: CUDA error: an illegal"
        ) as caught:
            sync.join()
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(ReplicaSyncError, match="a call failed"):
            sync.check()
        assert aborted.wait(30), "collectives of this rank are ended"
        dog.close()


def test_what_a_gpu_lacks_shows_at_the_start(caplog):
    caplog.set_level("INFO")
    lacking = {"push_copy_engine", "wait_values"}
    with World(1, library=lambda: FakeLibrary(lacking)) as world:
        (engine,) = world.engines
        assert (engine.push_form, engine.waits_form) == ("sm", "kernel")
    assert "weights are pushed by SMs: rs_push_copy_engine returned 801" in caplog.text
    assert "waits of streams take a kernel: rs_wait_values returned 801" in caplog.text
    with pytest.raises(RuntimeError, match="rs_reduce returned 801"):
        World(1, library=lambda: FakeLibrary({"reduce"}))


def test_kernels_that_compute_something_else_are_refused():
    class Wrong(FakeLibrary):
        def reduce(self, *arguments):
            pass

    with pytest.raises(RuntimeError, match=r"reduce of fake on cpu: need \[4.0, 8.0, 12.0\] ..., "):
        World(1, library=Wrong)


def refused_at_the_end(streams):
    """The calls before the one that is refused are in the stream."""
    (heap,), layout = LocalHeap.ranks(1), arena_layout(1)
    library = FakeLibrary({"reduce"})
    with pytest.raises(RuntimeError, match="rs_reduce returned 801"):
        CudaEngine(heap.alloc(layout.nbytes, 1), layout, timeout_s=PLENTY_S, library=library,
                   streams=streams)  # fmt: skip
    assert len(library.calls) > 4
    return streams.streams[PUSH].calls


def test_what_calls_use_lives_until_they_have_run_though_the_engine_cannot_be_made():
    streams = FakeStreams(lag_s=0.05)
    assert refused_at_the_end(streams).empty()
    assert cuda_self_test._in_use == []
    assert streams.errors == []
    streams.close()


def test_what_calls_use_stays_where_they_do_not_end(monkeypatch, caplog):
    monkeypatch.setattr(cuda_self_test, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(cuda_self_test, "_in_use", [])
    streams, gate = FakeStreams(), FakeEvent()
    streams.wait(PUSH, gate)
    assert not refused_at_the_end(streams).empty()
    assert len(cuda_self_test._in_use) == 1
    assert "memory of the self-test stays: kernels of fake do not end on cpu" in caplog.text
    gate.set()
    streams.drain()
    assert streams.errors == []
    streams.close()


def test_one_hardware_queue_takes_kernels(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with World(1) as world:
        assert world.engines[0].waits_form == "kernel"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert CudaOptions().waits_form() == "stream"
    with pytest.raises(ValueError, match="push: need"):
        CudaOptions(push="dma")
