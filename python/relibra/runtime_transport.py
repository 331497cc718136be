"""Which memory carries the replicas of a runtime, and the process group of its domain."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relibra.agreement import group_timeout, node_group
from relibra.domain_sync import DomainSync
from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap
from relibra_kernels.transport.sync_engine import HostEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra.topology import Topology

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "dist", "cpu_shm")
_PATIENCE_S = 1800.0  # of torch.distributed, where a group does not tell its own


def make_domain_sync(
    transport: str,
    group: dist.ProcessGroup | None,
    topology: Topology,
    rank: int,
    num_slots: int,
    timeout_s: float | None,
    groups: list[dist.ProcessGroup],
    *,
    generation: int = 1,
) -> DomainSync | None:
    """Replicas over shared memory; collective for ``"cpu_shm"``.

    Args:
        transport: one of `TRANSPORTS`.
        group: of all ranks, None for one.
        topology: a domain is the ranks of a node.
        rank: this rank.
        num_slots: S.
        timeout_s: seconds of a wait; None as ``group``.
        groups: where a group that is made here is added.
        generation: of the words, another one every time that memory is made again.

    Returns:
        None where ``torch.distributed`` moves replicas, or where none can be: one rank a domain,
        no slots.

    Raises:
        ReplicaSyncError: a rank did not take part in time.
    """
    if transport in ("auto", "dist") or group is None or num_slots == 0:
        return None
    domain = topology.ranks_of_node(topology.rank_to_node[rank])
    members = node_group(group, domain, f"domain-{topology.rank_to_node[rank]}", timeout_s)
    if members is not group:
        groups.append(members)
    if len(domain) == 1:
        return None
    if timeout_s is None:
        timeout = group_timeout(group)
        timeout_s = _PATIENCE_S if timeout is None else timeout.total_seconds()
    seconds = float(timeout_s)
    return DomainSync(
        lambda: CpuShmHeap(members, timeout_s=seconds),
        lambda arena, layout: HostEngine(arena, layout, timeout_s=seconds),
        domain,
        rank,
        num_slots,
        timeout_s=seconds,
        generation=1 + (generation - 1) % 65535,
        on_abort=_aborter(group),
    )


def _aborter(group: dist.ProcessGroup) -> Callable[[], None] | None:
    """What ends the collectives of a group that others wait in; gloo's end by their time-out."""
    if not torch.cuda.is_available():
        return None

    def abort() -> None:
        backend: Any = group._get_backend(torch.device("cuda"))
        if hasattr(backend, "abort"):
            log.error("replica synchronisation failed: aborting the process group")
            backend.abort()

    return abort
