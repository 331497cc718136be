"""Engine of a virtual rank: gives a device only waits whose words others have already sent there.

All ranks of a process share one device and its queues, so a wait that were submitted before the
push it waits for could hold up that very push. `LocalEngine` keeps the streams of a rank as lists:
a call leaves its list when everything before it has, and a wait only when the words it asks for
were submitted by their writers. A wait on the compute stream lets the other ranks run meanwhile.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, NamedTuple

from relibra_kernels.transport.sync_engine import COMPUTE, HostEngine, SyncEngine
from relibra_kernels.transport.sync_types import SyncOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from relibra_kernels.transport.lockstep import Lockstep
    from relibra_kernels.transport.sync_engine import PendingWait
    from relibra_kernels.transport.sync_types import ErrorCode

Words = dict[int, int]  # address -> largest value whose store was submitted


class InlineEngine(HostEngine):
    """`HostEngine` whose calls all run at once on the caller's thread."""

    def _run(self, stream: str, call: Callable[[], Any]) -> None:
        super()._run(COMPUTE, call)


class LocalEvent:
    """A place in a list.

    Attributes:
        stream: of the list.
        inner: the event of the device, None while it was not submitted.
        is_submitted: whether the list got there.
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.inner: Any = None
        self.is_submitted = False


class _Call(NamedTuple):
    """A call that was not submitted so far."""

    call: Callable[[], None]
    ready: Callable[[], bool] | None
    what: str

    def can_run(self) -> bool:
        return self.ready is None or self.ready()


class LocalEngine(SyncEngine):
    """The streams of one virtual rank over an engine of the device.

    Args:
        inner: runs what this engine submits, such as `InlineEngine` on the CPU.
        lockstep: of all ranks.
        words: shared by all ranks of an arena.
        domain: EP ranks of the domain, for messages.

    Attributes:
        words: as given.
    """

    def __init__(
        self, inner: SyncEngine, lockstep: Lockstep, words: Words, domain: Sequence[int]
    ) -> None:
        self._inner, self._lockstep, self.words, self._domain = inner, lockstep, words, domain
        self._lists: dict[str, collections.deque[_Call]] = {}
        lockstep.background.append(self._pump)

    def wait(self, stream: str, items: np.ndarray, use: int, op: SyncOp) -> None:
        """See `SyncEngine`."""
        if not len(items):
            return
        needs = list(zip(items["word"].tolist(), items["at_least"].tolist(), strict=True))

        def ready() -> bool:
            if all(self.words.get(word, 0) >= least for word, least in needs):
                return True
            return self._inner.failure() is not None

        peers = sorted({self._domain[peer] for peer in items["peer"].tolist()})
        what = f"{SyncOp(op).name} of use {use} from ranks {peers}"
        self._submit(stream, lambda: self._inner.wait(stream, items, use, op), ready, what)

    def push(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """See `SyncEngine`."""

        def call() -> None:
            self._inner.push(stream, items, keep)
            self._note(items["full"], items["word"])

        self._submit(stream, call)

    def publish(self, stream: str, items: np.ndarray) -> None:
        """See `SyncEngine`."""

        def call() -> None:
            self._inner.publish(stream, items)
            self._note(items["word"], items["value"])

        self._submit(stream, call)

    def reduce(self, stream: str, items: np.ndarray, keep: Any) -> None:
        """See `SyncEngine`."""
        self._submit(stream, lambda: self._inner.reduce(stream, items, keep))

    def record(self, stream: str) -> LocalEvent:
        """See `SyncEngine`."""
        event = LocalEvent(stream)

        def call() -> None:
            event.inner, event.is_submitted = self._inner.record(stream), True

        self._submit(stream, call)
        return event

    def wait_event(self, stream: str, event: Any) -> None:
        """See `SyncEngine`; also for an event of the device itself, such as a host gives."""
        if event is None:
            return
        if not isinstance(event, LocalEvent):
            self._submit(stream, lambda: self._inner.wait_event(stream, event))
            return

        def what() -> str:
            waiting = self._lists.get(event.stream)
            return waiting[0].what if waiting else f"an event of stream {event.stream!r}"

        self._submit(
            stream,
            lambda: self._inner.wait_event(stream, event.inner),
            lambda: event.is_submitted,
            what,
        )

    def failure(self) -> np.ndarray | None:
        """See `SyncEngine`."""
        return self._inner.failure()

    def report(self, code: ErrorCode, op: SyncOp, use: int, peer: int) -> None:
        """See `SyncEngine`."""
        self._inner.report(code, op, use, peer)

    def pending(self) -> list[PendingWait]:
        """Waits of the device; those in lists need no watching, see `Lockstep`."""
        return self._inner.pending()

    def load_words(self, addresses: Sequence[int]) -> list[int]:
        """See `SyncEngine`."""
        return self._inner.load_words(addresses)

    def settle(self) -> None:
        """See `SyncEngine`; nothing is left in the lists by then, see `SyncSide.join`."""
        self._inner.settle()

    def close(self) -> None:
        """Forgets what was not submitted, which nobody waits for; a second call does nothing."""
        self._lists.clear()
        if self._pump in self._lockstep.background:
            self._lockstep.background.remove(self._pump)
            self._inner.close()

    def _submit(
        self,
        stream: str,
        call: Callable[[], None],
        ready: Callable[[], bool] | None = None,
        what: str | Callable[[], str] = "",
    ) -> None:
        if stream == COMPUTE:
            if ready is not None:
                self._lockstep.wait(ready, what)
            call()
            return
        waiting = self._lists.setdefault(stream, collections.deque())
        waiting.append(_Call(call, ready, what if isinstance(what, str) else what()))
        self._drain(waiting)

    def _pump(self) -> bool:
        return sum(self._drain(waiting) for waiting in self._lists.values()) > 0

    def _drain(self, waiting: collections.deque[_Call]) -> bool:
        """Submits what can be; whether that was anything."""
        before = len(waiting)
        while waiting and waiting[0].can_run():
            waiting.popleft().call()
        return len(waiting) < before

    def _note(self, addresses: np.ndarray, values: np.ndarray) -> None:
        for address, value in zip(addresses.tolist(), values.tolist(), strict=True):
            if address:
                self.words[address] = max(value, self.words.get(address, 0))
