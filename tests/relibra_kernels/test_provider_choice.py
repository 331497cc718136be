"""``transport="auto"`` takes the best provider that works everywhere, and says why not a better."""

import logging
import types

import pytest
import torch
import torch.distributed as dist
from lost_rank import survivors_tell

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport import gpu_places, nvshmem_library, provider_choice
from relibra_kernels.transport.gpu_places import GpuPlace, why_no_peer_access
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.provider_choice import ProviderOptions, open_arena
from relibra_kernels.transport.rank_messages import RefusedError

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


@pytest.fixture
def world(monkeypatch, caplog):
    """Providers that would work, on GPUs that reach each other."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(provider_choice, "_logged", set())
    monkeypatch.setattr(provider_choice, "TorchSymmHeap", heap_class("torch_symm"))
    monkeypatch.setattr(provider_choice, "NvshmemHeap", heap_class("nvshmem"))
    monkeypatch.setattr(provider_choice, "why_no_peer_access", lambda places, rank: "")
    monkeypatch.setattr(nvshmem_library, "owner", lambda: "nobody: not loaded in this process")
    return monkeypatch


def choose(rank, transport="auto", options=None):
    choice = open_arena(transport, dist.group.WORLD, CPU, 1024, 1, options)
    if choice.heap is not None:
        choice.heap.close()
    return choice.name, dict(choice.refused)


def on_two(transport="auto", options=None):
    def body(rank, num_ranks):
        return choose(rank, transport, options)

    first, second = run_ranks(2, body, timeout=30)
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
    assert run_ranks(2, body, timeout=30) == [expected] * 2


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

    (found, told), (_, told_by_1) = run_ranks(2, body, timeout=30)
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

    for told in run_ranks(2, body, timeout=30):
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
        open_arena(name, None, torch.device("cuda", 0), 1024, 1)


def test_one_rank_without_a_group_and_an_unknown_name(world):
    choice = open_arena("auto", None, CPU, 1024, 1)
    assert choice.name == "dist"
    assert choice.arena is choice.heap is None
    assert "it needs a process group" in choice.refused["torch_symm"]
    with pytest.raises(ValueError, match="transport"):
        open_arena("nccl", None, CPU, 1024, 1)


def test_comm_08_ranks_that_differ_are_an_error_and_no_reason_to_fall_back(world):
    def body(rank, num_ranks):
        with pytest.raises(ReplicaSyncError, match="same nbytes .*rank 0: 1024, rank 1: 512") as e:
            open_arena("cpu_shm", dist.group.WORLD, CPU, 1024 >> rank, 1)
        return isinstance(e.value, RefusedError)

    assert run_ranks(2, body, timeout=30) == [False, False]


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
