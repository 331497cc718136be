"""Balanced MoE training in RL: plan ahead from replayed routing."""

from relibra.balanced_moe import MoEHandle as MoEHandle
from relibra.balanced_moe import balanced_moe as balanced_moe
from relibra.formats import load_routing as load_routing
from relibra.layout import ExpertLayout as ExpertLayout
from relibra.load_matrix import LoadMatrix as LoadMatrix
from relibra.load_matrix import balance_metrics as balance_metrics
from relibra.module import BalancedMoE as BalancedMoE
from relibra.plan import PassPlan as PassPlan
from relibra.plan import ReplicaPlan as ReplicaPlan
from relibra.plan import StepPlan as StepPlan
from relibra.plan_config import PlannerConfig as PlannerConfig
from relibra.plan_report import PlanReport as PlanReport
from relibra.planner import plan_step as plan_step
from relibra.runtime import Runtime as Runtime
from relibra.shape import ModelShape as ModelShape
from relibra.step import TrainingStep as TrainingStep
from relibra.topology import Topology as Topology
from relibra.trace import DispatchRows as DispatchRows
from relibra.trace import RoutingTrace as RoutingTrace
from relibra_kernels.errors import PlanError as PlanError
from relibra_kernels.errors import ReplicaSyncError as ReplicaSyncError
from relibra_kernels.errors import TraceError as TraceError
from relibra_kernels.errors import TraceWarning as TraceWarning
