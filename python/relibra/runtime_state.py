"""Weights, gradients and moments of a runtime's models in the order of their experts."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from relibra import logical_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    import torch.distributed as dist
    from torch import nn

    from relibra.attachment import Attachment


class RuntimeState(abc.ABC):
    """The part of `relibra.Runtime` that saves, loads and exports in expert order."""

    group: dist.ProcessGroup | None
    rank: int

    @abc.abstractmethod
    def attachment(self, name: str | None = None) -> Attachment:
        """The attached model of that name; see `relibra.Runtime`."""

    def logical_state_dict(
        self, module: nn.Module | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """State dict with whole expert tensors ``[E, ...]`` in expert order; collective.

        Args:
            module: part of the attached model, by default all of it.
            model: name of the attached model, by default the first.

        Raises:
            ValueError: ``module`` holds MoE layers of another model.
        """
        attachment = self.attachment(model)
        target = attachment.part(module)
        return logical_state.to_logical(target, attachment.layouts_by_layer(), self.group)

    def load_logical_state_dict(
        self, module: nn.Module | None, state: dict[str, Any], model: str | None = None
    ) -> None:
        """Load a state in expert order, saved under any layout and any number of ranks.

        Args:
            module: part of the attached model, None for all of it.
            state: from `logical_state_dict` of the same part.
            model: name of the attached model, by default the first.

        Raises:
            ValueError: ``module`` holds MoE layers of another model, or an expert tensor is
                missing or of another size.
        """
        attachment = self.attachment(model)
        target = attachment.part(module)
        logical_state.from_logical(target, state, attachment.layouts_by_layer(), self.rank)

    def export_experts(
        self, layer: int, model: str | None = None
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """``(expert, tensors)`` of a layer in expert order; collective."""
        attachment = self.attachment(model)
        moe, layout = attachment.layer_of(layer), attachment.layouts_by_layer()[layer]
        return logical_state.iterate_experts(moe, layout, self.group)

    def gather_experts(
        self, local_H: torch.Tensor, layer: int, model: str | None = None
    ) -> torch.Tensor:
        """A gradient or moment ``[H, ...]`` of a layer as ``[E, ...]`` by expert; collective."""
        layout = self.attachment(model).layouts_by_layer()[layer]
        return logical_state.gather_experts(local_H, layout, self.group)
