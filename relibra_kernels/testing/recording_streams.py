"""Streams that only write down what they are given: the input of `happens_before`.

One log serves all ranks of a process. A stream is named (rank, name), such as ``(0, "push")``.
An operation says what it reads and writes, as spans of memory or of anything with a name; it may
carry an action, which `happens_before.replay` runs later in an order of its choice.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    import torch

Stream: TypeAlias = "tuple[int, str]"  # rank, name


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of memory, or something with a name.

    Attributes:
        space: spans of different spaces never overlap.
        start: first byte.
        stop: byte after the last one.

    Example:
        >>> Span("memory", 0, 8).overlaps(Span("memory", 7, 9)), Span("a").overlaps(Span("b"))
        (True, False)
    """

    space: Hashable
    start: int = 0
    stop: int = 1

    def overlaps(self, other: Span) -> bool:
        """Whether a byte belongs to both."""
        same = self.space == other.space
        return same and self.start < other.stop and other.start < self.stop


def memory(address: int, num_bytes: int) -> Span:
    """Bytes of this process."""
    return Span("memory", address, address + num_bytes)


def tensor_span(tensor: torch.Tensor) -> Span:
    """Bytes of a contiguous tensor."""
    return memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@dataclasses.dataclass(frozen=True)
class Operation:
    """Work of a stream.

    Attributes:
        stream: that does it.
        name: for reports.
        reads: that must not change meanwhile.
        writes: that nobody may touch meanwhile.
        action: what it does, for `happens_before.replay`.
    """

    stream: Stream
    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    action: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """An event after all earlier work of a stream."""

    stream: Stream
    event: int


@dataclasses.dataclass(frozen=True)
class Wait:
    """A stream goes on after an event; as in CUDA, at once if it is not recorded yet."""

    stream: Stream
    event: int


@dataclasses.dataclass(frozen=True)
class Publish:
    """A word gets a value after all earlier work of a stream, visible to all ranks."""

    stream: Stream
    word: Hashable
    value: int


@dataclasses.dataclass(frozen=True)
class Await:
    """A stream goes on when a word is at least a value; the word may be published later."""

    stream: Stream
    word: Hashable
    at_least: int


Entry: TypeAlias = "Operation | Record | Wait | Publish | Await"


class RecordingStreams:
    """The streams of one rank.

    Args:
        log: shared by all ranks.
        rank: of these streams.

    Attributes:
        log: everything that was submitted, in order.

    Example:
        >>> streams = RecordingStreams([], rank=0)
        >>> streams.submit("push", "copy", reads=[Span("weights")], writes=[Span("slot")])
        >>> copied = streams.record("push")
        >>> streams.wait("compute", copied)
        >>> [type(entry).__name__ for entry in streams.log]
        ['Operation', 'Record', 'Wait']
    """

    def __init__(self, log: list[Entry], rank: int) -> None:
        self.log, self.rank = log, rank
        self._events = itertools.count()

    def submit(
        self,
        stream: str,
        name: str,
        *,
        reads: Iterable[Span] = (),
        writes: Iterable[Span] = (),
        action: Callable[[], object] | None = None,
    ) -> None:
        """Gives work to a stream."""
        spans = tuple(reads), tuple(writes)
        self.log.append(Operation((self.rank, stream), name, *spans, action))

    def record(self, stream: str) -> int:
        """An event after all that the stream was given so far."""
        event = next(self._events) << 16 | self.rank
        self.log.append(Record((self.rank, stream), event))
        return event

    def wait(self, stream: str, event: int | None) -> None:
        """The stream goes on after an event; None waits for nothing."""
        if event is not None:
            self.log.append(Wait((self.rank, stream), event))

    def publish(self, stream: str, word: Hashable, value: int) -> None:
        """Sets a word after all that the stream was given so far."""
        self.log.append(Publish((self.rank, stream), word, value))

    def wait_word(self, stream: str, word: Hashable, at_least: int) -> None:
        """The stream goes on when the word is there; 0 is always there."""
        if at_least > 0:
            self.log.append(Await((self.rank, stream), word, at_least))
