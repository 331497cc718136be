"""The protocol of peer dispatch, over the memory of one process: order, refusals, errors."""

import dataclasses
import functools
import itertools
import time

import pytest
import torch
from kernel_mutants import killed

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.happens_before import check_no_race, without
from relibra_kernels.testing.recording_engine import RecordingEngine
from relibra_kernels.testing.recording_streams import Await, Record, Wait, tensor_span
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.row_arena import BUFFERS, RowLayout
from relibra_kernels.transport.row_sync import RowSync, RowWay
from relibra_kernels.transport.sync_engine import HostEngine
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.watchdog import Watchdog

TIMEOUT_S = 2.0  # where somebody waits in vain
PLENTY_S = 60.0  # where nobody does, however busy the machine is
KEY = UseKey("m", 3, "train", 2, 7, "tokens")
RANKS = (4, 6, 9)  # EP ranks of the domain


class Domain:
    """All ranks of a domain in one process.

    Attributes:
        syncs: `RowSync` by place.
        counts: ``[P][P]`` rows that each place sends to each.
    """

    def __init__(self, counts, channel_bytes=None, timeout_s=PLENTY_S):
        self.counts, self.num = counts, len(counts)
        self.layout = RowLayout.of(self.num, channel_bytes or {"x": 4096, "y": 4096})
        self.heaps = LocalHeap.ranks(self.num)
        self.arenas = [heap.alloc(self.layout.nbytes, 1) for heap in self.heaps]
        self.syncs = []
        for place, arena in enumerate(self.arenas):
            engine = HostEngine(arena, self.layout, timeout_s=timeout_s)
            members = RANKS[: self.num], RANKS[place]
            self.syncs.append(RowSync(arena, self.layout, *members, engine, timeout_s=timeout_s))

    def splits(self, place):
        send = self.counts[place]
        receive = [row[place] for row in self.counts]
        first = [sum(row[to] for row in self.counts[:place]) for to in range(self.num)]
        return send, receive, first

    def rows(self, place, number, width=3):
        """What a place sends in a message: every row says who sent it to whom."""
        send = self.counts[place]
        rows = [
            [100.0 * number + 10 * place + to, index, 0.5]
            for to, count in enumerate(send)
            for index in range(count)
        ]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)[:, :width].contiguous()

    def expected(self, place, number, width=3):
        parts = []
        for source in range(self.num):
            sent = self.rows(source, number, width).split(self.counts[source])
            parts.append(sent[place])
        return torch.cat(parts)

    def start(self, place, number, channel="x", key=KEY, plan_hash="p", **changed):
        send, receive, first = self.splits(place)
        way = RowWay(channel, key, changed.get("first", first), plan_hash)
        x = changed.get("x", self.rows(place, number))
        receive = changed.get("receive", receive)
        return self.syncs[place].start(x, changed.get("send", send), receive, way)

    def close(self):
        for sync in self.syncs:
            sync.close()
        for heap in self.heaps:
            heap.close()


COUNTS = {
    "ragged": [[1, 2, 3], [4, 0, 1], [2, 5, 0]],
    "one-way": [[0, 3, 2], [0, 0, 4], [0, 0, 0]],
    "nothing": [[0] * 3] * 3,
    "one-rank": [[2]],
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_arrive_by_source_in_any_number_of_messages(name):
    domain = Domain(COUNTS[name])
    for number in range(7):
        channel = "xy"[number % 2]
        flight = [domain.start(place, number, channel) for place in range(domain.num)]
        for place, rows in enumerate(flight):
            found = rows.wait()
            assert torch.equal(found, domain.expected(place, number))
            assert rows.wait() is found
    for sync in domain.syncs:
        sync.join()
    domain.close()


@pytest.mark.parametrize("is_first_inference", [False, True])
def test_rows_are_of_the_mode_that_sent_them_whoever_reads_them(is_first_inference):
    """Tokens of a training pass that are still on their way when another one infers."""
    domain = Domain([[1, 2], [3, 1]])
    flight = []
    for number, is_inference in enumerate((is_first_inference, not is_first_inference)):
        with torch.inference_mode(is_inference):
            flight.append([domain.start(place, number) for place in range(2)])
    with torch.inference_mode(not is_first_inference):
        found = [[rows.wait() for rows in one] for one in reversed(flight)][::-1]
    for number, (one, is_inference) in enumerate(
        zip(found, (is_first_inference, not is_first_inference), strict=True)
    ):
        for place, rows in enumerate(one):
            assert rows.is_inference() == is_inference
            assert torch.equal(rows, domain.expected(place, number))
    domain.close()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_messages_are_read_in_any_order(order):
    """More than W messages in flight, as of several micro-batches; the reader's order is free."""
    domain = Domain([[1, 2], [3, 1]])
    flight = {}
    for number in range(3):
        for place in range(2):
            flight[number, place] = domain.start(place, number)
    for number in order:
        for place in range(2):
            assert torch.equal(flight[number, place].wait(), domain.expected(place, number))
    domain.close()


def test_the_later_message_first_gives_no_credit_for_the_earlier():
    """Credits are counts: message 1 read before message 0 must not free both buffers."""
    domain = Domain([[1, 2], [3, 1]])
    flight = [[domain.start(place, number) for place in range(2)] for number in range(2)]
    assert torch.equal(flight[1][0].wait(), domain.expected(0, 1))
    later = domain.start(1, 2)
    domain.syncs[1].join()  # its rows are in the buffer of message 0
    assert torch.equal(flight[0][0].wait(), domain.expected(0, 0))
    domain.start(0, 2).wait(), later.wait()
    domain.close()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.float32), ((5,), torch.bfloat16), ((2, 3), torch.int32), ((0,), torch.float32)],
)
def test_rows_of_any_shape(shape, dtype):
    domain = Domain([[1, 2], [0, 3]])
    flight = []
    for place in range(2):
        x = torch.arange(3 * max(1, torch.Size(shape).numel())).to(dtype) + 100 * place
        flight.append(domain.start(place, 0, x=x[: 3 * torch.Size(shape).numel()].view(3, *shape)))
    first, second = (rows.wait() for rows in flight)
    assert first.shape == (1, *shape)
    assert second.shape == (5, *shape)
    assert first.dtype == second.dtype == dtype
    if second.numel():
        assert second.reshape(5, -1)[2, 0] == 100
    domain.close()


def test_a_message_larger_than_planned_is_refused_before_launch():
    """comm-08: never written past the end, at the sender as at the receiver."""
    row = 3 * 8
    domain = Domain([[30, 40], [25, 2]], {"x": 42 * row, "y": 4096})
    assert domain.layout.capacity("x") == 1024  # 42 rows
    before = [arena.base.clone() for arena in domain.arenas]
    message = (
        r"rank 4: optimizer step 3, train, micro-batch 2, layer 7, tokens: need 1320 bytes \(55 "
        r"rows of 24\) in the receive buffer of channel 'x' of rank 4, got 1024"
    )
    with pytest.raises(ReplicaSyncError, match=message):
        domain.start(0, 0)
    with pytest.raises(ReplicaSyncError, match="need 1320 bytes .* of rank 4, got 1024"):
        domain.start(1, 0)  # the end of its rows at rank 4
    for old, arena in zip(before, domain.arenas, strict=True):
        assert torch.equal(old, arena.base)
    domain.close()


def failing(call):
    with pytest.raises(ReplicaSyncError) as caught:
        call()
    return str(caught.value)


def test_a_rank_that_does_not_send_is_named_and_all_hear_of_it():
    domain = Domain([[1, 2], [3, 1]], timeout_s=TIMEOUT_S)
    rows = domain.start(0, 0)
    text = failing(rows.wait)
    assert (
        "rank 4: exchange of rows of optimizer step 3, train, micro-batch 2, layer 7, tokens"
        in text
    )
    assert "waited 2 s in vain for rank 6; expected word 0x1000000" in text
    assert "observed 0x0" in text
    assert "x[0], messages arrived: rank 4: 0" in text
    assert domain.syncs[1].is_aborted()
    assert "stopped, since rank 4 failed first" in failing(lambda: domain.start(1, 0))
    assert failing(rows.wait) == text
    domain.close()


def test_a_rank_that_does_not_read_is_named():
    domain = Domain([[1, 2], [3, 1]], timeout_s=TIMEOUT_S)
    for number in range(2):
        flight = [domain.start(place, number) for place in range(2)]
        flight[0].wait()
    domain.start(0, 2)
    text = failing(domain.syncs[0].join)
    assert "exchange of rows (until the buffer may be overwritten) of optimizer step 3" in text
    assert "waited 2 s in vain for rank 6" in text
    domain.close()


OTHER = {
    "micro-batch": {"key": dataclasses.replace(KEY, micro_batch=3)},
    "layer": {"key": dataclasses.replace(KEY, layer=8)},
    "message": {"key": dataclasses.replace(KEY, direction="tokens again")},
    "plan": {"plan_hash": "q"},
    "counts": {"send": [2, 2], "x": torch.zeros(4, 3, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", OTHER)
def test_a_diverged_rank_is_reported(name):
    domain = Domain([[1, 2], [3, 1]])
    domain.start(1, 0, **OTHER[name])
    text = failing(domain.start(0, 0).wait)
    assert "met another plan, layer, use or expert of rank 6; expected word 0x100000001" in text
    assert domain.syncs[1].is_aborted()
    domain.close()


def test_the_watchdog_warns_of_rows_and_brings_news(caplog):
    domain, calls = Domain([[1, 2], [3, 1]], timeout_s=4.0), []
    dogs = [
        Watchdog(sync, functools.partial(calls.append, place))
        for place, sync in enumerate(domain.syncs)
    ]
    failing(domain.start(0, 0).wait)
    deadline = time.monotonic() + 20.0
    while len(calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for dog in dogs:
        dog.close()
    assert sorted(calls) == [0, 1]
    named = "in ROWS of optimizer step 3, train, micro-batch 2, layer 7, tokens for ranks [4, 6]"
    assert named in caplog.text
    domain.close()


def test_words_of_another_generation_are_not_there_yet():
    domain = Domain([[1, 2], [3, 1]])
    for place in range(2):
        domain.start(place, 0)
    for sync in domain.syncs:
        sync.join()
    arena = dataclasses.replace(domain.arenas[0], generation=2)
    engine = HostEngine(arena, domain.layout, timeout_s=TIMEOUT_S)
    later = RowSync(arena, domain.layout, RANKS[:2], 4, engine, timeout_s=TIMEOUT_S)
    send, receive, first = domain.splits(0)
    rows = later.start(domain.rows(0, 0), send, receive, RowWay("x", KEY, first, "p"))
    assert "in vain for rank 6" in failing(rows.wait)
    later.close(), domain.close()


def test_wrong_arguments_are_refused():
    domain = Domain([[1, 2], [3, 1]])
    for changed, match in (
        ({"send": [1]}, "send_splits: need 2 counts, got 1"),
        ({"receive": [1, 2, 3]}, "recv_splits: need 2 counts, got 3"),
        ({"first": [0, -1]}, "first_G: need"),
        ({"x": torch.zeros(2, 3)}, r"x: need 3 rows \(sum of send_splits\), got \[2, 3\]"),
        ({"channel": "z"}, "channel: need one of"),
    ):
        with pytest.raises(ValueError, match=match):
            domain.start(0, 0, **changed)
    with pytest.raises(ValueError, match="domain: need 2 ranks with 7 at place 0"):
        RowSync(domain.arenas[0], domain.layout, (4, 6), 7, domain.syncs[0].engine, timeout_s=1.0)
    other = RowLayout.of(2, {"x": 1})
    with pytest.raises(ValueError, match="arena: need"):
        RowSync(domain.arenas[0], other, (4, 6), 4, domain.syncs[0].engine, timeout_s=1.0)
    domain.close()


# -- streams -----------------------------------------------------------------------------------


class Recorded(RowSync):
    """Notes the copy out of the buffer as work of the compute stream."""

    def _copy_out(self, channel, buffer, out):
        nbytes = out.numel() * out.element_size()
        view = self.layout.view(self.arena.base, channel, buffer, nbytes)
        reads, writes = [tensor_span(view)], [tensor_span(out)]
        self.engine.streams.submit("compute", "read", reads=reads, writes=writes)


BOTH_WAYS, ONE_WAY = [[1, 2], [3, 1]], [[0, 3], [0, 0]]


def recorded_log(messages, counts=BOTH_WAYS):
    """What two ranks submit: rows are computed, sent, read and used, their memory used again."""
    log = []
    layout, heaps = RowLayout.of(2, {"x": 4096}), LocalHeap.ranks(2)
    arenas = [heap.alloc(layout.nbytes, 1) for heap in heaps]
    engines = [RecordingEngine(log, place) for place in range(2)]
    syncs = [
        Recorded(arena, layout, (0, 1), place, engines[place], timeout_s=1.0)
        for place, arena in enumerate(arenas)
    ]
    sent = [torch.zeros(sum(row), 3) for row in counts]
    keep = []
    for _ in range(messages):
        flight = []
        for place, sync in enumerate(syncs):
            spans = [tensor_span(sent[place])]
            engines[place].streams.submit("compute", "gate", writes=spans)
            receive = [row[place] for row in counts]
            first = [sum(row[to] for row in counts[:place]) for to in range(2)]
            flight.append(sync.start(sent[place], counts[place], receive, RowWay("x", KEY, first)))
        for place, rows in enumerate(flight):
            keep.append(rows.wait())
            spans = [tensor_span(keep[-1])]
            engines[place].streams.submit("compute", "experts", reads=spans)
    bases = arenas[0].peers
    credits = {base + layout.read("x", place) for base in bases for place in range(2)}
    arrived = {
        base + layout.arrived("x", buffer, place)
        for base in bases for buffer in range(BUFFERS) for place in range(2)
    }  # fmt: skip
    for heap in heaps:
        heap.close()
    return log, {"credit": credits, "arrived": arrived}


@pytest.mark.parametrize("counts", [BOTH_WAYS, ONE_WAY])
def test_streams_of_the_protocol_have_no_race(counts):
    log, _ = recorded_log(6, counts)
    check_no_race(log)


@pytest.mark.parametrize("name", ["credit", "arrived"])
def test_every_word_of_the_protocol_is_needed(name):
    """Rows that come back would imply the credit: the peer read the message before its next."""
    log, words = recorded_log(6, ONE_WAY)
    changed = without(log, lambda e: isinstance(e, Await) and e.word in words[name])
    assert len(changed) < len(log)
    with killed(f"peer dispatch does not wait for {name}", match="nothing orders them"):
        check_no_race(changed)


@pytest.mark.parametrize(("source", "target"), [("compute", "push"), ("push", "compute")])
def test_every_event_of_the_protocol_is_needed(source, target):
    """Rows are sent after they were computed, and change only after they were sent."""
    log, _ = recorded_log(6)
    records = {e.event for e in log if isinstance(e, Record) and e.stream[1] == source}
    waits = [e for e in log if isinstance(e, Wait) and e.event in records and e.stream[1] == target]
    assert waits
    with killed(f"peer dispatch: {target} does not wait for {source}", match="gate on rank"):
        check_no_race(without(log, lambda entry: entry in waits))
