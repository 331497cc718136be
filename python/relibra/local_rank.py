"""One virtual rank of `relibra.local_runtime`: a runtime whose peers are in this process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from relibra.agreement import check_agreement
from relibra.domain_sync import DomainSync
from relibra.local_attachment import ShardAttachment
from relibra.runtime import Runtime
from relibra_kernels.transport.heap_local import LocalArena, LocalHeap
from relibra_kernels.transport.lockstep import Lockstep
from relibra_kernels.transport.lockstep_group import LocalDispatch, LocalGroup, LocalReplica
from relibra_kernels.transport.provider_choice import ProviderOptions
from relibra_kernels.transport.sync_engine_local import InlineEngine, LocalEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch import nn

    from relibra.topology import Topology
    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.symmetric_heap import Arena
    from relibra_kernels.transport.sync_engine import SyncEngine

_PATIENCE_S = 1800.0  # of a device that does not get on; ranks that wait in vain tell at once


class LocalWorld:
    """What the virtual ranks of a process share.

    Args:
        topology: node of every rank; replicas stay inside a node.

    Attributes:
        lockstep: runs the ranks.
        device: of the models.
        group: collectives of all ranks.
    """

    def __init__(self, topology: Topology) -> None:
        self.lockstep = Lockstep(topology.num_ranks)
        self.device = torch.device("cpu")
        self.renew()

    def renew(self) -> None:
        """Nothing was posted and no memory made so far."""
        self.group = LocalGroup(self.lockstep)
        self._num_heaps = [0] * self.lockstep.num_ranks
        self._heaps: dict[tuple[tuple[int, ...], int], dict[int, LocalHeap]] = {}

    def make_heap(self, domain: tuple[int, ...], rank: int) -> LocalHeap:
        """The next heap of a rank; the same number of every rank of a domain is one heap."""
        key = (domain, self._num_heaps[rank])
        self._num_heaps[rank] += 1
        if key not in self._heaps:
            made = LocalHeap.ranks(len(domain), self.device)
            self._heaps[key] = dict(zip(domain, made, strict=True))
        heap = self._heaps[key].pop(rank)
        if not self._heaps[key]:  # all ranks have theirs
            del self._heaps[key]
        return heap


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """A virtual rank.

    Attributes:
        world: that it is in.
        rank: its number.
    """

    world: LocalWorld
    rank: int


class LocalRank(Runtime):
    """The runtime of one virtual rank; code of a rank uses it as that of a process.

    Args:
        place: the rank.
        topology: of all ranks.
        options: as those of `relibra.Runtime`.
    """

    def __init__(self, place: RankPlace, topology: Topology, **options: Any) -> None:
        self._world, self._number = place.world, place.rank
        super().__init__(None, topology, transport="local", **options)

    def share_streams(self, other: Runtime) -> None:
        """Tables are built on the same side stream, so that rows can travel between ranks."""
        self.table_memory.share_streams(other.table_memory)

    def reconnect(self) -> None:
        """After `_disconnect`, in a world that was renewed."""
        self._connect(None)
        for attachment in self.attachments.values():
            self._prepare_layers(attachment)

    def agree(
        self, facts: Mapping[str, int | str], *, what: str, fault: Exception | None = None
    ) -> None:
        """As `relibra.agreement.agree`, between virtual ranks."""
        told = None if fault is None else f"{type(fault).__name__}: {fault}"
        mine = (told, tuple(facts), tuple(facts.values()))
        with self.noting_failure():
            found = self._world.group.gather(self.rank, mine, what)
        if fault is not None:
            raise fault
        texts, names, values = zip(*found, strict=True)
        check_agreement(what, texts, names[0], values)

    def gather(self, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        """``x`` of every rank, by rank."""
        with self.noting_failure():
            return self._world.group.gather(self.rank, x, what)

    def _place(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        return self._world.lockstep.num_ranks, self._number

    def _new_attachment(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str
    ) -> ShardAttachment:
        return ShardAttachment(self, model, optimizer, name)

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        before = self.domain_sync
        super()._connect(None)
        self.dispatcher.flat = LocalDispatch(self._world.group, self.rank)
        self.replicas = LocalReplica(self._world.group, self.rank)
        domain = self.topology.ranks_of_node(self.topology.rank_to_node[self.rank])
        if len(domain) == 1 or (self.replica_slots == 0 and self.dispatch != "peer"):
            return
        sync = DomainSync(
            lambda: self._world.make_heap(domain, self.rank),
            lambda arena, layout: self._engine(arena, layout, domain),
            domain,
            self.rank,
            self.replica_slots,
            timeout_s=self.timeout_s or _PATIENCE_S,
            generation=1 + (self._generation - 1) % 65535,
        )
        sync.counts = self.replica_counts
        if before is not None:
            sync.hooks, sync.log = before.hooks, before.log
        self.domain_sync = sync
        self._connect_rows()

    def _connect_rows(self) -> None:
        if self.domain_sync is not None:
            super()._connect_rows()

    def _engine(self, arena: Arena, layout: AnyLayout, domain: tuple[int, ...]) -> SyncEngine:
        seconds = float(self.timeout_s or _PATIENCE_S)
        if self._world.device.type == "cuda":
            from relibra_kernels.transport.sync_engine_cuda import CudaEngine

            cuda = (self.transport_options or ProviderOptions()).cuda
            inner: SyncEngine = CudaEngine(arena, layout, timeout_s=seconds, options=cuda)
        else:
            inner = InlineEngine(arena, layout, timeout_s=seconds)
        assert isinstance(arena, LocalArena)
        return LocalEngine(inner, self._world.lockstep, arena.words, domain)
