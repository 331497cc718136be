"""Which memory carries the replicas of a runtime, and the process group of its domain."""

from __future__ import annotations

import dataclasses
import logging
import numbers
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relibra.agreement import group_timeout, node_group
from relibra.domain_sync import DomainSync
from relibra_kernels.transport import nvshmem_library
from relibra_kernels.transport.provider_choice import ProviderOptions, choose_provider

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra.topology import Topology

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "dist", "cpu_shm", "torch_symm", "nvshmem", "local")
_PATIENCE_S = 1800.0  # of torch.distributed, where a group does not tell its own
_LONGEST_S = 1e6  # of a time-out


def check_waits(timeout_s: object, options: object) -> None:
    """Raises unless these can be the time-out and the transport options of a runtime.

    Args:
        timeout_s: seconds, None for none.
        options: of the providers, None for the defaults.

    Raises:
        TypeError, ValueError: they cannot.

    Example:
        >>> check_waits(None, None)
        >>> check_waits("5", None)
        Traceback (most recent call last):
        ...
        TypeError: timeout_s: need a number of seconds or None, got '5'
    """
    if timeout_s is not None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
            raise TypeError(f"timeout_s: need a number of seconds or None, got {timeout_s!r:.80}")
        if not 0 < float(timeout_s) <= _LONGEST_S:
            raise ValueError(
                f"timeout_s: need more than 0 and up to {_LONGEST_S:g} s, got {timeout_s}"
            )
    if options is not None and not isinstance(options, ProviderOptions):
        raise TypeError(f"transport_options: need ProviderOptions or None, got {options!r:.80}")


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
    for_rows: bool = False,
    options: ProviderOptions | None = None,
) -> DomainSync | None:
    """Replicas over symmetric memory; collective but for ``"dist"``.

    Args:
        transport: one of `TRANSPORTS`.
        group: of all ranks, None for one.
        topology: a domain is the ranks of a node.
        rank: this rank.
        num_slots: S.
        timeout_s: seconds of a wait; None as ``group``.
        groups: where a group that is made here is added.
        generation: of the words, another one every time that memory is made again.
        for_rows: whether dispatched rows use the memory too, so that it is needed without slots.
        options: of the providers, None for the defaults; ``timeout_s`` comes from above.

    Returns:
        None where ``torch.distributed`` moves replicas, or where none can be: one rank a domain,
        no slots.

    Raises:
        RefusedError: the named transport does not work on some rank; names it and the reason.
        ReplicaSyncError: a rank did not take part in time.
    """
    if transport == "dist" or group is None or (num_slots == 0 and not for_rows):
        return None
    device = _device(transport, group)
    if transport == "auto" and device.type == "cpu":
        log.info("replica transport 'dist': no GPUs of this group")
        return None
    domain = topology.ranks_of_node(topology.rank_to_node[rank])
    members = node_group(group, domain, f"domain-{topology.rank_to_node[rank]}", timeout_s)
    if members is not group:
        groups.append(members)
    if timeout_s is None:
        timeout = group_timeout(group)
        timeout_s = _PATIENCE_S if timeout is None else timeout.total_seconds()
    seconds = float(timeout_s)
    options = dataclasses.replace(options or ProviderOptions(), timeout_s=seconds)
    choice = choose_provider(transport, members, device, options, group)
    if choice.make_heap is None or choice.make_engine is None or len(domain) == 1:
        return None
    return DomainSync(
        choice.make_heap,
        choice.make_engine,
        domain,
        rank,
        num_slots,
        timeout_s=seconds,
        generation=1 + (generation - 1) % 65535,
        on_abort=_aborter(group),
    )


def end_transport(*, peers_alive: bool) -> None:
    """The last act of a runtime: ends NVSHMEM if it was started here and nobody uses it any more.

    Args:
        peers_alive: False after a failure: leaves the instance, since ending it is collective.

    Raises:
        RuntimeError: NVSHMEM refused.
    """
    if peers_alive:
        nvshmem_library.finalize_unused()


def _device(transport: str, group: dist.ProcessGroup) -> torch.device:
    """Where replicas will live: on GPUs if the group has them, or if the transport needs them."""
    has_gpus = "nccl" in str(dist.get_backend_config(group))
    wanted = transport in ("torch_symm", "nvshmem") or (transport == "auto" and has_gpus)
    if wanted and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
