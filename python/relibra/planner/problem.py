"""The checked input of a planning call, in the form that the strategies use.

Letters: M micro-batches of a pass, C columns (micro-batches of all different passes), L MoE layers,
E experts, G ranks, H home slots a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout, Int32Array, Int64Array
from relibra.load_matrix import LoadMatrix
from relibra.plan_config import PlannerConfig
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class Problem:
    """Input of every strategy.

    Args:
        loads: gathered loads by pass, never empty.
        topology: of the G ranks.
        shape: of the model.
        base_layouts: one a layer, that the batch starts from.
        has_base: False when no layout was given and `base_layouts` is the identity.
        config: settings.
    """

    loads: Mapping[str, LoadMatrix]
    topology: Topology
    shape: ModelShape
    base_layouts: tuple[ExpertLayout, ...]
    has_base: bool
    config: PlannerConfig

    @property
    def home_slots(self) -> int:
        """H."""
        return self.base_layouts[0].slots_per_rank

    @cached_property
    def identity(self) -> ExpertLayout:
        """Experts in order over the ranks."""
        return ExpertLayout.identity(self.shape.num_experts, self.topology.num_ranks)

    @cached_property
    def same_as(self) -> Mapping[str, str]:
        """For each pass the first pass with equal totals: planned once."""
        same: dict[str, str] = {}
        for name, loads in self.loads.items():
            same[name] = name
            for other in set(same.values()) - {name}:
                if np.array_equal(loads.totals_MLE, self.loads[other].totals_MLE):
                    same[name] = other
        return same

    @cached_property
    def distinct_passes(self) -> tuple[str, ...]:
        """Passes that are planned, in order."""
        return tuple(name for name in self.loads if self.same_as[name] == name)

    @cached_property
    def weight_C(self) -> Int64Array:
        """int64 `[C]`, weight of each column, without a common factor."""
        weight = dict.fromkeys(self.distinct_passes, 0)
        for name in self.loads:
            weight[self.same_as[name]] += self.config.weight_of(name)
        common = math.gcd(*weight.values())
        counts = [self.loads[name].num_micro_batches for name in self.distinct_passes]
        values = [weight[name] // common for name in self.distinct_passes]
        return np.repeat(np.asarray(values, np.int64), counts)

    @cached_property
    def totals_CLE(self) -> Int64Array:
        """int64 `[C, L, E]`, rows of each expert in each column, not weighted."""
        return np.concatenate([self.loads[name].totals_MLE for name in self.distinct_passes])

    @cached_property
    def base_LGH(self) -> Int32Array:
        """int32 `[L, G, H]` of the base layouts."""
        return np.stack([layout.home_slot_expert_GH for layout in self.base_layouts])

    def weigh(self, largest_CL: Int64Array) -> Int64Array:
        """Weighted sum over columns, int64 `[L]`."""
        total: Int64Array = (largest_CL * self.weight_C[:, None]).sum(0)
        return total

    def slot_rows(self, home_LGH: Int32Array) -> Int64Array:
        """Rows of every home slot without replicas, int64 `[C, L, G, H]`."""
        experts = np.maximum(home_LGH, 0).reshape(1, len(home_LGH), -1).astype(np.int64)
        rows = np.take_along_axis(self.totals_CLE, experts, 2).reshape(-1, *home_LGH.shape)
        held: Int64Array = np.where(home_LGH >= 0, rows, 0)
        return held

    def rank_rows(self, home_LGH: Int32Array) -> Int64Array:
        """Rows of every rank without replicas, int64 `[C, L, G]`."""
        rows: Int64Array = self.slot_rows(home_LGH).sum(3)
        return rows

    def least_largest(self, home_LGH: Int32Array, replica_slots: int) -> Int64Array:
        """Bound on the fullest rank for a layout, int64 `[C, L]`.

        Exact without replicas, else the fullest node, flat inside.
        """
        rows = self.rank_rows(home_LGH)
        if replica_slots == 0:
            largest: Int64Array = rows.max(2)
            return largest
        node_G = self.topology.rank_to_node_G
        by_node = np.argsort(node_G, kind="stable")
        first_N = np.flatnonzero(np.diff(node_G[by_node], prepend=-1))
        node_rows = np.add.reduceat(rows[:, :, by_node], first_N, axis=2)
        per_rank = -(-node_rows // np.asarray(self.topology.node_sizes))
        bound: Int64Array = per_rank.max(2)
        return bound


def make_problem(
    loads: Mapping[str, LoadMatrix],
    topology: Topology,
    model: ModelShape,
    layout: Sequence[ExpertLayout] | None,
    config: PlannerConfig | None,
) -> Problem:
    """Checks the arguments of `plan_step`.

    Raises:
        PlanError, TypeError: see `plan_step`.
    """
    config = PlannerConfig() if config is None else config
    for name, value, kind in (
        ("loads", loads, Mapping),
        ("topology", topology, Topology),
        ("model", model, ModelShape),
        ("config", config, PlannerConfig),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: need {kind.__name__}, got {type(value).__name__}")
    if not loads:
        raise PlanError("loads: need at least one pass, got none")
    for name, matrix in loads.items():
        _check_loads(f"loads[{name!r}]", matrix, topology, model)
    ranks, experts = topology.num_ranks, model.num_experts
    if experts % ranks and not config.allow_filler:
        raise PlanError(
            f"num_experts: need a multiple of {ranks} ranks with allow_filler=False, got {experts}"
        )
    if layout is None:
        base = (ExpertLayout.identity(experts, ranks),) * model.num_layers
    else:
        base = _check_layout(layout, experts, ranks, model.num_layers)
    return Problem(dict(loads), topology, model, base, layout is not None, config)


def _check_loads(name: str, matrix: object, topology: Topology, model: ModelShape) -> None:
    if not isinstance(matrix, LoadMatrix):
        raise TypeError(f"{name}: need a LoadMatrix, got {type(matrix).__name__}")
    if not matrix.is_gathered:
        source = "one rank" if matrix.source_rank is None else f"rank {matrix.source_rank}"
        raise PlanError(
            f"{name}: need a gathered LoadMatrix, got the rows of {source} only; gather them "
            "first (runtime.gather_loads, or LoadMatrix.stack)"
        )
    if matrix.num_ranks != topology.num_ranks:
        sizes = topology.node_sizes
        even = len(set(sizes)) == 1
        text = f"{len(sizes)} x {sizes[0]}" if even else f"nodes of {list(sizes)}"
        raise PlanError(
            f"{name}: need {topology.num_ranks} source ranks for the topology ({text}), got "
            f"{matrix.num_ranks}"
        )
    for what, got, need in (
        ("experts", matrix.num_experts, model.num_experts),
        ("MoE layers", matrix.num_layers, model.num_layers),
    ):
        if got != need:
            raise PlanError(f"{name}: need {need} {what} as in the model, got {got}")


def _check_layout(
    layout: Sequence[ExpertLayout], experts: int, ranks: int, layers: int
) -> tuple[ExpertLayout, ...]:
    if isinstance(layout, ExpertLayout):
        raise TypeError("layout: need one ExpertLayout a layer in a sequence, got a single one")
    base = tuple(layout)
    if len(base) != layers:
        raise PlanError(f"layout: need one a layer, {layers}, got {len(base)}")
    for index, one in enumerate(base):
        if not isinstance(one, ExpertLayout):
            raise TypeError(f"layout[{index}]: need an ExpertLayout, got {type(one).__name__}")
        need = (experts, ranks, -(-experts // ranks))
        got = (one.num_experts, one.num_ranks, one.slots_per_rank)
        if got != need:
            raise PlanError(
                f"layout[{index}]: need (experts, ranks, home slots) = {need}, got {got}"
            )
    return base
