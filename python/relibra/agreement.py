"""Collective agreement: either every rank goes on, or every rank raises the same way.

A rank that finds a fault of its own must not leave its peers waiting in the next collective, so
faults found between collectives are exchanged here before anybody raises.
"""

from __future__ import annotations

import datetime
import json
import secrets
import zlib
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from relibra.load_matrix import LoadMatrix
from relibra_kernels.errors import PlanError, ReplicaSyncError
from relibra_kernels.transport.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MESSAGE_BYTES = 8192  # of an agreement
_FAULT_BYTES, _VALUE_BYTES = 1024, 320  # of texts in it
_LISTED_RANKS = 16  # in a message about values that differ


def own_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """A group over the same ranks with a time-out of its own; collective over ``group``.

    ``dist.new_group`` needs every rank of the world, or else names the group by its ranks and by
    how many groups this process has: a group made again after the first was destroyed would find
    the addresses of the first, and ranks with different histories would never meet. So the ranks
    agree on a name that was never used.

    Args:
        group: ranks and backend.
        timeout_s: seconds that a collective of the new group waits, more than 0.

    Raises:
        ReplicaSyncError: a rank did not take part in time.
    """
    what = "making the runtime's group"
    wait_for_all(group, timeout_s, what)
    members = list(range(dist.get_world_size(group)))
    timeout = datetime.timedelta(seconds=timeout_s)
    name = f"relibra-{_new_number(group, what):x}"
    return _make_groups(group, [(members, name)], timeout, what)[0]


def grid_groups(
    group: dist.ProcessGroup,
    members: tuple[list[int], list[int]],
    names: tuple[str, str],
    timeout_s: float | None,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The row and the column of this rank in a grid of the ranks of ``group``; collective over it.

    Args:
        group: ranks and backend.
        members: ranks inside ``group`` of each of the two groups, in the order they shall have.
        names: of the two, equal on their members and different elsewhere.
        timeout_s: seconds that a collective of the new groups waits, None as ``group``.

    Raises:
        ReplicaSyncError: a rank did not take part in time.
    """
    what = "making the groups of a two-hop dispatch"
    wait_for_all(group, timeout_s, what)
    number = _new_number(group, what)
    timeout = group_timeout(group)
    if timeout_s is not None:
        timeout = datetime.timedelta(seconds=timeout_s)
    named = zip(members, names, strict=True)
    parts = [(part, f"relibra-{number:x}-{name}") for part, name in named]
    first, second = _make_groups(group, parts, timeout, what)
    return first, second


def node_group(
    group: dist.ProcessGroup, members: Sequence[int], name: str, timeout_s: float | None
) -> dist.ProcessGroup:
    """The ranks of this rank's node; collective over ``group``.

    Args:
        group: ranks and backend.
        members: ranks inside ``group``, ascending.
        name: equal on the members and different elsewhere.
        timeout_s: seconds that a collective of the new group waits, None as ``group``.

    Returns:
        ``group`` itself where it has no other ranks.

    Raises:
        ReplicaSyncError: a rank did not take part in time.
    """
    if len(members) == dist.get_world_size(group):
        return group
    what = "making the groups of the nodes"
    wait_for_all(group, timeout_s, what)
    number = _new_number(group, what)
    timeout = group_timeout(group)
    if timeout_s is not None:
        timeout = datetime.timedelta(seconds=timeout_s)
    return _make_groups(group, [(list(members), f"relibra-{number:x}-{name}")], timeout, what)[0]


def _new_number(group: dist.ProcessGroup, what: str) -> int:
    """The same random number on all ranks of a group."""
    mine = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    return int(gather_tensor(mine, group, what)[0])


def _make_groups(
    group: dist.ProcessGroup,
    parts: Sequence[tuple[list[int], str]],
    timeout: datetime.timedelta | None,
    what: str,
) -> list[dist.ProcessGroup]:
    """Groups over members of ``group`` with names of their own; all ranks have them on return.

    A rank that were done with its group before a slower peer had connected would break the
    connection that the peer still waits for.
    """
    made = [_make_group(group, members, name, timeout, what) for members, name in parts]
    wait_for_all(group, None if timeout is None else timeout.total_seconds(), what)
    return made


def _make_group(
    group: dist.ProcessGroup,
    members: list[int],
    name: str,
    timeout: datetime.timedelta | None,
    what: str,
) -> dist.ProcessGroup:
    """A group over some ranks of ``group``, in the given order, under a name never used."""
    ranks = [dist.get_process_group_ranks(group)[member] for member in members]
    try:
        made: dist.ProcessGroup = distributed_c10d._new_process_group_helper(
            len(ranks),
            members.index(dist.get_rank(group)),
            ranks,
            dist.Backend(dist.get_backend(group)),
            distributed_c10d._get_default_store(),
            cast("Any", name),
            timeout=timeout,
        )[0]
    except RuntimeError as error:
        raise sync_error(what, group, error) from error
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The time-out a group was made with, None where torch does not tell."""
    options = getattr(group._get_backend(wire_device(group)), "options", None)
    return getattr(options, "_timeout", None)


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small control tensors of a collective must live: CPU for gloo, CUDA for NCCL."""
    if group is None or "cpu" in str(dist.get_backend_config(group)).split(":")[0]:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_tensor(
    x: torch.Tensor, group: dist.ProcessGroup | None, what: str
) -> list[torch.Tensor]:
    """``x`` of every rank, by rank; all must have the same shape.

    Raises:
        ReplicaSyncError: a rank did not take part within the group's time-out.
    """
    if group is None:
        return [x]
    mine = x.to(wire_device(group)).contiguous()
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(out, mine, group=group)
    except RuntimeError as error:
        raise sync_error(what, group, error) from error
    return [part.to(x.device) for part in out]


def stack_loads(own: LoadMatrix, group: dist.ProcessGroup | None) -> LoadMatrix:
    """Counts of all ranks, from each rank's own of the same sizes.

    Args:
        own: `[M, L, 1, E]`, not gathered.
        group: of the G ranks, None for one rank.

    Returns:
        `[M, L, G, E]`, equal on all ranks.

    Raises:
        PlanError: ranks differ in their optimizer steps.
        ReplicaSyncError: a rank did not take part within the group's time-out.
    """
    padding = own.padding_MLGE if own.padding_MLGE is not None else own.rows_MLGE * 0
    packed = [own.rows_MLGE, padding, own.num_unknown_ML, own.optimizer_step_M]
    flat = torch.cat([torch.tensor(part, dtype=torch.int32).reshape(-1) for part in packed])
    parts = []
    for part in gather_tensor(flat, group, "gather_loads"):
        fields = part.numpy()
        cut: list[Any] = []
        for one in packed:
            cut.append(fields[: one.size].reshape(one.shape))
            fields = fields[one.size :]
        parts.append(LoadMatrix(cut[0], cut[3], cut[1], cut[2], is_gathered=False))
    return LoadMatrix.stack(parts)


def wait_for_all(group: dist.ProcessGroup | None, timeout_s: float | None, what: str) -> None:
    """A barrier that names the ranks that did not come.

    Args:
        group: the group, None for one rank.
        timeout_s: seconds to wait, None for the group's own time-out.
        what: what is about to happen, for the message.

    Raises:
        ReplicaSyncError: somebody did not come in time.
    """
    if group is None or dist.get_backend(group) != "gloo":
        return
    # Without a number monitored_barrier waits half an hour, whatever the group was made with.
    timeout = group_timeout(group)
    if timeout_s is not None:
        timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise sync_error(what, group, error) from error


def agree(
    group: dist.ProcessGroup | None,
    facts: Mapping[str, int | str],
    *,
    what: str,
    fault: Exception | None = None,
    timeout_s: float | None = None,
) -> None:
    """Raise on every rank unless all ranks are well and hold the same facts.

    Every agreement sends messages of one size, so that ranks at different ones learn it here.

    Args:
        group: the group, None for one rank.
        facts: name -> value; the same names in the same order on every rank.
        what: the operation, for messages.
        fault: an error found by this rank alone.
        timeout_s: seconds to wait for the slowest rank, None for the group's own time-out.

    Raises:
        PlanError: another rank has a fault or is at another operation, or a fact differs; the
            message names ranks and values.
        ReplicaSyncError: a rank did not take part in time, or the fault of another rank is one.
        Exception: ``fault`` itself on the rank that has it.
    """
    if group is None:
        if fault is not None:
            raise fault
        return
    said = None if fault is None else f"{type(fault).__name__}: {fault}"
    try:
        wait_for_all(group, timeout_s, what)
        gathered = gather_tensor(_packed(what, said, [*facts.values()]), group, what)
    except ReplicaSyncError as error:
        if isinstance(fault, ReplicaSyncError):  # says more than that the ranks did not meet
            raise fault from fault.__cause__ or error
        if fault is not None:
            error.args = (f"{error}; this rank: {said}",)
        raise
    if fault is not None:
        raise fault
    rows = [json.loads(part.numpy().tobytes()) for part in gathered]
    told = [row[1] for row in rows]
    check_agreement(what, told, ["operation", *facts], [[row[0], *row[2:]] for row in rows])


def _packed(what: str, fault: str | None, values: Sequence[int | str]) -> torch.Tensor:
    """The message of one rank, uint8 of one size for all agreements."""
    said = None if fault is None else _bounded(fault, _FAULT_BYTES)
    row: list[Any] = [_bounded(what, _VALUE_BYTES), said]
    row += [_bounded(one, _VALUE_BYTES) if isinstance(one, str) else _sent(one) for one in values]
    text = json.dumps(row).encode()
    assert len(text) <= _MESSAGE_BYTES, f"{what}: too many facts for one message"
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)


def _sent(number: int) -> int | str:
    """The number; one of more than 64 bits as hexadecimal text, which has no limit of digits."""
    whole = int(number)
    return whole if whole.bit_length() <= 64 else _bounded(hex(whole), _VALUE_BYTES)


def _bounded(text: str, num_bytes: int) -> str:
    """Text that takes no more bytes as JSON; a long one is cut, with a checksum of all of it."""
    if len(json.dumps(text)) <= num_bytes:
        return text
    end = f"... (CRC-32 {zlib.crc32(text.encode(errors='replace')):08x})"
    length = num_bytes
    while len(json.dumps(text[:length] + end)) > num_bytes:
        length -= 1 + length // 8
    return text[:length] + end


def check_agreement(
    what: str,
    told: Sequence[str | None],
    names: Sequence[str],
    values_G: Sequence[Sequence[int | str]],
) -> None:
    """Raise unless all ranks are well and hold the same facts.

    Args:
        what: the operation, for messages.
        told: text of each rank's fault, None without.
        names: of the facts.
        values_G: of each rank's facts.

    Raises:
        PlanError, ReplicaSyncError: see `agree`.

    Example:
        >>> check_agreement("a step", [None, None], ["micro-batches"], [[2], [3]])
        Traceback (most recent call last):
        ...
        relibra_kernels.errors.PlanError: a step: need the same micro-batches on all ranks, got \
rank 0: 2, rank 1: 3
    """
    refused = [rank for rank, text in enumerate(told) if text is not None]
    if refused:
        text = told[refused[0]] or ""
        kind = ReplicaSyncError if text.startswith(ReplicaSyncError.__name__) else PlanError
        raise kind(f"{what}: refused by rank(s) {refused}; rank {refused[0]}: {text}")
    for name, *values in zip(names, *values_G, strict=False):  # other operations have other facts
        if len(set(values)) > 1:
            shown = _by_rank(values)
            raise PlanError(f"{what}: need the same {name} on all ranks, got {shown}")


def _by_rank(values: Sequence[int | str]) -> str:
    """Who has which value; of many ranks each different value once, the rarest first."""
    if len(values) <= _LISTED_RANKS:
        return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    ranks_of: dict[int | str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    shown = []
    for value, ranks in sorted(ranks_of.items(), key=lambda item: len(item[1]))[:_LISTED_RANKS]:
        rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        shown.append(f"rank(s) {', '.join(map(str, ranks[:8]))}{rest}: {value}")
    return ", ".join(shown)


def sync_error(what: str, group: dist.ProcessGroup, error: Exception) -> ReplicaSyncError:
    """The error of a rank whose peers did not take part in a collective.

    Args:
        what: the operation.
        group: of the ranks.
        error: what the collective raised.
    """
    ranks = Ranks.of(group)
    return ReplicaSyncError(
        f"{what}: rank {ranks.rank} of {ranks.size} waited in vain for its peers ({error})"
    )
