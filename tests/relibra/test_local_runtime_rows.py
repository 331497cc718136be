"""Virtual ranks that write rows into each other's receive buffers, against their all-to-all.

    TRITON_INTERPRET=0 python -m pytest -m gpu tests/relibra/test_local_runtime_rows.py

What the GPU test calls also runs here on the CPU.
"""

import dataclasses

import pytest
import torch
from local_world import DeviceWorld, make_local, run_local_step, train_local
from moe_world import Result, World, compare, references

from relibra.testing.plans import replica_only_split
from relibra_kernels.transport.row_sync import RowSync


def check_rows(world, monkeypatch, **options):
    """Both ways give the same bits; every rank sends its rows over the channels."""
    started, original = [], RowSync.start

    def start(sync, x, send, receive, way):
        started.append((sync.rank, way.channel))
        return original(sync, x, send, receive, way)

    monkeypatch.setattr(RowSync, "start", start)
    plan = world.random_plan(fill=1.0)
    options = {"plan": plan, "timeout_s": 20.0, **options}
    peer, flat = (train_local(world, dispatch=mode, **options) for mode in ("peer", "flat"))
    for rank, both in enumerate(zip(peer, flat, strict=True)):
        for field in dataclasses.fields(Result):
            pairs = zip(*(getattr(one, field.name) for one in both), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"rank {rank}: {field.name}"
        channels = {channel for who, channel in started if who == rank}
        assert channels == {"x", "scores", "y", "dy", "dx", "dscores"}


def world_of(device, num_ranks, dtype):
    return DeviceWorld(
        1, num_ranks, num_experts=4 * num_ranks, top_k=3, num_layers=2, micro_batches=2, tokens=24,
        replica_slots=2, hidden=64, expert=64, dtype=dtype, device=device, empty_rank=1,
    )  # fmt: skip


@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_rows_of_virtual_ranks_on_the_cpu(combine, monkeypatch):
    world = world_of("cpu", 3, torch.float32)
    recompute = "non-reentrant" if combine == "exact" else "off"
    check_rows(world, monkeypatch, combine=combine, order="1f1b", recompute=recompute)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_rows_of_virtual_ranks_on_one_gpu(combine, monkeypatch):
    check_rows(world_of("cuda", 8, torch.bfloat16), monkeypatch, combine=combine)


def test_buffers_grow_and_are_given_back_with_the_runtime():
    """Sleep between two steps, the second with more rows, sent to replicas only."""
    world = dataclasses.replace(world_of("cpu", 2, torch.float64), micro_batches=1)
    runtime, model = make_local(world, dispatch="peer")
    sizes = []
    for tokens in (8, 24, 24):
        one = dataclasses.replace(world, tokens=tokens)
        plan = one.random_plan(fill=1.0, split=replica_only_split, base=runtime.layout)
        run_local_step(one, runtime, model, plan)
        sizes.append([rank.dispatcher.peer.report()["total"] for rank in runtime.ranks])
        runtime.suspend()
        assert all(rank.dispatcher.peer is None for rank in runtime.ranks)
        runtime.resume(None)
    assert sizes[0] < sizes[1] == sizes[2]
    assert sizes[0][0] == sizes[0][1]
    runtime.close()


@pytest.mark.parametrize("tokens", [0, 2])
def test_ranks_that_end_their_backward_before_others_start(tokens):
    """A rank without rows waits for nobody, and gives its tables back at once."""
    world = World(
        1, 4, num_experts=4, top_k=1, num_layers=2, tokens=tokens, empty_rank=1, skew=8.0,
        replica_slots=0, dtype=torch.float64,
    )  # fmt: skip
    for recompute in ("off", "reentrant"):
        found = train_local(world, dispatch="peer", plan=world.random_plan(), recompute=recompute)
        for result, need in zip(found, references(world), strict=True):
            compare(result, need)


def test_words_of_buffers_that_were_given_back_are_forgotten():
    """New memory may lie where a word was: a wait on it must not find what was said there."""
    world = dataclasses.replace(world_of("cpu", 2, torch.float64), micro_batches=1)
    runtime, model = make_local(world, dispatch="peer")
    for tokens in (8, 24, 60):
        one = dataclasses.replace(world, tokens=tokens)
        plan = one.random_plan(fill=1.0, split=replica_only_split, base=runtime.layout)
        run_local_step(one, runtime, model, plan)
        first, second = (rank.dispatcher.peer.sync for rank in runtime.ranks)
        words = first.engine.words
        assert words is second.engine.words
        starts, nbytes = first.arena.peers, first.arena.nbytes
        assert words
        assert all(any(0 <= word - a < nbytes for a in starts) for word in words)
    runtime.close()
