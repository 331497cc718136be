"""Streams of a training step are race-free, and every event that is left out is reported.

The reference log is `protocol.reference_step`; the protocol of the product is recorded as well.
"""

import pytest
import torch
from kernel_mutants import killed
from protocol.reference_step import LateGather, PlainFsdp, PrefetchingFsdp, training_log
from sync_world import FIELDS, arena_layout

from relibra_kernels.testing.happens_before import (
    check_no_race,
    find_races,
    replay,
    waited_events,
    without,
    without_event,
)
from relibra_kernels.testing.recording_engine import RecordingEngine
from relibra_kernels.testing.recording_streams import (
    Await,
    Operation,
    Record,
    RecordingStreams,
    Span,
    Wait,
    tensor_span,
)
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_report import UseKey

HOSTS = (PrefetchingFsdp, PlainFsdp, LateGather)
WORDS = ("full", "retired", "grad_ready", "grad_retired", "rows", "row credit")


def sites(log, event):
    """Where an event is recorded, and what waits for it."""
    index = next(i for i, e in enumerate(log) if isinstance(e, Record) and e.event == event)
    before = next(e for e in log[index::-1] if isinstance(e, Operation))
    found = set()
    for index, wait in enumerate(log):
        if isinstance(wait, Wait) and wait.event == event:
            later = (e for e in log[index:] if isinstance(e, Operation) and e.stream == wait.stream)
            found.add(f"{before.name.split()[0]} -> {next(later).name.split()[0]}")
    return found


@pytest.mark.parametrize("replicated", [(), (0, 1, 2), (1, 2), (0,)])
@pytest.mark.parametrize("host", HOSTS)
def test_a_training_step_has_no_race(host, replicated):
    log, ranks = training_log(host, replicated=replicated)
    check_no_race(log)
    for last in {entry.stream for entry in log}:
        for rank in ranks:
            rank.read.clear()
        replay(log, last)
        for rank in ranks:
            assert len(rank.read) == 18 + 6 * len(replicated)
            assert all(value == right for _, value, right in rank.read), last


def test_every_dropped_event_is_reported():
    log, _ = training_log(PrefetchingFsdp, replicated=(1, 2))
    events = waited_events(log)
    reported = {event: find_races(without_event(log, event)) for event in events}
    assert len(events) == 164
    assert [sites(log, event) for event, races in reported.items() if not races] == []
    assert set.union(*(sites(log, event) for event in events)) == {
        "free -> gather",
        "gather -> push",
        "gather -> forward",
        "gather -> backward",
        "push -> free",
        "gate -> dispatch",
        "dispatch -> free",
        "wgrad -> home_reduce",
        "home_reduce -> wgrad",
        "home_reduce -> data-parallel",
        "optimizer -> gather",
    }


def test_events_that_the_peer_implies_are_known():
    """With replicas in every layer the next micro-batch waits for the peer anyway."""
    log, _ = training_log(PlainFsdp, replicated=(0, 1, 2))
    reduces = {e.event for e in log if isinstance(e, Record) and e.stream[1] == "reduce"}
    events = [event for event in waited_events(log) if event in reduces]
    unreported = [event for event in events if not find_races(without_event(log, event))]
    assert [sites(log, event) for event in unreported] == [{"home_reduce -> wgrad"}] * 2


@pytest.mark.parametrize("word", WORDS)
def test_every_dropped_word_is_reported(word):
    log, _ = training_log(PrefetchingFsdp)
    changed = without(log, lambda entry: isinstance(entry, Await) and entry.word[0] == word)
    assert len(changed) < len(log)
    assert find_races(changed)


def gather_waits(log, stream):
    """Waits of a stream for a gather."""
    records = {e.event for e in log if isinstance(e, Record) and e.stream[1] == "gather"}
    return [e for e in log if isinstance(e, Wait) and e.event in records and e.stream[1] == stream]


@pytest.mark.parametrize("stream", ["push", "compute"])
@pytest.mark.parametrize("host", HOSTS)
def test_weights_that_are_not_there_yet_are_caught(host, stream):
    """Nobody waits for the all-gather in the pre-hook, or for the late gather of parameters."""
    log, ranks = training_log(host)
    waits = gather_waits(log, stream)
    changed = without(log, lambda entry: entry in waits)
    with killed(
        f"{host.__name__}: {stream} does not wait for the gather", match="gather of layer [0-2] on"
    ):
        check_no_race(changed)
    replay(changed, (0, "gather"))
    assert [name for name, value, right in (*ranks[0].read, *ranks[1].read) if value != right]


@pytest.mark.parametrize("host", [PlainFsdp, PrefetchingFsdp])
def test_weights_freed_during_their_push_are_caught(host):
    """Without the local completion of the push, replicas of the peer are full of NaN."""
    log, ranks = training_log(host)
    pushes = {e.event for e in log if isinstance(e, Record) and e.stream[1] == "push"}
    changed = without(log, lambda entry: isinstance(entry, Wait) and entry.event in pushes)
    with killed(
        f"{host.__name__} frees weights during their push",
        match="push 0 on rank 0 push and free on rank 0 compute",
    ):
        check_no_race(changed)
    replay(changed, (0, "push"))
    assert [name for name, value, _ in ranks[1].read if value != value]  # NaN in replica slots


def test_a_wait_before_its_record_waits_for_nothing():
    streams = RecordingStreams([], 0)
    streams.submit("a", "write", writes=[Span("x")])
    event = streams.record("a")
    streams.wait("b", event)
    streams.submit("b", "read", reads=[Span("x")])
    check_no_race(streams.log)
    record = streams.log.pop(1)
    streams.log.append(record)
    assert [race.second.name for race in find_races(streams.log)] == ["read"]


def test_a_word_orders_only_what_its_first_value_follows():
    writer = RecordingStreams([], 0)
    reader = RecordingStreams(writer.log, 1)
    writer.submit("a", "one", writes=[Span("x")])
    writer.publish("a", "word", 1)
    writer.submit("a", "two", writes=[Span("y")])
    writer.publish("a", "word", 2)
    reader.wait_word("b", "word", 1)
    reader.submit("b", "read", reads=[Span("x"), Span("y")])
    assert [(race.first.name, race.span) for race in find_races(writer.log)] == [("two", Span("y"))]


def test_streams_that_wait_for_each_other_are_named():
    streams = RecordingStreams([], 0)
    streams.wait_word("a", "never", 1)
    with pytest.raises(RuntimeError, match="for ever: rank 0 a: .*never"):
        find_races(streams.log)


def test_bytes_overlap_by_address():
    streams, tensor = RecordingStreams([], 0), torch.zeros(8)
    streams.submit("a", "left", writes=[tensor_span(tensor[:4])])
    streams.submit("b", "right", writes=[tensor_span(tensor[4:])])
    streams.submit("c", "across", reads=[tensor_span(tensor[3:5])])
    assert [race.first.name for race in find_races(streams.log)] == ["left", "right"]


# -- the product's protocol ------------------------------------------------------------------


class Product:
    """`ReplicaSync` of two ranks over one log; micro-batches of two layers, forward and backward.

    Attributes:
        log: of all streams.
        words: part of the arena -> addresses of its words.
    """

    def __init__(self, num_uses, steps=1):
        self.layout, self.log = arena_layout(2), []
        heaps = LocalHeap.ranks(2)
        arenas = [heap.alloc(self.layout.nbytes, 1) for heap in heaps]
        self.engines = [RecordingEngine(self.log, rank) for rank in range(2)]
        self.syncs = [
            ReplicaSync(arenas[rank], self.layout, (0, 1), rank, engine, timeout_s=1.0)
            for rank, engine in enumerate(self.engines)
        ]
        self.weights = [[self.fields(None) for _ in range(2)] for _ in range(2)]
        self.grads = [[self.fields(torch.float32) for _ in range(2)] for _ in range(2)]
        self.reduced = [{}, {}]
        for _ in range(steps):
            self.run(num_uses)
        places = {
            "full": [self.layout.full(buffer, 0) for buffer in range(2)],
            "retired": [self.layout.retired(rank) for rank in range(2)],
            "grad_ready": [self.layout.grad_ready(b, r, 0) for b in range(2) for r in range(2)],
            "grad_retired": [self.layout.grad_retired(rank) for rank in range(2)],
        }
        self.words = {
            name: {base + offset for base in arenas[0].peers for offset in offsets}
            for name, offsets in places.items()
        }
        for heap in heaps:
            heap.close()

    def fields(self, dtype):
        return {name: torch.zeros(3, *shape, dtype=dtype or own)
                for name, (own, shape) in FIELDS.items()}  # fmt: skip

    def push(self, rank, n, ready=None):
        """One replica of the peer's home slot 0 on each rank."""
        key = UseKey("m", 0, "train", n // 4, n % 2, "backward" if n % 4 > 1 else "forward")
        lists = torch.tensor([[[0, 1 - rank, 0]], [[0, 1 - rank, 0]]], dtype=torch.int32)
        weights = self.weights[rank][n % 2]
        return self.syncs[rank].submit_push(key, weights, *lists, ready=ready)

    def run(self, num_uses):
        ahead = [self.push(rank, 0) for rank in range(2)]
        for n in range(num_uses):
            for rank in range(2):
                use = ahead[rank]
                if n + 1 < num_uses:
                    ahead[rank] = self.push(rank, n + 1)
                self.use(rank, n, use)
        for rank, (sync, engine) in enumerate(zip(self.syncs, self.engines, strict=True)):
            sync.join()
            fields = [*self.weights[rank], *self.grads[rank]]
            spans = [tensor_span(field) for layer in fields for field in layer.values()]
            engine.streams.submit("compute", "optimizer", writes=spans)

    def use(self, rank, n, use):
        sync, streams, layer = self.syncs[rank], self.engines[rank].streams, n % 2
        slots, home = sync.weights(use), self.weights[rank][layer]
        spans = [tensor_span(field[0]) for field in (*slots.values(), *home.values())]
        streams.submit("compute", f"experts {n}", reads=spans)
        sync.retire(use)
        if n % 4 > 1:
            sync.wait_event(self.reduced[rank].get(layer))
            spans = [tensor_span(field[0]) for field in sync.grad_slots(use).values()]
            spans += [tensor_span(field) for field in self.grads[rank][layer].values()]
            streams.submit("compute", f"wgrad {n}", writes=spans)
            sync.publish_grads(use)
            self.reduced[rank][layer] = sync.home_reduce(use, self.grads[rank][layer])


@pytest.mark.parametrize("steps", [1, 2])
def test_the_protocol_of_the_product_has_no_race(steps):
    product = Product(12, steps)
    check_no_race(product.log)
    kinds = {entry.stream[1] for entry in product.log}
    assert kinds == {"push", "compute", "reduce"}


@pytest.mark.parametrize("name", ["full", "retired", "grad_ready", "grad_retired"])
def test_every_word_of_the_product_is_needed(name):
    product = Product(16)
    words = product.words[name]
    changed = without(product.log, lambda e: isinstance(e, Await) and e.word in words)
    assert len(changed) < len(product.log)
    with killed(f"product does not wait for {name}", match="nothing orders them"):
        check_no_race(changed)


TIES = [
    ("compute", "reduce", "home_reduce on rank"),
    ("reduce", "compute", "home_reduce on rank"),
    ("compute", "push", "optimizer on rank 0 compute and push on rank 0 push"),
]


@pytest.mark.parametrize(("source", "target", "race"), TIES)
def test_events_of_the_product_are_needed(source, target, race):
    """Those that tie wgrad to home_reduce, both ways, and the optimizer to the next pushes."""
    log = Product(12, 2).log
    records = {e.event for e in log if isinstance(e, Record) and e.stream[1] == source}
    waits = [e for e in log if isinstance(e, Wait) and e.event in records and e.stream[1] == target]
    assert waits
    with killed(f"product: {target} does not wait for {source}", match=race):
        check_no_race(without(log, lambda entry: entry in waits))


class GatheringHost(Product):
    """Weights come by a gather on a stream of the host, whose event is given to the push."""

    def push(self, rank, n):
        streams, weights = self.engines[rank].streams, self.weights[rank][n % 2]
        streams.wait("gather", streams.record("compute"))  # earlier uses have read them
        spans = [tensor_span(field) for field in weights.values()]
        streams.submit("gather", f"gather {n}", writes=spans)
        return super().push(rank, n, streams.record("gather"))

    def use(self, rank, n, use):
        streams = self.engines[rank].streams
        streams.wait("compute", streams.record("gather"))
        super().use(rank, n, use)


def test_the_event_of_a_host_orders_the_push_behind_its_gather():
    log = GatheringHost(8).log
    check_no_race(log)
    waits = gather_waits(log, "push")
    assert len(waits) == 2 * 8
    with killed("product: push does not wait for the host's event", match="gather 0 on rank 0"):
        check_no_race(without(log, lambda entry: entry in waits))
