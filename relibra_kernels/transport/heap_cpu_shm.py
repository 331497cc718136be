"""Provider ``cpu_shm``: POSIX shared memory between the processes of one machine.

Each rank makes one segment and maps those of all ranks. Every name is removed as soon as all ranks
have mapped all segments: from then on the memory lives as long as a process maps it, and a process
that is killed leaves nothing behind. A process killed before that moment leaves its names to its
peers, which remove all names when the set-up fails; if nobody survives, the next set-up on the
machine finds files that no process holds locked, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.rank_messages import check_equal, exchange, step
from relibra_kernels.transport.symmetric_heap import Arena, Heap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist

_PREFIX = "relibra-"
_ORPHAN_AGE_S = 60  # a younger file may be between its creation and its lock


class CpuShmHeap(Heap):
    """One rank's heap.

    Args:
        group: the ranks of the domain, processes of one machine; None is this process alone.
        timeout_s: seconds to wait for the slowest rank during `alloc`.
        folder: the file system of shared memory.

    Example:
        >>> with CpuShmHeap(None) as heap:
        ...     arena = heap.alloc(4096, generation=1)
        ...     int(arena.base.sum()), len(arena.peers)
        (0, 1)
    """

    name = "cpu_shm"
    granule_bytes = mmap.PAGESIZE

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout_s: float = 60.0,
        folder: Path = Path("/dev/shm"),
    ) -> None:
        super().__init__(torch.device("cpu"))
        self._ranks, self._timeout_s, self._folder = Ranks.of(group), timeout_s, folder
        self._maps: dict[int, mmap.mmap] = {}

    def _alloc(self, nbytes: int, generation: int) -> Arena:
        paths = self._agree_on_names(nbytes, generation)
        try:
            self._step("creating shared memory", lambda: self._create(paths, nbytes))
            self._step("mapping shared memory", lambda: self._map(paths, nbytes))
        except BaseException:
            for mapped in self._maps.values():  # not left to the frames that the error holds
                mapped.close()
            self._maps = {}
            raise
        finally:
            for path in paths:  # of all ranks: one of them may be dead
                path.unlink(missing_ok=True)
        rank = self._ranks.rank
        # The tensor holds its mapping: a view left after close() never dangles.
        base = torch.frombuffer(self._maps[rank], dtype=torch.uint8)
        peers = tuple(_address(self._maps[peer]) for peer in range(self._ranks.size))
        return Arena(base, peers, None, nbytes, generation, rank)

    def _free(self, peers_alive: bool) -> None:
        self._maps = {}  # peers keep their own mappings of this rank's memory

    def _agree_on_names(self, nbytes: int, generation: int) -> list[Path]:
        """Paths of all ranks, known to each before any of them exists."""
        what = f"alloc of a {self.name} arena"
        mine = {"nbytes": nbytes, "generation": generation, "token": secrets.token_hex(8)}
        rows = exchange(self._ranks, mine, what=what, timeout_s=self._timeout_s)
        token = [row.pop("token") for row in rows][0]
        check_equal(dict(enumerate(rows)), what)
        return [self._folder / f"{_PREFIX}{token}-{rank}" for rank in range(self._ranks.size)]

    def _step(self, what: str, do: Callable[[], None]) -> None:
        step(self._ranks, do, what=what, timeout_s=self._timeout_s)

    def _create(self, paths: list[Path], nbytes: int) -> None:
        """This rank's segment, its memory reserved: a later write cannot find it exhausted."""
        try:
            _remove_orphans(self._folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            with _descriptor(paths[self._ranks.rank], flags) as fd:
                os.posix_fallocate(fd, 0, nbytes)
                # The mapping keeps a duplicate of the descriptor, and with it the lock.
                self._maps[self._ranks.rank] = mmap.mmap(fd, nbytes)
        except OSError as error:
            raise OSError(
                f"no shared memory of {nbytes} bytes in {self._folder} ({error.strerror}; "
                f"{_free_bytes(self._folder)} bytes free): make it larger (containers: "
                f"--shm-size) or ask for less"
            ) from error

    def _map(self, paths: list[Path], nbytes: int) -> None:
        """The segments of the peers."""
        for rank, path in enumerate(paths):
            if rank == self._ranks.rank:
                continue
            try:
                with _descriptor(path, os.O_RDWR) as fd:
                    self._maps[rank] = mmap.mmap(fd, nbytes)
            except (OSError, ValueError) as error:
                raise OSError(
                    f"rank {rank}'s memory is not to be mapped here ({error}): need all ranks on "
                    f"one machine with one {self._folder} (containers: --ipc=host)"
                ) from error


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    """An open file whose lock says that a process still uses it."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def _remove_orphans(folder: Path) -> None:
    """Removes segments whose processes were all killed during a set-up."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone, in use, or another user's
            if time.time() - path.stat().st_mtime < _ORPHAN_AGE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # no such folder
        return 0


def _address(mapped: mmap.mmap) -> int:
    return torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
