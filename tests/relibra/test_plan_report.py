"""PlanReport: every figure recomputed by hand on a small plan."""

import json

import numpy as np
import pytest

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.plan import PassPlan, StepPlan
from relibra.plan_report import PlanReport
from relibra.planner import plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology

TOPOLOGY = Topology(2, 2)
SHAPE = ModelShape(4, 1, (0,), hidden_size=10, expert_size=20)


def small_plan() -> StepPlan:
    """2 nodes x 2 ranks, one expert a rank; expert 0 has a copy on rank 1; micro-batch 1 is empty.

    Rows a rank: 130, 150 (50 of its own, 100 of expert 0), 40, 60; nodes 280 and 100.
    """
    rows = np.zeros((2, 1, 4, 4), np.int32)
    rows[0, 0, 0] = [200, 50, 0, 0]
    rows[0, 0, 3] = [30, 0, 40, 60]
    padding = np.zeros_like(rows)
    padding[0, 0, 0, 0] = 23
    replicas = np.full((2, 1, 4, 1), -1, np.int32)
    replicas[0, 0, 1, 0] = 0
    slot_rows = np.zeros((2, 1, 4, 2), np.int64)
    slot_rows[0, 0] = [[130, 0], [50, 100], [40, 0], [60, 0]]
    layout = ExpertLayout.identity(4, 4)
    return StepPlan.from_arrays(
        TOPOLOGY,
        SHAPE,
        [layout],
        {"train": PassPlan(replicas, slot_rows)},
        {"train": LoadMatrix(rows, padding_MLGE=padding)},
        base_layouts=[ExpertLayout([[1], [0], [3], [2]])],
    )


def test_every_figure() -> None:
    report = small_plan().report
    assert report.num_instances == 1
    assert report.imbalance_mean == report.imbalance_max == pytest.approx(150 / 95)
    assert report.imbalance_node_mean == pytest.approx(280 / 190)
    # 23 of the 230 rows of expert 0 are padding, a tenth, in its home and in its copy.
    routed = [130 * 0.9, 50 + 100 * 0.9, 40, 60]
    assert report.imbalance_routed_mean == pytest.approx(max(routed) / np.mean(routed))
    assert report.gap_replication == pytest.approx(150 / 140)
    # Any node with expert 0 (230 rows) has one more, at least the 40 rows of expert 2.
    assert report.gap_layout == pytest.approx(280 / 270)
    assert report.gap_total == pytest.approx(150 / 95)
    assert (report.replicas, report.fan_out_mean, report.fan_out_max) == (1, 1.0, 1)
    assert report.push_bytes == 3 * 10 * 20 * 2
    assert report.worst_rank_rows == 150
    assert report.worst_rank_rows_padded == 2 * 128
    assert (report.moved_experts, report.moved_experts_across_nodes) == (4, 0)
    assert report.migration_bytes == 4 * 3 * 10 * 20 * (2 + 12)
    # Source 0 keeps 130 rows of expert 0 and source 3 its 60; source 0 sends 70 + 50 to rank 1;
    # source 3 sends 40 to rank 2 in its node, and 30 rows of expert 0 to the other node.
    assert (report.local_rows, report.nvlink_rows, report.rdma_rows) == (190, 160, 30)
    assert report.hash == small_plan().hash


def test_it_is_plain_json_and_comes_back() -> None:
    report = small_plan().report
    assert PlanReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report


def test_unknown_sizes_give_no_bytes() -> None:
    loads = {"train": LoadMatrix(np.ones((1, 1, 4, 8), np.int32))}
    report = plan_step(loads, TOPOLOGY, model=ModelShape(8, 1, (0,)), strategy="none").report
    assert report.push_bytes is None
    assert report.migration_bytes is None


def test_nothing_to_do_is_balanced() -> None:
    loads = {"train": LoadMatrix(np.zeros((2, 1, 4, 8), np.int32))}
    report = plan_step(loads, TOPOLOGY, model=ModelShape(8, 1, (0,))).report
    assert report.num_instances == 0
    assert report.imbalance_mean == report.imbalance_node_p99 == report.gap_layout == 1.0
    assert report.replicas == report.worst_rank_rows == 0


def test_uneven_nodes_are_compared_by_rows_a_rank() -> None:
    rows = np.zeros((1, 1, 3, 6), np.int32)
    rows[0, 0, 0] = 10
    loads = {"train": LoadMatrix(rows)}
    topology = Topology(rank_to_node=[0, 0, 1])
    report = plan_step(loads, topology, model=ModelShape(6, 1, (0,))).report
    assert report.imbalance_mean == report.imbalance_node_mean == 1.0
    assert report.gap_layout == report.gap_replication == report.gap_total == 1.0
