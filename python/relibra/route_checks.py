"""Do a rank's routes fit the model and the plan?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from relibra.dispatch_rows import DispatchRows
from relibra.live_routes import LIVE_MODES
from relibra.load_matrix import LoadMatrix
from relibra_kernels.checks import check_choice
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.plan import StepPlan

Routes = Mapping[str, Sequence[DispatchRows]]


def checked_routes(routes: object, moe_layers: tuple[int, ...]) -> dict[str, list[DispatchRows]]:
    """Routes as lists, of the right types and layers.

    Args:
        routes: pass -> one `DispatchRows` a micro-batch.
        moe_layers: decoder layer numbers of the attached model.

    Raises:
        TypeError: not a mapping of names to sequences of `DispatchRows`.
        PlanError: rows recorded for other layers.
    """
    if not isinstance(routes, Mapping):
        raise TypeError(f"routes: need pass -> DispatchRows, got {type(routes).__name__}")
    checked: dict[str, list[DispatchRows]] = {}
    for name, rows in routes.items():
        if not isinstance(name, str) or not isinstance(rows, Sequence):
            raise TypeError(
                f"routes: need a name -> a sequence of DispatchRows, got {name!r} -> "
                f"{type(rows).__name__}"
            )
        for m, part in enumerate(rows):
            if not isinstance(part, DispatchRows):
                raise TypeError(
                    f"routes[{name!r}][{m}]: need DispatchRows, got {type(part).__name__}"
                )
            unnamed = part.moe_layers == tuple(range(part.num_layers))
            if part.moe_layers != moe_layers and not unnamed:
                raise PlanError(
                    f"routes[{name!r}][{m}]: need rows of MoE layers {list(moe_layers)}, got "
                    f"{list(part.moe_layers)}"
                )
        checked[name] = list(rows)
    return checked


def check_against_plan(
    routes: Mapping[str, Sequence[DispatchRows]], plan: StepPlan, rank: int
) -> None:
    """Refuses routes whose counts are not those that the plan was made for.

    Args:
        routes: from `checked_routes`.
        plan: with its loads.
        rank: this rank.

    Raises:
        PlanError: an unknown pass, missing loads, another number of micro-batches, or counts that
            differ; names the first place.
    """
    for name, rows in routes.items():
        if name not in plan.passes:
            raise PlanError(f"routes: need passes of {sorted(plan.passes)}, got {name!r}")
        if name not in plan.loads:
            raise PlanError(
                f"plan: need the loads of pass {name!r} to split rows by source, got none; "
                "read the plan with StepPlan.load(path, loads=...)"
            )
        loads = plan.loads[name]
        num = loads.rows_MLGE.shape[0]
        if len(rows) != num:
            raise PlanError(f"routes[{name!r}]: need {num} micro-batches, got {len(rows)}")
        mine = LoadMatrix.from_rows(rows, loads.optimizer_step_M).rows_MLGE[:, :, 0]
        planned = loads.rows_MLGE[:, :, rank]
        if mine.shape != planned.shape:
            raise PlanError(
                f"routes[{name!r}]: need [M, L, E] = {list(planned.shape)}, got {list(mine.shape)}"
            )
        if not np.array_equal(mine, planned):
            m, layer, expert = np.argwhere(mine != planned)[0].tolist()
            raise PlanError(
                f"routes[{name!r}]: micro-batch {m}, layer {plan.shape.moe_layers[layer]}"
                f", expert {expert}: the plan was made for {planned[m, layer, expert]} rows of "
                f"this rank, the routes hold {mine[m, layer, expert]}"
            )


def check_modes(
    unknown_rows: str,
    live_passes: Mapping[str, str],
    routes: Mapping[str, Sequence[DispatchRows]],
    plan: StepPlan,
) -> None:
    """Refuses modes of `relibra.live_routes` that do not exist or do not fit the passes.

    Args:
        unknown_rows: mode of micro-batches with rows that follow the live router.
        live_passes: pass -> mode, for passes without recorded routing.
        routes: from `checked_routes`.
        plan: of the step.

    Raises:
        TypeError, ValueError: an unknown mode.
        PlanError: a live pass with routes, or one that the plan does not have but needs.
    """
    check_choice("unknown_rows", unknown_rows, LIVE_MODES)
    for name, mode in live_passes.items():
        check_choice(f"live_passes[{name!r}]", mode, LIVE_MODES)
        if name in routes:
            raise PlanError(f"live_passes: need passes without routes, got {name!r} in both")
        if mode == "fraction" and name not in plan.passes:
            raise PlanError(
                f"live_passes: need a pass of the plan for mode 'fraction', one of "
                f"{sorted(plan.passes)}, got {name!r}"
            )
