"""What ReLibra does with PyTorch's symmetric memory, over a stand-in for it. Never run on a GPU."""

import logging
import sys
import types

import pytest
import torch
import torch.distributed as dist

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.heap_torch_symm import TorchSymmHeap

CPU = torch.device("cpu")


class FakeModule:
    """Ordinary memory that begins inside a segment; peers are far addresses."""

    def __init__(self, rank, shift=512, multicast=0):
        self.rank, self.shift, self.multicast = rank, shift, multicast
        self.fail_in = ""

    def empty(self, nbytes, *, dtype, device):
        if self.fail_in == "empty":
            raise RuntimeError("CUDA out of memory")
        return torch.full((nbytes,), 1, dtype=dtype, device=device)

    def rendezvous(self, tensor, group):
        if self.fail_in == "rendezvous":
            raise RuntimeError("peer access is not supported")
        own = tensor.data_ptr() - self.shift
        ptrs = [own + (rank - self.rank) * 2**40 for rank in range(dist.get_world_size(group))]
        return types.SimpleNamespace(buffer_ptrs=ptrs, multicast_ptr=self.multicast)


def heap_of(module, **options):
    return TorchSymmHeap(dist.group.WORLD, CPU, timeout_s=20, module=module, **options)


def on_two(body):
    return run_ranks(2, lambda rank, num_ranks: body(rank), timeout=60)


def refusal(heap):
    with pytest.raises(ReplicaSyncError) as caught:
        heap.alloc(4096, 1)
    return str(caught.value)


def test_an_arena():
    def body(rank):
        heap = heap_of(FakeModule(rank))
        for generation in (1, 2):
            arena = heap.alloc(4096, generation)
            assert not arena.base.any()
            assert (arena.nbytes, arena.generation, arena.rank) == (4096, generation, rank)
            assert arena.peers[1] - arena.peers[0] == 2**40
            assert arena.base.data_ptr() == arena.peers[rank]
            heap.close()
            heap.close()

    on_two(body)


def test_comm_04_multicast_only_where_asked_for_and_there():
    def body(rank):
        asked = [(2**45, True), (2**45, False), (0, True)]
        found = []
        for address, wanted in asked:
            heap = heap_of(FakeModule(rank, multicast=address), multicast=wanted)
            found.append(heap.alloc(64, 1).multicast)
        return found

    assert on_two(body) == [[2**45 + 512, None, None]] * 2


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("empty", "allocating symmetric memory: failed on rank(s) [1] of 2; rank 1: RuntimeErr"),
        ("rendezvous", "mapping the memory of peers: failed on rank(s) [1] of 2; rank 1: Runti"),
    ],
)
def test_a_fault_of_one_rank_reaches_both(where, text):
    def body(rank):
        module = FakeModule(rank)
        module.fail_in = where if rank else ""
        heap = heap_of(module)
        told = refusal(heap)
        assert heap._base is None
        module.fail_in = ""
        heap.alloc(64, 2)  # after the cause is gone
        return told

    assert all(text in told for told in on_two(body))


def test_different_sizes_and_different_offsets():
    def body(rank):
        heap = heap_of(FakeModule(rank))
        with pytest.raises(ReplicaSyncError, match="same nbytes .*rank 0: 64, rank 1: 128"):
            heap.alloc(64 * (rank + 1), 1)
        return refusal(heap_of(FakeModule(rank, shift=512 * (rank + 1))))

    for told in on_two(body):
        assert "need the same offset on all ranks, got rank 0: 512, rank 1: 1024" in told


def test_why_not(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TorchSymmHeap.why_not(gpu) == "this PyTorch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert TorchSymmHeap.why_not(gpu) == ""
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    monkeypatch.delattr(torch.distributed, "_symmetric_memory", raising=False)
    assert "has no symmetric memory" in TorchSymmHeap.why_not(gpu)


def test_the_real_module_has_what_is_called():
    module = pytest.importorskip("torch.distributed._symmetric_memory")
    handle = module._SymmetricMemory
    assert callable(module.empty)
    assert callable(module.rendezvous)
    assert hasattr(handle, "buffer_ptrs")
    assert hasattr(handle, "multicast_ptr")


def test_no_multicast_is_told(caplog):
    def body(rank):
        with caplog.at_level(logging.INFO):
            heap_of(FakeModule(rank), multicast=True).alloc(64, 1)
        return caplog.text

    assert all("torch_symm: no multicast on cpu: plain puts" in text for text in on_two(body))


@pytest.mark.gpu
def test_one_rank_on_one_gpu(tmp_path):
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        heap = TorchSymmHeap(dist.group.WORLD, torch.device("cuda", 0))
        for generation in (1, 2):
            arena = heap.alloc(2**20, generation)
            assert not arena.base.any()
            arena.base.fill_(generation)
            assert int(arena.base[-1]) == generation
            assert arena.peers == (arena.base.data_ptr(),)
            heap.close()
            del arena
    finally:
        dist.destroy_process_group()
