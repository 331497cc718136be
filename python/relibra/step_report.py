"""Figures of one training step for loggers: balance of every layer, and what its replicas cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.load_matrix import balance_metrics
from relibra.plan_report import PassFigures, imbalance_figures

if TYPE_CHECKING:
    from relibra.step_calls import StepCalls


def step_report(step: StepCalls) -> dict[str, float]:
    """Figures by name; see :meth:`relibra.step.TrainingStep.report`.

    Args:
        step: entered.
    """
    flat, two_hop = step.cross_node_tokens
    figures: dict[str, float] = {
        "optimizer_step": step.optimizer_step,
        "moved_experts": step.moved_experts,
        "moved_bytes": step.moved_bytes,
        "static_sent_bytes": step.static_sent_bytes,
        "cross_node_tokens_flat": flat,
        "cross_node_tokens_two_hop": two_hop,
        "row_buffer_bytes": step.row_buffer_bytes,
    }
    for name in sorted(step.routes):
        figures |= _balance(step, name)
    return figures | step.replica_counts.as_dict()


def _balance(step: StepCalls, name: str) -> dict[str, float]:
    """Balance over ranks of a pass in this step, a layer at a time."""
    plan, figures = step.plan, dict[str, float]()
    one = PassFigures(plan, name, plan.passes[name])
    shape = (-1, len(plan.layouts), one.rank_rows_QG.shape[1])
    rows_MLG = one.rank_rows_QG.reshape(shape)[step.micro_batches(name)]
    routed_MLG = one.routed_rank_rows_QG.reshape(shape)[step.micro_batches(name)]
    for index, layer in enumerate(step.attachment.moe_layers):
        rows_MG, routed_MG = rows_MLG[:, index], np.rint(routed_MLG[:, index]).astype(np.int64)
        rows_G = rows_MG.sum(0)
        found = balance_metrics(rows_G, np.maximum(rows_G - routed_MG.sum(0), 0))
        for end, part_MG in (("", rows_MG), ("_routed", routed_MG)):
            names = [f"imbalance_{part}{end}" for part in ("mean", "p99", "max")]
            found |= dict(zip(names, imbalance_figures(part_MG), strict=True))
        figures |= {f"{name}/layer_{layer}/{key}": value for key, value in found.items()}
    return figures
