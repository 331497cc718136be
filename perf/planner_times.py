"""Speed figures of the planner, in processor time of one thread (other work does not change it)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from planner_inputs import RANKS_PER_NODE, generator_rows, make_plan

from relibra.load_matrix import LoadMatrix
from relibra.plan_check import pass_slot_experts
from relibra.planner import PlannerConfig, PlanStream
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra.plan import StepPlan

REPEATS = 5


def least_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Least processor time of some calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def all_quotas(plan: StepPlan, rows: np.ndarray) -> np.ndarray:
    """Rows by source of every expert with copies, as in the plan file."""
    one = plan.passes["train"]
    return native.planner().split_copied(
        rows,
        pass_slot_experts(plan, one),
        one.slot_rows_MLGn,
        plan.topology.rank_to_rail_G,
        num_threads=1,
        rank_to_node_G=plan.topology.rank_to_node_G,
    )


def whole_batch_seconds(rows: np.ndarray) -> float:
    """From counts to the checked plan with the split of every use."""
    return least_seconds(lambda: all_quotas(make_plan(rows), rows))


def first_piece_ms(rows: np.ndarray) -> float:
    """From counts to the first layer's layout and all its micro-batches, planned in pieces."""
    model = ModelShape(rows.shape[3], 8, range(rows.shape[1]))
    topology = Topology(rows.shape[2] // RANKS_PER_NODE, RANKS_PER_NODE)
    config = PlannerConfig(num_threads=1)

    def run() -> None:
        stream = PlanStream({"train": LoadMatrix(rows)}, topology, model=model, config=config)
        next(iter(stream))

    return least_seconds(run) * 1e3


def proposals_per_second() -> float:
    """Swaps a second and core of the layout search: M = 32, E = 128, 8 nodes."""
    rows = generator_rows("medium", ep=64)
    load_LEC = np.ascontiguousarray(rows.sum(2, dtype=np.int64).transpose(1, 2, 0))
    capacity, scale = np.full(8, 16, np.int32), np.ones(8, np.int32)
    tried = 0

    def run() -> None:
        nonlocal tried
        result = native.planner().assign_bins(load_LEC, capacity, scale, None, 500_000, 0, False, 1)
        tried = int(result[2].sum())

    seconds = least_seconds(run, 3)
    return tried / seconds
