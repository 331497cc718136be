"""The control: the same step without balancing, and how the two are compared.

The control has a runtime of its own without replica slots, experts in order on their ranks, and an
optimizer state that never moves. Before each step it takes the balanced model's parameters through
the logical export: a control that runs free drifts apart chaotically, so it could judge the first
steps only.

Letters: E experts, H home slots a rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from relibra.logical_state import moe_prefixes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.demo.train import Learner


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two sets of tensors.

    Attributes:
        relative: Norm of the difference / norm of the control.
        largest: Largest absolute difference of an element.
    """

    relative: float
    largest: float

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], control: Mapping[str, torch.Tensor]
    ) -> Difference:
        """Compare tensors of the same names; norms are summed in float64.

        Args:
            tensors: By name.
            control: The same names and shapes.

        Raises:
            ValueError: Names differ.

        Example:
            >>> one = {"w": torch.tensor([3.0, 4.0])}
            >>> Difference.of({"w": torch.tensor([3.0, 4.5])}, one)
            Difference(relative=0.1, largest=0.5)
        """
        if tensors.keys() != control.keys():
            raise ValueError(
                f"tensors: need the names of the control, got a difference of "
                f"{sorted(tensors.keys() ^ control.keys())}"
            )
        need = torch.cat([tensor.flatten() for tensor in control.values()])
        gap = torch.cat([tensors[name].flatten() for name in control]).sub_(need)
        if gap.numel() == 0:
            return cls(0.0, 0.0)
        size, whole = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (gap, need))
        relative = 0.0 if size == 0 else float(size / whole)  # two exact zeros are equal
        return cls(relative, float(gap.abs().max()))


def compare(balanced: Learner, control: Learner, kind: str) -> Difference:
    """Compare parameters or gradients in logical expert order; collective.

    Args:
        balanced: The balanced model, under whatever layout.
        control: The control.
        kind: ``data`` or ``grad``.
    """
    return Difference.of(logical_tensors(balanced, kind), logical_tensors(control, kind))


def logical_tensors(learner: Learner, kind: str) -> dict[str, torch.Tensor]:
    """Parameters or gradients by name, experts as ``[E, ...]`` in logical order; collective.

    Args:
        learner: A model under its runtime.
        kind: ``data`` or ``grad``.
    """
    layer_of = {
        prefix + name: moe.layer
        for prefix, moe in moe_prefixes(learner.model).items()
        for name, _ in moe.named_parameters()
    }
    tensors = {}
    for name, param in learner.model.named_parameters():
        tensor = getattr(param, kind)
        if name in layer_of:
            tensor = learner.runtime.gather_experts(tensor, layer_of[name])
        tensors[name] = tensor
    return tensors
