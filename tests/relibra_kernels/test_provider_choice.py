"""``transport="auto"`` takes the best provider that works everywhere, and says why not a better."""

import dataclasses
import logging
import types

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeLibrary, FakeStreams, snapshot
from lost_rank import survivors_tell

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport import (
    cuda_library_load,
    gpu_places,
    nvshmem_library,
    provider_choice,
)
from relibra_kernels.transport.gpu_places import GpuPlace, why_no_peer_access
from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.provider_choice import ProviderOptions, choose_provider
from relibra_kernels.transport.provider_trial import try_provider
from relibra_kernels.transport.rank_messages import RefusedError
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_types import PUSH_ITEM

CPU = torch.device("cpu")
ORDER = ("torch_symm", "nvshmem")


def heap_class(name, reason="", fault=""):
    """A provider that works, or has a reason not to, or fails to allocate."""

    class Fake(LocalHeap):
        def __init__(self, group, device, **options):
            self.name, self.options = name, options
            made = LocalHeap.ranks(1)[0]
            super().__init__(made._shared, 0)

        @staticmethod
        def why_not(device):
            return reason

        def _alloc(self, nbytes, generation):
            if fault:
                raise RefusedError(fault)
            return super()._alloc(nbytes, generation)

    return Fake


def allocate(heap, make_engine, ranks, timeout_s):
    """A trial without peers."""
    heap.alloc(1024, 1)
    heap.close()


@pytest.fixture
def world(monkeypatch, caplog):
    """Providers that would work, on GPUs that reach each other."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(provider_choice, "_logged", set())
    monkeypatch.setattr(provider_choice, "TorchSymmHeap", heap_class("torch_symm"))
    monkeypatch.setattr(provider_choice, "NvshmemHeap", heap_class("nvshmem"))
    monkeypatch.setattr(provider_choice, "why_no_peer_access", lambda places, rank: "")
    monkeypatch.setattr(provider_choice, "try_provider", allocate)
    monkeypatch.setattr(cuda_library_load, "why_not", lambda device: "")
    monkeypatch.setattr(nvshmem_library, "owner", lambda: "nobody: not loaded in this process")
    return monkeypatch


def choose(rank, transport="auto", options=None):
    choice = choose_provider(transport, dist.group.WORLD, CPU, options)
    assert (choice.make_heap is None) == (choice.name == "dist") == (choice.make_engine is None)
    return choice.name, dict(choice.refused)


def on_two(transport="auto", options=None):
    def body(rank, num_ranks):
        return choose(rank, transport, options)

    first, second = run_ranks(2, body, timeout=60)
    assert first == second
    return first


def test_the_best_one_that_works(world):
    assert on_two() == ("torch_symm", {})
    world.setattr(provider_choice, "TorchSymmHeap", heap_class("torch_symm", "no CUDA"))
    name, refused = on_two(options=ProviderOptions(nvshmem_is_free=True))
    assert (name, refused) == ("nvshmem", {"torch_symm": "rank 0: no CUDA"})
    world.setattr(provider_choice, "NvshmemHeap", heap_class("nvshmem", "not installed"))
    name, refused = on_two()
    assert name == "dist"
    assert refused == {"torch_symm": "rank 0: no CUDA", "nvshmem": "rank 0: not installed"}


def test_auto_starts_no_nvshmem_behind_the_users_back(world):
    world.setattr(provider_choice, "TorchSymmHeap", heap_class("torch_symm", "no CUDA"))
    name, refused = on_two()
    assert name == "dist"
    assert "one instance a process and none is running (nobody: not loaded" in refused["nvshmem"]
    assert "nvshmem_is_free=True" in refused["nvshmem"]
    world.setattr(nvshmem_library, "owner", lambda: "other code in this process: PE 0 of 2")
    assert on_two()[0] == "nvshmem"
    world.setattr(nvshmem_library, "owner", lambda: "nobody: loaded, init_status 1")
    assert on_two()[0] == "dist"
    assert on_two("nvshmem")[0] == "nvshmem"  # asked for by name


def test_one_rank_without_it_decides_for_all(world):
    def body(rank, num_ranks):
        if rank == 1:
            provider_choice.TorchSymmHeap = heap_class("torch_symm", "driver too old")
        return choose(rank, options=ProviderOptions(nvshmem_is_free=True))

    expected = ("nvshmem", {"torch_symm": "rank 1: driver too old"})
    assert run_ranks(2, body, timeout=60) == [expected] * 2


def test_every_domain_takes_the_same(world):
    """Two nodes of two ranks: on the second one GPU 3 does not reach its neighbour."""

    def body(rank, num_ranks):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        if rank == 3:
            provider_choice.TorchSymmHeap = heap_class("torch_symm", "no P2P")
        options = ProviderOptions(nvshmem_is_free=True)
        choice = choose_provider("auto", groups[rank // 2], CPU, options, dist.group.WORLD)
        with pytest.raises(RefusedError) as caught:
            choose_provider("torch_symm", groups[rank // 2], CPU, options, dist.group.WORLD)
        return choice.name, dict(choice.refused), str(caught.value)

    reason = "domain of rank 2: rank 1: no P2P"
    told = f"transport='torch_symm' does not work here: {reason}"
    assert run_ranks(4, body, timeout=60) == [("nvshmem", {"torch_symm": reason}, told)] * 4


def test_a_provider_without_kernels_is_none(world):
    world.setattr(cuda_library_load, "why_not", lambda device: "librelibra_cuda.so was not built")
    name, refused = on_two()
    assert name == "dist"
    assert refused == dict.fromkeys(ORDER, "rank 0: librelibra_cuda.so was not built")


class SharedHeap(CpuShmHeap):
    """A provider of GPUs, on the CPU."""

    def __init__(self, group, device, *, timeout_s, **options):
        super().__init__(group, timeout_s=timeout_s)
        self.name = "torch_symm"

    reaches_itself_alone = False

    @staticmethod
    def why_not(device):
        return ""

    def _alloc(self, nbytes, generation):
        arena = super()._alloc(nbytes, generation)
        if self.reaches_itself_alone:
            return dataclasses.replace(arena, peers=(arena.peers[arena.rank],) * len(arena.peers))
        return arena


class LosingLibrary(FakeLibrary):
    """Stores the words, but not the weights, once its first push was looked at."""

    def push_copy_engine(self, items, n, fault, stream):
        read = snapshot(items, PUSH_ITEM, n)
        if "push_copy_engine" in self.calls:
            read["bytes"] = 0
        super().push_copy_engine(read.ctypes.data, n, fault, stream)


@pytest.mark.parametrize("fault", ["", "engine", "memory", "content"])
def test_a_provider_is_tried_before_it_is_taken(world, fault):
    """Between processes, with the engine of GPUs: a fault of one rank is a reason on all."""
    world.setattr(provider_choice, "TorchSymmHeap", SharedHeap)
    world.setattr(provider_choice, "NvshmemHeap", heap_class("nvshmem", "not installed"))
    world.setattr(provider_choice, "try_provider", try_provider)

    def body(rank, num_ranks):
        def engine(arena, layout, **options):
            if fault == "engine" and rank == 1:
                raise RuntimeError("rs_push returned 209: no kernel of the library is for this GPU")
            library = LosingLibrary() if fault == "content" and rank == 1 else FakeLibrary()
            return CudaEngine(arena, layout, library=library, streams=FakeStreams(), **options)

        provider_choice.CudaEngine = engine
        SharedHeap.reaches_itself_alone = fault == "memory" and rank == 1
        return choose(rank, options=ProviderOptions(timeout_s=3.0 if fault == "memory" else 20.0))

    first, second = run_ranks(2, body, timeout=60)
    assert first == second
    name, refused = first
    if not fault:
        assert (name, refused) == ("torch_symm", {})
        return
    assert name == "dist"
    trying = "trying torch_symm: failed on rank(s)"
    need = {
        "engine": f"{trying} [1] of 2; rank 1: RuntimeError: rs_push",
        "memory": trying,
        "content": f"{trying} [0] of 2; rank 0: RuntimeError: rank 0 did not find what rank 1 sent",
    }
    assert refused["torch_symm"].startswith(need[fault])


def test_comm_04_no_peer_access_falls_back_to_dist_and_says_so_once(world, caplog):
    world.setattr(
        provider_choice,
        "why_no_peer_access",
        lambda places, rank: f"GPU {rank} has no peer access to GPU 1" if rank == 0 else "",
    )

    def body(rank, num_ranks):
        options = ProviderOptions(nvshmem_is_free=True)
        found = [choose(rank, options=options) for _ in range(3)]
        return found, [record.getMessage() for record in caplog.records]

    (found, told), (_, told_by_1) = run_ranks(2, body, timeout=60)
    reason = "rank 0: GPU 0 has no peer access to GPU 1"
    assert found == [("dist", dict.fromkeys(ORDER, reason))] * 3
    assert told == [f"replica transport 'dist': torch_symm: {reason}; nvshmem: {reason}"]
    assert told_by_1 == []


def test_an_allocation_that_fails_on_all_ranks_is_a_reason_too(world):
    fault = "mapping the memory of peers: failed on rank(s) [0]"
    world.setattr(provider_choice, "TorchSymmHeap", heap_class("torch_symm", fault=fault))
    options = ProviderOptions(nvshmem_is_free=True)
    assert on_two(options=options) == ("nvshmem", {"torch_symm": fault})


@pytest.mark.parametrize("name", ORDER)
def test_a_name_refuses_with_the_reason(name):
    def body(rank, num_ranks):
        with pytest.raises(RefusedError) as caught:
            choose(rank, name)
        return str(caught.value)

    for told in run_ranks(2, body, timeout=60):
        assert told.startswith(f"transport={name!r} does not work here: rank 0: ")
        assert "needs a CUDA device, got cpu" in told


def test_shared_memory_by_name_only():
    assert on_two()[0] == "dist"
    assert on_two("cpu_shm") == ("cpu_shm", {})
    assert on_two("dist") == ("dist", {})
    with pytest.raises(RefusedError, match="it holds CPU memory, the device is cuda:0"):
        provider_choice_on_gpu("cpu_shm")


def provider_choice_on_gpu(name):
    properties = types.SimpleNamespace(uuid="gpu-0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        choose_provider(name, None, torch.device("cuda", 0))


def test_one_rank_without_a_group_and_an_unknown_name(world):
    choice = choose_provider("auto", None, CPU)
    assert choice.name == "dist"
    assert choice.make_heap is choice.make_engine is None
    assert "it needs a process group" in choice.refused["torch_symm"]
    with pytest.raises(ValueError, match="transport"):
        choose_provider("nccl", None, CPU)


def test_comm_08_ranks_that_differ_are_an_error_and_no_reason_to_fall_back(world):
    def body(rank, num_ranks):
        heap = choose_provider("cpu_shm", dist.group.WORLD, CPU).make_heap()
        with pytest.raises(ReplicaSyncError, match="same nbytes .*rank 0: 1024, rank 1: 512") as e:
            heap.alloc(1024 >> rank, 1)
        return isinstance(e.value, RefusedError)

    assert run_ranks(2, body, timeout=60) == [False, False]


def test_comm_02_a_rank_that_never_chooses_is_named(world, tmp_path):
    def fn(rank):
        if rank == 1:
            return None
        with pytest.raises(ReplicaSyncError) as caught:
            choose(rank, options=ProviderOptions(timeout_s=0.3))
        return caught.value

    (told,) = survivors_tell(2, 1, fn, tmp_path).values()
    assert told.startswith("choosing transport 'torch_symm': rank 0 of 2 waited 0.3 s"), told
    assert "rank(s) [1]" in told


def test_why_gpus_do_not_reach_each_other(monkeypatch):
    reach = {(0, 1), (1, 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        gpu_places.torch.cuda,
        "get_device_properties",
        lambda gpu: types.SimpleNamespace(uuid=f"gpu-{getattr(gpu, 'index', gpu)}"),
    )
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in reach
    )
    near = [GpuPlace("a", f"gpu-{index}") for index in range(3)]
    assert why_no_peer_access(near[:2], 0) == ""
    assert why_no_peer_access(near, 1) == "GPU 1 of rank 1 has no peer access to GPU 2 of rank 2"
    assert why_no_peer_access([near[0], GpuPlace("a", "gpu-7")], 0) == ""  # not visible here
    assert why_no_peer_access([near[0], near[0]], 1) == "ranks 1 and 0 use the same GPU gpu-0"
    assert GpuPlace.here(torch.device("cuda", 2)).gpu == "gpu-2"
