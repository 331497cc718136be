"""Dispatch inside a domain: a rank writes its rows straight into its peers' receive buffers.

`PeerDispatch` owns the memory, which grows with the steps; the protocol is `row_sync`'s. Gathering
the rows of x into sending order is a copy of its own here; ``triton_ops.peer_copy`` has a kernel
that does both at once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from relibra_kernels.transport.row_arena import CHANNELS, RowLayout
from relibra_kernels.transport.row_sync import RowSync
from relibra_kernels.transport.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.dispatch import DispatchTransport
    from relibra_kernels.transport.row_sync import PeerRows, RowWay
    from relibra_kernels.transport.symmetric_heap import Arena, SymmetricHeap
    from relibra_kernels.transport.sync_engine import SyncEngine

_GENERATIONS = 65535


@dataclasses.dataclass(frozen=True)
class PeerTransport:
    """The message of one use of one channel as a transport; `PeerDispatch.over` makes it.

    Attributes:
        dispatch: whose memory carries it.
        way: which message it is.
    """

    dispatch: PeerDispatch
    way: RowWay

    def start(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str = "",
    ) -> PeerRows:
        """Starts the message; every rank of the domain calls it in the same order.

        Args:
            x: ``[V, ...]``, any dtype; rows by destination rank.
            send_splits: P counts that sum to V.
            recv_splits: P counts; entry p is what rank p sends here.
            what: not needed; the way names the use in errors.

        Returns:
            The message in flight; its rows are ``[sum(recv_splits), ...]``, ordinary memory.

        Raises:
            TypeError, ValueError: splits that do not fit the domain or ``x``.
            ReplicaSyncError: more rows than a receive buffer holds; or an earlier failure.
        """
        return self.dispatch.sync.start(x, send_splits, recv_splits, self.way)

    def exchange(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str = "",
    ) -> torch.Tensor:
        """`start` and wait; arguments, result and errors as there."""
        return self.start(x, send_splits, recv_splits, what=what).wait()


class PeerDispatch:
    """Receive buffers of one rank, and who looks after their waits.

    Args:
        make_heap: makes a heap over the domain; collective there.
        make_engine: runs the protocol over an arena of it.
        domain: EP ranks of the domain, ascending.
        rank: this EP rank.
        timeout_s: seconds of a wait.
        generation: of the first arena; others count on.
        on_abort: see `Watchdog`.

    Example:
        >>> import torch
        >>> from relibra_kernels.transport.heap_local import LocalHeap
        >>> from relibra_kernels.transport.row_sync import RowWay
        >>> from relibra_kernels.transport.sync_engine import HostEngine
        >>> from relibra_kernels.transport.sync_report import UseKey
        >>> (heap,) = LocalHeap.ranks(1)
        >>> engine = lambda arena, layout: HostEngine(arena, layout, timeout_s=1.0)
        >>> peer = PeerDispatch(lambda: heap, engine, [0], 0, timeout_s=1.0)
        >>> peer.reserve({"x": 24})
        5120
        >>> way = RowWay("x", UseKey("actor", 0, "train", 0, 1, "tokens"), first_G=[0])
        >>> peer.over(way).exchange(torch.ones(2, 3), [2], [2]).shape
        torch.Size([2, 3])
        >>> peer.close(peers_alive=True)
    """

    def __init__(
        self,
        make_heap: Callable[[], SymmetricHeap],
        make_engine: Callable[[Arena, AnyLayout], SyncEngine],
        domain: Sequence[int],
        rank: int,
        *,
        timeout_s: float,
        generation: int = 1,
        on_abort: Callable[[], None] | None = None,
    ) -> None:
        self.domain, self.rank, self.timeout_s = tuple(domain), rank, timeout_s
        self._make_heap, self._make_engine, self._on_abort = make_heap, make_engine, on_abort
        self._generation = generation
        self._open: tuple[SymmetricHeap, RowSync, Watchdog] | None = None
        self._was_left = False  # a step ended by an error: peers may be anywhere

    @property
    def sync(self) -> RowSync:
        """The protocol over the buffers of now.

        Raises:
            RuntimeError: there are none.
        """
        if self._open is None:
            raise RuntimeError(
                "peer dispatch: need receive buffers, got none: call reserve() first"
            )
        return self._open[1]

    def over(self, way: RowWay) -> PeerTransport:
        """The transport of one message.

        Args:
            way: which message it is.
        """
        return PeerTransport(self, way)

    def grown(self, channel_bytes: Mapping[str, int]) -> RowLayout:
        """The layout that `reserve` would make; equal on ranks with equal needs and histories.

        A buffer that must grow grows by a quarter at least, so that a slowly rising load makes
        new memory rarely.

        Args:
            channel_bytes: that one buffer of a channel must hold.
        """
        if self._open is None:
            return RowLayout.of(len(self.domain), channel_bytes)
        sizes = {}
        for name in CHANNELS:
            need, have = channel_bytes.get(name, 0), self.sync.layout.capacity(name)
            sizes[name] = have if need <= have else max(need, have + have // 4)
        return RowLayout.of(len(self.domain), sizes)

    def reserve(self, channel_bytes: Mapping[str, int]) -> int:
        """Buffers of at least these sizes; collective in the domain where they must grow.

        Args:
            channel_bytes: that one buffer of a channel must hold, equal on all ranks.

        Returns:
            Bytes of all buffers and words on one rank.

        Raises:
            ReplicaSyncError: no memory, other sizes on another rank, or a rank did not take part.
        """
        layout = self.grown(channel_bytes)
        if self._open is not None:
            if layout == self.sync.layout:
                return layout.nbytes
            self.sync.read_all()
            self._release(peers_alive=True)
        heap = self._make_heap()
        arena = heap.alloc(layout.nbytes, self._generation)
        self._generation = 1 + self._generation % _GENERATIONS
        try:
            engine = self._make_engine(arena, layout)
        except BaseException:
            heap.close(peers_alive=False)
            raise
        sync = RowSync(arena, layout, self.domain, self.rank, engine, timeout_s=self.timeout_s)
        self._open = heap, sync, Watchdog(sync, self._on_abort)
        return layout.nbytes

    def report(self) -> dict[str, int]:
        """Bytes on one rank: both buffers of each channel, ``words``, ``total``; empty without."""
        return {} if self._open is None else self.sync.layout.report()

    def finish(self) -> None:
        """All rows of a step were sent and read.

        Raises:
            ReplicaSyncError: something failed.
        """
        if self._open is not None:
            self.sync.is_aborted()  # no wait may have met it
            self.sync.join()
        self._was_left = False

    def leave(self) -> None:
        """A step ended by an error: nobody knows which of its messages come."""
        self._was_left = True

    def abort(self) -> None:
        """This rank failed: ends the waits of all ranks of the domain."""
        if self._open is not None:
            self.sync.abort()

    def close(self, *, peers_alive: bool) -> None:
        """Gives the memory back; a second call does nothing.

        Args:
            peers_alive: False after a failure: waits for nobody.
        """
        self._release(peers_alive=peers_alive and not self._was_left)

    def meet(self) -> None:
        """All ranks are here to close: none waits any more for rows of a step that it left."""
        if self._open is not None and self._was_left:
            _, sync, watchdog = self._open
            watchdog.close()
            sync.end_waits()
        self._was_left = False

    def _release(self, *, peers_alive: bool) -> None:
        if self._open is None:
            return
        heap, sync, watchdog = self._open
        self._open = None
        watchdog.close()  # which need not end collectives for what follows
        if not peers_alive:
            sync.abort()
        sync.close()
        heap.close(peers_alive=peers_alive)


if TYPE_CHECKING:
    _is_a_transport: type[DispatchTransport] = PeerTransport
