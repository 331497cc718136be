"""What the ranks of a training step must have alike, and what is wrong with its routes."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from relibra.rank_settings import model_facts
from relibra.route_checks import check_against_plan, check_modes
from relibra.static_slots import num_static
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.step import TrainingStep


def step_facts(step: TrainingStep) -> dict[str, int | str]:
    """Facts to agree on with all ranks when a step is entered.

    Args:
        step: with checked routes, or with none.
    """
    routes = step.routes
    modes = (step.unknown_rows, sorted(step.live_passes.items()))
    return {
        "optimizer_step": step.optimizer_step,
        **model_facts(step.attachment.layers),
        "passes (CRC-32 of their names)": zlib.crc32("|".join(sorted(routes)).encode()),
        "choices a token": max((r.top_k for rows in routes.values() for r in rows), default=0),
        "number of micro-batches": sum(len(rows) for rows in routes.values()),
        "modes of live passes (CRC-32)": zlib.crc32(repr(modes).encode()),
        "static slots a rank": num_static(step.plan),
        "plan hash": int(getattr(step.plan, "hash", "0")[:15], 16),
    }


def check_step_routes(step: TrainingStep) -> None:
    """Raise unless routes, modes and plan of a step fit together.

    Args:
        step: that is entered.

    Raises:
        PlanError: they do not.
    """
    routes, plan = step.routes, step.plan
    check_modes(step.unknown_rows, step.live_passes, routes, plan)
    if not routes and not step.live_passes:
        raise PlanError("routes: need at least one pass, got none")
    check_against_plan(routes, plan, step.runtime.rank)
    if routes and not any(step.micro_batches(name) for name in routes):
        steps = {int(one) for name in routes for one in plan.loads[name].optimizer_step_M}
        raise PlanError(f"optimizer_step: need one of {sorted(steps)}, got {step.optimizer_step!r}")
