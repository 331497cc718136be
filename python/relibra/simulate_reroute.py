"""Rows that do not follow the plan: what they do to the balance.

Letters as in `relibra.simulate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.pass_cost import executed_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int64Array
    from relibra.plan import StepPlan
    from relibra.token_copies import FloatArray


def reroute(plan: StepPlan, pass_: str, share: float) -> Int64Array:
    """Rows of every slot when a share of the rows does not follow the plan.

    The rest keeps its slots. The others choose experts like the whole batch does in that layer, and
    are executed at home: nothing was planned for them. Their all-to-all is taken to be the plan's.

    Args:
        plan: the plan.
        pass_: name of the pass.
        share: 0..1.

    Returns:
        int64 `[M, L, G, n]`, the total of every instance unchanged.

    Example:
        >>> from relibra.load_matrix import LoadMatrix
        >>> from relibra.planner import plan_step
        >>> from relibra.shape import ModelShape
        >>> from relibra.topology import Topology
        >>> loads = {"train": LoadMatrix([[[[8, 0]]], [[[0, 8]]]])}  # M 2, E 2, one rank
        >>> plan = plan_step(loads, Topology(1, 1), model=ModelShape(2, 1, (0,)), strategy="none")
        >>> reroute(plan, "train", 0.5)[0, 0, 0].tolist()[:2]
        [6, 2]
    """
    rows = executed_rows(plan, pass_)
    if share == 0:
        return rows
    total_ML = rows.sum((2, 3))
    if plan.is_executable:
        home_LGH = np.stack([layout.home_slot_expert_GH for layout in plan.layouts])
        popular_LE = plan.loads[pass_].totals_MLE.sum(0).astype(np.float64)
        num_layers = len(home_LGH)
        flat = np.maximum(home_LGH, 0).reshape(num_layers, -1)
        held = np.take_along_axis(popular_LE, flat, 1).reshape(home_LGH.shape)
        wish = np.zeros(rows.shape[1:])
        wish[:, :, : home_LGH.shape[2]] = np.where(home_LGH >= 0, held, 0.0)
    else:
        wish = rows.sum(0).astype(np.float64)
    wish /= np.maximum(wish.sum((1, 2), keepdims=True), 1)
    mixed = (1 - share) * rows + share * total_ML[:, :, None, None] * wish
    return _round(mixed.reshape(*total_ML.shape, -1), total_ML).reshape(rows.shape)


def _round(wanted: FloatArray, total: Int64Array) -> Int64Array:
    """Integers near `wanted` along the last axis with the sums `total`."""
    whole = np.floor(wanted).astype(np.int64)
    rank = np.argsort(np.argsort(whole - wanted, axis=-1, kind="stable"), axis=-1, kind="stable")
    rounded: Int64Array = whole + (rank < (total - whole.sum(-1))[..., None])
    return rounded


def row_imbalance(rows_MLG: npt.NDArray[np.number]) -> float:
    """Sum of the fullest ranks / sum of the means."""
    mean = float(rows_MLG.mean(-1).sum())
    return float(rows_MLG.max(-1).sum()) / mean if mean else 1.0
