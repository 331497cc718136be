"""Planning some layers at a time, so that training can start before the last layer is planned."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relibra.planner.outcome import join_layers
from relibra.planner.problem import make_problem
from relibra.planner.strategies import STRATEGIES, check_strategy, finish_plan
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from relibra.cost_model import CostModel
    from relibra.layout import ExpertLayout
    from relibra.load_matrix import LoadMatrix
    from relibra.plan import PassPlan, StepPlan
    from relibra.plan_config import PlannerConfig
    from relibra.planner.outcome import Outcome
    from relibra.shape import ModelShape
    from relibra.token_sample import TokenSample
    from relibra.topology import Topology


@dataclass(frozen=True)
class LayersPlan:
    """What is planned for some neighbouring MoE layers.

    Args:
        first_layer: index of the first of them among the MoE layers.
        layouts: one a layer.
        passes: `PassPlan` of every pass, for these layers only.
        planner_ms: time since the stream was made.
    """

    first_layer: int
    layouts: tuple[ExpertLayout, ...]
    passes: Mapping[str, PassPlan]
    planner_ms: float


class PlanStream:
    """`plan_step` in pieces: iterate for the layers in order, then `finish()` for the whole plan.

    Layers are planned apart, so the pieces and the whole are exactly what `plan_step` gives.

    Args:
        loads: as in `plan_step`.
        topology: as in `plan_step`.
        model: as in `plan_step`.
        layout: as in `plan_step`.
        config: as in `plan_step`.
        strategy: as in `plan_step`.
        cost_model: as in `plan_step`.
        token_sample: as in `plan_step`.
        layers_at_once: layers planned together; as many as the planner has threads is fastest, 1
            gives the first layer soonest.

    Raises:
        PlanError, TypeError: as `plan_step`.

    Example:
        >>> from relibra.load_matrix import LoadMatrix
        >>> from relibra.shape import ModelShape
        >>> from relibra.topology import Topology
        >>> loads = LoadMatrix([[[[90, 10], [0, 0]], [[5, 5], [0, 0]]]])  # M 1, L 2, G 2, E 2
        >>> stream = PlanStream({"train": loads}, Topology(1, 2), model=ModelShape(2, 1, (0, 1)))
        >>> [part.first_layer for part in stream], stream.finish().report.imbalance_mean
        ([0, 1], 1.0)
    """

    def __init__(
        self,
        loads: Mapping[str, LoadMatrix],
        topology: Topology,
        *,
        model: ModelShape,
        layout: Sequence[ExpertLayout] | None = None,
        config: PlannerConfig | None = None,
        strategy: str = "relibra",
        cost_model: CostModel | None = None,
        token_sample: TokenSample | npt.ArrayLike | None = None,
        layers_at_once: int = 1,
    ) -> None:
        self._start = time.perf_counter()
        check_strategy(strategy)
        self._strategy = strategy
        self._problem = make_problem(
            loads,
            topology,
            model,
            layout,
            config,
            cost_model=cost_model,
            token_sample=token_sample,
        )
        self._step = check_int("layers_at_once", layers_at_once, minimum=1)
        self._parts: list[Outcome] = []
        self._next = 0
        self._planning_ms = 0.0

    def __iter__(self) -> Iterator[LayersPlan]:
        """Plans the layers that are left, one piece after the other."""
        problem = self._problem
        while self._next < problem.shape.num_layers:
            begin = time.perf_counter()
            first, self._next = self._next, min(self._next + self._step, problem.shape.num_layers)
            outcome = STRATEGIES[self._strategy](problem.only_layers(first, self._next))
            self._parts.append(outcome)
            now = time.perf_counter()
            self._planning_ms += (now - begin) * 1e3
            passes = {name: outcome.passes[problem.same_as[name]] for name in problem.loads}
            yield LayersPlan(first, outcome.layouts, passes, (now - self._start) * 1e3)

    def finish(self) -> StepPlan:
        """The whole plan, equal to that of `plan_step`; plans the layers that are left.

        Raises:
            PlanError: the model has no MoE layer.
        """
        for _ in self:
            pass
        if not self._parts:
            raise PlanError("model.moe_layers: need at least one MoE layer, got none")
        return finish_plan(
            self._problem, join_layers(self._parts), self._strategy, self._planning_ms
        )
