"""A process group as the transports see it: rank, size, and errors that say what failed."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from relibra_kernels.checks import check_tensor
from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Size of a group and this process's place in it; no group means one rank.

    Attributes:
        group: a process group, or None for this process alone (not the default group).
        size: G.
        rank: rank inside the group.

    Example:
        >>> Ranks.of(None)
        Ranks(group=None, size=1, rank=0)
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Ask the group once.

        Raises:
            ValueError: this process is not a member.
        """
        if group is None:
            return cls(None, 1, 0)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                "group: need a process group that this process belongs to, got another"
            )
        return cls(group, dist.get_world_size(group), rank)

    @contextlib.contextmanager
    def naming_errors(self, operation: str, what: str) -> Iterator[None]:
        """Turns an error of the process group into one that names the operation and its use.

        Raises:
            ReplicaSyncError: a RuntimeError came out of ``torch.distributed`` (time-out, lost
                peer, sizes that do not fit); the original error is its cause.
        """
        try:
            yield
        except RuntimeError as error:
            self.raise_named(operation, what, error)

    def raise_named(self, operation: str, what: str, error: RuntimeError) -> NoReturn:
        """`naming_errors` for an error that was caught.

        Raises:
            ReplicaSyncError: always.
        """
        if isinstance(error, ReplicaSyncError):
            raise error
        raise ReplicaSyncError(
            f"{operation} of {what} failed on rank {self.rank} of {self.size}: {error}"
        ) from error


def check_list(name: str, entries: torch.Tensor) -> list[list[int]]:
    """A push or pull list as Python integers.

    Raises:
        TypeError: no integer tensor.
        ValueError: not ``[p, 3]``.
    """
    check_tensor(name, entries, dtype=(torch.int32, torch.int64), shape=(None, 3))
    values: list[list[int]] = entries.numpy().tolist()  # host data, never a device sync
    return values
