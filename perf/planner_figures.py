"""Balance figures of plans on the seeded generator, one record a load matrix."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from planner_inputs import KINDS, SEEDS, generator_rows, make_plan, rank_rows

from relibra_kernels import native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relibra.plan import StepPlan


@dataclass(frozen=True)
class Record:
    """Figures of one load matrix; imbalance is max / mean rows of a rank.

    Args:
        kind: of the generator.
        experts: E.
        ep: G, in nodes of 8.
        order: of the samples.
        seed: of the batch.
        mean: overall, reordering and S = 1.
        p99: overall, of single instances.
        node_mean: over nodes, what no replica changes.
        none_mean: without balancing.
        in_mean: inside single nodes with S = 1, each planned for itself.
        in_p99: of single nodes.
        in_us: processor time a node.
        in2_mean: inside single nodes with S = 2.
        in2_max: worst node with S = 2.
        above_node: overall mean less that over nodes.
        worse_than_none: layers in which `none` is better.
        moved_again: experts that move when the same loads are planned on the plan's layouts.
    """

    kind: str
    experts: int
    ep: int
    order: str
    seed: int
    mean: float
    p99: float
    node_mean: float
    none_mean: float
    in_mean: float
    in_p99: float
    in_us: float
    in2_mean: float
    in2_max: float
    above_node: float
    worse_than_none: int
    moved_again: int


def in_node(plan: StepPlan, rows: np.ndarray, slots: int) -> tuple[np.ndarray, float]:
    """Max / mean of every single (node, micro-batch, layer), and microseconds of each."""
    totals = rows.sum(2, dtype=np.int64)
    home = np.stack([layout.home_slot_expert_GH for layout in plan.layouts])
    ratios, seconds, count = [], 0.0, 0
    for node in range(plan.topology.num_nodes):
        ranks = list(plan.topology.ranks_of_node(node))
        here = np.ascontiguousarray(home[:, ranks])
        one_node, times = np.zeros(len(ranks), np.int32), []
        for _ in range(3):
            start = time.process_time()
            largest = native.planner().replicate(totals, here, one_node, slots, 0.0, 1)[2]
            times.append(time.process_time() - start)
        experts = here.reshape(1, len(here), -1).astype(np.int64)
        held = np.take_along_axis(
            totals, np.broadcast_to(experts, (len(totals), *experts.shape[1:])), 2
        )
        ratios.append((largest * len(ranks) / held.sum(2)).reshape(-1))
        seconds += min(times)
        count += largest.size
    return np.concatenate(ratios), seconds / count * 1e6


def figures(kind: str, experts: int, ep: int, order: str, seed: int) -> Record:
    rows = generator_rows(kind, ep=ep, experts=experts, order=order, seed=seed)
    plan, none = make_plan(rows), make_plan(rows, "none")
    two = make_plan(rows, replica_slots=2)
    single, micros = in_node(plan, rows, 1)
    double, _ = in_node(two, rows, 2)
    report = plan.report
    ours, base = (rank_rows(one).max(2).sum(0) for one in (plan, none))
    return Record(
        kind,
        experts,
        ep,
        order,
        seed,
        mean=report.imbalance_mean,
        p99=report.imbalance_p99,
        node_mean=report.imbalance_node_mean,
        none_mean=none.report.imbalance_mean,
        in_mean=float(single.mean()),
        in_p99=float(np.quantile(single, 0.99)),
        in_us=micros,
        in2_mean=float(double.mean()),
        in2_max=float(double.max()),
        above_node=report.imbalance_mean - report.imbalance_node_mean,
        worse_than_none=int((ours > base).sum()),
        moved_again=make_plan(rows, layout=plan.layouts).report.moved_experts,
    )


def sweep(*, smoke: bool) -> Iterator[Record]:
    """All kinds, E and EP; seeds 0-2 in grouped order, seed 0 in random order.

    With `smoke` one kind, E and seed.
    """
    for kind in KINDS[:1] if smoke else KINDS:
        for experts in (128,) if smoke else (128, 256):
            for ep in (8, 16) if smoke else (8, 16, 32, 64):
                for order in ("grouped", "random"):
                    for seed in SEEDS[:1] if smoke or order == "random" else SEEDS:
                        yield figures(kind, experts, ep, order, seed)
