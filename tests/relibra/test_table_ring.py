"""The ring of table sets: what is built ahead, what waits for what, and whose memory it is."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from moe_world import Model, World
from torch.utils.checkpoint import checkpoint

import relibra
from relibra import step_tables, table_ring
from relibra.local_use import local_tables
from relibra.plan import ExpertLayout
from relibra.step_tables import StepTables
from relibra.table_ring import ALIGN_BYTES, TableMemory, TableRing
from relibra_kernels.errors import PlanError
from relibra_kernels.ops.launch_data import launch_data
from relibra_kernels.testing.launch import RankError, run_ranks

WORLD = World(num_layers=3, micro_batches=3, hidden=8, expert=8)
CPU = torch.device("cpu")


class FakeStreams:
    """Notes (what, stream, event) in the order in which a program gives it."""

    def __init__(self):
        self.log, self.current, self._events = [], "compute", itertools.count()

    @contextlib.contextmanager
    def side(self):
        before, self.current = self.current, "side"
        yield
        self.current = before

    def note(self, what, event=None):
        self.log.append((what, self.current, event))

    def record(self):
        event = next(self._events)
        self.note("record", event)
        return event

    def wait(self, event):
        self.note("wait", event)


@pytest.fixture
def streams(monkeypatch):
    """Fake streams for every device, on which builds and writes are noted too."""
    fake = FakeStreams()
    monkeypatch.setattr(table_ring, "streams_of", lambda device: fake)
    build, copy = step_tables.build_tables, torch._foreach_copy_

    def noted_build(*args, **kwargs):
        fake.note("build", args[5].rsplit(", ", 1)[-1])
        return build(*args, **kwargs)

    def noted_copy(*args):
        fake.note("write")
        copy(*args)

    monkeypatch.setattr(step_tables, "build_tables", noted_build)
    monkeypatch.setattr(torch, "_foreach_copy_", noted_copy)
    return fake


def prepared(world=WORLD, **options):
    runtime = relibra.Runtime(None, world.topology, **options)
    model = Model(world, 0, 1)
    runtime.attach(model)
    return runtime, model


def forward(step, model, m, world=WORLD, rank=0, **options):
    x, scores, dy = world.batch(rank, m)
    x.requires_grad_()
    with step.forward(micro_batch=m):
        return model(x, scores, **options), dy


def steps(runtime, world=WORLD):
    return runtime.step(world.random_plan(), {"train": world.routes(0)})


def test_the_next_layer_is_built_on_the_side_stream(streams):
    runtime, model = prepared()
    with steps(runtime) as step:
        forward(step, model, 0)
    builds = [(stream, name) for what, stream, name in streams.log if what == "build"]
    assert builds == [
        ("compute", "layer 1"),
        ("side", "layer 2 (ahead)"),
        ("side", "layer 3 (ahead)"),
    ]


def test_tables_are_read_after_their_event_and_their_memory_is_written_after_its_last_reader(
    streams,
):
    runtime, model = prepared()
    with steps(runtime) as step:
        for m in range(2):
            y, dy = forward(step, model, m)
            sets = dict(step._tables._built)
            y.backward(dy)
    log = streams.log
    ready = {built.ready for built in sets.values()}
    assert len(ready) == 3
    for event in ready:  # of micro-batch 1, whose sets micro-batch 0 had before
        recorded = next(i for i, note in enumerate(log) if note[::2] == ("record", event))
        stream = log[recorded][1]
        written = max(i for i in range(recorded) if log[i][:2] == ("write", stream))
        waited = max(i for i in range(written) if log[i][0] == "wait")
        built = max(i for i in range(written) if log[i][0] == "build")
        assert built < waited < written < recorded
        assert log[waited][1] == stream, "the stream that writes is the one that waits"
        free = log[waited][2]
        released = next(i for i, note in enumerate(log) if note[::2] == ("record", free))
        assert log[released] == ("record", "compute", free), "by the stream that read the set"
        assert released < waited
        used = [i for i, note in enumerate(log) if note == ("wait", "compute", event)]
        assert used
        assert used[0] > recorded
    assert runtime.table_memory.num_sets == 3


def test_sets_in_flight_follow_the_micro_batches_and_memory_is_kept_across_steps():
    runtime, model = prepared()
    memory, addresses = runtime.table_memory, []
    for _ in range(2):
        with steps(runtime) as step:
            flying = [forward(step, model, m) for m in range(3)]
            assert memory.num_in_flight == len(step._tables) == 3 * WORLD.num_layers
            built = step._tables._built.values()
            addresses.append({one.table_set.memory.data_ptr() for one in built})
            for y, dy in flying:
                y.backward(dy)
            assert memory.num_in_flight == 0
        assert memory.num_sets == 3 * WORLD.num_layers
    assert addresses[0] == addresses[1]
    with steps(runtime) as step:
        for m in range(3):  # one in flight at a time
            y, dy = forward(step, model, m)
            assert memory.num_in_flight == WORLD.num_layers
            y.backward(dy)
    runtime.close()
    assert memory.num_sets == 0


@pytest.mark.parametrize(("combine", "tables"), [("reduced", 10), ("exact", 12)])
def test_every_table_starts_on_a_128_byte_boundary_in_memory_sized_before_the_first_use(
    combine, tables
):
    runtime, model = prepared(combine=combine)
    with steps(runtime) as step:
        forward(step, model, 0), forward(step, model, 1)
        sizes, largest = set(), 0
        for built in step._tables._built.values():
            memory, used = built.table_set.memory, 0
            sizes.add(len(memory))
            found = table_ring._device_tables(built.tables)
            found += launch_data(built.tables.mtile_B4).tensors()
            assert len(found) == tables
            for table in found:
                assert table.data_ptr() % ALIGN_BYTES == 0
                assert memory.data_ptr() <= table.data_ptr()
                used += -(-table.numel() * 4 // ALIGN_BYTES) * ALIGN_BYTES
            largest = max(largest, used)
        assert sizes == {runtime.table_memory._set_bytes}, "nothing had to grow"
        assert largest <= min(sizes)


@pytest.mark.parametrize("combine", ["reduced", "exact"])
def test_set_bytes_is_what_the_tables_take(combine):
    world = dataclasses.replace(WORLD, micro_batches=1, num_layers=1)
    runtime, model = prepared(world, combine=combine)
    with steps(runtime, world) as step:
        forward(step, model, 0, world)
        (built,) = step._tables._built.values()
        launch = launch_data(built.tables.mtile_B4)
        needed = table_ring._total_bytes(built.tables, launch)
        assert needed == len(built.table_set.memory)


def builds_in(step, run):
    """Places of the layers whose tables are built, and whether ahead."""
    found, build = [], step._tables.build
    step._tables.build = lambda key, make, *, ahead: (
        found.append((key[2], ahead)),
        build(key, make, ahead=ahead),
    )
    run()
    return found


def test_nothing_is_built_ahead_for_a_recomputation():
    runtime, model = prepared()

    def wrap(moe, *args):
        return checkpoint(moe, *args, use_reentrant=False)

    with steps(runtime) as step:
        y, dy = forward(step, model, 0, wrap=wrap)
        assert builds_in(step, lambda: y.backward(dy)) == []
        assert len(step._tables) == 0


def test_nothing_is_built_ahead_for_live_routes():
    runtime, model = prepared(replica_slots=0)
    ids = torch.from_numpy(WORLD.ids(0, 0)).long()
    x, scores, _ = WORLD.batch(0, 0)
    plan = WORLD.random_plan(replica_slots=0)
    live = {"reference": "home"}
    with runtime.step(plan, {"train": WORLD.routes(0)}, live_passes=live) as step:

        def run():
            with torch.no_grad(), step.forward(micro_batch=0, pass_="reference"):
                model(x, scores, ids=ids)

        assert builds_in(step, run) == [(0, False), (1, False), (2, False)]
        assert runtime.table_memory.num_in_flight == 0


def test_a_forward_without_gradients_gives_its_sets_back():
    runtime, model = prepared()
    with steps(runtime) as step:
        with torch.no_grad():
            forward(step, model, 0)
        assert runtime.table_memory.num_in_flight == 0


def test_tables_that_were_given_back_cannot_be_used():
    runtime, model = prepared()
    x, scores, dy = WORLD.batch(0, 0)
    moe = model.layers[0]
    with steps(runtime) as step, step.forward(micro_batch=0):
        handle = step.handle(1)
        y = relibra.balanced_moe(x.requires_grad_(), scores[0], moe.w13, moe.w2, handle=handle)
        y.backward(dy)
        with pytest.raises(RuntimeError, match=r"given back .*; take a new handle"):
            relibra.balanced_moe(x, scores[0], moe.w13, moe.w2, handle=handle)
        relibra.balanced_moe(x, scores[0], moe.w13, moe.w2, handle=step.handle(1))


def test_tables_for_sums_at_the_destination_do_not_return_rows_one_by_one():
    runtime, model = prepared()
    x, scores, _ = WORLD.batch(0, 0)
    moe = model.layers[0]
    with steps(runtime) as step, step.forward(micro_batch=0):
        handle = dataclasses.replace(step.handle(1), combine="exact")
        with pytest.raises(RuntimeError, match=r'built for combine="reduced", used for .*"exact"'):
            relibra.balanced_moe(x, scores[0], moe.w13, moe.w2, handle=handle)


def test_ids_of_a_layer_whose_tables_were_built_ahead_are_those_of_the_tables():
    runtime, model = prepared()
    x, scores, _ = WORLD.batch(0, 0)
    with steps(runtime) as step, step.forward(micro_batch=0) as use:
        model.layers[0](x, scores[0])
        ids = step.ids(use, 1)
        for other, asked in ((None, True), (ids, True), (ids.to("meta"), False)):
            built = step._tables.built(use, 1).ids_TK
            assert (step.planned_ids(use, 1, other) is built) == asked
            assert torch.equal(step.planned_ids(use, 1, other), ids)
        with pytest.raises(ValueError, match="need the replayed ids"):
            model.layers[1](x, scores[1], (ids + 1) % WORLD.num_experts)


def test_a_kept_graph_keeps_its_tables_until_it_is_let_go():
    runtime, model = prepared()
    with steps(runtime) as step:
        y, dy = forward(step, model, 0)
        y.backward(dy, retain_graph=True)
        assert runtime.table_memory.num_in_flight == WORLD.num_layers
        y.backward(dy)
        assert runtime.table_memory.num_in_flight == 0


def test_smaller_sets_are_dropped_when_a_larger_one_is_needed():
    memory, layout = TableMemory(), ExpertLayout.identity(4, 1)
    ring = TableRing(memory, CPU, "model")

    def build(m, num_tokens):
        ids = torch.arange(2 * num_tokens, dtype=torch.int32).view(-1, 2) % 4
        ring.build(("train", m, 0), lambda: local_tables(ids, layout), ahead=False)
        assert torch.equal(ring["train", m, 0].ids_TK, ids)

    build(0, 4), build(1, 4)
    small = len(ring._built["train", 0, 0].table_set.memory)
    ring.release(("train", 0, 0))
    assert memory.num_sets == 2
    build(2, 400)
    assert memory.num_sets == 2, "the free one was too small"
    ring.release(("train", 1, 0)), ring.release(("train", 2, 0))
    assert memory.num_sets == 1
    build(3, 4)
    assert len(ring._built["train", 3, 0].table_set.memory) > small


def forgets_to_build_ahead(rank, num_ranks, world):
    if rank == 1:  # a forked process of its own
        StepTables.to_build = lambda self, use, index: [index] * ((*use.key[1:], index) not in self)
    runtime = relibra.Runtime(torch.distributed.group.WORLD, world.topology)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    plan = world.random_plan()
    with runtime.step(plan, {"train": world.routes(rank)}) as step:
        forward(step, model, 0, world, rank)


def test_a_rank_that_builds_other_tables_is_found_before_the_exchange():
    world = World(1, 2, num_layers=2, hidden=8, expert=8)
    with pytest.raises(RankError, match="same order of passes") as error:
        run_ranks(2, forgets_to_build_ahead, world)
    assert isinstance(error.value.__cause__, PlanError)
