"""The protocol of peer dispatch: rows straight into the receive buffers of their destinations.

Written once, over an arena of any provider and an engine of any device. The messages of a channel
are numbered n = 0, 1, ... in the order in which all ranks start them; message n uses buffer n mod W
of its channel, W = 2, on every rank.

    start(n)  reads message n - W if nobody has; push stream: waits until every destination has
              read message n - W, copies, writes ``arrived`` at each destination
    read(n)   compute stream: waits for ``arrived`` of every source with rows, whose hash must be
              that of this use, channel, plan and place of the rows; copies the rows out of the
              buffer; tells all ranks that it may be overwritten; in the order of the channel: reads
              earlier messages first

A use of a layer sends x, scores and y forward; dy, x again where it was not kept, dscores and dx
backward.

Offsets: the rows of a source lie behind those of lower sources. Sender and receiver know them as
host integers from the token counts of the step, so that nothing is asked and nothing waits for a
device; a message that would not fit is refused before anything of it is launched.

The rows are copied out once, although a view of the arena would save that: received tokens and
scores live until the backward of their layer, in any number of layers and micro-batches at once,
and two buffers hold two messages. The copy reads and writes each received row once in local memory,
2 * U * D * size bytes for U rows; over a link with 1/8 of the memory's bandwidth that is 1/4 of the
time of the transfer itself. In return a buffer is free as soon as it was read.

A message may be read before its owner asks for it, on the compute stream of whoever starts or reads
a later one: a host with several compute streams orders those that use one channel.

Why it cannot deadlock, with any number of channels and beside the pushes of weights (`ReplicaSync`)
on the same streams: take the order in which a rank submits everything, which is the same on all
ranks. Every wait in it is for a word that each writer submits earlier in it. ``arrived`` of message
n is written by start(n), before any read(n). The credit of message n - W is written by its read,
which start(n) itself makes up for, before it waits; hosts may thus start and read messages of
different micro-batches in any order. Weight pushes wait for uses that were retired before, see
there. A stream runs its calls in the order of submission; so among all calls that have not run on
any rank the one submitted earliest can run, whatever streams share a hardware queue. Why it cannot
hang: every wait has a time-out, the first error stores a word at all ranks, and that word ends
every wait.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relibra_kernels.checks import check_int, check_tensor
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.row_arena import (
    BUFFERS,
    CHANNELS,
    RowLayout,
    channel_number,
    table_of_rows,
)
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH
from relibra_kernels.transport.sync_items import ArenaItems
from relibra_kernels.transport.sync_report import SyncFailure, UseKey
from relibra_kernels.transport.sync_side import SyncSide
from relibra_kernels.transport.sync_types import (
    PUSH_ITEM,
    WAIT_ITEM,
    ErrorCode,
    SyncOp,
    hash_of_expert,
    hash_of_use,
    pack_word,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra_kernels.transport.symmetric_heap import Arena
    from relibra_kernels.transport.sync_engine import SyncEngine


@dataclasses.dataclass(frozen=True)
class RowWay:
    """Which message of a use rows belong to, and where they go.

    Attributes:
        channel: one of `row_arena.CHANNELS`.
        key: of the use; its direction names the message. Equal on all ranks.
        first_G: row of this rank's first row in the buffer of each rank.
        plan_hash: of the plan.
    """

    channel: str
    key: UseKey
    first_G: Sequence[int]
    plan_hash: str = ""

    def hash_of(self, first: int, count: int) -> int:
        """What the word of rows ``[first, first + count)`` of the receiver carries."""
        return hash_of_expert(self._hash, first + count)

    @functools.cached_property
    def _hash(self) -> int:
        return hash_of_use((*self.key.parts(), self.channel), self.plan_hash)


class PeerRows:
    """A message on its way; keep the sent tensor unchanged until `wait` returned.

    Made by `RowSync.start`.
    """

    def __init__(
        self,
        sync: RowSync,
        way: RowWay,
        n: int,
        number: int,
        counts: Sequence[int],
        like: torch.Tensor,
    ) -> None:
        self.way, self.n, self.number = way, n, number
        self._sync: RowSync | None = sync
        self._counts, self._like = counts, like
        self._rows: torch.Tensor | None = None
        self.pushed: Any = None  # event after this rank's copies

    def wait(self) -> torch.Tensor:
        """The received rows, by source rank; a second call gives them again.

        Raises:
            ReplicaSyncError: a rank did not send them in time, or sent other ones.
        """
        if self._rows is None:
            assert self._sync is not None
            self._rows = self._sync.read(self, self._counts, self._like)
            self._sync = None
        return self._rows


class RowSync(SyncSide[RowLayout]):
    """One rank's side of the protocol in one domain.

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
        layout: RowLayout,
        domain: Sequence[int],
        rank: int,
        engine: SyncEngine,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(arena, layout, domain, rank, engine, timeout_s=timeout_s)
        self._items = ArenaItems(arena)
        ranks = range(layout.num_ranks)
        self._read = [[layout.read(channel, rank) for rank in ranks] for channel in CHANNELS]
        self._num_started = [0] * len(CHANNELS)
        self._unread: dict[tuple[int, int], PeerRows] = {}  # (channel, buffer) -> last message

    def start(
        self, x: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], way: RowWay
    ) -> PeerRows:
        """Starts a message; every rank of the domain calls it in the same order.

        Args:
            x: ``[V, ...]``, any dtype; rows by destination.
            send_splits: P counts that sum to V.
            recv_splits: P counts; entry p is what place p sends here.
            way: which message it is.

        Raises:
            TypeError, ValueError: splits that do not fit the domain or ``x``.
            ReplicaSyncError: more rows than a receive buffer holds; or an earlier failure.
        """
        self.check()
        number = channel_number(way.channel)
        sends = self._splits("send_splits", send_splits)
        firsts = self._splits("first_G", way.first_G)
        receives = self._splits("recv_splits", recv_splits)
        check_tensor("x", x)
        if x.dim() == 0 or x.shape[0] != sum(sends):
            raise ValueError(f"x: need {sum(sends)} rows (sum of send_splits), got {list(x.shape)}")
        row_bytes = x.element_size() * math.prod(x.shape[1:])
        self._check_room(way, row_bytes, sends, firsts, receives)
        n = self._num_started[number]
        buffer = n % BUFFERS
        if (before := self._unread.get((number, buffer))) is not None:
            before.wait()  # its credits must not hang on when the caller reads it
        self._num_started[number] += 1
        rows = PeerRows(self, way, n, self._number(way.key), receives, x.new_empty(0, *x.shape[1:]))
        self._unread[number, buffer] = rows
        sent = x.detach().contiguous()
        peers = [peer for peer, count in enumerate(sends) if count]
        items, keep = self._pushed(rows, sent, row_bytes, sends)
        credits = self._items.credits(self._read[number], n - BUFFERS + 1, peers)
        self.engine.wait_event(PUSH, self.engine.record(COMPUTE))
        self.engine.wait(PUSH, credits, rows.number, SyncOp.ROW_CREDIT)
        self.engine.push(PUSH, items, keep)
        rows.pushed = self._last[PUSH] = self.engine.record(PUSH)
        return rows

    def read(self, rows: PeerRows, counts: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """The rows of a message, out of their buffer; see `PeerRows.wait`.

        Args:
            rows: not read before.
            counts: P rows by source.
            like: ``[0, ...]``, dtype, device and shape of a row.

        Raises:
            ReplicaSyncError: a rank did not send them in time, or sent other ones.
        """
        self.check()
        way, buffer, place = rows.way, rows.n % BUFFERS, channel_number(rows.way.channel)
        before = self._unread.get((place, (rows.n - 1) % BUFFERS))
        if before is not None and before.n < rows.n:
            before.wait()  # the credit says that all messages up to this one were read
        self.engine.wait(COMPUTE, self._arrived(rows, counts), rows.number, SyncOp.ROWS)
        self.check()
        with torch.inference_mode(like.is_inference()):  # as it was sent: others may read it first
            received = like.new_empty(sum(counts), *like.shape[1:])
            self._copy_out(way.channel, buffer, received)
        self.engine.publish(COMPUTE, self._items.credit(self._read[place], rows.n + 1))
        del self._unread[place, buffer]
        self.wait_event(rows.pushed)  # what was sent may change now
        return received

    def read_all(self) -> None:
        """Reads every message that nobody has read.

        Raises:
            ReplicaSyncError: see `read`.
        """
        for rows in sorted(self._unread.values(), key=lambda rows: rows.number):
            rows.wait()

    def table(self) -> str:
        """All words of this rank."""
        base = self.arena.peers[self.arena.rank]
        return table_of_rows(self.layout, base, self.domain, self.engine.load_words)

    # -- items -------------------------------------------------------------------------------

    def _pushed(
        self, rows: PeerRows, x: torch.Tensor, row_bytes: int, sends: Sequence[int]
    ) -> tuple[np.ndarray, Any]:
        """One copy a destination, with its word; and what must stay alive."""
        way, arena, buffer = rows.way, self.arena, rows.n % BUFFERS
        target = self.layout.rows(way.channel, buffer)
        word_at = self.layout.arrived(way.channel, buffer, arena.rank)
        arrivals = np.zeros(len(sends), np.uint32)
        items: list[tuple[int, ...]] = []
        begin = 0
        for peer, count in enumerate(sends):
            if count:
                first = way.first_G[peer]
                word = pack_word(arena.generation, rows.n, way.hash_of(first, count))
                items.append(
                    (
                        x.data_ptr() + begin * row_bytes,
                        arena.peers[peer] + target + first * row_bytes,
                        count * row_bytes,
                        arena.peers[peer] + word_at,
                        word,
                        arrivals.ctypes.data + peer * arrivals.itemsize,
                    )
                )
            begin += count
        return np.array(items, PUSH_ITEM), (x, arrivals)

    def _arrived(self, rows: PeerRows, counts: Sequence[int]) -> np.ndarray:
        """That the rows of every source are there, and are those of this message."""
        mine, generation = self.arena.peers[self.arena.rank], self.arena.generation
        items, first = [], 0
        for source, count in enumerate(counts):
            if count:
                place = self.layout.arrived(rows.way.channel, rows.n % BUFFERS, source)
                exact = pack_word(generation, rows.n, rows.way.hash_of(first, count))
                least = pack_word(generation, rows.n, 0)
                items.append((mine + place, least, exact, source, -1))
            first += count
        return np.array(items, WAIT_ITEM)

    def _copy_out(self, channel: str, buffer: int, out: torch.Tensor) -> None:
        nbytes = out.numel() * out.element_size()
        if nbytes:
            view = self.layout.view(self.arena.base, channel, buffer, nbytes)
            out.view(-1).view(torch.uint8).copy_(view)

    # -- helpers -----------------------------------------------------------------------------

    def _splits(self, name: str, splits: Sequence[int]) -> list[int]:
        if len(splits) != len(self.domain):
            raise ValueError(f"{name}: need {len(self.domain)} counts, got {len(splits)}")
        return [check_int(name, count, minimum=0) for count in splits]

    def _check_room(
        self,
        way: RowWay,
        row_bytes: int,
        sends: Sequence[int],
        firsts: Sequence[int],
        receives: Sequence[int],
    ) -> None:
        """Nothing is written past the end of a buffer, here or at a peer."""
        ends = [first + count if count else 0 for first, count in zip(firsts, sends, strict=True)]
        ends[self.arena.rank] = max(ends[self.arena.rank], sum(receives))
        for peer, end in enumerate(ends):
            if end * row_bytes > (room := self.layout.capacity(way.channel)):
                raise ReplicaSyncError(
                    f"rank {self.rank}: {way.key}: need {end * row_bytes} bytes ({end} rows of "
                    f"{row_bytes}) in the receive buffer of channel {way.channel!r} of rank "
                    f"{self.domain[peer]}, got {room}: the micro-batch is larger than planned"
                )

    def _failure(self, record: np.void) -> SyncFailure:
        """The error record in words of EP ranks and layers."""
        peer = int(record["peer"])
        return SyncFailure(
            rank=self.rank,
            code=ErrorCode(record["code"]),
            operation=SyncOp(record["op"]),
            peer=self.domain[peer] if peer >= 0 else -1,
            slot=-1,
            expert=-1,
            key=self._names.get(int(record["use"])),
            expected=int(record["expected"]),
            observed=int(record["observed"]),
            table=self.table(),
        )
