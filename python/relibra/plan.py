"""The plan of a training batch: layouts, replicas and row quotas. Pure data on NumPy arrays.

Letters: M micro-batches, L MoE layers, G ranks, E experts; H home, X static and S replica slots a
rank, n = H + X + S. Slot id = rank * n + j: home slots first, then static, then replica slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from relibra import plan_check, plan_file
from relibra.layout import ExpertLayout, Int32Array, frozen_static
from relibra.pass_plan import PassPlan, ReplicaPlan, ReportSlots
from relibra.placement_maps import PlacementMaps
from relibra.plan_config import PlannerConfig
from relibra.plan_report import FROM_LOADS, PlanReport, build_report
from relibra.source_split import split_rows
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from relibra.load_matrix import LoadMatrix
    from relibra.shape import ModelShape
    from relibra.topology import Topology

__all__ = [
    "ExpertLayout",
    "PassPlan",
    "PlacementMaps",
    "PlanReport",
    "ReplicaPlan",
    "StepPlan",
]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A checked plan of one rollout batch: one layout a layer, replicas and rows a pass.

    Every plan that can be constructed executes correctly: `__post_init__` checks all rules
    (`relibra.plan_check`). Reports of strategies that cannot be executed (`is_executable` False)
    hold the rows of each rank in its first slot and no replicas.

    Args:
        topology: nodes and rails of the G ranks.
        shape: of the model; `shape.num_layers` is L.
        layouts: one a layer, valid for all passes.
        passes: `PassPlan` by pass name: at most 64 letters, digits and `_.+-`.
        loads: gathered `LoadMatrix` by pass name; empty only for a plan read from a file without
            them, which can be looked at but not split by source.
        base_layouts: layouts that the batch starts from; experts move from these to `layouts`.
            None = the same as `layouts`.
        strategy: name of the strategy.
        config: settings of the planner.
        is_executable: False for strategies that are for reports only.
        planner_ms: time that planning took.
        stored_report: report of a plan file, from which `stored_figures` are taken.
        stored_rows_sha256: digest of the loads of each pass, for a plan without `loads`.
        static_slot_expert_LGX: int32 `[L, G, X]`, static copies of all passes, -1 free; None is
            X = 0. They hold the home's weights of the current optimizer step, see
            `static_refresh_M`, and may lie on any node.
        report_slots: slots by pass, where a strategy for reports knows them.

    Raises:
        PlanError: a rule is broken; names the pass, micro-batch, layer and rank.

    Example:
        >>> from relibra.load_matrix import LoadMatrix
        >>> from relibra.shape import ModelShape
        >>> from relibra.topology import Topology
        >>> plan = StepPlan.from_arrays(
        ...     Topology(1, 2), ModelShape(2, 1, (0,)), [ExpertLayout([[0], [1]])],
        ...     {"train": PassPlan([[[[1], [-1]]]], [[[[1, 2], [3, 0]]]])},
        ...     {"train": LoadMatrix([[[[1, 2], [0, 3]]]])})
        >>> plan.source_quota("train", 0, 0).tolist()
        [[1, 2, 0, 0], [0, 0, 3, 0]]
        >>> plan.report.imbalance_mean
        1.0
    """

    topology: Topology
    shape: ModelShape
    layouts: tuple[ExpertLayout, ...]
    passes: Mapping[str, PassPlan]
    loads: Mapping[str, LoadMatrix]
    base_layouts: tuple[ExpertLayout, ...] = ()
    strategy: str = "custom"
    config: PlannerConfig = field(default_factory=PlannerConfig)
    is_executable: bool = True
    planner_ms: float = 0.0
    stored_report: PlanReport | None = None
    stored_rows_sha256: Mapping[str, str] = field(default_factory=dict)
    static_slot_expert_LGX: Int32Array = None  # type: ignore[assignment]  # set below
    report_slots: Mapping[str, ReportSlots] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fixes the containers and checks every rule."""
        object.__setattr__(self, "layouts", tuple(self.layouts))
        object.__setattr__(self, "base_layouts", tuple(self.base_layouts) or self.layouts)
        for name in ("passes", "loads", "stored_rows_sha256", "report_slots"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        size = (len(self.layouts), self.topology.num_ranks)
        static = frozen_static(self.static_slot_expert_LGX, size, "LGX")
        object.__setattr__(self, "static_slot_expert_LGX", static)
        self.validate()

    @classmethod
    def from_arrays(
        cls,
        topology: Topology,
        shape: ModelShape,
        layouts: Sequence[ExpertLayout],
        passes: Mapping[str, PassPlan],
        loads: Mapping[str, LoadMatrix],
        *,
        base_layouts: Sequence[ExpertLayout] | None = None,
        static_slot_expert_LGX: Int32Array | None = None,
    ) -> StepPlan:
        """A plan made by hand, checked like any other; arguments as in the class."""
        base = tuple(base_layouts or ())
        static: Any = static_slot_expert_LGX
        return cls(
            topology, shape, tuple(layouts), passes, loads, base, static_slot_expert_LGX=static
        )

    def validate(self) -> None:
        """Checks every rule of a plan.

        Raises:
            PlanError: the first rule that is broken.
        """
        plan_check.check_plan(self)

    @property
    def base_layout(self) -> tuple[ExpertLayout, ...]:
        """Layouts that the batch starts from; must equal `runtime.layout`."""
        return self.base_layouts

    @property
    def num_micro_batches(self) -> int:
        """M of the passes, which must agree for this property.

        Raises:
            PlanError: passes have different numbers of micro-batches.
        """
        counts = {name: plan.num_micro_batches for name, plan in self.passes.items()}
        if len(set(counts.values())) != 1:
            raise PlanError(f"num_micro_batches: need equal passes, got {counts}")
        return next(iter(counts.values()))

    @cached_property
    def slots_per_rank(self) -> int:
        """Home, static and replica slots, n = H + X + S."""
        return int(next(iter(self.passes.values())).slot_rows_MLGn.shape[3])

    def replica_plan(self, pass_: str, micro_batch: int, layer_index: int) -> ReplicaPlan:
        """Slots and rows of one use of a layer.

        Args:
            pass_: name of the pass.
            micro_batch: m.
            layer_index: index into `shape.moe_layers`, not the decoder layer number.

        Raises:
            PlanError: no such pass, micro-batch or layer.
        """
        plan = self._pass(pass_)
        self._check_place(plan, micro_batch, layer_index)
        return ReplicaPlan(
            self.layouts[layer_index],
            plan.replica_slot_expert_MLGS[micro_batch, layer_index],
            plan.slot_rows_MLGn[micro_batch, layer_index],
            self.static_slot_expert_LGX[layer_index],
        )

    def static_refresh_M(self, pass_: str) -> npt.NDArray[np.bool_]:
        """Micro-batches of a pass before which every static copy gets its home's weights again.

        They are the first of every optimizer step; gradients of static copies go home after the
        last micro-batch before the next one. None without static copies.

        Args:
            pass_: name of the pass.

        Returns:
            bool `[M]`.

        Raises:
            PlanError: no such pass; no loads, whose `optimizer_step_M` tells the steps.
        """
        plan = self._pass(pass_)
        if (self.static_slot_expert_LGX < 0).all():
            return np.zeros(plan.num_micro_batches, np.bool_)
        steps = self._loads(pass_).optimizer_step_M
        first: npt.NDArray[np.bool_] = np.diff(steps, prepend=-1) != 0
        return first

    def source_quota(self, pass_: str, micro_batch: int, layer_index: int) -> Int32Array:
        """Rows that each source rank sends to each slot.

        The documented pure function of counts and slot rows, `relibra.source_split`.

        Args:
            pass_: name of the pass.
            micro_batch: m.
            layer_index: index into `shape.moe_layers`.

        Returns:
            int32 `[G, G*n]`, all rows: also those of experts without a copy, which go home.

        Raises:
            PlanError: no such pass, micro-batch or layer; no loads; not executable.
        """
        if not self.is_executable:
            raise PlanError(f"strategy: need one that can be executed, got {self.strategy!r}")
        loads = self._loads(pass_)
        view = self.replica_plan(pass_, micro_batch, layer_index)
        return split_rows(
            loads.rows_MLGE[micro_batch, layer_index],
            view.slot_expert_Gn,
            view.slot_rows_Gn,
            self.topology.rank_to_rail_G,
            self.topology.rank_to_node_G,
        )

    def placement_maps(self, pass_: str, micro_batch: int) -> PlacementMaps:
        """Maps between slots and experts of all layers, for EPLB-style tools.

        Args:
            pass_: name of the pass.
            micro_batch: m.
        """
        views = [self.replica_plan(pass_, micro_batch, i) for i in range(len(self.layouts))]
        slots = np.stack([view.slot_expert_Gn.reshape(-1) for view in views])
        return PlacementMaps(slots, self.shape.num_experts)

    @cached_property
    def report(self) -> PlanReport:
        """Balance, replicas, bytes and times of the plan; see `stored_figures`."""
        return build_report(self)

    @property
    def stored_figures(self) -> tuple[str, ...]:
        """Figures of `report` that are as a plan file says, which `hash` does not cover.

        All others are computed from the arrays. The time of planning is always stored; what only
        the loads give is stored where the plan was loaded without the loads of every pass.
        """
        if self.stored_report is None:
            return ()
        return ("planner_ms", *(() if set(self.loads) == set(self.passes) else FROM_LOADS))

    @cached_property
    def rows_sha256(self) -> Mapping[str, str]:
        """Digest of the loads of each pass."""
        computed = {name: plan_check.rows_digest(loads) for name, loads in self.loads.items()}
        return MappingProxyType(dict(self.stored_rows_sha256) | computed)

    @cached_property
    def hash(self) -> str:
        """sha256 of all that decides execution, counts included; ranks compare it."""
        return plan_check.plan_hash(self)

    def save(self, path: str | Path, with_quota: bool = False) -> None:
        """Writes the plan as `.npz`, format in `relibra.plan_file`.

        Args:
            path: file to write; it appears under its name only when it is complete.
            with_quota: also write the split by source rank.

        Raises:
            PlanError: a plan that is for reports only, or no loads for `with_quota`.
        """
        plan_file.save_plan(self, path, with_quota=with_quota)

    @classmethod
    def load(cls, path: str | Path, loads: Mapping[str, LoadMatrix] | None = None) -> StepPlan:
        """Reads and checks a plan file.

        Args:
            path: file written by `save`.
            loads: the loads it was made for; without them the plan has no split by source.

        Returns:
            The plan. Of its report, `stored_figures` are as the file says.

        Raises:
            PlanError: no plan file, a broken rule, or loads of another batch.
        """
        return plan_file.load_plan(cls, path, loads or {})

    def _pass(self, pass_: str) -> PassPlan:
        if pass_ not in self.passes:
            raise PlanError(f"pass_: need one of {sorted(self.passes)}, got {pass_!r}")
        return self.passes[pass_]

    def _loads(self, pass_: str) -> LoadMatrix:
        if pass_ not in self.loads:
            self._pass(pass_)
            raise PlanError(
                f"loads: need those of pass {pass_!r} to split rows by source, got none; read the "
                "plan with StepPlan.load(path, loads=...)"
            )
        return self.loads[pass_]

    def _check_place(self, plan: PassPlan, micro_batch: int, layer_index: int) -> None:
        for name, value, limit in (
            ("micro_batch", micro_batch, plan.num_micro_batches),
            ("layer_index", layer_index, len(self.layouts)),
        ):
            if not 0 <= value < limit:
                raise PlanError(f"{name}: need 0..{limit - 1}, got {value}")
