"""Arguments of plan_step that are refused, each with one clear error."""

import numpy as np
import pytest

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

LOADS = {"train": LoadMatrix(np.ones((1, 2, 4, 8), np.int32))}


@pytest.mark.parametrize(
    ("value", "named"),
    [(np.nan, "float"), (np.inf, "float"), (1.5, "float"), (-1, "-1"), (2**31, "2147483648")],
)
def test_loads_that_are_no_counts_are_refused(value: float, named: str) -> None:
    rows = np.ones((1, 1, 2, 4), np.array(value).dtype)
    rows[0, 0, 1, 2] = value
    with pytest.raises(PlanError, match=f"rows_MLGE: need .*{named}"):
        LoadMatrix(rows)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loads": {}}, PlanError, "loads: need at least one pass"),
        ({"loads": LOADS["train"]}, TypeError, "loads: need Mapping, got LoadMatrix"),
        ({"loads": {"train": [1]}}, TypeError, r"loads\['train'\]: need a LoadMatrix, got list"),
        ({"topology": 4}, TypeError, "topology: need Topology, got int"),
        ({"model": ModelShape(9, 1, (0, 1))}, PlanError, "need 9 experts as in the model, got 8"),
        ({"model": ModelShape(8, 1, (0,))}, PlanError, "need 1 MoE layers as in the model, got 2"),
        ({"strategy": "best"}, PlanError, "strategy: need one of none, lpt, .*ideal, got 'best'"),
        (
            {"layout": [ExpertLayout.identity(8, 4)]},
            PlanError,
            "layout: need one a layer, 2, got 1",
        ),
        ({"layout": ExpertLayout.identity(8, 4)}, TypeError, "layout: need one .* in a sequence"),
        (
            {"layout": [ExpertLayout.identity(8, 2)] * 2},
            PlanError,
            r"layout\[0\]: need .* = \(8, 4, 2\), got \(8, 2, 4\)",
        ),
        ({"layout": [1, 2]}, TypeError, r"layout\[0\]: need an ExpertLayout, got int"),
        ({"config": 3}, TypeError, "config: need PlannerConfig, got int"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments: dict[str, object] = {
        "loads": LOADS,
        "topology": Topology(2, 2),
        "model": ModelShape(8, 1, (0, 1)),
    }
    with pytest.raises(error, match=message):
        plan_step(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replica_slots": -1}, "replica_slots: need an integer 0"),
        ({"replica_slots": 1.0}, r"replica_slots: need an integer .* got 1\.0"),
        ({"cost": "money"}, "cost: need 'rows' or 'time', got 'money'"),
        ({"proposals": -1}, "proposals: need an integer 0"),
        ({"tolerance": float("nan")}, "tolerance: need 0 <= tolerance < 1, got nan"),
        ({"tolerance": "x"}, "tolerance: need a number, got 'x'"),
        ({"pass_weight": {"train": 0}}, r"pass_weight\['train'\]: need an integer 1"),
        ({"pass_weight": 3}, "pass_weight: need a mapping"),
        ({"allow_filler": 1}, "allow_filler: need True or False, got 1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlannerConfig(**change)  # type: ignore[arg-type]


def test_groups_of_more_ranks_than_any_job_has_are_refused_at_once() -> None:
    """Exact relabelling of 4,096 ranks would take minutes a layer."""
    shape = ModelShape(2, 1, (0,))
    widest = LoadMatrix(np.ones((1, 1, 1024, 2), np.int32))
    plan = plan_step({"train": widest}, Topology(128, 8), model=shape, strategy="none")
    assert plan.topology.num_ranks == 1024
    with pytest.raises(PlanError, match="topology: need at most 1024 ranks to plan, got 1032"):
        plan_step(
            {"train": LoadMatrix(np.ones((1, 1, 1032, 2), np.int32))},
            Topology(129, 8),
            model=shape,
        )
