"""Virtual ranks in lockstep: P threads of which exactly one runs, handed on where a rank waits.

The code of a rank is written for a process that may wait for its peers. Here it runs on a thread of
its own until it waits for what is not there yet; then the next rank runs. Nothing is ever waited
for that no rank has done yet, so that one device, or one autograd thread, serves all of them. When
every rank waits and none can go on, nobody ever will: that is told at once, without a time-out.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relibra_kernels.checks import check_int, check_process
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.thread_state import ThreadState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Lockstep:
    """P virtual ranks.

    Args:
        num_ranks: P, at least 1.

    Attributes:
        background: work that no rank waits for by itself, such as queued copies; each call does
            what can be done now and says whether that was anything.

    Example:
        >>> steps, said = Lockstep(2), []
        >>> def call(rank):
        ...     said.append(rank)
        ...     steps.wait(lambda: len(said) == 2, "both")
        ...     return 10 * rank
        >>> steps.run(call), said
        ([0, 10], [0, 1])
        >>> steps.run(lambda rank: steps.wait(lambda: False, "the end of time"))
        Traceback (most recent call last):
        ...
        relibra_kernels.errors.ReplicaSyncError: all virtual ranks wait and none can go on: rank 0 \
waits for the end of time; rank 1 waits for the end of time
        >>> steps.close()
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = check_int("num_ranks", num_ranks, minimum=1)
        self.background: list[Callable[[], bool]] = []
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._process = os.getpid()  # whose threads run the ranks
        self._turn, self._lock = _CurrentTurn(), threading.Lock()

    def run(self, call: Callable[[int], T]) -> list[T]:
        """Runs ``call(rank)`` on every rank; the first rank starts. One run at a time.

        Args:
            call: runs in the `ThreadState` of the caller.

        Returns:
            Results by rank.

        Raises:
            RuntimeError: called by a rank, or in a fork of the process that made the ranks.
            Exception: the first one that a rank raised; the others went as far as they could.
                Its attribute ``failed_ranks`` lists the ranks that raised.
            ReplicaSyncError: no rank could go on; names what each waits for.
        """
        self.require_process()
        if self._turn.now is not None:
            raise RuntimeError(f"run: need the caller of the ranks, got rank {self._turn.now.rank}")
        with self._lock:
            return self._run(call)

    def wait(self, ready: Callable[[], bool], what: str | Callable[[], str]) -> None:
        """The calling rank goes on when something is true.

        Args:
            ready: asked by turns; quick, without side effects.
            what: it waits for, as in ``"rank 1 waits for ..."``; called when it waits in vain.

        Raises:
            ReplicaSyncError: it will never be true. Outside of `run` nothing but `background` can
                make it so.
        """
        turn = self._turn.now
        if turn is not None:
            turn.wait(ready, what)
            return
        while not ready():
            if not self.pump():
                raise ReplicaSyncError(f"nobody can go on: the caller waits for {_text(what)}")

    def pump(self) -> bool:
        """Does what can be done in the background; whether that was anything."""
        return sum(work() for work in self.background) > 0

    def require_process(self) -> None:
        """Raise in a forked child, where the ranks have no threads.

        Raises:
            RuntimeError: that is so; names both processes.
        """
        check_process("the virtual ranks", self._process)

    def close(self) -> None:
        """Ends the threads; a second call does nothing, nor does one in a forked child."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None

    def _run(self, call: Callable[[int], T]) -> list[T]:
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(self.num_ranks, "relibra-local")
        state = ThreadState.here()
        turns = [_Turn[T](rank) for rank in range(self.num_ranks)]
        for turn in turns:
            self._pool.submit(self._main, turn, call, state)
        failed: list[_Turn[T]] = []
        try:
            self._schedule(turns, failed)
        except BaseException as error:  # such as an interrupt
            _end(turns, error)
            raise
        if failed:
            first: Any = failed[0].error
            first.failed_ranks = sorted(turn.rank for turn in failed)
            try:
                raise first
            finally:
                del first, failed  # its frames hold tensors
        return [turn.result for turn in turns]

    def _main(self, turn: _Turn[T], call: Callable[[int], T], state: ThreadState) -> None:
        turn.begin()
        self._turn.now = turn
        try:
            with state.carried():
                turn.result = call(turn.rank)
        except BaseException as error:  # told by `run`
            turn.error = error
        finally:
            self._turn.now = None
            turn.end()

    def _schedule(self, turns: Sequence[_Turn[T]], failed: list[_Turn[T]]) -> None:
        going = list(turns)
        while going:
            has_moved = False
            for turn in going:
                if turn.can_go():
                    turn.take()
                    has_moved = True
                    if turn.error is not None:
                        failed.append(turn)
            going = [turn for turn in going if not turn.is_done]
            if going and not self.pump() and not has_moved:
                _stop(going, failed)


class _CurrentTurn(threading.local):
    now: _Turn[Any] | None = None


class _Turn(Generic[T]):
    """One rank in one run: whose it is to go on, and how it ended."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.what: str | Callable[[], str] = "its start"
        self.is_done = self.is_running = False
        self.error: BaseException | None = None
        self.stopped: BaseException | None = None
        self.result: T
        self._ready: Callable[[], bool] | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    # -- on the caller's thread

    def can_go(self) -> bool:
        return self.stopped is not None or self._ready is None or self._ready()

    def take(self) -> None:
        """The rank runs until it waits again or ends."""
        self.is_running = True
        self._go.release()
        self.join()

    def join(self) -> None:
        self._back.acquire()
        self.is_running = False

    # -- on the rank's thread

    def begin(self) -> None:
        self._go.acquire()

    def end(self) -> None:
        self.is_done = True
        self._back.release()

    def wait(self, ready: Callable[[], bool], what: str | Callable[[], str]) -> None:
        if self.stopped is None and ready():
            return
        if self.stopped is None:
            self._ready, self.what = ready, what
            self._back.release()
            self._go.acquire()
            self._ready = None
        if self.stopped is not None:
            raise self.stopped


def _text(what: str | Callable[[], str]) -> str:
    return what if isinstance(what, str) else what()


def _stop(going: Sequence[_Turn[Any]], failed: Sequence[_Turn[Any]]) -> None:
    """Nobody can go on: every rank that waits gets an error that says so."""
    parts = [f"rank {turn.rank} waits for {_text(turn.what)}" for turn in going]
    parts += [f"rank {turn.rank} failed before ({turn.error!r})" for turn in failed]
    whose = "all virtual ranks wait" if not failed else "virtual ranks wait"
    for turn in going:
        turn.stopped = ReplicaSyncError(f"{whose} and none can go on: {'; '.join(parts)}")


def _end(turns: Sequence[_Turn[Any]], error: BaseException) -> None:
    """Every rank comes to its end, by an error where it waits."""
    for turn in turns:
        if not turn.is_done:
            turn.stopped = ReplicaSyncError(f"the caller of rank {turn.rank} stopped: {error!r}")
    for turn in turns:
        if turn.is_running:
            turn.join()
        while not turn.is_done:
            turn.take()
