"""Plans from loads: `plan_step`, its strategies, planning in pieces, and places of samples."""

from relibra.plan_config import PlannerConfig
from relibra.planner.groups import plan_groups
from relibra.planner.sample_places import place_samples, sample_costs
from relibra.planner.strategies import STRATEGIES, plan_step
from relibra.planner.stream import LayersPlan, PlanStream
from relibra.token_sample import TokenSample

__all__ = [
    "STRATEGIES",
    "LayersPlan",
    "PlanStream",
    "PlannerConfig",
    "TokenSample",
    "place_samples",
    "plan_groups",
    "plan_step",
    "sample_costs",
]
