"""What a runtime does with the replicas of its models: buffers, host hooks, ends of steps."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from relibra.domain_sync import LayerHooks
from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping
    from typing import Any

    import torch

    from relibra.attachment import Attachment
    from relibra.domain_sync import DomainSync
    from relibra.movers import ReplicaBuffers


class RuntimeReplicas(abc.ABC):
    """The part of `relibra.Runtime` that looks after replicas.

    Attributes:
        domain_sync: replicas over symmetric memory; None where ``torch.distributed`` moves them.
    """

    buffers: ReplicaBuffers
    domain_sync: DomainSync | None = None

    @abc.abstractmethod
    def attachment(self, name: str | None = None) -> Attachment:
        """The attached model of that name; see `relibra.Runtime`."""

    @abc.abstractmethod
    def noting_failure(self) -> contextlib.AbstractContextManager[None]:
        """Notes a failed collective; see `relibra.Runtime`."""

    def set_layer_hooks(
        self,
        layer: int,
        *,
        weights_ready: Callable[[], Any] | None = None,
        weights_release: Callable[[Any], None] | None = None,
        starts_stage: bool = False,
        model: str | None = None,
    ) -> None:
        """Says when the weights of a layer can be pushed ahead of its entry; replaces hooks.

        Without hooks the weights must be in the layer's parameters during the whole step. With
        ``"dist"`` replicas are pushed at their layer's entry, and nothing is asked.

        Args:
            layer: decoder layer number.
            weights_ready: called on every rank at the same places: None while nobody can tell,
                then the layer is pushed at its own entry; anything else means that they are there.
            weights_release: called with an event after which the weights have been read.
            starts_stage: other layers may run between the layer before and this one, such as
                where a pipeline stage begins: nothing is pushed ahead across that border.
            model: name of the attached model, by default the first.

        Raises:
            ValueError: no such layer or model.
        """
        attachment = self.attachment(model)
        attachment.layer_of(layer)
        if self.domain_sync is not None:
            hooks = LayerHooks(weights_ready, weights_release, starts_stage)
            self.domain_sync.hooks[attachment.name, layer] = hooks

    def forget_hooks(self, model: str) -> None:
        """Forgets what `set_layer_hooks` was told of a model."""
        if self.domain_sync is not None:
            hooks = self.domain_sync.hooks
            self.domain_sync.hooks = {at: one for at, one in hooks.items() if at[0] != model}

    def _prepare(self, slots: Mapping[str, torch.Tensor]) -> None:
        """Replica buffers for layers with these home weights."""
        if self.domain_sync is None:
            self.buffers.weights(slots)
            self.buffers.grads(slots)
            return
        for name, weights in slots.items():
            if weights.device.type != "cpu":
                raise ValueError(
                    f'{name}: need weights on the CPU with transport="cpu_shm", got '
                    f"{weights.device}"
                )
        with self.noting_failure():
            self.domain_sync.prepare(slots)

    def replica_fault(self) -> Exception | None:
        """Ends the replicas' part of a step: what went wrong, None where gradients are home."""
        try:
            with self.noting_failure():
                if self.domain_sync is not None:
                    self.domain_sync.finish()
        except ReplicaSyncError as error:
            return error
        return None

    def forget_replicas(self) -> None:
        """A step ended by an error: none of its uses comes any more."""
        if self.domain_sync is not None:
            self.domain_sync.forget_step()
