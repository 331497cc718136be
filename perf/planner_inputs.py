"""Loads for the planner's gates: the seeded generator and the public trace in ../shared."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology

SHARED = Path(__file__).resolve().parents[2] / "shared"
RANKS_PER_NODE = 8
SEEDS = (0, 1, 2)
KINDS = ("medium", "volatile", "qwenlike")


@cache
def shared_tool(name: str) -> ModuleType:
    """A module of ../shared/tools; SystemExit when it is missing."""
    path = SHARED / "tools" / f"{name}.py"
    if not path.is_file():
        raise SystemExit(f"error: the gates need ../shared/tools/{name}.py, which is missing")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def generator_rows(kind: str, *, ep: int, **settings: object) -> np.ndarray:
    """int32 `[M, L, G, E]`, C-contiguous."""
    work = shared_tool("workloads").make_workload(kind, ep=ep, **settings)
    return np.ascontiguousarray(work.rows)


def trace_rows(ep: int, sequences: int) -> np.ndarray:
    """The GPT-OSS trace, `sequences` in a micro-batch."""
    tool = shared_tool("trace_loads")
    return np.ascontiguousarray(
        tool.cut(tool.load_trace(), ep=ep, sequences_per_micro_batch=sequences).rows
    )


def make_plan(
    rows: np.ndarray,
    strategy: str = "relibra",
    *,
    layout: Sequence[ExpertLayout] | None = None,
    previous: Mapping[str, LoadMatrix] | None = None,
    **settings: object,
) -> StepPlan:
    """Nodes of 8 ranks, one thread."""
    return plan_step(
        {"train": LoadMatrix(rows)},
        Topology(max(1, rows.shape[2] // RANKS_PER_NODE), min(rows.shape[2], RANKS_PER_NODE)),
        model=ModelShape(rows.shape[3], 8, range(rows.shape[1])),
        layout=layout,
        config=PlannerConfig(**({"num_threads": 1} | settings)),  # type: ignore[arg-type]
        strategy=strategy,
        previous=previous,
    )


def rank_rows(plan: StepPlan) -> np.ndarray:
    """int64 `[M, L, G]`."""
    return plan.passes["train"].slot_rows_MLGn.sum(3)
