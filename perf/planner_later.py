"""Gates of what is built on the planner: composition, static copies, co-activation, time mode.

Each entry is the tuple of a `Gate`'s values; None as figure is "not built yet".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from planner_coactivation import coactivation_gates
from planner_compose import bins_as_samples, compose_ms, limits, records
from planner_inputs import KINDS, SEEDS, generator_rows, make_plan, rank_rows
from planner_modelled import THINNING, modelled_records
from planner_times import first_piece_ms

from relibra import compose, composed_loads, expert_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

Values = tuple[str, str, str, float | None, float | None, float | None, bool, float | None]


@dataclass(frozen=True)
class CopiesRecord:
    """Instances of one load matrix, composed, with two static copies a node."""

    experts: int
    order: str
    p50: float
    mean: float
    p99: float


def with_copies(kind: str, experts: int, order: str, seed: int) -> CopiesRecord:
    """EP64: composed by all experts and by nodes, then planned with X = 2."""
    rows = generator_rows(kind, ep=64, experts=experts, order=order, seed=seed)
    samples, current, budgets = bins_as_samples(rows)
    options = {"loss_normalisation": "step", "num_threads": 1}
    once = compose(samples, 64, budgets, current=current, **options)
    plan = make_plan(composed_loads(once, samples).rows_MLGE)
    nodes = expert_nodes(plan.layouts, plan.topology)
    twice = compose(samples, 64, budgets, current=once, projection=nodes, **options)
    final = make_plan(composed_loads(twice, samples).rows_MLGE, static_copies=2)
    load = rank_rows(final)
    return CopiesRecord(
        experts,
        order,
        p50=float(np.quantile(load.max(2) / load.mean(2), 0.5)),
        mean=final.report.imbalance_mean,
        p99=final.report.imbalance_p99,
    )


def copies_gates(*, smoke: bool) -> Iterator[Values]:
    """Worst over kinds and seeds."""
    kinds, seeds = (KINDS[:1], SEEDS[:1]) if smoke else (KINDS, SEEDS)
    for experts, musts in ((128, (1.003, 1.005, 1.025)), (256, (1.006, 1.012, 1.04))):
        found = [
            with_copies(kind, experts, order, seed)
            for kind in kinds
            for order in ("grouped", "random")
            for seed in seeds
        ]
        stretch = (1.001, 1.002, 1.005)
        for figure, must, hoped in zip(("p50", "mean", "p99"), musts, stretch, strict=True):
            grouped, random = (
                max(getattr(one, figure) for one in found if one.order == order)
                for order in ("grouped", "random")
            )
            area = f"composition + X=2, EP64, E{experts}"
            yield area, figure, "simulated", grouped, must, hoped, False, random
        if smoke:
            return


def modelled_gates(*, smoke: bool) -> Iterator[Values]:
    """Sums over all cases: plans of `cost="time"` against `none`.

    A layout serves all micro-batches of a layer, so with very few rows a single micro-batch may
    lose what the others win: that is printed, and has no limit.
    """
    found = list(modelled_records(smoke=smoke))
    area = "never worse than none, by modelled time"
    for name, field, thinned, must in (
        ("layers that are", "slower_layers", (False, True), 0),
        ("micro-batches that are", "slower_micro_batches", (False,), 0),
        (f"micro-batches, rows / {THINNING}", "slower_micro_batches", (True,), None),
    ):
        grouped, random = (
            sum(
                getattr(one, field)
                for one in found
                if one.order == order and (one.thinning > 1) in thinned
            )
            for order in ("grouped", "random")
        )
        if not (smoke and thinned == (True,)):
            yield area, name, "simulated", grouped, must, must, False, random


def later_gates(*, smoke: bool) -> Iterator[Values]:
    """All of them."""
    if not smoke:
        found = list(records())
        for line in limits(found):
            yield (
                "with composition (by experts, then by nodes)",
                str(line["name"]),
                "simulated",
                line["value"],
                line["must"],
                line["stretch"],
                False,
                line["other"],
            )
    yield from copies_gates(smoke=smoke)
    rows = generator_rows("medium", ep=64, layers=2 if smoke else 48)
    composed, _ = compose_ms(256, layers=2 if smoke else 48)
    total = composed + first_piece_ms(rows)
    area, name = "first layer's plan after counts", "ms, composition projected to 256"
    yield area, name, "measured", total, 80, 40, False, None
    yield from coactivation_gates(smoke=smoke)
    yield from modelled_gates(smoke=smoke)
