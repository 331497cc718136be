"""The gates of the demo: each has a name, a value and a limit.

A value that is not a number fails every gate.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from relibra.demo.settings import FULL_RUN_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra.demo.records import StepRecord

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}

MAX_GRADIENT_DIFFERENCE = 1e-6
MAX_PARAMETER_DIFFERENCE = 1e-6
MAX_LOG_PROB_DIFFERENCE = 1e-4
MAX_RANK_IMBALANCE = 1.15
MIN_RANK_IMBALANCE_NONE = 1.3
MAX_NODE_IMBALANCE = 1.04
MIN_SHARE_OF_STEPS = 0.5
MIN_FINAL_REWARD = 0.60
MIN_REWARD_GAIN = 0.35
MIN_GREEDY_FRACTION = 0.65
REWARD_WINDOW = 10


@dataclasses.dataclass(frozen=True)
class Check:
    """One judged number.

    Attributes:
        name: What the report and the exit message call it.
        value: Measured.
        relation: ``<=`` or ``>=``.
        limit: What ``value`` is compared with.
        step: Step that it belongs to, None for the whole run.

    Example:
        >>> check = Check("gradient-vs-control", float("nan"), "<=", 1e-6, step=3)
        >>> check.passed, str(check)
        (False, 'gradient-vs-control at step 3: nan, need <= 1e-06')
    """

    name: str
    value: float
    relation: str
    limit: float
    step: int | None = None

    def __post_init__(self) -> None:
        """Refuse a relation that nothing implements."""
        if self.relation not in _COMPARE:
            raise ValueError(f"relation: need one of {sorted(_COMPARE)}, got {self.relation!r}")

    @property
    def passed(self) -> bool:
        """Whether the value keeps the limit; never for NaN."""
        return _COMPARE[self.relation](self.value, self.limit)

    def __str__(self) -> str:
        """Name, place, value and need."""
        place = "" if self.step is None else f" at step {self.step}"
        return f"{self.name}{place}: {self.value:.4g}, need {self.relation} {self.limit:g}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the verdict."""
        return {**dataclasses.asdict(self), "passed": self.passed}


def judge_step(record: StepRecord) -> list[Check]:
    """Judge what must hold in every step: the balanced step equals the control.

    Args:
        record: A finished step.

    Returns:
        The checks; the rollout is judged first, since what it got is what trains.
    """
    gates = (
        ("rollout-log-probs", record.log_prob_difference, MAX_LOG_PROB_DIFFERENCE),
        ("gradient-vs-control", record.gradient_difference, MAX_GRADIENT_DIFFERENCE),
        ("parameters-vs-control", record.parameter_difference, MAX_PARAMETER_DIFFERENCE),
    )
    return [Check(name, value, "<=", limit, record.step) for name, value, limit in gates]


def judge_run(records: Sequence[StepRecord], greedy_fraction: float) -> list[Check]:
    """Judge a run that finished.

    Args:
        records: All steps, at least one.
        greedy_fraction: Fraction of positions right on the held-out prompts.

    Returns:
        Worst step of each per-step check, balance gates, and with a full-length run the reward
        gates (fewer steps do not suffice to learn the task).
    """
    worst = [
        max(column, key=lambda check: (check.value != check.value, check.value))
        for column in zip(*(judge_step(record) for record in records), strict=True)
    ]
    balance = [
        Check("rank-imbalance", _mean(records, "rank_imbalance"), "<=", MAX_RANK_IMBALANCE),
        Check(
            "rank-imbalance-without-balancing",
            _mean(records, "rank_imbalance_none"),
            ">=",
            MIN_RANK_IMBALANCE_NONE,
        ),
        Check("node-imbalance", _mean(records, "node_imbalance"), "<=", MAX_NODE_IMBALANCE),
        Check(
            "share-of-steps-with-replicas", _share(records, "replicas"), ">=", MIN_SHARE_OF_STEPS
        ),
        Check(
            "share-of-steps-with-cross-node-moves",
            _share(records, "cross_node_moves"),
            ">=",
            MIN_SHARE_OF_STEPS,
        ),
    ]
    return worst + balance + _judge_reward(records, greedy_fraction)


def _judge_reward(records: Sequence[StepRecord], greedy_fraction: float) -> list[Check]:
    if len(records) < FULL_RUN_STEPS:
        return []
    first = _mean(records[:REWARD_WINDOW], "reward")
    last = _mean(records[-REWARD_WINDOW:], "reward")
    return [
        Check("reward-of-last-10-steps", last, ">=", MIN_FINAL_REWARD),
        Check("reward-gain-over-first-10-steps", last - first, ">=", MIN_REWARD_GAIN),
        Check("greedy-fraction-right-held-out", greedy_fraction, ">=", MIN_GREEDY_FRACTION),
    ]


def _mean(records: Sequence[StepRecord], name: str) -> float:
    return sum(float(getattr(record, name)) for record in records) / len(records)


def _share(records: Sequence[StepRecord], name: str) -> float:
    return sum(1 for record in records if getattr(record, name) > 0) / len(records)
