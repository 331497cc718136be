"""One rank's side of a protocol over an arena: what replicas and rows have in common.

Operations are submitted to an engine, numbered in the order of the domain, and named in errors.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relibra_kernels.transport.sync_engine import COMPUTE
from relibra_kernels.transport.sync_types import ErrorCode, SyncOp, unpack_word

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.symmetric_heap import Arena
    from relibra_kernels.transport.sync_engine import SyncEngine
    from relibra_kernels.transport.sync_report import SyncFailure, UseKey

REMEMBERED = 16  # uses that an error can name

LayoutT = TypeVar("LayoutT", bound="AnyLayout")


class SyncSide(abc.ABC, Generic[LayoutT]):
    """Errors, aborts and ends of one rank in one domain.

    Args:
        arena: of the domain.
        layout: of the arena.
        domain: EP ranks of the domain, ascending; place is the rank inside the arena.
        rank: this EP rank.
        engine: that runs the calls.
        timeout_s: of a wait, for messages.

    Raises:
        ValueError: the sizes of arena, layout and domain do not fit together.
    """

    def __init__(
        self,
        arena: Arena,
        layout: LayoutT,
        domain: Sequence[int],
        rank: int,
        engine: SyncEngine,
        *,
        timeout_s: float,
    ) -> None:
        if not (len(domain) == len(arena.peers) == layout.num_ranks) or domain[arena.rank] != rank:
            raise ValueError(
                f"domain: need {layout.num_ranks} ranks with {rank} at place {arena.rank}, got "
                f"{list(domain)} for an arena of {len(arena.peers)}"
            )
        if arena.nbytes != layout.nbytes:
            raise ValueError(f"arena: need {layout.nbytes} bytes, got {arena.nbytes}")
        self.arena, self.layout, self.domain, self.rank = arena, layout, tuple(domain), rank
        self.engine, self.timeout_s = engine, timeout_s
        self._num_uses = 0
        self._names: dict[int, UseKey] = {}
        self._last: dict[str, Any] = {}  # stream -> event after what it was given
        self._error: Exception | None = None

    @abc.abstractmethod
    def table(self) -> str:
        """All words of this rank, for messages."""

    @abc.abstractmethod
    def _failure(self, record: np.void) -> SyncFailure:
        """The error record in words of ranks and layers."""

    def _number(self, key: UseKey) -> int:
        """The next number, and remembers whose it is."""
        number = self._num_uses
        self._num_uses += 1
        self._names[number] = key
        self._names.pop(number - REMEMBERED, None)
        return number

    def wait_event(self, event: Any) -> None:
        """The compute stream goes on after an event.

        Raises:
            ReplicaSyncError: something failed.
        """
        self.engine.wait_event(COMPUTE, event)
        self.check()

    def join(self) -> None:
        """All that was submitted is done.

        Raises:
            ReplicaSyncError: something failed.
        """
        for event in self._last.values():
            self.engine.wait_event(COMPUTE, event)
        self.engine.settle()
        self.check()

    def check(self) -> None:
        """Raises the first failure of this rank, again at every call.

        Raises:
            ReplicaSyncError: who waited for whom, with the table of words.
        """
        if self._error is None and (record := self.engine.failure()) is not None:
            self._error = self._failure(record[0]).error(self.timeout_s)
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """This rank failed elsewhere: ends all waits of all ranks of the domain."""
        self.engine.report(ErrorCode.TIMEOUT, SyncOp.ROWS, max(self._num_uses - 1, 0), -1)

    def end_waits(self) -> None:
        """Ends all waits of this rank and tells nobody: the others end theirs."""
        n = max(self._num_uses - 1, 0)
        self.engine.report(ErrorCode.PEER_ABORTED, SyncOp.ROWS, n, self.arena.rank)

    def is_aborted(self) -> bool:
        """Whether this rank or a peer failed; an abort of a peer is noted in the error record."""
        if self.engine.failure() is not None:
            return True
        base = self.arena.peers[self.arena.rank]
        (word,) = self.engine.load_words([base + self.layout.abort])
        generation, origin, _ = unpack_word(word)
        if word == 0 or generation != self.arena.generation:
            return False
        n = max(self._num_uses - 1, 0)
        self.engine.report(ErrorCode.PEER_ABORTED, SyncOp.ROWS, n, origin)
        return True

    def close(self) -> None:
        """Ends the engine's threads; the arena is the caller's."""
        self.engine.close()

    def describe(self, n: int) -> str:
        """Names a recent use by number."""
        return str(self._names[n]) if n in self._names else f"use {n}"
