"""Weights out to replica slots and gradients home, over ``torch.distributed`` point to point.

Why sends and receives between the pairs in the lists, and no all-to-all: a rank without an entry
makes no call at all, so an empty list costs nothing and no rank has to know whether others are
busy; and slots are sent from, and received into, the buffers they live in, without packing.

Why it cannot deadlock: a rank posts every receive and every send of a call before it waits for
any of them, and a call waits for nothing but the partners in its own lists, which post theirs in
the same call. Between two ranks messages match in posting order: both sides go by ascending
(replica rank, replica slot), then by field. So the calls of a pair match if both ranks make them
in the same order of uses, which the training step guarantees.

Why it is deterministic: `reduce` receives every replica's gradient into its own buffer and adds
them afterwards in ascending (rank, replica slot) order, whatever order they arrived in.

NCCL: the first point-to-point call of a group must be preceded by a collective of the whole group
(the step's agreement is one), since a communicator is set up by all of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist

from relibra_kernels.checks import check_tensor
from relibra_kernels.transport.group import Ranks, check_list

Fields: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
Operation: TypeAlias = Callable[..., dist.Work | None]


@runtime_checkable
class ReplicaTransport(Protocol):
    """What the layer needs from a weight and gradient mover."""

    def push(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor, *, what: str
    ) -> None:
        """Home weights -> replica slots."""
        ...

    def reduce(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor, *, what: str
    ) -> None:
        """Replica gradients -> home gradients."""
        ...


class DistReplica:
    """Push and home-reduce by point-to-point messages of a process group (gloo or NCCL).

    Args:
        group: process group whose ranks the lists name; None is this process alone.

    Example:
        One rank, which also keeps a copy of its own home slot 1:

        >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> home, replica = torch.tensor([[1.0], [2.0]]), torch.zeros(1, 1)
        >>> transport = DistReplica(None)
        >>> transport.push([(home, replica)], int32([[1, 0, 0]]), int32([[0, 0, 1]]), what="w")
        >>> replica.item()
        2.0
        >>> transport.reduce([(replica, home)], int32([[1, 0, 0]]), int32([[0, 0, 1]]), what="g")
        >>> home.flatten().tolist()
        [1.0, 4.0]
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ranks = Ranks.of(group)

    def push(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor, *, what: str
    ) -> None:
        """Copies home slots into replica slots, all fields of a slot.

        Args:
            fields: (home ``[H, ...]``, replica ``[S, ...]``) pairs of one dtype each; the same
                fields on every rank.
            push_list: int32 ``[p, 3]`` = (home slot, destination rank, replica slot there).
            pull_list: int32 ``[q, 3]`` = (replica slot, home rank, home slot there).
            what: names the use in errors.

        Raises:
            TypeError, ValueError: a list or field that does not fit.
            ReplicaSyncError: a message failed or timed out.
        """
        pushes, pulls = self._lists(push_list, pull_list)
        for home, replica in fields:
            check_tensor("replica", replica, dtype=home.dtype, shape=(None, *home.shape[1:]))
            self._check_slots(pushes, pulls, home, replica)
        messages = [
            self._message(dist.irecv, replica[slot], rank)
            for slot, rank, _ in pulls
            if rank != self.ranks.rank
            for _, replica in fields
        ]
        for slot, rank, replica_slot in pushes:
            for home, replica in fields:
                if rank == self.ranks.rank:
                    replica[replica_slot].copy_(home[slot])
                else:
                    messages.append(self._message(dist.isend, home[slot].contiguous(), rank))
        self._run(messages, "replica push", what)

    def reduce(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor, *, what: str
    ) -> None:
        """Adds replica gradients to home gradients in ascending (rank, replica slot) order.

        Args:
            fields: (replica ``[S, ...]``, home ``[H, ...]``) pairs; home is fp32 or fp64, a tensor
                or a sequence of H tensors with the ``shape`` of one.
            push_list: as for `push`: the replicas of this rank's experts.
            pull_list: as for `push`: the homes of this rank's replicas.
            what: names the use in errors.

        Raises:
            TypeError, ValueError: a list or field that does not fit.
            ReplicaSyncError: a message failed or timed out.
        """
        pushes, pulls = self._lists(push_list, pull_list)
        for replica, home in fields:
            first = home[0] if len(home) else home
            check_tensor("home_grad", first, dtype=(torch.float32, torch.float64))
            check_tensor("replica_grad", replica, shape=(None, *home.shape[1:]))
            self._check_slots(pushes, pulls, home, replica)
        messages: list[dist.P2POp] = []
        terms: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot, rank, replica_slot in pushes:
            for replica, home in fields:
                if rank == self.ranks.rank:
                    terms.append((home[slot], replica[replica_slot]))
                    continue
                arriving = replica.new_empty(replica.shape[1:])
                messages.append(self._message(dist.irecv, arriving, rank))
                terms.append((home[slot], arriving))
        messages += [
            self._message(dist.isend, replica[slot], rank)
            for slot, rank, _ in pulls
            if rank != self.ranks.rank
            for replica, _ in fields
        ]
        self._run(messages, "home reduce", what)
        for home_slot, gradient in terms:
            home_slot.add_(gradient)

    def _lists(
        self, push_list: torch.Tensor, pull_list: torch.Tensor
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Both lists by ascending (rank, slot) of the replica, the order of the messages."""
        pushes = sorted(check_list("push_list", push_list), key=lambda entry: entry[1:])
        return pushes, sorted(check_list("pull_list", pull_list))

    def _check_slots(
        self,
        pushes: list[list[int]],
        pulls: list[list[int]],
        home: torch.Tensor,
        replica: torch.Tensor,
    ) -> None:
        """Refuses entries outside the buffers, and replica slots that cannot be sent in place."""
        check_tensor("replica", replica[0] if len(replica) else replica, contiguous=True)
        limit = (len(home), self.ranks.size, len(replica))
        for name, entries, limits in (
            ("push_list", pushes, limit),
            ("pull_list", pulls, (limit[2], limit[1], limit[0])),
        ):
            for entry in entries:
                if any(not 0 <= value < top for value, top in zip(entry, limits, strict=True)):
                    raise ValueError(f"{name}: need entries below {list(limits)}, got {entry}")

    def _message(self, operation: Operation, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        if self.ranks.group is None:
            raise ValueError(f"push_list, pull_list: need rank 0 without a group, got {rank}")
        peer = dist.get_global_rank(self.ranks.group, rank)
        return dist.P2POp(operation, tensor, peer, self.ranks.group)

    def _run(self, messages: list[dist.P2POp], operation: str, what: str) -> None:
        """Posts all messages of this rank, then waits for all of them."""
        if not messages:
            return
        with self.ranks.naming_errors(operation, what):
            for work in dist.batch_isend_irecv(messages):
                work.wait()
