"""Baselines that only place experts."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology


def test_locality_only_keeps_as_many_rows_in_their_node_as_any_layout_can() -> None:
    rng = np.random.default_rng(0)
    rows = rng.poisson(20 * np.exp(rng.normal(size=(1, 2, 4, 14))), (3, 2, 4, 14)).astype(np.int32)
    loads, shape = {"train": LoadMatrix(rows)}, ModelShape(14, 2, (0, 1))
    topology = Topology(rank_to_node=[0, 1, 1, 0])
    plan = plan_step(loads, topology, model=shape, strategy="locality_only")
    best = [0, 0]
    for layer in range(2):
        sent = rows[:, layer].sum(0)  # [G, E]
        node = np.stack([sent[[0, 3]].sum(0), sent[[1, 2]].sum(0)])
        slots = np.repeat(node, 8, axis=0)  # 8 home slots a node, two of all are filler
        chosen = linear_sum_assignment(np.pad(slots, [(0, 0), (0, 2)]), maximize=True)
        best[0] += np.pad(slots, [(0, 0), (0, 2)])[chosen].sum()
    report = plan.report
    assert report.local_rows is not None
    assert report.nvlink_rows is not None
    assert report.local_rows + report.nvlink_rows == best[0]
    none = plan_step(loads, topology, model=shape, strategy="none").report
    assert none.local_rows is not None
    assert none.nvlink_rows is not None
    assert report.local_rows + report.nvlink_rows > none.local_rows + none.nvlink_rows


def test_locality_only_moves_nothing_without_a_gain() -> None:
    rows = np.full((1, 1, 4, 8), 10, np.int32)
    base = [ExpertLayout(np.random.default_rng(1).permutation(8).reshape(4, 2))]
    plan = plan_step(
        {"train": LoadMatrix(rows)},
        Topology(2, 2),
        model=ModelShape(8, 2, (0,)),
        layout=base,
        config=PlannerConfig(),
        strategy="locality_only",
    )
    assert plan.report.moved_experts == 0
