"""Plans from loads: `plan_step`, its strategies, and planning in pieces."""

from relibra.plan_config import PlannerConfig
from relibra.planner.groups import plan_groups
from relibra.planner.strategies import STRATEGIES, plan_step
from relibra.planner.stream import LayersPlan, PlanStream

__all__ = ["STRATEGIES", "LayersPlan", "PlanStream", "PlannerConfig", "plan_groups", "plan_step"]
