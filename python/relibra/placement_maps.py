"""Plans in the form of EPLB-style tools: maps between physical slots and logical experts.

Letters: L layers, Q slots of all ranks, E experts, X most copies of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from relibra.layout import Int32Array, frozen_ints
from relibra_kernels.errors import PlanError


@dataclass(frozen=True, eq=False)
class PlacementMaps:
    """Where the copies of every expert are, layer by layer.

    Args:
        physical_to_logical_map: int32 `[L, Q]`, expert in each slot, -1 = empty; any integers:
            nested lists, arrays or CPU tensors.
        num_experts: E.

    Raises:
        TypeError: the map holds no integers.
        PlanError: an expert out of range, or one without a slot.

    Example:
        >>> maps = PlacementMaps([[2, 0, 1, 0, -1, 3]], 4)
        >>> maps.logical_to_physical_map.tolist()
        [[[1, 3], [2, -1], [0, -1], [5, -1]]]
        >>> maps.expert_count.tolist()
        [[2, 1, 1, 1]]
    """

    physical_to_logical_map: Int32Array
    num_experts: int

    def __post_init__(self) -> None:
        """Takes a read-only copy and checks it."""
        if self.num_experts < 1:
            raise PlanError(f"num_experts: need an integer >= 1, got {self.num_experts}")
        name = "physical_to_logical_map"
        experts = frozen_ints(
            name,
            self.physical_to_logical_map,
            np.int32,
            shape=(None, None),
            minimum=-1,
            maximum=self.num_experts - 1,
        )
        object.__setattr__(self, name, experts)
        missing = np.argwhere(self.expert_count == 0)
        if missing.size:
            layer, expert = missing[0]
            raise PlanError(f"{name}: need a slot for expert {expert} of layer {layer}, got none")

    @cached_property
    def expert_count(self) -> Int32Array:
        """int32 `[L, E]`, copies of each expert."""
        experts = self.physical_to_logical_map
        layer, slot = np.nonzero(experts >= 0)
        cells = layer * self.num_experts + experts[layer, slot]
        count = np.bincount(cells, minlength=len(experts) * self.num_experts)
        return count.reshape(-1, self.num_experts).astype(np.int32)

    @cached_property
    def logical_to_physical_map(self) -> Int32Array:
        """int32 `[L, E, X]`, slots of each expert ascending, then -1."""
        experts = self.physical_to_logical_map
        layer, slot = np.nonzero(experts >= 0)
        expert = experts[layer, slot]
        order = np.lexsort((slot, expert, layer))
        layer, slot, expert = layer[order], slot[order], expert[order]
        first = np.cumsum(self.expert_count.reshape(-1)) - self.expert_count.reshape(-1)
        copy = np.arange(len(slot)) - first[layer * self.num_experts + expert]
        width = int(self.expert_count.max(initial=0))
        slots = np.full((len(experts), self.num_experts, width), -1, np.int32)
        slots[layer, expert, copy] = slot
        return slots

    def __eq__(self, other: object) -> bool:
        """Equality by value."""
        if not isinstance(other, PlacementMaps):
            return NotImplemented
        return self.num_experts == other.num_experts and np.array_equal(
            self.physical_to_logical_map, other.physical_to_logical_map
        )

    __hash__ = None  # type: ignore[assignment]
