"""Finds conflicting accesses of streams that nothing orders: races that a sanitizer cannot see.

Derived: L. Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978, with
vector clocks. An operation comes before another if it is earlier in the same stream, or if a chain
of events and words leads from it to the other. A word orders only its first publication that
satisfies the wait, since the waiter may have seen no later one. Two accesses that overlap, one of
them a write, and of which neither comes before the other, are a race.

`replay` runs the actions of a log in an order that the streams allow, the worst one for a given
stream, so that a race becomes a wrong value.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from typing import TYPE_CHECKING, TypeAlias

from relibra_kernels.testing.recording_streams import (
    Await,
    Operation,
    Publish,
    Record,
    Span,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from relibra_kernels.testing.recording_streams import Entry, Stream

Clock: TypeAlias = "dict[Stream, int]"  # entries of each stream that come before, or its own


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses without an order.

    Attributes:
        first: earlier in the log.
        second: later in the log.
        span: of `first`, that both touch.
    """

    first: Operation
    second: Operation
    span: Span

    def __str__(self) -> str:
        one, other = self.first, self.second
        return (
            f"{one.name} on rank {one.stream[0]} {one.stream[1]} and {other.name} on rank "
            f"{other.stream[0]} {other.stream[1]}: nothing orders them on {self.span}"
        )


class _Words:
    """Publications so far, with what comes before each."""

    def __init__(self) -> None:
        self._published: dict[Hashable, list[tuple[int, Clock]]] = defaultdict(list)

    def publish(self, word: Hashable, value: int, clock: Clock) -> None:
        self._published[word].append((value, clock))

    def first(self, word: Hashable, at_least: int) -> Clock | None:
        enough = [one for one in self._published[word] if one[0] >= at_least]
        return min(enough, key=lambda one: one[0])[1] if enough else None


def in_order(log: Sequence[Entry], last: Stream | None = None) -> Iterator[tuple[Entry, Clock]]:
    """Runs a log as its streams would.

    Args:
        log: of all ranks, in the order of submission.
        last: this stream runs only when no other one can.

    Yields:
        Entries, each with its clock.

    Raises:
        RuntimeError: the streams wait for each other for ever; names what each one waits for.
    """
    streams: dict[Stream, deque[Entry]] = {}
    for entry in sorted(log, key=lambda one: one.stream == last):  # `last` comes last
        streams.setdefault(entry.stream, deque()).append(entry)
    recorded_at = {entry.event: i for i, entry in enumerate(log) if isinstance(entry, Record)}
    unrecorded = {  # waits that were submitted before their event: they wait for nothing
        id(entry)
        for i, entry in enumerate(log)
        if isinstance(entry, Wait) and recorded_at.get(entry.event, len(log)) > i
    }
    clocks: dict[Stream, Clock] = {stream: dict.fromkeys(streams, 0) for stream in streams}
    events: dict[int, Clock] = {}
    words = _Words()

    def reason(entry: Entry) -> Clock | None:
        """What lets an entry run; None if it cannot."""
        if isinstance(entry, Wait) and id(entry) not in unrecorded:
            return events.get(entry.event)
        if isinstance(entry, Await):
            return words.first(entry.word, entry.at_least)
        return {}

    moved = True
    while moved:
        moved = False
        for stream, entries in streams.items():
            while entries and (before := reason(entries[0])) is not None:
                if stream == last and moved:
                    break  # others may go on first
                entry, moved = entries.popleft(), True
                clock = clocks[stream] = _joined(clocks[stream], before)
                clock[stream] += 1
                if isinstance(entry, Record):
                    events[entry.event] = clock
                elif isinstance(entry, Publish):
                    words.publish(entry.word, entry.value, clock)
                yield entry, clock
    stuck = [f"rank {s[0]} {s[1]}: {entries[0]}" for s, entries in streams.items() if entries]
    if stuck:
        raise RuntimeError("streams wait for each other for ever: " + "; ".join(stuck))


def find_races(log: Sequence[Entry]) -> list[Race]:
    """All pairs of conflicting operations without an order, one for each pair.

    Args:
        log: of all ranks, in the order of submission.

    Raises:
        RuntimeError: the streams wait for each other for ever.

    Example:
        >>> from relibra_kernels.testing.recording_streams import RecordingStreams
        >>> streams = RecordingStreams([], rank=0)
        >>> streams.submit("push", "copy", writes=[Span("slot")])
        >>> streams.submit("compute", "read", reads=[Span("slot")])
        >>> print(*find_races(streams.log))  # doctest: +ELLIPSIS
        copy on rank 0 push and read on rank 0 compute: nothing orders them on Span(...)
    """
    place = {id(entry): index for index, entry in enumerate(log)}
    seen: dict[Hashable, list[tuple[Operation, Clock, Span, bool]]] = defaultdict(list)
    races: dict[tuple[int, int], Race] = {}
    for entry, clock in in_order(log):
        if not isinstance(entry, Operation):
            continue
        accesses = [(span, False) for span in entry.reads] + [(span, True) for span in entry.writes]
        for span, writes in accesses:
            for other, before, other_span, wrote in seen[span.space]:
                stream = other.stream
                if not (writes or wrote) or other is entry or not span.overlaps(other_span):
                    continue
                if clock[stream] < before[stream]:
                    first, second = sorted((other, entry), key=lambda one: place[id(one)])
                    key = (place[id(first)], place[id(second)])
                    races.setdefault(key, Race(first, second, other_span))
        for span, writes in accesses:
            seen[span.space].append((entry, clock, span, writes))
    return [races[key] for key in sorted(races)]


def check_no_race(log: Sequence[Entry]) -> None:
    """See `find_races`.

    Raises:
        AssertionError: there is a race; names the first ones and their number.
    """
    if races := find_races(log):
        shown = "\n".join(str(race) for race in races[:5])
        raise AssertionError(f"{shown}\n{len(races)} in all")


def replay(log: Sequence[Entry], last: Stream | None = None) -> None:
    """Runs the actions of a log; see `in_order`."""
    for entry, _ in in_order(log, last):
        if isinstance(entry, Operation) and entry.action is not None:
            entry.action()


def waited_events(log: Sequence[Entry]) -> list[int]:
    """Events that some stream waits for, in order."""
    return sorted({entry.event for entry in log if isinstance(entry, Wait)})


def without(log: Sequence[Entry], drop: Callable[[Entry], bool]) -> list[Entry]:
    """A log without some of its waits, records or words."""
    return [entry for entry in log if isinstance(entry, Operation) or not drop(entry)]


def without_event(log: Sequence[Entry], event: int) -> list[Entry]:
    """A log in which nobody waits for an event."""
    return without(log, lambda entry: isinstance(entry, Wait) and entry.event == event)


def _joined(one: Clock, other: Clock) -> Clock:
    joined = dict(one)
    for stream, count in other.items():
        if count > joined[stream]:
            joined[stream] = count
    return joined
