"""Plans from loads: `plan_step` and its strategies."""

from relibra.plan_config import PlannerConfig
from relibra.planner.strategies import STRATEGIES, plan_step

__all__ = ["STRATEGIES", "PlannerConfig", "plan_step"]
