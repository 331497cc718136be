"""Short messages between all ranks of a group, and agreement before anybody raises.

The ranks of a heap set up memory together. A rank that finds a fault of its own must tell its
peers, or they wait in the next step of the set-up; and a rank that never comes must be named by
everybody, whatever rank it is. So messages go from every rank to every rank, each with the same
deadline, over the CPU backend of the group; a group without one (NCCL alone) gathers them on the
device, where only the group's own time-out ends a wait.
"""

from __future__ import annotations

import datetime
import json
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relibra_kernels.transport.group import Ranks

MESSAGE_BYTES = 4096
_FAULT_CHARS = 400  # at most 6 bytes each as JSON
_TAG = 0x5E7  # keeps these messages apart from a user's own on the same group


class RefusedError(ReplicaSyncError):
    """A step that ranks could not do, known to all of them: they may all try another way.

    Example:
        >>> issubclass(RefusedError, ReplicaSyncError)
        True
    """


def exchange(
    ranks: Ranks, message: Mapping[str, Any], *, what: str, timeout_s: float
) -> list[dict[str, Any]]:
    """The message of every rank, by rank; collective.

    Args:
        ranks: the group.
        message: what JSON can hold, at most 4096 bytes as text.
        what: the operation, for errors.
        timeout_s: seconds to wait for the slowest rank.

    Raises:
        ReplicaSyncError: names the ranks that did not take part in time.

    Example:
        >>> from relibra_kernels.transport.group import Ranks
        >>> exchange(Ranks.of(None), {"bytes": 7}, what="set-up", timeout_s=1.0)
        [{'bytes': 7}]
    """
    if ranks.group is None:
        return [dict(message)]
    text = json.dumps(message).encode()
    if len(text) > MESSAGE_BYTES:
        raise ValueError(f"message: need at most {MESSAGE_BYTES} bytes, got {len(text)}")
    mine = torch.frombuffer(bytearray(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
    if _has_cpu_backend(ranks.group):
        parts = _send_to_all(ranks, mine, what, timeout_s)
    else:
        parts = _gather_on_device(ranks, mine, what)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def agree(
    ranks: Ranks,
    facts: Mapping[str, int | str],
    *,
    what: str,
    timeout_s: float,
    fault: Exception | None = None,
) -> list[dict[str, Any]]:
    """Every rank goes on with equal facts, or every rank raises; collective.

    Args:
        ranks: the group.
        facts: name -> value that must be equal on all ranks.
        what: the operation, for errors.
        timeout_s: seconds to wait for the slowest rank.
        fault: an error that this rank alone has found.

    Returns:
        The facts of every rank, by rank.

    Raises:
        RefusedError: a rank has a fault. On that rank, ``fault`` is the cause.
        ReplicaSyncError: a rank is missing, or a fact differs; the message names ranks and
            values.

    Example:
        >>> from relibra_kernels.transport.group import Ranks
        >>> agree(Ranks.of(None), {"bytes": 7}, what="set-up", timeout_s=1.0)
        [{'bytes': 7}]
    """
    text = "" if fault is None else f"{type(fault).__name__}: {fault}"[:_FAULT_CHARS]
    rows = exchange(ranks, {**facts, "fault": text}, what=what, timeout_s=timeout_s)
    faults = {rank: told for rank, row in enumerate(rows) if (told := row.pop("fault"))}
    if faults:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in faults.items())
        raise RefusedError(
            f"{what}: failed on rank(s) {list(faults)} of {ranks.size}; {told}"
        ) from fault
    check_equal(dict(enumerate(rows)), what)
    return rows


def step(ranks: Ranks, do: Callable[[], None], *, what: str, timeout_s: float) -> None:
    """Does something on every rank: an error of one is an error of all; collective.

    Args:
        ranks: the group.
        do: the rank's own part; its OSError and RuntimeError are told to all.
        what: the step, for errors.
        timeout_s: seconds to wait for the slowest rank.

    Raises:
        RefusedError: a rank's part failed.
        ReplicaSyncError: a rank is missing.
    """
    fault: Exception | None = None
    try:
        do()
    except (OSError, RuntimeError) as error:
        fault = error
    agree(ranks, {}, what=what, timeout_s=timeout_s, fault=fault)


def check_equal(rows: Mapping[int, Mapping[str, Any]], what: str) -> None:
    """Raises where ranks hold different facts.

    Args:
        rows: rank -> its facts; the same names on all.
        what: the operation, for errors.

    Raises:
        ReplicaSyncError: names the first fact that differs, with the values of all ranks.

    Example:
        >>> check_equal({0: {"bytes": 8}, 1: {"bytes": 4}}, "arena")
        Traceback (most recent call last):
        ...
        relibra_kernels.errors.ReplicaSyncError: arena: need the same bytes on all ranks, got \
rank 0: 8, rank 1: 4
    """
    for name in next(iter(rows.values())):
        values = {rank: row[name] for rank, row in rows.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise ReplicaSyncError(f"{what}: need the same {name} on all ranks, got {shown}")


def _has_cpu_backend(group: dist.ProcessGroup) -> bool:
    return "cpu" in str(dist.get_backend_config(group)).split(":")[0]


def _send_to_all(
    ranks: Ranks, mine: torch.Tensor, what: str, timeout_s: float
) -> list[torch.Tensor]:
    """One message to and from every peer, waited for one by one, so that each absence is seen."""
    deadline = time.monotonic() + timeout_s
    parts = [torch.empty_like(mine) for _ in range(ranks.size)]
    parts[ranks.rank] = mine
    peers = [rank for rank in range(ranks.size) if rank != ranks.rank]
    works: list[tuple[int, dist.Work | None]] = []
    missing: dict[int, str] = {}
    for peer in peers:
        try:
            receive = dist.irecv(parts[peer], group=ranks.group, group_src=peer, tag=_TAG)
            send = dist.isend(mine, group=ranks.group, group_dst=peer, tag=_TAG)
            works += [(peer, receive), (peer, send)]
        except RuntimeError as error:  # its process is gone
            missing[peer] = str(error)
    for peer, work in works:
        left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            if work is not None and peer not in missing:
                work.wait(left)
        except RuntimeError as error:
            missing[peer] = str(error)
    if missing:
        first = next(iter(missing.values())).splitlines()[0][:200]
        raise ReplicaSyncError(
            f"{what}: rank {ranks.rank} of {ranks.size} waited {timeout_s:g} s in vain for "
            f"rank(s) {sorted(missing)} ({first})"
        )
    return parts


def _gather_on_device(ranks: Ranks, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
    sent = mine.to(torch.device("cuda", torch.cuda.current_device()))
    parts = [torch.empty_like(sent) for _ in range(ranks.size)]
    with ranks.naming_errors("message exchange", what):
        dist.all_gather(parts, sent, group=ranks.group)
    return [part.cpu() for part in parts]
