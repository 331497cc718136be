"""What replicas cost a rank in one step: pushes made ahead, pushes at entry, and time waited."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Wait = tuple["Callable[[Any, Any], float]", Any, Any]  # how to subtract, since, until


@dataclasses.dataclass
class LayerCounts:
    """One layer of one model, on this rank.

    Attributes:
        ahead: uses whose replicas were pushed before the layer began.
        at_entry: uses whose replicas were pushed when it began, so that it waited for all of it.
        reused: backward uses that read what the recompute just before them had pushed.
        given_back: pushes ahead whose use did not come next.
        pushed_bytes: of weights that this rank sent to replicas.
        waited_s: seconds for which uses waited for weights; NaN where an engine keeps no time.
        waits: those not yet added, since the device may not have got there.
    """

    ahead: int = 0
    at_entry: int = 0
    reused: int = 0
    given_back: int = 0
    pushed_bytes: int = 0
    waited_s: float = 0.0
    waits: list[Wait] = dataclasses.field(default_factory=list)

    def add(self, other: LayerCounts) -> None:
        """Those of another rank too."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)

    def settle(self) -> None:
        """The device is done: adds the waits, and lets go of what keeps their time."""
        self.waited_s += sum(subtract(since, until) for subtract, since, until in self.waits)
        self.waits.clear()


class StepCounts:
    """Counts of the layers of one model in one step.

    Example:
        >>> counts = StepCounts()
        >>> counts.of(3).ahead += 2
        >>> counts.as_dict()["layer_3/replica_uses_pushed_ahead"]
        2
    """

    def __init__(self) -> None:
        self._layers: dict[int, LayerCounts] = {}

    def of(self, layer: int) -> LayerCounts:
        """Counts of a decoder layer."""
        return self._layers.setdefault(layer, LayerCounts())

    def layers(self) -> list[LayerCounts]:
        """Counts of all layers."""
        return list(self._layers.values())

    def as_dict(self) -> dict[str, float]:
        """Figures by name, for loggers; seconds are known when a step has ended.

        Returns:
            ``layer_<number>/replica_...`` by ascending number: uses pushed ahead, at entry and
            reused, pushes given back, bytes pushed, and, where an engine keeps time, seconds of
            exposed push.
        """
        figures: dict[str, float] = {}
        for layer, one in sorted(self._layers.items()):
            figures |= {
                f"layer_{layer}/replica_uses_pushed_ahead": one.ahead,
                f"layer_{layer}/replica_uses_pushed_at_entry": one.at_entry,
                f"layer_{layer}/replica_uses_reused": one.reused,
                f"layer_{layer}/replica_pushes_given_back": one.given_back,
                f"layer_{layer}/replica_pushed_bytes": one.pushed_bytes,
                f"layer_{layer}/replica_exposed_push_s": one.waited_s,
            }
        return {name: value for name, value in figures.items() if not math.isnan(value)}


class ReplicaCounts:
    """Counts of the models of a runtime, each in the step that it is in, or was in last."""

    def __init__(self) -> None:
        self._models: dict[str, StepCounts] = {}

    def begin(self, model: str) -> StepCounts:
        """A step of a model begins; its counts from now on."""
        self._models[model] = StepCounts()
        return self._models[model]

    def of(self, model: str, layer: int) -> LayerCounts:
        """Counts of a layer in the step of its model.

        Args:
            model: name.
            layer: decoder layer number.
        """
        return self._models.setdefault(model, StepCounts()).of(layer)

    def settle(self) -> None:
        """The device has done all that the models' steps gave it."""
        for one in self._layers():
            one.settle()

    def forget_waits(self) -> None:
        """What failed is not timed; nothing is kept that holds an engine."""
        for one in self._layers():
            one.waits.clear()

    def _layers(self) -> list[LayerCounts]:
        return [one for step in self._models.values() for one in step.layers()]
