"""Moves the data of one use of one layer over the transports of a runtime."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from relibra_kernels.reference.combine import accumulation_dtype

if TYPE_CHECKING:
    from relibra.balanced_moe import MoEHandle
    from relibra.rank_tables import LayerTables
    from relibra.runtime import Runtime
    from relibra.use import Use


class ReplicaBuffers:
    """Replica slots that all layers of a runtime share, made when first used.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def weights(self, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Slots ``[S, ...]`` for weights of these shapes."""
        return tuple(self._buffer("weight", w, w.dtype) for w in like)

    def grads(self, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Gradient slots ``[S, ...]`` for weights of these shapes."""
        return tuple(self._buffer("grad", w, accumulation_dtype(w.dtype)) for w in like)

    def _buffer(self, kind: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key = (kind, tuple(weight.shape[1:]), dtype, weight.device)
        if key not in self._buffers:
            shape = (self.num_slots, *weight.shape[1:])
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=weight.device)
        return self._buffers[key]

    def clear(self) -> None:
        """Forgets them."""
        self._buffers.clear()


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
        with self.runtime.noting_failure():
            out: torch.Tensor = self.runtime.dispatcher.exchange(
                x, send_splits, recv_splits, what=what
            )
            return out

    def push(
        self, weights: tuple[torch.Tensor, ...], tables: LayerTables, what: str
    ) -> tuple[torch.Tensor, ...]:
        """Home weights -> replica slots."""
        buffers = self.runtime.buffers.weights(weights)
        pairs = list(zip(weights, buffers, strict=True))
        with self.runtime.noting_failure():
            self.runtime.replicas.push(
                pairs, tables.push_list, tables.pull_list, what=f"{what}: push"
            )
        return buffers

    def replica_grads(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The runtime's gradient slots."""
        return self.runtime.buffers.grads(weights)

    def reduce(
        self,
        replica_grads: tuple[torch.Tensor, ...],
        home_grads: tuple[torch.Tensor, ...],
        tables: LayerTables,
        what: str,
    ) -> None:
        """Replica gradients -> home gradients."""
        pairs = list(zip(replica_grads, home_grads, strict=True))
        with self.runtime.noting_failure():
            self.runtime.replicas.reduce(
                pairs, tables.push_list, tables.pull_list, what=f"{what}: home-reduce"
            )

    def enter_backward(self, handle: MoEHandle) -> None:
        """Tells recomputed layers of this backward which use they belong to."""
        if self.use is not None:
            self.use.step.require_open(handle.what)
            self.use.step.attachment.enter_task(self.use)
            layer = self.use.step.attachment.moe_layers[self.index or 0]
            self.use.step.note("backward", self.use, layer)

    def leave_backward(self, handle: MoEHandle) -> None:
        """The tables of this use of this layer are not needed again."""
        if self.use is not None and self.index is not None:
            self.use.step.release(self.use, self.index)
