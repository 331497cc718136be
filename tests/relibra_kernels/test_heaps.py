"""One contract for every provider of symmetric memory that works on this machine.

A test body is a generator that runs on every rank; each ``yield`` waits for all ranks. Ranks of
``cpu_shm`` are processes, those of ``local`` take turns in this one.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import told_in_fork
from lost_rank import survivors_tell
from shared_memory import SHM, leaked_segments

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport import symmetric_heap
from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.symmetric_heap import Arena, SymmetricHeap

WORLDS = [("cpu_shm", 4), ("local", 8)]
NBYTES = 8192


def run_all(provider, num_ranks, body, timeout_s=20.0):
    """``body(heap, rank)`` on all ranks, its yields as barriers; the results by rank."""
    if provider == "local":
        heaps = LocalHeap.ranks(num_ranks)
        return take_turns([body(heap, rank) for rank, heap in enumerate(heaps)])
    return run_ranks(num_ranks, run_process, body, timeout_s, timeout=60)


def run_process(rank, num_ranks, body, timeout_s):
    steps = body(CpuShmHeap(dist.group.WORLD, timeout_s=timeout_s), rank)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        dist.barrier()


def take_turns(steps):
    results = {}
    while len(results) < len(steps):
        for rank, step in enumerate(steps):
            try:
                next(step)
            except StopIteration as end:
                results[rank] = end.value
    return [results[rank] for rank in range(len(steps))]


def memory(address, nbytes):
    """The bytes at an address, as a tensor."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def footprint():
    """Descriptors and shared mappings of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("relibra-"), leaked_segments()


contract = pytest.mark.parametrize(("provider", "num_ranks"), WORLDS)


@contract
def test_sizes_addresses_and_a_zeroed_start(provider, num_ranks):
    def body(heap, rank):
        assert isinstance(heap, SymmetricHeap)
        assert heap.name == provider
        with heap:
            arena = heap.alloc(NBYTES, generation=7)
            assert (arena.nbytes, arena.generation, arena.rank) == (NBYTES, 7, rank)
            assert arena.base.dtype == torch.uint8
            assert arena.base.shape == (NBYTES,)
            assert arena.base.data_ptr() == arena.peers[rank] == arena.address(rank, 0)
            assert arena.base.data_ptr() % 1024 == 0
            assert len(set(arena.peers)) == num_ranks
            assert arena.multicast is None
            assert not memory(arena.peers[-1], NBYTES).any()
            assert arena.address(0, 128) == arena.peers[0] + 128
            for bad in ((num_ranks, 0), (0, NBYTES)):
                with pytest.raises(ValueError, match="need"):
                    arena.address(*bad)
            yield

    run_all(provider, num_ranks, body)


@contract
def test_what_one_rank_writes_all_see_at_the_same_offset(provider, num_ranks):
    def body(heap, rank):
        arena = heap.alloc(NBYTES, generation=1)
        yield
        for peer in range(num_ranks):  # a word of my own at every peer, and one at myself
            memory(arena.address(peer, 128 * rank), 1)[0] = 10 + rank
        arena.base[4096 + rank] = 100 + rank
        yield
        mine = arena.base[: 128 * num_ranks : 128].tolist()
        assert mine == [10 + other for other in range(num_ranks)]
        assert int(arena.base[:4096].count_nonzero()) == num_ranks
        read = [int(memory(arena.address(peer, 4096 + peer), 1)[0]) for peer in range(num_ranks)]
        assert read == [100 + peer for peer in range(num_ranks)]
        yield
        heap.close()

    run_all(provider, num_ranks, body)


@contract
def test_comm_03_close_close_and_alloc_again(provider, num_ranks):
    def body(heap, rank):
        arena = heap.alloc(NBYTES, generation=1)
        arena.base.fill_(rank + 1)
        with pytest.raises(ReplicaSyncError, match=r"already has an open arena: close\(\) it"):
            heap.alloc(NBYTES, generation=2)
        yield
        heap.close()
        heap.close()
        assert int(arena.base[0]) == rank + 1  # a view that is left dangles nowhere
        del arena
        yield
        arena = heap.alloc(2 * NBYTES, generation=2)
        assert (arena.nbytes, arena.generation) == (2 * NBYTES, 2)
        assert not arena.base.any()
        yield
        heap.close(peers_alive=False)

    run_all(provider, num_ranks, body)


@pytest.mark.parametrize(("provider", "num_ranks"), [("cpu_shm", 2), ("local", 8)])
def test_a_hundred_cycles_leak_nothing(provider, num_ranks):
    def body(heap, rank):
        before = None
        for cycle in range(100):
            arena = heap.alloc(NBYTES, generation=cycle)
            arena.base.fill_(cycle + 1)
            yield
            heap.close()
            del arena
            yield
            before = before or footprint()
        assert footprint() == before
        return before

    assert all(left[1:] == (0, []) for left in run_all(provider, num_ranks, body))


@contract
def test_arguments_that_cannot_be_meant(provider, num_ranks):
    def body(heap, rank):
        for nbytes, generation in ((0, 1), (2**63, 1), (64, -1), (64, 2**16)):
            with pytest.raises(ValueError, match="need"):
                heap.alloc(nbytes, generation)
        with pytest.raises(TypeError, match="nbytes"):
            heap.alloc(64.0, 1)
        yield

    run_all(provider, num_ranks, body)


def refusals(heap, nbytes, generation):
    """Text of the error, None without one; nothing may be left mapped."""
    try:
        arena = heap.alloc(nbytes, generation)
    except ReplicaSyncError as error:
        assert footprint()[1] == 0
        return str(error)
    del arena
    return None


@contract
@pytest.mark.parametrize(("name", "place"), [("nbytes", 0), ("generation", 1)])
def test_comm_08_one_rank_with_another_size(provider, num_ranks, name, place):
    def body(heap, rank):
        asked = [NBYTES, 4]
        if rank == 1:
            asked[place] //= 2
        yield
        return refusals(heap, *asked)

    told = run_all(provider, num_ranks, body)
    full, half = (NBYTES, NBYTES // 2) if place == 0 else (4, 2)
    text = f"need the same {name} on all ranks, got rank 0: {full}, rank 1: {half}"
    assert text in told[1]
    if provider == "cpu_shm":  # local is lockstep: ranks that came before have theirs
        assert all(text in one for one in told)


def test_comm_08_every_rank_hears_of_exhausted_shared_memory():
    def body(heap, rank):
        told = refusals(heap, 2**50, 1)
        yield
        good = heap.alloc(NBYTES, 2)
        assert not good.base.any()
        heap.close()
        return told

    for told in run_all("cpu_shm", 3, body):
        assert "creating shared memory: failed on rank(s) [0, 1, 2] of 3" in told
        assert f"no shared memory of {2**50} bytes in /dev/shm (No space left on device; " in told
        assert "bytes free): make it larger (containers: --shm-size)" in told
    assert leaked_segments() == []


def test_a_fault_of_one_rank_reaches_all(tmp_path):
    def fn(rank, num_ranks):
        folder = tmp_path / "missing" if rank == 2 else SHM
        return refusals(CpuShmHeap(dist.group.WORLD, folder=folder, timeout_s=20), NBYTES, 1)

    for told in run_ranks(3, fn):
        assert "creating shared memory: failed on rank(s) [2] of 3; rank 2: OSError: no sh" in told
        assert "(No such file or directory; 0 bytes free)" in told
    assert leaked_segments() == []


def test_ranks_that_share_no_memory(tmp_path):
    def fn(rank, num_ranks):
        folder = tmp_path / str(rank)  # as two containers with a /dev/shm each
        folder.mkdir()
        return refusals(CpuShmHeap(dist.group.WORLD, folder=folder, timeout_s=20), NBYTES, 1)

    for told in run_ranks(2, fn):
        assert "mapping shared memory: failed on rank(s) [0, 1] of 2" in told
        assert "rank 1's memory is not to be mapped here" in told
        assert "containers: --ipc=host" in told
    assert list(tmp_path.glob("*/*")) == []


def test_comm_02_a_rank_that_never_comes_is_named_by_all(tmp_path):
    def fn(rank):
        if rank == 1:
            return None
        return refusals(CpuShmHeap(dist.group.WORLD, timeout_s=4), NBYTES, 1)

    for rank, told in survivors_tell(3, 1, fn, tmp_path).items():
        text = f"alloc of a cpu_shm arena: rank {rank} of 3 waited 4 s in vain for rank(s) [1]"
        assert told.startswith(text), told
    assert leaked_segments() == []


@pytest.mark.parametrize("moment", ["before", "_create", "_map", "open"])
def test_a_killed_process_leaves_nothing(moment, tmp_path):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def fn(rank):
        heap = CpuShmHeap(dist.group.WORLD, timeout_s=30)
        if rank == 1:
            if moment in ("_create", "_map"):
                step = getattr(heap, moment)
                setattr(heap, moment, lambda *args: (step(*args), die()))
            if moment != "before":
                heap.alloc(NBYTES, 1)
            die()
        return refusals(heap, NBYTES, 1)

    for told in survivors_tell(3, 1, fn, tmp_path).values():
        assert told == "None" if moment == "open" else "in vain for rank(s) [1] (" in told, told
    assert leaked_segments() == []


def test_segments_of_a_run_that_was_killed_whole_are_removed(tmp_path):
    old, used, young, foreign = (
        tmp_path / name for name in ("relibra-a-0", "relibra-b-0", "relibra-c-0", "other")
    )
    for path in (old, used, young, foreign):
        path.touch()
    for path in (old, used, foreign):
        os.utime(path, (0, 0))
    with used.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with CpuShmHeap(None, folder=tmp_path) as heap:
            heap.alloc(64, 1)
    assert [path.exists() for path in (old, used, young, foreign)] == [False, True, True, True]


def test_comm_03_an_exception_inside_with_closes_and_waits_for_nobody():
    seen = []

    class Heap(CpuShmHeap):
        def _free(self, peers_alive):
            seen.append(peers_alive)

    def fail():
        with Heap(None) as heap:
            heap.alloc(64, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with Heap(None) as heap:
        heap.alloc(64, 1)
    assert seen == [False, True]


def test_a_forked_child_closes_without_its_peers(monkeypatch):
    """Groups, contexts and connections of its parent are not there to free memory together."""
    (heap,) = LocalHeap.ranks(1)

    def told(peers_alive):
        raise RuntimeError(f"peers alive: {peers_alive}")

    with monkeypatch.context() as patch:
        patch.setattr(heap, "_free", told)
        heap.alloc(NBYTES, 1)
        assert told_in_fork(heap.close) == "peers alive: False"
    heap.close()


def test_comm_03_exit_without_close_is_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(symmetric_heap, "_open_heaps", weakref.WeakSet())  # of other tests
    heaps = [*LocalHeap.ranks(1), CpuShmHeap(None)]
    for heap in heaps:
        heap.alloc(64, 1)
    symmetric_heap._warn_of_open_heaps()
    (record,) = caplog.records
    assert "2 symmetric heap(s) still open (cpu_shm, local): call close()" in record.getMessage()
    caplog.clear()
    for heap in heaps:
        heap.close()
    symmetric_heap._warn_of_open_heaps()
    assert caplog.records == []


def test_comm_03_exit_without_close_ends_the_process():
    code = (
        "from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap\n"
        "heap = CpuShmHeap(None)\n"
        "arena = heap.alloc(4096, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr.count("1 symmetric heap(s) still open (cpu_shm): call close()") == 1
    assert leaked_segments() == []


def test_an_arena_whose_base_is_elsewhere():
    base = torch.zeros(64, dtype=torch.uint8)
    for peers, nbytes in (((1,), 64), ((base.data_ptr(),), 32)):
        with pytest.raises(ValueError, match=r"base: need \d+ bytes at peers\[0\]"):
            Arena(base, peers, None, nbytes, 0, 0)


def test_a_local_arena_without_memory(monkeypatch):
    monkeypatch.setattr(torch, "zeros", out_of_memory)
    with pytest.raises(ReplicaSyncError, match="no memory for 2 parts of 64 bytes on cpu"):
        LocalHeap.ranks(2)[0].alloc(64, 1)


def out_of_memory(*args, **kwargs):
    raise RuntimeError("out of memory")
