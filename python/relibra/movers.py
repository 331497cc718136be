"""Moves the data of one use of one layer over the transports of a runtime."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.row_arena import OUT_CHANNELS
from relibra_kernels.transport.row_sync import RowWay
from relibra_kernels.transport.sync_report import UseKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from relibra.balanced_moe import MoEHandle
    from relibra.rank_tables import Exchange, LayerTables
    from relibra.runtime import Runtime
    from relibra.use import Use
    from relibra_kernels.transport.dispatch import Arrival, DispatchTransport, FlatDispatch
    from relibra_kernels.transport.two_hop import Relay


class ReplicaBuffers:
    """Replica slots that all layers of a runtime share, made when first used.

    Layers whose experts have other fields, shapes or dtypes have a buffer of their own.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._buffers: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}

    def weights(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Slots ``[S, ...]`` by field, for home weights ``[H, ...]`` of these shapes."""
        return self._views("weight", like, {name: w.dtype for name, w in like.items()})

    def grads(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradient slots ``[S, ...]`` by field, for home weights of these shapes."""
        dtypes = {name: accumulation_dtype(w.dtype) for name, w in like.items()}
        return self._views("grad", like, dtypes)

    def _views(
        self, kind: str, like: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, torch.Tensor]:
        fields = {name: (dtypes[name], tuple(w.shape[1:])) for name, w in like.items()}
        device = next(iter(like.values())).device
        key = (kind, device, *fields.items())
        if key not in self._buffers:
            layout = SlotLayout.of(fields)
            self._buffers[key] = layout.views(layout.allocate(self.num_slots, device))
        return self._buffers[key]

    def clear(self) -> None:
        """Forgets them."""
        self._buffers.clear()


@dataclasses.dataclass(slots=True)
class _NotedArrival:
    """Rows on their way; a failure of their exchange is noted in the runtime."""

    rows: Arrival
    runtime: Runtime

    def wait(self) -> torch.Tensor:
        with self.runtime.noting_failure():
            return self.rows.wait()


@dataclasses.dataclass(frozen=True)
class GroupMovers:
    """Data movement of one use of one layer over the runtime's transports."""

    runtime: Runtime
    use: Use | None
    index: int | None

    def exchange(
        self, x: torch.Tensor, send_splits: list[int], recv_splits: list[int], what: str
    ) -> torch.Tensor:
        """All-to-all of rows."""
        return self.start_exchange(x, send_splits, recv_splits, what).wait()

    def start_exchange(
        self,
        x: torch.Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        what: str,
        channel: str = "",
    ) -> Arrival:
        """`exchange` without waiting."""
        runtime = self.runtime
        with runtime.noting_failure():
            if runtime.dispatcher.peer is None or not channel:
                transport: DispatchTransport = runtime.dispatcher.flat
            else:
                transport = self._transport(channel, what)
            rows = transport.start(x, send_splits, recv_splits, what=what)
        return _NotedArrival(rows, runtime)

    def _transport(self, channel: str, what: str) -> DispatchTransport:
        """Peer dispatch for rows of a channel whose places the plan knows; else the flat one."""
        dispatcher, use, index = self.runtime.dispatcher, self.use, self.index
        assert dispatcher.peer is not None
        if use is None or index is None or use.mode != "exact":
            return dispatcher.flat
        step, key = use.step, (use.pass_, use.micro_batch, index)
        if channel in OUT_CHANNELS:
            first_G = step.splits_of(key).send_first
        elif channel == "y" and self.runtime.combine == "exact":
            first_G = step.source_of(*key).return_first_G
        else:
            first_G = step.splits_of(key).return_first
        attachment = step.attachment
        layer, name = attachment.moe_layers[index], what.rpartition(": ")[2]
        row_key = UseKey(attachment.name, *use.key, layer, name)
        return dispatcher.peer.over(RowWay(channel, row_key, first_G, step.plan.hash))

    def start_relay(self, x: torch.Tensor, relay: Relay, what: str) -> Arrival:
        """Rows over two hops."""
        with self.runtime.noting_failure():
            rows = self.runtime.dispatcher.two_hop.start(
                x, relay, what=what, backend=self.runtime.kernels
            )
        return _NotedArrival(rows, self.runtime)

    def hop_exchanges(self, what: str) -> tuple[Exchange, Exchange]:
        """All-to-all over the rail group, and inside the node."""
        with self.runtime.noting_failure():
            two_hop = self.runtime.dispatcher.two_hop

        def over(hop: FlatDispatch) -> Exchange:
            def exchange(x: torch.Tensor, send: list[int], recv: list[int]) -> torch.Tensor:
                with self.runtime.noting_failure():
                    return hop.exchange(x, send, recv, what=what)

            return exchange

        return over(two_hop.rail), over(two_hop.node)

    def push(
        self, weights: Mapping[str, torch.Tensor], tables: LayerTables, what: str
    ) -> dict[str, torch.Tensor]:
        """Home weights -> replica slots."""
        sync = self.runtime.domain_sync
        if sync is not None:
            with self.runtime.noting_failure():
                return sync.push(self.use, self.index, weights, tables)
        buffers = self.runtime.buffers.weights(weights)
        pairs = [(home, buffers[name]) for name, home in weights.items()]
        since = time.perf_counter()
        with self.runtime.noting_failure():
            self.runtime.replicas.push(
                pairs, tables.push_list, tables.pull_list, what=f"{what}: push"
            )
        self._count(pairs, len(tables.push_list), since)
        return buffers

    def _count(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], num_pushes: int, since: float
    ) -> None:
        """Counts a push at the entry of a layer, which waited for all of it."""
        if self.use is None or self.index is None:
            return
        attachment = self.use.step.attachment
        counts = self.use.step.replica_counts.of(attachment.moe_layers[self.index])
        counts.at_entry += 1
        counts.pushed_bytes += num_pushes * sum(slot[0].nbytes for _, slot in pairs if len(slot))
        is_host = all(slot.device.type == "cpu" for _, slot in pairs)
        # of the device nobody keeps the time
        counts.waited_s += time.perf_counter() - since if is_host else math.nan

    def release_weights(self) -> None:
        """The replica slots of the last push may be overwritten."""
        if self.runtime.domain_sync is not None:
            with self.runtime.noting_failure():
                self.runtime.domain_sync.release_weights(self.use)

    def replica_grads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The runtime's gradient slots."""
        sync = self.runtime.domain_sync
        if sync is not None:
            with self.runtime.noting_failure():
                return sync.grad_slots(self.use, self.index, weights)
        return self.runtime.buffers.grads(weights)

    def reduce(
        self,
        replica_grads: Mapping[str, torch.Tensor],
        home_grads: Mapping[str, torch.Tensor],
        tables: LayerTables,
        what: str,
    ) -> None:
        """Replica gradients -> home gradients."""
        sync, may_lag = self.runtime.domain_sync, self.runtime.grad_mode == "main_grad"
        if sync is not None:
            with self.runtime.noting_failure():
                sync.reduce(self.use, self.index, home_grads, may_lag=may_lag)
            return
        pairs = [(replica, home_grads[name]) for name, replica in replica_grads.items()]
        with self.runtime.noting_failure():
            self.runtime.replicas.reduce(
                pairs, tables.push_list, tables.pull_list, what=f"{what}: home-reduce"
            )

    def note_stage(self, stage: str, *, is_open: bool) -> None:
        """Notes a stage handle that must be used before the step ends."""
        if self.use is not None:
            self.use.step.note_stage(stage, is_open=is_open)

    def enter_experts(self, handle: MoEHandle, detail: str) -> None:
        """Notes options and fields: other ones on another rank would mix up its collectives."""
        self._set_direction("forward")
        self._note("experts", detail)

    def enter_backward(self, handle: MoEHandle, detail: str) -> None:
        """Tells recomputed layers of this backward which use they belong to."""
        self._set_direction("backward")
        if self.use is not None:
            self.use.step.require_open(handle.what)
            self.use.step.attachment.enter_task(self.use)
        self._note("backward", detail)

    def _set_direction(self, direction: str) -> None:
        if self.runtime.domain_sync is not None:
            self.runtime.domain_sync.direction = direction

    def _note(self, stage: str, detail: str) -> None:
        if self.use is not None:
            layer = self.use.step.attachment.moe_layers[self.index or 0]
            self.use.step.note(stage, self.use, layer, detail)

    def leave_backward(self, handle: MoEHandle) -> None:
        """The tables of this use of this layer are not needed again."""
        if self.use is not None and self.index is not None:
            self.use.step.release(self.use, self.index)
