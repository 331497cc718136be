"""Which transport carries replica weights and gradients, and why not a better one.

``auto`` takes the first that works on all ranks: ``torch_symm``, ``nvshmem``, ``dist``. NVSHMEM is
one instance a process, so ``auto`` takes it only where an instance is there already or the user
states that nothing else in the process uses it. ``cpu_shm`` is taken by name only.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

from relibra_kernels.checks import check_choice
from relibra_kernels.transport import cuda_library_load, nvshmem_library
from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.gpu_places import GpuPlace, why_no_peer_access
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap
from relibra_kernels.transport.heap_nvshmem import NvshmemHeap
from relibra_kernels.transport.heap_torch_symm import TorchSymmHeap
from relibra_kernels.transport.provider_trial import try_provider
from relibra_kernels.transport.rank_messages import RefusedError, exchange, step
from relibra_kernels.transport.sync_engine import HostEngine
from relibra_kernels.transport.sync_engine_cuda import CudaEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    import torch.distributed as dist

    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.symmetric_heap import Arena, Heap
    from relibra_kernels.transport.sync_engine import SyncEngine

log = logging.getLogger(__name__)

AUTO_ORDER = ("torch_symm", "nvshmem", "dist")
NAMES = ("auto", *AUTO_ORDER, "cpu_shm")
_REASON_CHARS = 300

_logged: set[str] = set()


@dataclasses.dataclass(frozen=True)
class ProviderOptions:
    """How symmetric memory is made and used.

    Attributes:
        timeout_s: seconds to wait for the slowest rank.
        multicast: whether a multicast address is wanted where the hardware has one.
        nvshmem_is_free: the user's word that nothing else in the process uses NVSHMEM.
        all_pes_allocate: the user's word about a larger NVSHMEM instance, see `NvshmemHeap`.
        cuda: how GPUs copy and wait.

    Example:
        >>> ProviderOptions().multicast
        False
    """

    timeout_s: float = 60.0
    multicast: bool = False
    nvshmem_is_free: bool = False
    all_pes_allocate: bool = False
    cuda: CudaOptions = dataclasses.field(default_factory=CudaOptions)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen; the same on all ranks.

    Attributes:
        name: of the transport.
        make_heap: makes a heap over the domain, collective there; None for ``dist``.
        make_engine: runs the protocol over an arena of it; None for ``dist``.
        refused: better transport -> why it does not work here.
    """

    name: str
    make_heap: Callable[[], Heap] | None
    make_engine: Callable[[Arena, AnyLayout], SyncEngine] | None
    refused: Mapping[str, str]


def choose_provider(
    transport: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    options: ProviderOptions | None = None,
    everyone: dist.ProcessGroup | None = None,
) -> Choice:
    """Takes the named transport, or the best that works; collective.

    A provider works if it does on all ranks of all domains: it is tried before it is taken.

    Args:
        transport: ``"auto"``, ``"torch_symm"``, ``"nvshmem"``, ``"dist"`` or ``"cpu_shm"``; equal
            on all ranks.
        group: the ranks of the domain, None for one rank.
        device: of the replica storage.
        options: None for the defaults.
        everyone: the ranks of all domains, which take the same; None where this is the only one.

    Raises:
        ValueError: another name.
        RefusedError: the named transport does not work on some rank; the message says why.
        ReplicaSyncError: a rank is missing.

    Example:
        >>> import torch
        >>> choice = choose_provider("auto", None, torch.device("cpu"))
        >>> choice.name, choice.refused["torch_symm"]
        ('dist', 'rank 0: symmetric memory of PyTorch needs a CUDA device, got cpu')
    """
    check_choice("transport", transport, NAMES)
    options = options or ProviderOptions()
    ranks, refused = Ranks.of(group), dict[str, str]()
    for name in AUTO_ORDER if transport == "auto" else (transport,):
        if name == "dist":
            break
        is_auto = transport == "auto"
        reason = _why_not_in_domain(name, ranks, device, options, auto=is_auto)
        reason = _of_all_domains(name, reason, group, everyone, options.timeout_s)
        if not reason:
            choice = Choice(
                name,
                functools.partial(_make, name, ranks, device, options),
                functools.partial(_engine, name, options, options.timeout_s),
                refused,
            )
            return _announce(choice, ranks, device)
        if not is_auto:
            raise RefusedError(f"transport={name!r} does not work here: {reason}")
        refused[name] = reason
    return _announce(Choice("dist", None, None, refused), ranks, device)


def _why_not_in_domain(
    name: str, ranks: Ranks, device: torch.device, options: ProviderOptions, *, auto: bool
) -> str:
    """Why a provider does not work between the ranks of this domain; collective there."""
    reason = _why_not_everywhere(name, ranks, device, options, auto=auto)
    if reason or name == "cpu_shm" or ranks.size == 1:
        return reason
    try:
        heap = _make(name, ranks, device, options)
        try_provider(heap, functools.partial(_engine, name, options), ranks, options.timeout_s)
    except RefusedError as error:
        return str(error)
    return ""


def _of_all_domains(
    name: str,
    reason: str,
    group: dist.ProcessGroup | None,
    everyone: dist.ProcessGroup | None,
    timeout_s: float,
) -> str:
    """A reason of any domain; those of others name its first rank."""
    if everyone is None or everyone is group:
        return reason
    what, ranks = f"choosing transport {name!r}", Ranks.of(everyone)
    rows = exchange(ranks, {"why": reason[:_REASON_CHARS]}, what=what, timeout_s=timeout_s)
    return _joined([str(row["why"]) for row in rows], "domain of rank")


def _engine(
    name: str, options: ProviderOptions, timeout_s: float, arena: Arena, layout: AnyLayout
) -> SyncEngine:
    if name == "cpu_shm":
        return HostEngine(arena, layout, timeout_s=timeout_s)
    return CudaEngine(arena, layout, timeout_s=timeout_s, options=options.cuda)


def _announce(choice: Choice, ranks: Ranks, device: torch.device) -> Choice:
    """One line for each different outcome, on the first rank; a warning where a GPU is idle."""
    if choice.refused and ranks.rank == 0:
        why = "; ".join(f"{name}: {reason}" for name, reason in choice.refused.items())
        text = f"replica transport {choice.name!r}: {why}"
        if text not in _logged:
            _logged.add(text)
            log.log(logging.WARNING if device.type == "cuda" else logging.INFO, "%s", text)
    return choice


def _why_not_everywhere(
    name: str, ranks: Ranks, device: torch.device, options: ProviderOptions, *, auto: bool
) -> str:
    """Why a provider cannot be used, with the ranks where it cannot; collective."""
    what = f"choosing transport {name!r}"
    place = GpuPlace.here(device)
    mine = {
        "why": _why_not_here(name, ranks, device, options, auto)[:_REASON_CHARS],
        "place": dataclasses.astuple(place),
    }
    rows = exchange(ranks, mine, what=what, timeout_s=options.timeout_s)
    reason = _joined([str(row["why"]) for row in rows])
    if reason or name == "cpu_shm":
        return reason
    places = [GpuPlace(*row["place"]) for row in rows]
    own = {"why": why_no_peer_access(places, ranks.rank)[:_REASON_CHARS]}
    rows = exchange(ranks, own, what=what, timeout_s=options.timeout_s)
    return _joined([str(row["why"]) for row in rows])


def _joined(reasons: list[str], who: str = "rank") -> str:
    """Each different reason once, with the first rank that has it."""
    firsts: dict[str, int] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            firsts.setdefault(reason, rank)
    return ", ".join(f"{who} {rank}: {reason}" for reason, rank in firsts.items())


def _why_not_here(
    name: str, ranks: Ranks, device: torch.device, options: ProviderOptions, auto: bool
) -> str:
    """What this process alone can tell."""
    if name == "cpu_shm":
        return "" if device.type == "cpu" else f"it holds CPU memory, the device is {device}"
    heap = TorchSymmHeap if name == "torch_symm" else NvshmemHeap
    if reason := heap.why_not(device):
        return reason
    if ranks.group is None:
        return "it needs a process group"
    if reason := cuda_library_load.why_not(device):
        return reason
    if name == "nvshmem" and auto and not options.nvshmem_is_free:
        who = nvshmem_library.owner()
        if who.startswith("nobody"):
            return (
                f"NVSHMEM is one instance a process and none is running ({who}): start it, or "
                f"pass nvshmem_is_free=True if nothing else in the process uses it"
            )
    return ""


def _make(name: str, ranks: Ranks, device: torch.device, options: ProviderOptions) -> Heap:
    """The heap on every rank, or an error on every rank."""
    made: list[Heap] = []
    timeout_s, multicast = options.timeout_s, options.multicast

    def make() -> None:
        if name == "cpu_shm":
            made.append(CpuShmHeap(ranks.group, timeout_s=timeout_s))
            return
        assert ranks.group is not None  # a reason not to come here
        if name == "torch_symm":
            heap: Heap = TorchSymmHeap(
                ranks.group, device, timeout_s=timeout_s, multicast=multicast
            )
        else:
            heap = NvshmemHeap(
                ranks.group,
                device,
                timeout_s=timeout_s,
                multicast=multicast,
                all_pes_allocate=options.all_pes_allocate,
            )
        made.append(heap)

    step(ranks, make, what=f"opening {name}", timeout_s=timeout_s)
    return made[0]
