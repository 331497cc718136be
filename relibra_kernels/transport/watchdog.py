"""Looks after the waits of one rank: a warning at half the time-out, and news of an abort.

A rank that waits in a collective of its process group sees no word of the protocol. The watchdog
does: it notes the abort of a peer in this rank's error record and calls what ends the collectives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from relibra_kernels.transport.sync_side import SyncSide

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 1.0


class AbortGate:
    """What ends the collectives of a rank, but not while it votes.

    A peer that has left a vote may fail in its next step while this rank is still in it. Were the
    vote ended by that, this rank alone would keep its old parameters. What is wrong with the vote
    itself ends it by its time-out.

    Args:
        abort: ends them; None does nothing.

    Example:
        >>> gate = AbortGate(lambda: print("aborted"))
        >>> with gate.holding():
        ...     print("voted")
        voted
        >>> gate()
        aborted
    """

    def __init__(self, abort: Callable[[], None] | None) -> None:
        self._abort, self._lock = abort, threading.Lock()

    def __call__(self) -> None:
        """Ends the collectives, when no vote goes on."""
        with self._lock:
            if self._abort is not None:
                self._abort()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Within the block no collective is ended."""
        with self._lock:
            yield


class Watchdog:
    """A thread that looks after one side of a protocol.

    Args:
        sync: of this rank.
        on_abort: called once after a failure of this rank or of a peer, such as to abort process
            groups; its own errors are logged.
    """

    def __init__(self, sync: SyncSide[Any], on_abort: Callable[[], None] | None = None) -> None:
        self._sync, self._on_abort = sync, on_abort
        self._pause_s = min(sync.timeout_s / 8, _LONGEST_PAUSE_S)
        self._warned: set[float] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._main, name="relibra-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        self._end.set()
        self._thread.join()

    def _main(self) -> None:
        while not self._end.wait(self._pause_s):
            self._warn()
            if self._is_aborted():
                self._abort()
                return

    def _is_aborted(self) -> bool:
        try:
            return self._sync.is_aborted()
        except ReplicaSyncError:  # told by the next check of the rank itself
            return True

    def _warn(self) -> None:
        """One warning a wait that has lasted half the time-out."""
        now = time.monotonic()
        for wait in self._sync.engine.pending():
            if now - wait.since > self._sync.timeout_s / 2 and wait.since not in self._warned:
                self._warned.add(wait.since)
                peers = sorted({self._sync.domain[peer] for peer in wait.items["peer"].tolist()})
                log.warning(
                    "rank %d has waited %.1f s of %g s in %s of %s for ranks %s; words:\n%s",
                    self._sync.rank,
                    now - wait.since,
                    self._sync.timeout_s,
                    wait.op.name,
                    self._sync.describe(wait.use),
                    peers,
                    self._sync.table(),
                )

    def _abort(self) -> None:
        if self._on_abort is not None:
            try:
                self._on_abort()
            except Exception:
                log.exception("ending the collectives of rank %d failed", self._sync.rank)
