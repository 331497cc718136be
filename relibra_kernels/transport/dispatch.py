"""Tokens to the ranks that compute them, and back: one all-to-all of rows with known split sizes.

Both split lists are host integers before the first forward, so nothing here waits for a device.
A token travels once to each destination rank; a rank may send or receive nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from relibra_kernels.checks import check_int, check_tensor
from relibra_kernels.transport.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class DispatchTransport(Protocol):
    """What the layer needs from a dispatcher."""

    def start(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str,
    ) -> Arrival:
        """`exchange` without waiting; ``x`` stays unchanged until the rows are waited for."""
        ...

    def exchange(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str,
    ) -> torch.Tensor:
        """Sends consecutive rows of ``x`` to the ranks in order; returns the rows received."""
        ...


class Arrival(Protocol):
    """Rows on their way to this rank."""

    def wait(self) -> torch.Tensor:
        """The rows; a second call gives them again."""
        ...


@dataclasses.dataclass(slots=True)
class PendingRows:
    """An exchange in flight. Keep ``sent`` alive and unchanged until ``wait`` returned.

    Attributes:
        sent: the rows that are being read.
        received: the buffer that is being filled.
        work: the collective, None when nothing moves.
        ranks: the group.
        what: names the use in errors.
    """

    sent: torch.Tensor
    received: torch.Tensor
    work: dist.Work | None
    ranks: Ranks
    what: str

    def wait(self) -> torch.Tensor:
        """The received rows, by source rank.

        Raises:
            ReplicaSyncError: the collective failed or timed out.
        """
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                self.ranks.raise_named("exchange", self.what, error)
        return self.received


class FlatDispatch:
    """Dispatch by one ``all_to_all_single`` over the whole group.

    Args:
        group: process group (gloo or NCCL); None, or a group of one rank, moves nothing.

    Example:
        >>> import torch
        >>> FlatDispatch(None).exchange(torch.ones(2, 3), [2], [2], what="tokens").shape
        torch.Size([2, 3])
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ranks = Ranks.of(group)

    def start(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str,
    ) -> PendingRows:
        """Starts an exchange; every rank of the group calls it in the same order.

        Args:
            x: ``[V, ...]``, any dtype; rows by destination rank.
            send_splits: G counts that sum to V.
            recv_splits: G counts; entry r is what rank r sends here.
            what: names the use in errors.

        Returns:
            The exchange in flight; its rows are ``[sum(recv_splits), ...]``. With one rank they
            are ``x`` itself, not a copy.

        Raises:
            TypeError, ValueError: splits that do not fit the group or ``x``.
            ReplicaSyncError: the collective could not start.
        """
        send = self._check_splits("send_splits", send_splits)
        receive = self._check_splits("recv_splits", recv_splits)
        check_tensor("x", x)
        if x.dim() == 0 or x.shape[0] != sum(send):
            raise ValueError(f"x: need {sum(send)} rows (sum of send_splits), got {list(x.shape)}")
        if self.ranks.size == 1:
            if send != receive:
                raise ValueError(f"recv_splits: need {send} with one rank, got {receive}")
            return PendingRows(x, x, None, self.ranks, what)
        sent = x.contiguous()
        received = x.new_empty((sum(receive), *x.shape[1:]))
        try:
            work = dist.all_to_all_single(
                received, sent, receive, send, group=self.ranks.group, async_op=True
            )
        except RuntimeError as error:
            self.ranks.raise_named("exchange", what, error)
        return PendingRows(sent, received, work, self.ranks, what)

    def exchange(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str,
    ) -> torch.Tensor:
        """`start` and wait; arguments, result and errors as there."""
        return self.start(x, send_splits, recv_splits, what=what).wait()

    def _check_splits(self, name: str, splits: Sequence[int]) -> list[int]:
        if len(splits) != self.ranks.size:
            raise ValueError(f"{name}: need {self.ranks.size} counts, got {len(splits)}")
        if type(splits) is list and set(map(type, splits)) == {int} and min(splits) >= 0:
            return splits
        return [check_int(name, count, minimum=0) for count in splits]
