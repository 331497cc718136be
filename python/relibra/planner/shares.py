"""Planning shared by several planners: which layers each takes, and its outcome as bytes.

Layers are planned apart (`relibra.planner.stream`), so planners need nothing of each other, and the
parts put together are exactly what one planner would find.

Letters: L MoE layers.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.pass_plan import PassPlan, ReportSlots
from relibra.planner.outcome import Outcome
from relibra.planner.strategies import STRATEGIES
from relibra_kernels.checks import check_int

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra.planner.problem import Problem


def layer_shares(num_layers: int, num_planners: int) -> tuple[range, ...]:
    """Neighbouring layers for each planner, as equal as can be.

    Args:
        num_layers: L.
        num_planners: those after the first L get none.

    Returns:
        Indices of layers, one range a planner.

    Raises:
        TypeError, ValueError: numbers that are no integers or too small.

    Example:
        >>> layer_shares(5, 3)
        (range(0, 2), range(2, 4), range(4, 5))
    """
    check_int("num_layers", num_layers, minimum=0)
    check_int("num_planners", num_planners, minimum=1)
    least, more = divmod(num_layers, num_planners)
    firsts = [least * index + min(index, more) for index in range(num_planners + 1)]
    return tuple(range(*ends) for ends in zip(firsts[:-1], firsts[1:], strict=True))


def plan_layers(problem: Problem, strategy: str, layers: range, num_threads: int) -> Outcome:
    """What a strategy finds for some neighbouring layers.

    Args:
        problem: the input of all layers.
        strategy: one of `STRATEGIES`.
        layers: indices of the layers, not empty.
        num_threads: threads of this planner; the outcome does not depend on it.

    Raises:
        PlanError: as `plan_step`.
    """
    mine = problem.with_config(replace(problem.config, num_threads=num_threads))
    return STRATEGIES[strategy](mine.only_layers(layers.start, layers.stop))


def pack_outcome(outcome: Outcome) -> bytes:
    """An outcome as the bytes of an `.npz` file.

    Args:
        outcome: of any layers.
    """
    homes = np.stack([layout.home_slot_expert_GH for layout in outcome.layouts])
    arrays = {"home": homes, "is_executable": np.asarray(outcome.is_executable)}
    if outcome.static_LGX is not None:
        arrays["static"] = outcome.static_LGX
    arrays["passes"] = np.asarray(list(outcome.passes), dtype=np.str_)
    arrays["reports"] = np.asarray(list(outcome.report_slots), dtype=np.str_)
    for index, one in enumerate(outcome.passes.values()):
        arrays[f"replica_{index}"] = one.replica_slot_expert_MLGS
        arrays[f"rows_{index}"] = one.slot_rows_MLGn
    for index, slots in enumerate(outcome.report_slots.values()):
        arrays[f"report_expert_{index}"] = slots.slot_expert_MLGn
        arrays[f"report_rows_{index}"] = slots.slot_rows_MLGn
    file = io.BytesIO()
    save: Callable[..., None] = np.savez
    save(file, **arrays)
    return file.getvalue()


def unpack_outcome(packed: bytes) -> Outcome:
    """The outcome that `pack_outcome` was given.

    Args:
        packed: its result.

    Raises:
        PlanError: slots or rows that no planner writes.

    Example:
        >>> layouts = (ExpertLayout.identity(4, 2),)
        >>> unpack_outcome(pack_outcome(Outcome(layouts, {}))) == Outcome(layouts, {})
        True
    """
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        passes = {
            str(name): PassPlan(arrays[f"replica_{index}"], arrays[f"rows_{index}"])
            for index, name in enumerate(arrays["passes"])
        }
        slots = {
            str(name): ReportSlots(arrays[f"report_expert_{index}"], arrays[f"report_rows_{index}"])
            for index, name in enumerate(arrays["reports"])
        }
        return Outcome(
            tuple(ExpertLayout(home_GH) for home_GH in arrays["home"]),
            passes,
            bool(arrays["is_executable"]),
            slots,
            arrays["static"] if "static" in arrays.files else None,
        )
