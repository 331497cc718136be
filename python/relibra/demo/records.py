"""What the demo measures in one step, and the numbers derived from rows of ranks.

Letters: M micro-batches, L MoE layers, G ranks, N nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relibra.topology import Topology

Rows = npt.NDArray[np.int64]


def imbalance(rows_MLG: Rows) -> float:
    """Max over places / mean over places of rows, summed over (micro-batch, layer) before dividing.

    Args:
        rows_MLG: int64 ``[M, L, places]``.

    Returns:
        1.0 is perfect balance, also where there are no rows at all.

    Example:
        >>> imbalance(np.array([[[1, 3]], [[2, 2]]]))
        1.25
    """
    total = rows_MLG.sum()
    return float(rows_MLG.max(axis=-1).sum() * rows_MLG.shape[-1] / total) if total else 1.0


def node_rows(rows_MLG: Rows, topology: Topology) -> Rows:
    """Rows of each node, int64 ``[M, L, N]``, of rows of each rank."""
    rows_MLN = np.zeros((*rows_MLG.shape[:2], topology.num_nodes), np.int64)
    for rank, node in enumerate(topology.rank_to_node):
        rows_MLN[..., node] += rows_MLG[..., rank]
    return rows_MLN


@dataclasses.dataclass(frozen=True)
class StepLoads:
    """Rows of each rank in one step, without balancing and as executed.

    Attributes:
        none_MLG: int64 ``[M, L, G]``, experts laid out in order, no replicas.
        balanced_MLG: int64 ``[M, L, G]``.
        topology: Nodes of the ranks.
    """

    none_MLG: Rows
    balanced_MLG: Rows
    topology: Topology

    def __post_init__(self) -> None:
        """Balancing moves rows, it never loses or adds one."""
        if not np.array_equal(self.none_MLG.sum(-1), self.balanced_MLG.sum(-1)):
            raise ValueError("balanced_MLG: need as many rows as none_MLG in every layer")

    def imbalances(self) -> dict[str, float]:
        """Imbalance at rank and node level, before and after."""
        return {
            "rank_imbalance_none": imbalance(self.none_MLG),
            "rank_imbalance": imbalance(self.balanced_MLG),
            "node_imbalance_none": imbalance(node_rows(self.none_MLG, self.topology)),
            "node_imbalance": imbalance(node_rows(self.balanced_MLG, self.topology)),
        }


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One line of the table.

    Attributes:
        step: Counts from 0.
        reward: Mean reward of the samples of all ranks.
        rank_imbalance_none: Max / mean rows of a rank without balancing.
        rank_imbalance: The same as executed.
        node_imbalance_none: Max / mean rows of a node without balancing.
        node_imbalance: The same as executed.
        replicas: Replica slots in use, over micro-batches and layers.
        moves: Experts that changed their home rank before the step.
        cross_node_moves: Those of them that changed their node.
        push_bytes: Bytes of weights pushed to replicas in one forward of all micro-batches.
        gradient_norm: Before clipping.
        gradient_difference: Norm of the difference to the control's gradient / its norm.
        parameter_difference: Largest absolute difference to the control after the optimizer.
        log_prob_difference: Largest difference of rollout and training log-probs of a token.
        times: Seconds by stage and ``planner_ms``; the only values that vary between equal runs.
    """

    step: int
    reward: float
    rank_imbalance_none: float
    rank_imbalance: float
    node_imbalance_none: float
    node_imbalance: float
    replicas: int
    moves: int
    cross_node_moves: int
    push_bytes: int
    gradient_norm: float
    gradient_difference: float
    parameter_difference: float
    log_prob_difference: float
    times: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


class Stopwatch:
    """Seconds by stage of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent
