"""Replication against an exact solver on seeded instances; `perf/planner_milp.py` makes both."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def planner_milp(project_root: Path) -> ModuleType:
    path = project_root / "perf" / "planner_milp.py"
    spec = importlib.util.spec_from_file_location("planner_milp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_milp"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_no_plan_beats_the_exact_solver_and_most_equal_it(
    planner_milp: ModuleType, record_property: Callable[[str, object], None]
) -> None:
    records = planner_milp.run_instances(300)
    assert [record.seed for record in records] == list(range(300))
    assert {record.shape[0] for record in records} == {2, 4, 8}
    assert {record.slots for record in records} == {0, 1, 2}
    for record in records:
        assert record.ours >= record.best, f"{record}: better than the optimum"
        if record.slots >= record.shape[1]:
            assert record.ours == record.best, f"{record}: S >= H"
    ratios = np.array([record.ratio for record in records])
    record_property("within_half_a_percent", float(np.mean(ratios <= 1.005)))
    record_property("worst", float(ratios.max()))
    # What is asked for is 0.95 and 1.05; without the change of single sites the worst is 1.020.
    assert np.mean(ratios <= 1.005) >= 0.98
    assert ratios.max() <= 1.015


def test_the_oracle_on_an_instance_done_by_hand(planner_milp: ModuleType) -> None:
    """Ranks of 14, 12, 4 and 10 rows, one slot each: 10 everywhere needs a chain over rank 1."""
    rows = np.array([[14], [12], [4], [10]])
    assert planner_milp.exact_maximum(rows, 0) == 14
    assert planner_milp.exact_maximum(rows, 1) == planner_milp.solver_maximum(rows, 1) == 10
