"""Several ranks from one process: fork after the imports, gloo over a file, no ports.

Fork starts four ranks in 0.1 s, where spawn or torchrun take seconds, because the children share
what the parent has imported. It is safe only while the parent has no CUDA context and no other
busy threads; each rank computes with one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
import zlib
from multiprocessing import connection, get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkProcess

_LENGTH_BYTES, _READ_BYTES = 8, 1 << 20


class RankError(RuntimeError):
    """A rank raised or died; carries the first failure.

    Attributes:
        rank: the rank.
        report: its traceback, or how it died.

    ``__cause__`` is the rank's own exception where it could be sent.
    """

    def __init__(self, rank: int, num_ranks: int, report: str) -> None:
        super().__init__(f"rank {rank} of {num_ranks} failed:\n{report}")
        self.rank = rank
        self.report = report


class _ByValue(ForkingPickler):
    """Sends tensors by value; by default they would stay in memory shared with a dying process."""

    _extra_reducers: ClassVar[dict[type, Any]] = {}


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a child needs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    num_ranks: int
    folder: Path
    timeout: float
    group_timeout: float


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float | None = None,
) -> list[Any]:
    """Runs ``fn(rank, num_ranks, *args)`` on forked ranks of one gloo group.

    Args:
        num_ranks: number of ranks; the default process group holds all of them.
        fn: any callable, closures included; its result must be picklable. Tensors come back as
            copies.
        *args: passed on, by fork, so without pickling.
        timeout: seconds until the whole run counts as hung.
        group_timeout: seconds after which a collective fails; None is ``timeout``. The group
            is made when all ranks have started: a slow start is no failure.

    Returns:
        The results in rank order.

    Raises:
        ValueError: ``num_ranks`` below 1.
        RankError: a rank raised or died, or its result arrived damaged; the first one, with its
            traceback. The others are killed.
        TimeoutError: not all ranks answered in time; names the silent ones and where they stood.

    Example:
        >>> def total(rank, num_ranks, scale):
        ...     mine = torch.tensor([float(rank * scale)])
        ...     torch.distributed.all_reduce(mine)
        ...     return mine.item()
        >>> run_ranks(2, total, 10)
        [10.0, 10.0]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: need at least 1, got {num_ranks}")
    _import_before_fork()
    with (
        tempfile.TemporaryDirectory(prefix="relibra_ranks_") as folder,
        contextlib.ExitStack() as stack,
    ):
        job = _Job(fn, args, num_ranks, Path(folder), timeout, group_timeout or timeout)
        processes, pipes = _start(job)
        stack.callback(_stop, processes, pipes)
        return _collect(job, processes, pipes, time.monotonic() + timeout)


def _import_before_fork() -> None:
    """Loads what torch imports on first use: 2 s here once, instead of in every rank at once."""
    import torch._dynamo  # noqa: F401


def _start(job: _Job) -> tuple[list[ForkProcess], list[connection.Connection]]:
    context = get_context("fork")
    sys.stdout.flush()
    sys.stderr.flush()
    pairs = [context.Pipe() for _ in range(job.num_ranks)]
    parents, children = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    processes = []
    for rank in range(job.num_ranks):
        others = [*parents, *(pipe for other, pipe in enumerate(children) if other != rank)]
        processes.append(
            context.Process(
                target=_rank_main, args=(job, rank, children[rank], others), daemon=True
            )
        )
        processes[-1].start()
    for pipe in children:
        pipe.close()
    return processes, parents


def _rank_main(
    job: _Job, rank: int, pipe: connection.Connection, others: list[connection.Connection]
) -> None:
    """Body of a child: join the group, run, report, leave when the parent says so."""
    for other in others:  # inherited by fork; a dead rank is seen only when all copies are closed
        other.close()
    stacks = (job.folder / f"stack_{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    try:
        _join_group(job, rank)
        message = bytes(_ByValue.dumps((True, job.fn(rank, job.num_ranks, *job.args), "")))
    except BaseException as error:
        message = _failure(error)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, EOFError):
        _send(pipe, _sealed(message))
        pipe.recv_bytes()  # peers may still need this rank's connections
    os._exit(0)  # no destructors of inherited objects, no second flush of inherited buffers


def _join_group(job: _Job, rank: int) -> None:
    """Joins when all ranks are there: a group with a short time-out does not wait for the last."""
    (job.folder / f"here_{rank}").touch()
    deadline = time.monotonic() + job.timeout
    while not all((job.folder / f"here_{peer}").exists() for peer in range(job.num_ranks)):
        if time.monotonic() > deadline:  # the caller is gone, or has given up
            raise TimeoutError(f"not all {job.num_ranks} ranks started")
        time.sleep(0.002)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.num_ranks,
        timeout=datetime.timedelta(seconds=job.group_timeout),
    )


def _sealed(message: bytes) -> bytes:
    """A message behind its CRC-32, so that bytes that change on their way are no wrong result."""
    return zlib.crc32(message).to_bytes(4, "little") + message


def _opened(sealed: bytes, rank: int, num_ranks: int) -> bytes:
    message, need = sealed[4:], int.from_bytes(sealed[:4], "little")
    if (got := zlib.crc32(message)) != need:
        report = f"its message of {len(message)} bytes was damaged on its way: "
        raise RankError(rank, num_ranks, f"{report}need CRC-32 {need:#010x}, got {got:#010x}")
    return message


def _send(pipe: connection.Connection, message: bytes) -> None:
    """A message behind its length, which the caller may read piece by piece."""
    rest = memoryview(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
    while rest:
        rest = rest[os.write(pipe.fileno(), rest) :]


def _received(pipe: connection.Connection, found: bytearray) -> bytes | None:
    """Adds what has come of a message, without waiting for more; the message when all has.

    Raises:
        EOFError: the rank is gone.
    """
    try:
        part = os.read(pipe.fileno(), _READ_BYTES)
    except ConnectionError:
        part = b""
    if not part:
        raise EOFError
    found += part
    length = int.from_bytes(found[:_LENGTH_BYTES], "little")
    is_complete = len(found) >= _LENGTH_BYTES and len(found) == _LENGTH_BYTES + length
    return bytes(found[_LENGTH_BYTES:]) if is_complete else None


def _failure(error: BaseException) -> bytes:
    report = traceback.format_exc()
    try:
        message = bytes(_ByValue.dumps((False, error, report)))
        _ByValue.loads(message)
    except Exception:
        return bytes(_ByValue.dumps((False, None, report)))
    return message


def _collect(
    job: _Job,
    processes: list[ForkProcess],
    pipes: list[connection.Connection],
    deadline: float,
) -> list[Any]:
    """Waits for all results; the first failure or the deadline ends it."""
    results: dict[int, Any] = {}
    found = [bytearray() for _ in pipes]
    while len(results) < job.num_ranks:
        silent = [rank for rank in range(job.num_ranks) if rank not in results]
        ready = connection.wait(
            [pipes[rank] for rank in silent], timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            _raise_hang(job, processes, silent)
        for rank in (rank for rank in silent if pipes[rank] in ready):
            try:
                sealed = _received(pipes[rank], found[rank])
            except EOFError:
                raise _death(job, processes, rank) from None
            if sealed is None:
                continue
            found[rank].clear()
            good, value, report = _loaded(_opened(sealed, rank, job.num_ranks))
            if not good:
                _raise_if_another_died(job, processes)
                raise RankError(rank, job.num_ranks, report) from value
            results[rank] = value
    return [results[rank] for rank in range(job.num_ranks)]


def _loaded(message: bytes) -> tuple[bool, Any, str]:
    """Whether a rank returned, its result or error, its traceback."""
    try:
        good, value, report = _ByValue.loads(message)
    except Exception as error:
        return False, error, f"its result cannot be loaded:\n{traceback.format_exc()}"
    return good, value, report


def _death(job: _Job, processes: list[ForkProcess], rank: int) -> RankError:
    processes[rank].join(5)
    return RankError(rank, job.num_ranks, f"died with exit code {processes[rank].exitcode}")


def _raise_if_another_died(job: _Job, processes: list[ForkProcess]) -> None:
    """A rank that raised lives on until it may leave: a dead one is what made it raise."""
    ended = connection.wait([process.sentinel for process in processes], timeout=0.1)
    for rank, process in enumerate(processes):
        if process.sentinel in ended:
            raise _death(job, processes, rank)


def _raise_hang(job: _Job, processes: list[ForkProcess], silent: list[int]) -> NoReturn:
    """Names the ranks that gave no answer and shows their Python stacks."""
    for rank in silent:
        with contextlib.suppress(OSError):
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    stacks = [f"rank {rank}:\n{text}" for rank, text in _stacks(job, silent).items()]
    raise TimeoutError(
        f"ranks {silent} of {job.num_ranks} gave no answer within {job.timeout:g} s\n"
        + "\n".join(stacks)
    )


def _stacks(job: _Job, ranks: list[int], patience_s: float = 3.0) -> dict[int, str]:
    """What the ranks wrote, when all have and no more comes, or after a while."""
    paths = {rank: job.folder / f"stack_{rank}" for rank in ranks}
    deadline, before = time.monotonic() + patience_s, None
    while True:
        found = {rank: path.read_text().strip() for rank, path in paths.items() if path.exists()}
        is_complete = all(found.values()) and found == before
        if is_complete or time.monotonic() > deadline:
            return {rank: text or "no stack" for rank, text in found.items()}
        before = found
        time.sleep(0.2)


def _stop(processes: list[ForkProcess], pipes: list[connection.Connection]) -> None:
    """Lets finished ranks leave together and kills the rest."""
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send_bytes(b"leave")
        pipe.close()
    deadline = time.monotonic() + 0.5
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
