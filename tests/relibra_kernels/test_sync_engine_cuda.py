"""The engine of GPUs on a GPU of threads: the same protocol and results as on the CPU."""

import ctypes
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from cuda_world import KEY, World, int32, one_replica
from fake_cuda import FakeDriver, FakeEvent, FakeLibrary, FakeStreams
from kernel_mutants import killed
from sync_world import FIELDS, NUM_HOME, NUM_LAYERS, Schedule, run_schedule

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.transport import cuda_lanes, sync_engine_cuda
from relibra_kernels.transport.cuda_library_cubins import CubinLibrary
from relibra_kernels.transport.cuda_library_load import PACKAGE
from relibra_kernels.transport.cuda_streams import SIDE
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_types import WAIT_ITEM, SyncOp


def check_schedule(schedule, **options):
    """Weights by content, and gradients bit for bit those of one process."""
    expected, barrier = schedule.sums(), threading.Barrier(schedule.num_ranks, timeout=60)

    def body(rank, sync):
        return run_schedule(schedule, sync, rank, barrier=barrier.wait)

    with World(schedule.num_ranks, **options) as world:
        found = world.run(body)
    for rank, by in enumerate(found):
        if isinstance(by, BaseException):
            raise by
        for layer in range(NUM_LAYERS):
            for field in FIELDS:
                need = expected[layer][rank][field]
                assert_equal_bits(f"rank {rank} layer {layer}", by[layer][field], need)
    return world


CASES = {
    "copy engine, streams wait": {},
    "copy engine, kernels wait": {"waits": "kernel"},
    "SMs, streams wait": {"push": "sm"},
    "TMA, kernels wait": {"push": "tma", "waits": "kernel"},
    "late compute stream": {"is_late": True, "lag_s": 3e-4},
}


@pytest.mark.parametrize("name", CASES)
def test_weights_by_content_and_gradients_bit_for_bit(name):
    orders = ("forward-backward", "recompute", "1f1b")
    number = list(CASES).index(name)
    schedule = Schedule(4, 40, order=orders[number % 3], seed=20 + number)
    world = check_schedule(schedule, **CASES[name])
    form = CASES[name].get("push", "copy_engine")
    calls = world.libraries[0].calls
    assert f"push_{form}".replace("_sm", "") in calls
    assert ("wait_values" in calls) == (CASES[name].get("waits") != "kernel")


def test_the_kernels_of_cubins_do_the_same():
    """Launched by argument arrays, as through cuda.bindings or CuPy."""

    def library():
        return CubinLibrary(PACKAGE / "replica_sync.fatbin", FakeDriver())

    world = check_schedule(Schedule(3, 30, seed=30), library=library)
    assert {(e.push_form, e.waits_form) for e in world.engines} == {("sm", "kernel")}


# -- memory that a stream still reads --------------------------------------------------------


@pytest.fixture
def poison(monkeypatch):
    """A small ring whose free parts hold rubbish."""
    monkeypatch.setattr(sync_engine_cuda, "_RING_BYTES", 4096)
    collect = cuda_lanes.Lane.collect

    def poisoned(lane):
        before = lane._tail
        idle = collect(lane)
        places = np.arange(before, lane._tail) % len(lane._bytes)
        lane._memory.numpy()[places] = 0xAB
        return idle

    monkeypatch.setattr(cuda_lanes.Lane, "collect", poisoned)
    return monkeypatch


def busy(num_uses, **options):
    return check_schedule(Schedule(2, num_uses, seed=31), push="sm", lag_s=2e-4, **options)


def test_a_ring_is_used_over_and_over(poison):
    world = busy(200)
    turns = [lane._head / 4096 for lane in world.engines[0]._lanes.values()]
    assert min(turns) > 5, turns


@pytest.mark.slow
def test_a_thousand_uses_of_a_small_ring(poison):
    busy(1000)


def what_a_slow_stream_reads(num_calls=40):
    """Items as a stream finds them that is held up until the ring is full, or to the end."""
    streams, gate, seen, looks = FakeStreams(), FakeEvent(), [], []
    lock = threading.RLock()

    def look():
        looks.append(lock.acquire(timeout=20))
        if looks[-1]:
            lock.release()

    def when_full():
        watchdog = threading.Thread(target=look)
        watchdog.start(), watchdog.join()
        gate.set()

    lane = cuda_lanes.Lane(streams, PUSH, 1024, lock, when_full)
    streams.wait(PUSH, gate)
    for number in range(num_calls):
        items = (ctypes.c_double * 20).from_address(lane.place(np.full(20, float(number))))
        streams.streams[PUSH].submit(lambda items=items: seen.append(list(items)))
        lane.submitted()
    gate.set()
    streams.drain()
    streams.close()
    assert seen == [[number] * 20 for number in range(num_calls)]
    return looks


def test_a_full_ring_waits_for_its_oldest_part(monkeypatch):
    looks = what_a_slow_stream_reads()
    assert looks
    assert all(looks), "others must look at the waits meanwhile"
    monkeypatch.setattr(cuda_lanes.Lane, "collect", lambda lane: lane._flights.clear() is None)
    with killed("ring: parts are given back before the stream has read them"):
        what_a_slow_stream_reads()


def test_tensors_live_until_their_stream_has_passed():
    with World(2) as world:
        gate, (engine, _), (sync, _) = FakeEvent(), world.engines, world.syncs
        engine.wait_event(PUSH, gate)
        arrays = {n: np.zeros((NUM_HOME, *shape), np.int16) for n, (_, shape) in FIELDS.items()}
        home = {n: torch.from_numpy(one).view(torch.bfloat16) for n, one in arrays.items()}
        alive = weakref.ref(arrays["w13"])
        sync.submit_push(KEY, home, int32([[1, 1, 0]]), int32([]))
        del home, arrays
        engine.pending()
        assert alive() is not None
        gate.set()
        engine.settle(), engine.pending()
        assert alive() is None


def test_a_closed_engine_holds_no_memory_until_garbage_is_collected():
    """One is made for every arena, so in every cycle of suspend and resume."""
    with World(1) as world:
        options = {"library": FakeLibrary(), "streams": FakeStreams()}
        engine = CudaEngine(world.engines[0]._arena, world.layout, timeout_s=20.0, **options)
        engine.close()
        options["streams"].close()
        alive = weakref.ref(engine)
        del engine
        assert alive() is None


def test_too_many_items_are_refused_and_too_many_bytes_too(monkeypatch):
    monkeypatch.setattr(sync_engine_cuda, "_RING_BYTES", 4096)
    with World(1) as world:
        (engine,) = world.engines
        with pytest.raises(ValueError, match="items: need at most 4096 a call, got 4097"):
            engine.wait(COMPUTE, np.zeros(4097, WAIT_ITEM), 0, SyncOp.ROWS)
        with pytest.raises(ValueError, match="items: need at most 2048 bytes a call, got 3200"):
            engine.wait(COMPUTE, np.zeros(100, WAIT_ITEM), 0, SyncOp.ROWS)
        with pytest.raises(ValueError, match="stream: need one of .*, got 'other'"):
            engine.wait("other", np.zeros(1, WAIT_ITEM), 0, SyncOp.ROWS)


# -- looks -----------------------------------------------------------------------------------


def test_who_waits_for_what_is_known_without_waiting():
    with World(2, is_late=True) as world:
        engine, sync = world.engines[1], world.syncs[1]
        ReplicaSync.weights(sync, one_replica(sync, 1))
        deadline = time.monotonic() + 30
        while not (found := engine.pending()) and time.monotonic() < deadline:
            time.sleep(0.005)
        (wait,) = found
        assert (wait.stream, wait.op, wait.use) == (COMPUTE, SyncOp.WEIGHTS, 0)
        assert wait.items["peer"].tolist() == [0]
        assert engine.pending()[0].since == wait.since
        one_replica(world.syncs[0], 0)
        engine.settle()
        assert engine.pending() == []


def test_words_are_read_by_a_gpu_that_is_stuck_as_last_seen():
    with World(1, timeout_s=0.2) as world:
        (engine,), (streams,) = world.engines, world.streams
        arena, gate = engine._arena, FakeEvent()
        word = arena.peers[0] + world.layout.retired(0)
        assert engine.load_words([word]) == [0]
        arena.base[world.layout.retired(0)] = 7
        streams.wait(SIDE, gate)
        assert engine.load_words([word]) == [0]
        start = time.monotonic()
        for _ in range(1000):
            assert engine.load_words([word]) == [0]
        assert time.monotonic() - start < 1000 * 0.05 / 2, "a stuck GPU is waited for once"
        gate.set()
        streams.drain()
        assert engine.load_words([word, word]) == [7, 7]
        with pytest.raises(ValueError, match="addresses: need words of this rank"):
            engine.load_words([arena.peers[0] - 8])


def test_times_of_streams():
    with World(1) as world:
        (engine,) = world.engines
        first, second = engine.clock(PUSH), engine.clock(PUSH)
        assert 0 <= engine.seconds(first, second) < 10


def test_a_closed_engine_refuses_and_closing_waits_for_the_streams():
    with World(1) as world:
        (engine,), gate = world.engines, FakeEvent()
        engine.wait_event(REDUCE, gate)
        word = engine._arena.peers[0] + world.layout.retired(0)
        engine.wait(REDUCE, np.array([(word, 0, 0, 0, -1)], WAIT_ITEM), 0, SyncOp.GRADS)
        threading.Timer(0.1, gate.set).start()
        engine.close()
        assert gate.query()
        engine.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.wait(PUSH, np.zeros(1, WAIT_ITEM), 0, SyncOp.WEIGHTS)
