"""Memory that every rank of a domain holds at the same layout and all of them can address.

A provider gives one arena at a time: allocated together, freed together, by explicit calls. All
providers share the checks, the life cycle and the errors of `Heap`; a provider file only says how
its memory is made, mapped and given back.
"""

from __future__ import annotations

import abc
import atexit
import dataclasses
import logging
import os
import weakref
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from relibra_kernels.checks import check_int
from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    import types
    from typing import Self

log = logging.getLogger(__name__)

MAX_BYTES = 2**62
MAX_GENERATION = 2**16 - 1  # the generation has 16 bits of every word


@dataclasses.dataclass(frozen=True)
class Arena:
    """One rank's part of a symmetric allocation, and where the parts of its peers are.

    Attributes:
        base: this rank's part, uint8 ``[nbytes]`` on its device, zeroed by the provider.
        peers: P addresses of the same part of every rank, as this process (or its GPU) reaches
            them; entry `rank` is ``base.data_ptr()``.
        multicast: address at which one store reaches all ranks, None where there is none.
        nbytes: size of a part, equal on all ranks.
        generation: marks the words of this allocation, 0 to 65535.
        rank: this rank inside the domain.

    Example:
        >>> import torch
        >>> base = torch.zeros(256, dtype=torch.uint8)
        >>> arena = Arena(base, (base.data_ptr(),), None, 256, generation=1, rank=0)
        >>> arena.address(0, 128) - base.data_ptr()
        128
    """

    base: torch.Tensor
    peers: tuple[int, ...]
    multicast: int | None
    nbytes: int
    generation: int
    rank: int

    def __post_init__(self) -> None:
        """Check what no provider may get wrong."""
        if self.base.numel() != self.nbytes or self.base.data_ptr() != self.peers[self.rank]:
            raise ValueError(
                f"base: need {self.nbytes} bytes at peers[{self.rank}] = "
                f"{self.peers[self.rank]:#x}, got {self.base.numel()} at {self.base.data_ptr():#x}"
            )

    def address(self, rank: int, offset: int) -> int:
        """Where byte ``offset`` of a rank's part is.

        Args:
            rank: inside the domain.
            offset: bytes, below `nbytes`.

        Raises:
            ValueError: outside the arena.
        """
        check_int("rank", rank, minimum=0, maximum=len(self.peers) - 1)
        check_int("offset", offset, minimum=0, maximum=self.nbytes - 1)
        return self.peers[rank] + offset


@runtime_checkable
class SymmetricHeap(Protocol):
    """What the replica synchronisation needs from a provider of symmetric memory.

    Attributes:
        name: of the provider.
        granule_bytes: an allocation takes a multiple of this.
        device: of the memory.
    """

    name: str
    granule_bytes: int
    device: torch.device

    def alloc(self, nbytes: int, generation: int) -> Arena:
        """Makes a zeroed arena; collective, with equal arguments."""
        ...

    def close(self, *, peers_alive: bool = True) -> None:
        """Gives the arena back; collective; a second call does nothing."""
        ...


class Heap(abc.ABC):
    """Life cycle that all providers share; a context manager that closes.

    A heap that was closed can allocate again.
    """

    name: str
    granule_bytes: int
    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_open, self._process = False, os.getpid()  # which made the arena

    def alloc(self, nbytes: int, generation: int) -> Arena:
        """Makes a zeroed arena; collective.

        Args:
            nbytes: size of each rank's part, equal on all ranks.
            generation: 0 to 65535, equal on all ranks; another one for every allocation, so that
                words left from an earlier one are not taken for new.

        Raises:
            TypeError, ValueError: no sizes that can be meant.
            ReplicaSyncError: the last arena is still open; a rank is missing, asks for another
                size, or has no memory: on every rank, with the ranks and values.
        """
        check_int("nbytes", nbytes, minimum=1, maximum=MAX_BYTES)
        check_int("generation", generation, minimum=0, maximum=MAX_GENERATION)
        if self._is_open:
            raise ReplicaSyncError(
                f"alloc: this {self.name} heap already has an open arena: close() it first"
            )
        with torch.inference_mode(False):  # an ordinary tensor, which outlives the caller's mode
            arena = self._alloc(nbytes, generation)
        self._is_open, self._process = True, os.getpid()
        _open_heaps.add(self)
        return arena

    def close(self, *, peers_alive: bool = True) -> None:
        """Gives the arena back; every rank calls it, a second call does nothing.

        Args:
            peers_alive: False after an error: gives back what needs no peer and waits for
                nobody. So does a forked child, which has no connection to any.
        """
        if not self._is_open:
            return
        self._is_open = False
        _open_heaps.discard(self)
        self._free(peers_alive and self._process == os.getpid())

    @abc.abstractmethod
    def _alloc(self, nbytes: int, generation: int) -> Arena:
        """Make the arena, or raise on every rank and leave nothing behind."""

    @abc.abstractmethod
    def _free(self, peers_alive: bool) -> None:
        """Forget the arena."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close(peers_alive=error is None)


_open_heaps: weakref.WeakSet[Heap] = weakref.WeakSet()


def round_up(nbytes: int, granule: int) -> int:
    """The smallest multiple of ``granule`` that holds ``nbytes``.

    Example:
        >>> round_up(1025, 1024), round_up(1024, 1024)
        (2048, 1024)
    """
    return -(-nbytes // granule) * granule


@atexit.register
def _warn_of_open_heaps() -> None:
    """One warning at exit. Nothing is freed here: that needs peers, which may be gone."""
    names = sorted(heap.name for heap in _open_heaps)
    if names:
        log.warning(
            "exit with %d symmetric heap(s) still open (%s): call close() on every rank before "
            "the process group is destroyed",
            len(names),
            ", ".join(names),
        )
