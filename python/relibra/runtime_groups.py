"""The process groups of a runtime and all that hangs on them: made, given up, and made again."""

from __future__ import annotations

import abc
import traceback
from typing import TYPE_CHECKING

import torch.distributed as dist

from relibra.agreement import own_group
from relibra.dispatcher import Dispatcher, hop_ranks
from relibra.runtime_replicas import RuntimeReplicas
from relibra.runtime_transport import make_domain_sync
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.replica import DistReplica

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.attachment import Attachment
    from relibra.table_ring import TableMemory
    from relibra.topology import Topology


class RuntimeGroups(RuntimeReplicas):
    """The part of `relibra.Runtime` that talks to its peers.

    Attributes:
        group: of all ranks, None for one rank, and while suspended.
        checks_order: whether every use is checked against the other ranks at once (gloo).
        dispatcher, replicas: transports of tokens and, over ``torch.distributed``, of replicas.
        failure: what ended the runtime, None while all is well.
    """

    num_ranks: int
    rank: int
    topology: Topology
    transport: str
    dispatch: str
    replica_slots: int
    timeout_s: float | None
    attachments: dict[str, Attachment]
    table_memory: TableMemory
    group: dist.ProcessGroup | None = None
    failure: Exception | None = None
    _is_suspended = _closed = False
    _generation = 0

    @abc.abstractmethod
    def agree(self, facts: Mapping[str, int], *, what: str, fault: Exception | None = None) -> None:
        """Agrees with all ranks; see `relibra.Runtime`."""

    def suspend(self) -> None:
        """Frees replica memory and forgets process groups, between steps; collective.

        Models stay attached. Until `resume` the runtime refuses all work, and its groups may be
        destroyed, as in reinforcement learning where training sleeps during every rollout.

        Raises:
            RuntimeError: a training step is active, or the runtime was closed, suspended or failed.
            ReplicaSyncError: a rank did not take part in time.
        """
        self.require_open()
        fault: Exception | None = None
        for name, attachment in self.attachments.items():
            if attachment.active is not None:
                fault = RuntimeError(f"suspend: model {name!r} is in a training step")
        self.agree({}, what="suspend", fault=fault)
        self._disconnect()
        self._is_suspended = True

    def resume(self, group: dist.ProcessGroup | None) -> None:
        """Goes on over a new process group; collective.

        Args:
            group: as many ranks as before, in the same order.

        Raises:
            RuntimeError: the runtime is not suspended.
            ValueError: another number of ranks, or another rank here.
            ReplicaSyncError: a rank did not take part in time.
        """
        if self._closed or not self._is_suspended:
            raise RuntimeError("resume: need a suspended runtime, got one that is not")
        ranks = Ranks.of(group)
        if (ranks.size, ranks.rank) != (self.num_ranks, self.rank):
            raise ValueError(
                f"group: need rank {self.rank} of {self.num_ranks} as before, got rank "
                f"{ranks.rank} of {ranks.size}"
            )
        self._is_suspended = False
        self._connect(group)
        for attachment in self.attachments.values():
            for moe in attachment.layers.values():
                self._prepare(moe.expert_weights.slots())

    def require_open(self) -> None:
        """Raise unless the runtime can work.

        Raises:
            RuntimeError: it was closed, is suspended, or failed.
        """
        if self._closed:
            raise RuntimeError("the runtime is closed; make a new one")
        if self._is_suspended:
            raise RuntimeError("the runtime is suspended; call resume(group) first")
        if self.failure is not None:
            raise RuntimeError(
                f"the runtime failed before ({self.failure}); make a new one"
            ) from self.failure

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        """Transports over a group; collective with a time-out of its own or symmetric memory."""
        self.group, self._groups = group, list[dist.ProcessGroup]()
        if group is not None and self.timeout_s is not None:
            self.group = own_group(group, self.timeout_s)
            self._groups.append(self.group)
        self.checks_order = self.group is not None and dist.get_backend(self.group) == "gloo"
        hops = hop_ranks(self.dispatch, self.topology, self.rank)
        self.dispatcher = Dispatcher(self.group, hops, self.timeout_s)
        self.replicas = DistReplica(self.group)
        self._generation += 1
        before, self.domain_sync = self.domain_sync, None
        self.domain_sync = make_domain_sync(
            self.transport,
            self.group,
            self.topology,
            self.rank,
            self.replica_slots,
            self.timeout_s,
            self._groups,
            generation=self._generation,
        )
        if before is not None and self.domain_sync is not None:
            self.domain_sync.hooks, self.domain_sync.log = before.hooks, before.log

    def _disconnect(self) -> None:
        """Frees buffers and the groups that were made here."""
        self.buffers.clear()
        self.table_memory.clear()
        if self.domain_sync is not None:
            self.domain_sync.close(peers_alive=self.failure is None)
            if self.failure is not None:  # its frames hold views of that memory
                traceback.clear_frames(self.failure.__traceback__)
        if self.failure is None and dist.is_initialized():
            for group in (*self.dispatcher.groups(), *self._groups[::-1]):
                dist.destroy_process_group(group)
        self.group, self._groups = None, []
        self.dispatcher, self.replicas = Dispatcher(None, None, None), DistReplica(None)
