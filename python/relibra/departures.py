"""Why ranks left a training step: what each tells the others without a collective.

A rank that leaves by an exception of its own calls no collective any more, and its peers wait for
it until their time-out. They find its reason in the store of the process group. Ranks whose wait
failed say so there too: who has said nothing is late or dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch.distributed.distributed_c10d import Store

_SHARE, _MOST_S = 0.2, 5.0  # of the time-out, and seconds, that others may take to speak
_MAX_CHARS = 400  # of a reason
_LEFT, _FAILED = "relibra-left-", "relibra-failed-"


class Departures:
    """Notes of the ranks of one process group.

    Args:
        group: of the ranks, None for one.
        timeout_s: seconds that a rank waits for its peers.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float = 1.0) -> None:
        self._limit_s = min(_SHARE * timeout_s, _MOST_S)
        self._store: Store | None = None
        self._rank, self._size = 0, 1
        self._may_have_notes = True  # of a runtime before, over the same group
        if group is not None:
            self._store = distributed_c10d._world.pg_map[group][1]
            self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def forget(self) -> None:
        """All ranks have begun a step: takes back what this one told about an earlier one.

        Not before: a rank that goes on at once would take its reason from peers that still wait.
        """
        if self._store is not None and self._may_have_notes:
            self._may_have_notes = False
            self._shortly(self._delete, self._store)

    def note(self, error: BaseException, what: str) -> None:
        """This rank leaves by an exception of its own.

        Args:
            error: the exception.
            what: the step.
        """
        if self._store is not None:
            self._may_have_notes = True
            reason = f"rank {self._rank} left {what} by {type(error).__name__}: {error}"
            reason = reason[:_MAX_CHARS].encode(errors="replace").decode()  # no lone surrogates
            self._shortly(self._write, self._store, reason)

    def told(self) -> str:
        """This rank waited in vain: what the others told about it.

        Takes a fifth of the time-out and 5 s at most, twice that where the store does not answer.
        """
        if self._store is None:
            return ""
        self._may_have_notes = True
        found: list[str] = []
        self._shortly(self._read, self._store, found)
        return "; ".join(found)

    def _delete(self, store: Store) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and the notes with it
            for kind in (_LEFT, _FAILED):
                store.delete_key(f"{kind}{self._rank}")

    def _write(self, store: Store, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody to tell
            store.set(f"{_LEFT}{self._rank}", reason)

    def _read(self, store: Store, found: list[str]) -> None:
        """Reasons of ranks that left; without any, the ranks that said nothing in time."""
        peers = [rank for rank in range(self._size) if rank != self._rank]
        try:
            store.set(f"{_FAILED}{self._rank}", "")
            deadline = time.monotonic() + self._limit_s
            while True:
                left = [rank for rank in peers if store.check([f"{_LEFT}{rank}"])]
                silent = [rank for rank in peers if not store.check([f"{_FAILED}{rank}"])]
                if left or not silent or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            reasons = [store.get(f"{_LEFT}{rank}").decode(errors="replace") for rank in left]
            if silent and not left:
                reasons.append(f"no word so far from rank(s) {silent}")
            found.extend(reasons)
        except RuntimeError:  # the store is gone with the process that served it
            return

    def _shortly(self, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the store: the process that serves it may be the one that is lost."""
        thread = threading.Thread(target=call, args=args, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: nobody is told
            thread.start()
            thread.join(2 * self._limit_s)
