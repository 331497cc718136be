"""What is asked of PyTorch for streams, events and memory of a GPU; PyTorch is a stand-in."""

import contextlib

import pytest
import torch

from relibra_kernels.transport.cuda_streams import SIDE, TorchStreams
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE

GPU = torch.device("cuda", 3)


class Stream:
    def __init__(self, device=None, priority=0):
        self.device, self.priority, self.cuda_stream = device, priority, id(self)
        self.waited, self.copies = [], []

    def wait_event(self, event):
        self.waited.append(event)


class Event:
    def __init__(self, enable_timing=False):
        self.enable_timing, self.recorded = enable_timing, []

    def record(self, stream):
        self.recorded.append(stream)


class Copied:
    """A tensor that notes on which stream it was written."""

    def __init__(self, current):
        self.current, self.writes = current, []

    def copy_(self, source, non_blocking=False):
        self.writes.append((self.current[-1], source, non_blocking))


@pytest.fixture
def current(monkeypatch):
    """The stack of current streams."""
    stack = [Stream(GPU)]

    @contextlib.contextmanager
    def on(stream):
        stack.append(stream)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stack[-1])
    return stack


def test_streams_are_made_once_at_high_priority_and_compute_is_the_current_one(current):
    streams = TorchStreams(GPU)
    own = [streams._stream(name) for name in (PUSH, REDUCE, SIDE)]
    assert len(set(own)) == 3
    assert all((one.device, one.priority) == (GPU, -1) for one in own)
    assert streams.handle(PUSH) == own[0].cuda_stream
    assert streams.handle(COMPUTE) == current[0].cuda_stream
    with torch.cuda.stream(other := Stream(GPU)):
        assert streams.handle(COMPUTE) == other.cuda_stream
    with pytest.raises(ValueError, match="stream: need one of .*'compute', 'push', .*, got 'rows'"):
        streams.handle("rows")


def test_events_are_recorded_again_and_waited_for_on_the_device(current):
    streams = TorchStreams(GPU)
    event = streams.record(REDUCE)
    assert not event.enable_timing, "an event that keeps time makes streams slower"
    assert streams.record(COMPUTE, event) is event
    assert event.recorded == [streams._stream(REDUCE), current[0]]
    streams.wait(COMPUTE, event)
    assert current[0].waited == [event]
    assert streams.clock(PUSH).enable_timing


def test_small_copies_wait_for_nobody(current):
    streams, target = TorchStreams(GPU), Copied(current)
    with streams.current():
        streams.copy(SIDE, target, "pinned")
    assert target.writes == [(streams._stream(SIDE), "pinned", True)]


def test_memory_is_pinned_or_on_the_device(current, monkeypatch):
    made, waited = [], []
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: made.append((size, options)))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    streams = TorchStreams(GPU)
    streams.pinned(64), streams.zeros(128)
    assert made == [
        ((64,), {"dtype": torch.uint8, "pin_memory": True}),
        ((128,), {"dtype": torch.uint8, "device": GPU}),
    ]
    assert waited == [GPU], "zeroed when it is used by another stream"
