"""Choices of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from relibra.cost_model import CostModel
from relibra.plan_config import PlannerConfig
from relibra.planner import STRATEGIES
from relibra.topology import Topology
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.presets import Hardware, ModelPreset
    from relibra.shape import ModelShape

OVERLAPS = (0.0, 0.5, 0.8, 1.0)
# Strategies that every simulation plans: what the others are compared with.
REFERENCES = ("none", "eplb_oracle", "ideal")


@dataclass(frozen=True)
class SimulateSettings:
    """Choices of a simulation.

    Args:
        model: for D, F and the dense part.
        hardware: rates.
        ep: numbers of ranks G to try.
        ranks_per_node: None = the hardware's domain; a smaller G is one node.
        strategies: names; None = all that the planner has.
        overlaps: of RDMA and NVLink, in the order of the report; the first table uses `overlap`.
        overlap: of the first table.
        reroute: percentages of rows that do not follow the plan.
        dispatch: `flat` or `two_hop`.
        combine: `reduced` or `exact`.
        recompute: `none` or `full`.
        planner: settings of the planner.
        pipeline_stages: stages that share the layers; each has G ranks of its own and plans its own
            layers, and a step is as long as `relibra.pass_cost.pipeline_seconds` says.
        data_parallel: EP groups that hold the same experts, each with its part of every
            micro-batch. `relibra` plans them together with one layout a layer; the others plan
            every group alone, which flatters those that move experts.
        cost_fields: fields of `CostModel` that have no name of their own here.

    Raises:
        PlanError: a value out of range, or an unknown strategy.
    """

    model: ModelPreset
    hardware: Hardware
    ep: tuple[int, ...] = (8, 16, 32)
    ranks_per_node: int | None = None
    strategies: tuple[str, ...] | None = None
    overlaps: tuple[float, ...] = OVERLAPS
    overlap: float = 0.5
    reroute: tuple[float, ...] = ()
    dispatch: str = "flat"
    combine: str = "reduced"
    recompute: str = "none"
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    pipeline_stages: int = 1
    data_parallel: int = 1
    cost_fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what no other class checks."""
        if not self.ep or min(self.ep) < 1:
            raise PlanError(f"ep: need numbers of ranks of at least 1, got {list(self.ep)}")
        for name in self.strategies or ():
            if name not in STRATEGIES:
                raise PlanError(f"strategy: need one of {', '.join(STRATEGIES)}, got {name!r}")
        for share in self.reroute:
            if not 0 <= share <= 100:
                raise PlanError(f"reroute: need percentages 0..100, got {share!r}")
        for value in (*self.overlaps, self.overlap):
            if not 0 <= value <= 1:
                raise PlanError(f"overlap: need 0..1, got {value!r}")
        for name in ("pipeline_stages", "data_parallel"):
            try:
                check_int(name, getattr(self, name), minimum=1, maximum=1 << 12)
            except (TypeError, ValueError) as error:
                raise PlanError(str(error)) from None
        object.__setattr__(self, "cost_fields", MappingProxyType(dict(self.cost_fields)))
        for ranks in self.ep:
            self.cost(ranks, self.model.shape())

    @property
    def names(self) -> tuple[str, ...]:
        """Strategies to plan, the references included, in the planner's order."""
        asked = STRATEGIES if self.strategies is None else {*self.strategies, *REFERENCES}
        return tuple(name for name in STRATEGIES if name in asked)

    def topology(self, num_ranks: int) -> Topology:
        """Nodes of a group.

        Args:
            num_ranks: G.

        Raises:
            PlanError: G is no multiple of the ranks of a node.
        """
        width = self.ranks_per_node or self.hardware.domain_ranks
        if num_ranks <= width:
            return Topology(1, num_ranks)
        if num_ranks % width:
            raise PlanError(f"ep: need a multiple of {width} ranks a node, got {num_ranks}")
        return Topology(num_ranks // width, width)

    def cost(self, num_ranks: int, shape: ModelShape) -> CostModel:
        """The cost model for a group; the first stage has a micro-batch in flight for each stage.

        Args:
            num_ranks: G.
            shape: of the loads.
        """
        return CostModel(
            self.hardware,
            shape,
            self.topology(num_ranks),
            self.model,
            dispatch=self.dispatch,
            combine=self.combine,
            overlap=self.overlap,
            recompute=self.recompute,
            **{
                "in_flight": self.pipeline_stages,
                "data_parallel": self.data_parallel,
                **self.cost_fields,
            },
        )

    @property
    def layers_of_stage(self) -> int:
        """MoE layers that a rank of the whole model has, for the forecast of memory."""
        return -(-len(self.model.moe_layers) // self.pipeline_stages)
