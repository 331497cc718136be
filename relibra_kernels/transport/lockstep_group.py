"""Collectives of virtual ranks: what all of them have posted, the last one hands out.

The transports have the faces of those over ``torch.distributed`` and the same results bit for bit;
rows are copied when the last rank has posted its own, so that tensors may change after `wait`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from relibra_kernels.checks import check_tensor
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.dispatch import FlatDispatch
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.replica import DistReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra_kernels.transport.lockstep import Lockstep
    from relibra_kernels.transport.replica import Fields


@dataclasses.dataclass
class _Meeting:
    """One collective: who has posted what, and the results when all have."""

    name: tuple[str, str]
    posted: dict[int, Any] = dataclasses.field(default_factory=dict)
    results: Sequence[Any] | None = None


class LocalGroup:
    """All virtual ranks of a process.

    Args:
        lockstep: that runs them.

    Example:
        >>> from relibra_kernels.transport.lockstep import Lockstep
        >>> steps = Lockstep(2)
        >>> group = LocalGroup(steps)
        >>> steps.run(lambda rank: group.gather(rank, "x" * rank, "names"))
        [['', 'x'], ['', 'x']]
        >>> steps.close()
    """

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep, self.num_ranks = lockstep, lockstep.num_ranks
        self._num_posted = [0] * self.num_ranks
        self._meetings: dict[int, _Meeting] = {}

    @property
    def is_between(self) -> bool:
        """Whether some ranks have posted what others have not."""
        return len(set(self._num_posted)) > 1

    def post(
        self,
        rank: int,
        operation: str,
        what: str,
        value: Any,
        hand_out: Callable[[list[Any]], Sequence[Any]],
    ) -> Callable[[], Any]:
        """Takes part in the next collective of a rank.

        Args:
            rank: that posts.
            operation: such as ``"exchange"``.
            what: names its use.
            value: of this rank.
            hand_out: from the values of all ranks to their results, called once.

        Returns:
            What waits for all ranks and gives this rank's result.

        Raises:
            ReplicaSyncError: another rank is in another collective.
        """
        number = self._num_posted[rank]
        meeting = self._meetings.setdefault(number, _Meeting((operation, what)))
        if meeting.name != (operation, what):
            raise ReplicaSyncError(
                f"{operation} of {what}: need the same collective on all virtual ranks, got rank "
                f"{rank} here and ranks {sorted(meeting.posted)} in {' of '.join(meeting.name)}"
            )
        self._num_posted[rank] += 1
        meeting.posted[rank] = value
        if len(meeting.posted) == self.num_ranks:
            del self._meetings[number]
            results = hand_out([meeting.posted[r] for r in range(self.num_ranks)])
            meeting.posted.clear()
            meeting.results = results

        def wait() -> Any:
            text = f"{operation} of {what}"
            self.lockstep.wait(lambda: meeting.results is not None, text)
            assert meeting.results is not None
            return meeting.results[rank]

        return wait

    def gather(self, rank: int, value: Any, what: str) -> list[Any]:
        """The values of all ranks, by rank.

        Args:
            rank: that takes part.
            value: nobody changes it.
            what: names the use in errors.
        """
        found: list[Any] = self.post(
            rank, "gather", what, value, lambda values: [list(values)] * self.num_ranks
        )()
        return found


@dataclasses.dataclass(frozen=True)
class _LocalRows:
    """Rows on their way between virtual ranks."""

    sent: torch.Tensor
    arrived: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """The received rows, by source rank."""
        return self.arrived()


class LocalDispatch(FlatDispatch):
    """`FlatDispatch` between virtual ranks.

    Args:
        group: of all ranks.
        rank: this one.
    """

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.ranks = Ranks(None, group.num_ranks, rank)
        self._group = group

    def start(  # type: ignore[override]  # another kind of arrival
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        what: str,
    ) -> _LocalRows:
        """As `FlatDispatch.start`.

        Raises:
            TypeError, ValueError: splits that do not fit the group or ``x``.
            ReplicaSyncError: they do not fit those of other ranks.
        """
        send = self._check_splits("send_splits", send_splits)
        receive = self._check_splits("recv_splits", recv_splits)
        check_tensor("x", x)
        if x.dim() == 0 or x.shape[0] != sum(send):
            raise ValueError(f"x: need {sum(send)} rows (sum of send_splits), got {list(x.shape)}")
        posted = (x, send, receive)

        def hand_out(values: list[tuple[torch.Tensor, list[int], list[int]]]) -> list[torch.Tensor]:
            return _all_to_all(values, what)

        arrived = self._group.post(self.ranks.rank, "exchange", what, posted, hand_out)
        return _LocalRows(x, arrived)


def _all_to_all(
    values: Sequence[tuple[torch.Tensor, list[int], list[int]]], what: str
) -> list[torch.Tensor]:
    """Received rows by rank."""
    for source, (_, send, _) in enumerate(values):
        for target, (_, _, receive) in enumerate(values):
            if send[target] != receive[source]:
                raise ReplicaSyncError(
                    f"exchange of {what}: need the rows that rank {source} sends, "
                    f"{send[target]}, got {receive[source]} expected by rank {target}"
                )
    pieces = [torch.split(x, send) for x, send, _ in values]
    return [torch.cat([piece[target] for piece in pieces]) for target in range(len(values))]


class LocalReplica(DistReplica):
    """`DistReplica` between virtual ranks; every rank calls it, also without an entry.

    Args:
        group: of all ranks.
        rank: this one.
    """

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.ranks = Ranks(None, group.num_ranks, rank)
        self._group = group

    def push(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor, *, what: str
    ) -> None:
        """As `DistReplica.push`."""
        pushes = self._checked(fields, push_list, pull_list)

        def copy(home: torch.Tensor, replica: torch.Tensor) -> None:
            replica.copy_(home)

        self._post("replica push", what, (pushes, fields), copy)

    def reduce(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor, *, what: str
    ) -> None:
        """As `DistReplica.reduce`."""
        turned = [(home, replica) for replica, home in fields]
        pushes = self._checked(turned, push_list, pull_list)

        def add(home: torch.Tensor, replica: torch.Tensor) -> None:
            home.add_(replica)

        self._post("home reduce", what, (pushes, turned), add)

    def _post(
        self,
        operation: str,
        what: str,
        mine: tuple[list[list[int]], Fields],
        act: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """When all ranks are here, ``act(home slot, replica slot)`` for every copy of each."""

        def hand_out(values: list[tuple[list[list[int]], Fields]]) -> list[None]:
            for pushes, fields in values:
                for slot, rank, replica_slot in pushes:
                    for (home, _), (_, replica) in zip(fields, values[rank][1], strict=True):
                        act(home[slot], replica[replica_slot])
            return [None] * len(values)

        self._group.post(self.ranks.rank, operation, what, mine, hand_out)()

    def _checked(
        self, fields: Fields, push_list: torch.Tensor, pull_list: torch.Tensor
    ) -> list[list[int]]:
        """Pushes by ascending (rank, slot) of the replica."""
        pushes, pulls = self._lists(push_list, pull_list)
        for home, replica in fields:
            check_tensor("replica", replica, shape=(None, *home.shape[1:]))
            self._check_slots(pushes, pulls, home, replica)
        return pushes
