"""Pictures of a run: imbalance, rows of ranks before and after, reward, differences.

Letters: M micro-batches, L MoE layers, G ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relibra.demo import judge
from relibra.demo.model import import_demo_library
from relibra.demo.records import Rows, StepLoads, imbalance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from relibra.demo.records import StepRecord

_NONE, _BALANCED = "#b04a3a", "#2a6f97"


def write_picture(
    path: Path, loads: Sequence[StepLoads], records: Sequence[StepRecord] = ()
) -> None:
    """Draw a run into a PNG file.

    Args:
        path: File to write.
        loads: Rows of ranks of every step, at least one.
        records: Steps of a reinforcement learning run; without them reward and differences are
            left out.

    Raises:
        DemoSetupError: matplotlib is not installed.
    """
    import_demo_library("matplotlib").use("Agg")
    pyplot = import_demo_library("matplotlib.pyplot")
    rows = 2 if records else 1
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 4 * rows), squeeze=False)
    draw_imbalance(axes[0][0], loads)
    draw_rank_rows(axes[0][1], loads[-1])
    if records:
        draw_reward(axes[1][0], records)
        draw_differences(axes[1][1], records)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def micro_batch_imbalance(rows_MLG: Rows) -> list[float]:
    """Imbalance of every micro-batch: max / mean rows of a rank, over its layers."""
    return [imbalance(rows_MLG[index : index + 1]) for index in range(len(rows_MLG))]


def fullest_place(loads: StepLoads) -> tuple[int, int]:
    """Micro-batch and layer whose fullest rank has the most rows without balancing."""
    fullest = loads.none_MLG.max(axis=-1)
    place = np.unravel_index(int(fullest.argmax()), fullest.shape)
    return int(place[0]), int(place[1])


def draw_imbalance(axis: Any, loads: Sequence[StepLoads]) -> None:
    """Imbalance of every micro-batch of the run."""
    none = [value for step in loads for value in micro_batch_imbalance(step.none_MLG)]
    balanced = [value for step in loads for value in micro_batch_imbalance(step.balanced_MLG)]
    axis.plot(none, color=_NONE, linewidth=1, label="none")
    axis.plot(balanced, color=_BALANCED, linewidth=1, label="relibra")
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set(title="Imbalance of ranks", xlabel="micro-batch", ylabel="max / mean rows of a rank")
    axis.legend()


def draw_rank_rows(axis: Any, loads: StepLoads) -> None:
    """Rows of each rank in the fullest micro-batch and layer of a step."""
    micro_batch, layer = fullest_place(loads)
    none_G, balanced_G = (
        loads.none_MLG[micro_batch, layer],
        loads.balanced_MLG[micro_batch, layer],
    )
    ranks = np.arange(len(none_G))
    axis.bar(ranks - 0.2, none_G, 0.4, color=_NONE, label="none")
    axis.bar(ranks + 0.2, balanced_G, 0.4, color=_BALANCED, label="relibra")
    axis.axhline(float(none_G.mean()), color="grey", linewidth=0.8, linestyle="--", label="mean")
    axis.set_xticks(ranks)
    title = f"Rows of ranks, micro-batch {micro_batch}, MoE layer {layer} of the last step"
    axis.set(title=title, xlabel="rank", ylabel="rows")
    axis.legend()


def draw_reward(axis: Any, records: Sequence[StepRecord]) -> None:
    """Reward of every step."""
    axis.plot([record.reward for record in records], color=_BALANCED)
    axis.set(title="Reward", xlabel="step", ylabel="fraction of positions right", ylim=(0, 1))


def draw_differences(axis: Any, records: Sequence[StepRecord]) -> None:
    """Differences to the control, with their limits dashed."""
    lines = (
        ("gradient_difference", judge.MAX_GRADIENT_DIFFERENCE, "gradient (relative norm)"),
        ("parameter_difference", judge.MAX_PARAMETER_DIFFERENCE, "parameters (largest)"),
        ("log_prob_difference", judge.MAX_LOG_PROB_DIFFERENCE, "rollout vs. training log-probs"),
    )
    for name, limit, label in lines:
        values = [max(float(getattr(record, name)), 1e-12) for record in records]
        (line,) = axis.plot(values, label=label, linewidth=1)
        axis.axhline(limit, color=line.get_color(), linewidth=0.8, linestyle="--")
    axis.set(title="Difference to the unbalanced control (limits dashed)", xlabel="step")
    axis.set_yscale("log")
    axis.legend()
