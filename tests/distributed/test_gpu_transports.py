"""Runtimes over the providers of GPUs, on fake GPUs: the choice, training, and the ends."""

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist
from fake_gpus import ENGINES, use_fake_gpus
from moe_world import Result, World, compare, reference
from replica_training import make, run_step, train

import relibra
from relibra import runtime_transport
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport import nvshmem_library, provider_choice
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.provider_choice import ProviderOptions
from relibra_kernels.transport.rank_messages import RefusedError

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=3, micro_batches=2, tokens=9, replica_slots=2,
    dtype=torch.float64,
)  # fmt: skip
OPTIONS = {"timeout_s": 20.0}


def same(one, other):
    for field in dataclasses.fields(Result):
        pairs = zip(getattr(one, field.name), getattr(other, field.name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), field.name


def run_everything(rank, num_ranks):
    """All in one world of processes, which are dear."""
    plain, _ = train(WORLD, rank, "1f1b", "off", transport="dist", **OPTIONS)
    compare(plain, reference(WORLD, rank), "dist")
    told = {}
    with pytest.MonkeyPatch.context() as patch:
        use_fake_gpus(patch)
        auto, log = train(WORLD, rank, "1f1b", "off", transport="auto", **OPTIONS)
        same(auto, plain)
        assert log, "replicas went over symmetric memory"
        assert {engine.push_form for engine in ENGINES} == {"copy_engine"}
        ENGINES.clear()
        options = ProviderOptions(cuda=CudaOptions(push="sm", waits="kernel"))
        more = {"transport_options": options, "grad_mode": "main_grad", **OPTIONS}
        by_name, _ = train(WORLD, rank, "in-turn", "non-reentrant", transport="nvshmem", **more)
        compare(by_name, reference(WORLD, rank), "nvshmem")
        forms = {(engine.push_form, engine.waits_form) for engine in ENGINES}
        assert forms == {("sm", "kernel")}
        told["suspended"] = suspended(rank)
        told["wrong device"] = wrong_device()
    with pytest.MonkeyPatch.context() as patch:
        use_fake_gpus(patch, torch_symm="no P2P" if rank == 1 else "")
        told["fall-back"] = fall_back(rank, plain)
        told["by name"] = refused("torch_symm", RefusedError)
    told["no GPUs"] = [refused(name, RefusedError) for name in ("torch_symm", "nvshmem")]
    return told


def suspended(rank):
    """The provider is chosen again over the new group."""
    runtime, model = make(WORLD, rank, transport="torch_symm", **OPTIONS)
    plan = WORLD.random_plan(fill=0.8)
    run_step(WORLD, rank, runtime, model, plan)
    runtime.suspend()
    assert runtime.domain_sync is None or not runtime.domain_sync._kinds
    runtime.resume(dist.group.WORLD)
    run_step(WORLD, rank, runtime, model, plan)
    runtime.close()
    return len(ENGINES)


def wrong_device():
    runtime = relibra.Runtime(dist.group.WORLD, transport="torch_symm", **OPTIONS)
    with pytest.raises(ValueError, match="need|needs") as caught:
        runtime.domain_sync.prepare({"w13": torch.empty(1, 4, 2, device="meta")})
    runtime.close()
    return str(caught.value)


def fall_back(rank, plain):
    """comm-04: one rank without peer access takes ``dist`` to all, and says so once."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    provider_choice.log.addHandler(handler)
    try:
        for _ in range(2):
            found, log = train(WORLD, rank, "1f1b", "off", transport="auto", **OPTIONS)
            same(found, plain)
            assert not log
    finally:
        provider_choice.log.removeHandler(handler)
    return lines


def refused(name, error):
    with pytest.raises(error) as caught:
        relibra.Runtime(dist.group.WORLD, transport=name, **OPTIONS)
    return str(caught.value)


def test_runtimes_over_providers_of_gpus():
    first, second = run_ranks(2, run_everything, timeout=240)
    reason = "rank 1: no P2P"
    lines = first.pop("fall-back")
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"replica transport 'dist': torch_symm: {reason}; nvshmem: rank 0: ")
    assert second.pop("fall-back") == []
    assert first == second
    need = 'transport: "torch_symm" needs expert weights on cpu, got w13 on meta; use'
    assert first["wrong device"].startswith(need)
    assert first["by name"] == f"transport='torch_symm' does not work here: {reason}"
    for name, told in zip(("torch_symm", "nvshmem"), first["no GPUs"], strict=True):
        assert told.startswith(f"transport='{name}' does not work here: rank 0: ")
        assert "needs a CUDA device, got cpu" in told


@pytest.mark.parametrize(
    ("config", "available", "expected"),
    [
        ("cpu:gloo,cuda:gloo,mps:gloo", True, {"auto": "cpu", "torch_symm": "cuda:1"}),
        ("cpu:gloo,cuda:nccl", True, {"auto": "cuda:1", "nvshmem": "cuda:1", "cpu_shm": "cpu"}),
        ("cuda:nccl", True, {"auto": "cuda:1"}),
        ("cpu:gloo,cuda:nccl", False, {"auto": "cpu", "torch_symm": "cpu"}),
    ],
)
def test_the_device_of_a_group(monkeypatch, config, available, expected):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for transport, device in expected.items():
        assert str(runtime_transport._device(transport, None)) == device


def test_nvshmem_ends_with_the_last_runtime_if_it_was_started_here(monkeypatch):
    ended = []

    class Library:
        def finalize_own(self):
            ended.append(nvshmem_library._num_allocations)
            return True

    relibra.Runtime().close()
    assert ended == []
    monkeypatch.setattr(nvshmem_library, "_initialized_here", Library())
    runtime = relibra.Runtime()
    monkeypatch.setattr(nvshmem_library, "_num_allocations", 1)  # another runtime uses it
    relibra.Runtime().close()
    assert ended == []
    monkeypatch.setattr(nvshmem_library, "_num_allocations", 0)
    runtime.failure = ReplicaSyncError("a peer is gone")
    runtime.close()
    assert ended == [], "ending it is collective"
    relibra.Runtime().close()
    assert ended == [0]
