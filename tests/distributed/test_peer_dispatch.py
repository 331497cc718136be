"""Rows written into the receivers' memory give what one all-to-all gives, bit for bit."""

import contextlib
import dataclasses
import math
import re

import pytest
import torch
import torch.distributed as dist
from fake_gpus import ENGINES, use_fake_gpus
from moe_world import Result, World, collect_weight_grads, compare, reference
from replica_training import make, run_step, train

import relibra
from relibra import step as steps
from relibra.testing.plans import random_split, replica_only_split
from relibra_kernels.errors import PlanError, ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.row_arena import CHANNELS
from relibra_kernels.transport.row_sync import RowSync
from relibra_kernels.transport.sync_engine_cuda import CudaEngine

FOUR = World(
    1, 4, num_experts=8, top_k=2, num_layers=2, micro_batches=2, tokens=9, replica_slots=2,
    dtype=torch.float64,
)  # fmt: skip
TWO = dataclasses.replace(FOUR, ranks_per_node=2)
TWO_BATCHES = dataclasses.replace(FOUR, num_layers=1)
SMALL = dataclasses.replace(FOUR, num_layers=1, micro_batches=1)
OPTIONS = {"transport": "cpu_shm", "timeout_s": 60.0}


def same(first, second, what):
    for field in dataclasses.fields(Result):
        pairs = zip(getattr(first, field.name), getattr(second, field.name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{what}: {field.name}"


class Counted:
    """Messages that a rank starts, by channel, and the most bytes that it receives in one."""

    def __enter__(self):
        self.channels, self.most, self.original = [], {}, RowSync.start

        def start(sync, x, send, receive, way):
            self.channels.append(way.channel)
            nbytes = sum(receive) * x.element_size() * math.prod(x.shape[1:])
            self.most[way.channel] = max(self.most.get(way.channel, 0), nbytes)
            return self.original(sync, x, send, receive, way)

        RowSync.start = start
        return self

    def __exit__(self, *error):
        RowSync.start = self.original


class Needs:
    """What a step reserves."""

    def __enter__(self):
        self.bytes, self.original = {}, steps.row_needs

        def row_needs(step, counts):
            self.bytes = self.original(step, counts)
            return self.bytes

        steps.row_needs = row_needs
        return self

    def __exit__(self, *error):
        steps.row_needs = self.original


def check_sizes(most, needs):
    """Buffers hold the largest message of any rank, and no more."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, most)
    assert needs == {name: max(one[name] for one in found) for name in CHANNELS}


def both(world, rank, *, order="in-turn", recompute="off", **options):
    """The same step with peer and with flat dispatch, which must agree."""
    with Counted() as counted, Needs() as needs:
        peer, _ = train(world, rank, order, recompute, dispatch="peer", **OPTIONS, **options)
    flat, _ = train(world, rank, order, recompute, dispatch="flat", **OPTIONS, **options)
    same(peer, flat, f"{order} {recompute} {options}")
    check_sizes(counted.most, needs.bytes)
    num_layers = world.num_layers * world.micro_batches
    forwards = num_layers * (1 + (recompute != "off"))
    counts = {name: counted.channels.count(name) for name in set(counted.channels)}
    assert counts["scores"] == counts["y"] == counts["x"] == forwards
    assert counts["dy"] == counts["dx"] == counts["dscores"] == num_layers
    return peer


def run_four(rank, num_ranks):
    torch.set_num_threads(1)
    result = both(FOUR, rank, order="1f1b", recompute="non-reentrant", grad_mode="main_grad")
    compare(result, reference(FOUR, rank), "peer")
    both(dataclasses.replace(SMALL, empty_rank=1, dtype=torch.float32), rank, combine="exact")
    both(dataclasses.replace(SMALL, tokens=0, replica_slots=0), rank)
    return True


def test_four_ranks_equal_flat():
    assert all(run_ranks(4, run_four))


def run_one_way(rank):
    """Rank 1 has no tokens; all rows of an expert with a replica go there."""
    world = dataclasses.replace(TWO, num_experts=4, micro_batches=1, empty_rank=1)
    plan = world.random_plan(split=replica_only_split, fill=1.0)
    results = []
    for mode in ("peer", "flat"):
        runtime, model = make(world, rank, dispatch=mode, **OPTIONS)
        result = run_step(world, rank, runtime, model, plan)
        collect_weight_grads(world, runtime, model, result)
        results.append(result)
        runtime.close()
    same(*results, "one way")


def run_stages(rank):
    """Two layers' tokens in flight, several micro-batches started before any is computed."""
    results = []
    for mode in ("peer", "flat"):
        runtime, model = make(TWO, rank, dispatch=mode, **OPTIONS)
        plan, moe = TWO.random_plan(split=random_split), model.layers[0]
        with runtime.step(plan, {"train": TWO.routes(rank)}) as step:
            flight = []  # with gradients: without, a handle ends with its forward
            for m in (0, 1, 0, 1):  # more messages than buffers
                x, scores, _ = TWO.batch(rank, m)
                with step.forward(micro_batch=m):
                    flight.append(moe.start(x, scores[0], moe.replayed_ids()))
            pending = [one.compute() for one in flight]
            results.append([one.wait() for one in reversed(pending)])
        runtime.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def run_on_fake_gpus(rank):
    """The same calls over the engine of GPUs and its providers."""
    results, num_engines = [], [0]
    with pytest.MonkeyPatch.context() as patch:
        use_fake_gpus(patch)
        for mode in ("peer", "flat"):
            options = {"transport": "torch_symm", "timeout_s": 20.0, "dispatch": mode}
            results.append(train(TWO, rank, "1f1b", **options)[0])
            num_engines.append(len(ENGINES) - sum(num_engines))
        assert {type(engine) for engine in ENGINES} == {CudaEngine}
    assert num_engines[1] == num_engines[2] + 1, "rows have an engine of their own"
    same(*results, "fake GPUs")


def run_live(rank):
    """Rows of the live router have no places that are known before: they travel flat."""
    results = []
    for mode in ("peer", "flat"):
        runtime, model = make(TWO, rank, dispatch=mode, **OPTIONS)
        with (
            Counted() as counted,
            runtime.step(TWO.random_plan(), {}, live_passes={"live": "online"}) as step,
            step.forward(micro_batch=5, pass_="live"),
            torch.no_grad(),
        ):
            x, scores, _ = TWO.batch(rank, 0)
            results.append(model(x, scores, torch.from_numpy(TWO.ids(rank, 0)).long()))
        assert counted.channels == []
        runtime.close()
    assert torch.equal(*results)


def run_left(rank):
    """Every rank leaves a step with a message on its way; the next step, of more rows, trains."""
    runtime, model = make(TWO, rank, dispatch="peer", **OPTIONS)
    small = dataclasses.replace(TWO, tokens=3)
    with (
        contextlib.suppress(KeyError),
        runtime.step(small.random_plan(), {"train": small.routes(rank)}) as step,
        step.forward(micro_batch=0),
    ):
        x, scores, _ = small.batch(rank, 0)
        model.layers[0].start(x, scores[0], model.layers[0].replayed_ids())
        raise KeyError
    plan = TWO.random_plan(base=runtime.layout)
    result = run_step(TWO, rank, runtime, model, plan)
    collect_weight_grads(TWO, runtime, model, result)
    compare(result, reference(TWO, rank), "after an error")
    runtime.close()


def run_growing(rank):
    """Buffers are made for the step, kept while they hold, and made again for a larger one."""
    runtime, model = make(TWO, rank, dispatch="peer", **OPTIONS)
    sizes, generations = [], []
    for tokens in (9, 6, 80, 82, 9):
        world = dataclasses.replace(TWO, tokens=tokens, micro_batches=1)
        plan = world.random_plan(base=runtime.layout)
        with runtime.step(plan, {"train": world.routes(rank)}) as step:
            with step.forward(micro_batch=0):
                x, scores, dy = world.batch(rank, 0)
                model(x.requires_grad_(), scores).backward(dy)
            sizes.append(step.row_buffer_bytes)
        generations.append(runtime.dispatcher.peer.sync.arena.generation)
        assert runtime.dispatcher.peer.report()["total"] == sizes[-1]
    assert sizes[0] == sizes[1] < sizes[2] <= sizes[3] == sizes[4]
    assert generations[:3] == [1, 1, 2]
    assert generations[3] == generations[4]
    runtime.close()
    runtime.close()


def run_refused(rank):
    """What cannot be is refused on all ranks, before anything is launched."""
    with pytest.raises(PlanError, match='dispatch: "peer" needs all ranks on one node'):
        relibra.Runtime(dist.group.WORLD, relibra.Topology(2, 1), dispatch="peer")
    with pytest.raises(ValueError, match='"peer" needs symmetric memory .* got transport=.dist'):
        relibra.Runtime(dist.group.WORLD, dispatch="peer", transport="dist", timeout_s=20.0)
    alone = relibra.Runtime(dispatch="peer")
    assert alone.dispatcher.peer is None
    alone.close()


def run_two(rank, num_ranks):
    torch.set_num_threads(1)
    both(TWO, rank, recompute="reentrant", static_slots=1)
    for check in (
        run_one_way,
        run_stages,
        run_on_fake_gpus,
        run_live,
        run_left,
        run_growing,
        run_refused,
    ):
        check(rank)
    return True


def test_two_ranks_equal_flat_in_every_form():
    assert all(run_ranks(2, run_two))


def run_diverged(rank, num_ranks):
    """Rank 2 takes the output gradients of a micro-batch for those of another."""
    runtime, model = make(TWO_BATCHES, rank, dispatch="peer", **OPTIONS)
    runtime.checks_order = False  # as without gloo
    before, original = [], RowSync.start

    def start(sync, x, send, receive, way):
        if rank == 2 and way.channel == "dy" and way.key.micro_batch == 1:
            way = dataclasses.replace(way, key=dataclasses.replace(way.key, micro_batch=0))
        return original(sync, x, send, receive, way)

    def entered():
        before.extend(param.detach().clone() for param in model.parameters())

    RowSync.start = start
    with pytest.raises(ReplicaSyncError) as caught:
        run_step(TWO_BATCHES, rank, runtime, model, TWO_BATCHES.random_plan(), entered=entered)
    RowSync.start = original
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.close()
    return str(caught.value)


def test_a_diverged_rank_is_told_by_all_at_once():
    found = run_ranks(4, run_diverged, timeout=OPTIONS["timeout_s"])
    # A rank with rows of nobody else may be further, at the weights, when it hears of it.
    pattern = (
        r"rank \d: .* of optimizer step 0, train, micro-batch [01], layer 1, .*: (met another plan,"
        r" layer, use or expert of|stopped, since) rank \d.*; expected word 0x[0-9a-f]+, observed "
        r"0x[0-9a-f]+; words of rank \d:"
    )
    assert all(re.search(pattern, text) for text in found), found
    met = (
        r"rank (\d): exchange of rows of .*, micro-batch [01], layer 1, output gradients: met "
        r"another plan, layer, use or expert of rank (\d);"
    )
    pairs = [match.groups() for text in found if (match := re.search(met, text))]
    assert pairs, found
    assert all("2" in pair for pair in pairs), "one of the two is the rank that diverged"


def run_late(rank):
    """A rank whose rows failed after its last use: the vote at the step's end hears of it."""
    runtime, model = make(TWO, rank, dispatch="peer", **OPTIONS)

    def fail_late(model):
        if rank == 1:
            runtime.dispatcher.abort()
        return original(model)

    original, runtime.replica_fault = runtime.replica_fault, fail_late
    with pytest.raises(ReplicaSyncError):
        run_step(TWO, rank, runtime, model, TWO.random_plan())
    runtime.close()


def run_lone(rank, error):
    """A rank leaves its step alone: the other hears of it while it waits for rows.

    By the error itself if it is one of synchronisation, else when the rank closes.
    """
    runtime, model = make(TWO, rank, dispatch="peer", **OPTIONS)
    runtime.checks_order = False

    def start(*_):
        raise error

    original = RowSync.start
    if rank == 1:
        RowSync.start = start
    with pytest.raises(error if rank == 1 else ReplicaSyncError) as caught:
        run_step(TWO, rank, runtime, model, TWO.random_plan())
    RowSync.start = original
    if error is ReplicaSyncError:
        dist.barrier()
    runtime.close()
    return str(caught.value)


def run_failing(rank, num_ranks):
    run_late(rank)
    return [run_lone(rank, error) for error in (ReplicaSyncError, KeyError)]


def test_a_failure_of_rows_reaches_a_rank_wherever_it_is():
    found = run_ranks(2, run_failing, timeout=OPTIONS["timeout_s"])
    for text in found[0]:
        assert "exchange of rows of optimizer step 0, train, micro-batch 0, layer 1, tokens" in text
        assert "stopped, since rank 1 failed first" in text


# -- comm-08 -----------------------------------------------------------------------------------


def run_half(rank, num_ranks):
    """One rank takes the rows of the step for half of what they are."""
    runtime, model = make(TWO, rank, dispatch="peer", **OPTIONS)
    needs = steps.row_needs
    if rank == 1:
        steps.row_needs = lambda *args: {k: n // 2 for k, n in needs(*args).items()}
    with pytest.raises(PlanError) as caught:
        run_step(TWO, rank, runtime, model, TWO.random_plan())
    steps.row_needs = needs
    peer = runtime.dispatcher.peer
    assert peer.report() == {}
    runtime.close()
    return str(caught.value)


def run_larger(rank, num_ranks):
    """All ranks planned for a smaller micro-batch than comes."""
    runtime, model = make(TWO, rank, dispatch="peer", **OPTIONS)
    needs = steps.row_needs
    steps.row_needs = lambda *args: {k: n // 16 for k, n in needs(*args).items()}
    before = [param.detach().clone() for param in model.parameters()]

    def entered():
        before[:] = [param.detach().clone() for param in model.parameters()]

    with pytest.raises(ReplicaSyncError) as caught:
        run_step(TWO, rank, runtime, model, TWO.random_plan(), entered=entered)
    steps.row_needs = needs
    rows = runtime.dispatcher.peer.sync.arena.base[
        : runtime.dispatcher.peer.sync.layout.arrived("x", 0, 0)
    ]
    written = bool(rows.any())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.close()
    return str(caught.value), written


def test_comm_08_buffers_of_different_sizes_are_told_with_both():
    for text in run_ranks(2, run_half):
        assert (
            "receive buffers: need the same bytes of a receive buffer of channel 'x' on all" in text
        )
        assert "rank 0: " in text
        assert "rank 1: " in text


def test_comm_08_a_larger_micro_batch_is_refused_before_launch():
    found = run_ranks(2, run_larger)
    assert any("the micro-batch is larger than planned" in text for text, _ in found)
    for text, written in found:
        assert "larger than planned" in text or "failed first" in text
        assert not written
