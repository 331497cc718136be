"""The process groups of a runtime and all that hangs on them: made, given up, and made again."""

from __future__ import annotations

import abc
import os
import traceback
from typing import TYPE_CHECKING

import torch.distributed as dist

from relibra.agreement import agree, group_timeout, own_group
from relibra.departures import Departures
from relibra.dispatcher import Dispatcher, hop_ranks, make_peer
from relibra.runtime_replicas import RuntimeReplicas
from relibra.runtime_transport import make_domain_sync
from relibra_kernels.checks import check_process
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.replica import DistReplica
from relibra_kernels.transport.row_arena import CHANNELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from relibra.attachment import Attachment
    from relibra.table_ring import TableMemory
    from relibra.topology import Topology
    from relibra_kernels.transport.provider_choice import ProviderOptions


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
    transport_options: ProviderOptions | None = None
    attachments: dict[str, Attachment]
    table_memory: TableMemory
    group: dist.ProcessGroup | None = None
    failure: Exception | None = None
    _is_suspended = _closed = False
    _generation = 0
    _process = 0

    @abc.abstractmethod
    def agree(
        self, facts: Mapping[str, int | str], *, what: str, fault: Exception | None = None
    ) -> None:
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
        for side in (self.dispatcher.peer, self.domain_sync):
            if side is not None:
                side.meet()
        self._disconnect()
        self._is_suspended = True

    def resume(self, group: dist.ProcessGroup | None) -> None:
        """Goes on over a new process group; collective.

        Where that fails the runtime stays suspended.

        Args:
            group: as many ranks as before, in the same order.

        Raises:
            RuntimeError: the runtime is not suspended, or an earlier call failed in a collective.
            ValueError: another number of ranks, or another rank here.
            ReplicaSyncError: a rank did not take part in time.
        """
        if self._closed or not self._is_suspended:
            raise RuntimeError("resume: need a suspended runtime, got one that is not")
        if self.failure is not None:
            self.require_open()
        size, rank = self._place(group)
        if (size, rank) != (self.num_ranks, self.rank):
            raise ValueError(
                f"group: need rank {self.rank} of {self.num_ranks} as before, got rank {rank} of "
                f"{size}"
            )
        with self.noting_failure():
            self._connect(group)
        for attachment in self.attachments.values():
            self._prepare_layers(attachment)
        self._is_suspended = False  # not before: half a connection moves nothing

    def require_open(self) -> None:
        """Raise unless the runtime can work.

        Raises:
            RuntimeError: it was closed, is suspended, or failed, or this is a forked child, to
                which threads and process groups do not pass on.
        """
        if self._closed:
            raise RuntimeError("the runtime is closed; make a new one")
        self.require_process()
        if self.failure is not None:
            raise RuntimeError(
                f"the runtime failed before ({self.failure}); make a new one"
            ) from self.failure
        if self._is_suspended:
            raise RuntimeError("the runtime is suspended; call resume(group) first")

    def require_process(self) -> None:
        """Raise in a forked child of the process that connected the runtime, which would hang.

        Raises:
            RuntimeError: that is so; names both processes.
        """
        if self.num_ranks > 1:
            check_process("the runtime", self._process)

    @abc.abstractmethod
    def _new_attachment(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str
    ) -> Attachment:
        """The model under this kind of runtime."""

    def _attached(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str
    ) -> Attachment:
        """A model with its buffers, on all ranks or on none; collective between processes."""
        attachment: Attachment | None = None
        fault: Exception | None = None
        facts = dict[str, int | str]()
        try:
            if name in self.attachments:
                raise ValueError(f"name: {name!r} is attached already; need a new name")
            attachment = self._new_attachment(model, optimizer, name)
            facts = attachment.facts()
            if self.domain_sync is None:  # memory of this rank alone
                self._prepare_layers(attachment)
        except Exception as error:  # whatever it is, the peers must hear of it
            fault = error
        try:
            with self.noting_failure():
                agree(self.group, facts, what="attach", fault=fault, timeout_s=self.timeout_s)
            assert attachment is not None
            if self.domain_sync is not None:
                self._prepare_layers(attachment)
        except BaseException:
            if attachment is not None:
                attachment.release()
            raise
        return attachment

    def _place(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        """Number of EP ranks, and this one."""
        ranks = Ranks.of(group)
        return ranks.size, ranks.rank

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        """Transports over a group; collective with a time-out of its own or symmetric memory."""
        self._process = os.getpid()  # whose threads and groups these are
        self.group, self._groups = group, list[dist.ProcessGroup]()
        if group is not None and self.timeout_s is not None:
            self.group = own_group(group, self.timeout_s)
            self._groups.append(self.group)
        self.checks_order = self.group is not None and dist.get_backend(self.group) == "gloo"
        hops = hop_ranks(self.dispatch, self.topology, self.rank)
        self.dispatcher = Dispatcher(self.group, hops, self.timeout_s)
        self.replicas = DistReplica(self.group)
        self.departures = Departures(self.group, self._patience_s())
        self._generation += 1
        made = make_domain_sync(
            self.transport,
            self.group,
            self.topology,
            self.rank,
            self.replica_slots,
            self.timeout_s,
            self._groups,
            generation=self._generation,
            for_rows=self.dispatch == "peer",
            options=self.transport_options,
        )
        if made is not None:
            made.counts = self.replica_counts
            if self.domain_sync is not None:  # of before a sleep
                made.hooks, made.log = self.domain_sync.hooks, self.domain_sync.log
        self.domain_sync = made
        self._connect_rows()

    def _connect_rows(self) -> None:
        """Peer dispatch over the memory of the replicas."""
        try:
            self.dispatcher.peer = make_peer(
                self.dispatch, self.num_ranks, self.domain_sync, self.transport
            )
        except ValueError:  # on all ranks
            self._disconnect()
            raise

    def reserve_rows(self, needs: Mapping[str, int], what: str) -> int:
        """Receive buffers of peer dispatch for a step; collective with ``dispatch="peer"``.

        Args:
            needs: channel -> bytes of a buffer, equal on all ranks.
            what: the step.

        Returns:
            Bytes of all buffers on this rank; 0 with other dispatch.

        Raises:
            PlanError: the ranks do not agree on the sizes; names them, on every rank.
            ReplicaSyncError: no memory, or a rank did not take part in time.
        """
        peer = self.dispatcher.peer
        if peer is None:
            return 0
        sizes = zip(CHANNELS, peer.grown(needs).channel_bytes, strict=True)
        facts = {f"bytes of a receive buffer of channel {name!r}": size for name, size in sizes}
        self.agree(facts, what=f"{what}: receive buffers")
        with self.noting_failure():
            return peer.reserve(needs)

    def _patience_s(self) -> float:
        """Seconds that a collective of this runtime waits."""
        timeout = None if self.group is None else group_timeout(self.group)
        return 1.0 if timeout is None else timeout.total_seconds()

    def _disconnect(self) -> None:
        """Frees buffers and the groups that were made here."""
        self.buffers.clear()
        self.table_memory.clear()
        if self.dispatcher.peer is not None:
            self.dispatcher.peer.close(peers_alive=self.failure is None)
        if self.domain_sync is not None:
            self.domain_sync.close(peers_alive=self.failure is None)
            if self.failure is not None:  # its frames hold views of that memory
                traceback.clear_frames(self.failure.__traceback__)
        is_own = self._process == os.getpid()
        if is_own and self.failure is None and dist.is_initialized():
            for group in (*self.dispatcher.groups(), *self._groups[::-1]):
                dist.destroy_process_group(group)
        self.group, self._groups = None, []
        self.dispatcher, self.replicas = Dispatcher(None, None, None), DistReplica(None)
        self.departures = Departures(None)
