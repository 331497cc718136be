"""Tokens over two hops: once to each node over the rail, then to the ranks inside the node.

A rank sends a token to the rank with its own local index in every node that computes a row of it
(the relay rank; the two share a rail of the network), and the relay rank passes it on to each rank
of its node that does. The way back goes through the same relay rank. A token with rows on several
ranks of a node thus crosses the network once and not once a rank.

Both hops are an all-to-all of rows whose split sizes are host integers, so nothing here waits for a
device. What the relay rank does between them, picking rows or adding them up, is in the tables.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from relibra_kernels import ops  # noqa: F401  registers torch.ops.relibra
from relibra_kernels.checks import check_tensor
from relibra_kernels.transport.dispatch import FlatDispatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from relibra_kernels.transport.dispatch import Arrival


@dataclasses.dataclass(frozen=True)
class Relay:
    """One path over two hops, as one rank sees it as source, relay rank and destination.

    Attributes:
        rail_first: over the rail and then inside the node; False is the way back.
        send_first, recv_first: rows to and from each member of the first hop's group.
        index: what the relay rank passes on: ``[N]``, received rows in sending order, or
            ``[N, J]``, sums over received rows (-1 takes no part, j ascending); int32. A sum is
            accumulated in fp32 (fp64 for fp64 rows) and rounded once, to the dtype of the rows,
            before it travels on.
        send_second, recv_second: rows to and from each member of the second hop's group.

    Raises:
        TypeError, ValueError: ``index`` is no int32 tensor of one or two dimensions, or the second
            hop sends another number of rows than it has.

    Example:
        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> Relay(True, [2], [2], int32([1, 1, 0]), [3], [3]).index.shape
        torch.Size([3])
    """

    rail_first: bool
    send_first: Sequence[int]
    recv_first: Sequence[int]
    index: torch.Tensor
    send_second: Sequence[int]
    recv_second: Sequence[int]

    def __post_init__(self) -> None:
        """Check the table."""
        check_tensor("index", self.index, dtype=torch.int32)
        if self.index.dim() not in (1, 2) or len(self.index) != sum(self.send_second):
            raise ValueError(
                f"index: need [{sum(self.send_second)}] or [{sum(self.send_second)}, J], as many "
                f"rows as the second hop sends, got {list(self.index.shape)}"
            )

    def pass_on(self, rows: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Rows of the first hop -> rows of the second hop, at the relay rank.

        Args:
            rows: ``[sum(recv_first), ...]``; ``[.., D]`` where they are summed.
            backend: of the sum, see `relibra_kernels.ops`.

        Example:
            >>> index = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
            >>> relay = Relay(False, [3], [3], index, [2], [2])
            >>> relay.pass_on(torch.tensor([[1.0], [10.0], [100.0]])).tolist()
            [[101.0], [10.0]]
        """
        if self.index.dim() == 1:
            return rows.index_select(0, self.index)
        total: torch.Tensor = torch.ops.relibra.combine(rows, self.index, None, backend)
        return total


class PendingRelay:
    """Rows on their way over two hops; the second hop starts inside `wait`.

    Args:
        first: the first hop in flight.
        second: transport of the second hop.
        relay: the path.
        what: names the use in errors.
        backend: of sums at the relay rank.
    """

    def __init__(
        self, first: Arrival, second: FlatDispatch, relay: Relay, what: str, backend: str
    ) -> None:
        self._first: Arrival | None = first
        self._second, self._relay, self._what, self._backend = second, relay, what, backend
        self._rows: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The rows that arrived, by sender of the second hop; a second call gives them again.

        Every rank waits for its relays in the same order, since a wait starts a hop.

        Raises:
            ReplicaSyncError: a collective failed or timed out.
        """
        if self._rows is None:
            assert self._first is not None
            relay = self._relay
            self._rows = self._second.exchange(
                relay.pass_on(self._first.wait(), self._backend),
                relay.send_second,
                relay.recv_second,
                what=f"{self._what}, {_hop_name(not relay.rail_first)}",
            )
            self._first = None  # its buffers are not needed again
        return self._rows


class TwoHopDispatch:
    """Dispatch over a rail group and a node group.

    Args:
        rail: group of the ranks with this rank's local index, one a node, by node; None moves
            nothing.
        node: group of the ranks of this node, by local index; None moves nothing.

    Example:
        >>> index = torch.tensor([1, 1, 0], dtype=torch.int32)
        >>> relay = Relay(True, [2], [2], index, [3], [3])
        >>> rows = torch.tensor([[5.0], [6.0]])
        >>> TwoHopDispatch(None, None).start(rows, relay, what="tokens").wait().tolist()
        [[6.0], [6.0], [5.0]]
    """

    def __init__(self, rail: dist.ProcessGroup | None, node: dist.ProcessGroup | None) -> None:
        self.rail, self.node = FlatDispatch(rail), FlatDispatch(node)

    def start(
        self, x: torch.Tensor, relay: Relay, *, what: str, backend: str = "auto"
    ) -> PendingRelay:
        """Starts the first hop; every rank calls it, and waits, in the same order.

        Args:
            x: ``[sum(relay.send_first), ...]``, any dtype; rows by member of the first hop.
            relay: the path.
            what: names the use in errors.
            backend: of sums at the relay rank, see `relibra_kernels.ops`.

        Raises:
            TypeError, ValueError: splits that do not fit the groups or ``x``.
            ReplicaSyncError: the collective could not start.
        """
        hops = (self.rail, self.node) if relay.rail_first else (self.node, self.rail)
        first = hops[0].start(
            x, relay.send_first, relay.recv_first, what=f"{what}, {_hop_name(relay.rail_first)}"
        )
        return PendingRelay(first, hops[1], relay, what, backend)


def _hop_name(over_rail: bool) -> str:
    return "rail hop" if over_rail else "node hop"
