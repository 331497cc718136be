"""Moves the data of one use of one layer over the transports of a runtime."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from relibra.balanced_moe import MoEHandle
    from relibra.rank_tables import LayerTables
    from relibra.runtime import Runtime
    from relibra.use import Use


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
        buffers = self.runtime.weight_buffers(weights)
        pairs = list(zip(weights, buffers, strict=True))
        with self.runtime.noting_failure():
            self.runtime.replicas.push(
                pairs, tables.push_list, tables.pull_list, what=f"{what}: push"
            )
        return buffers

    def replica_grads(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The runtime's gradient slots."""
        return self.runtime.grad_buffers(weights)

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
