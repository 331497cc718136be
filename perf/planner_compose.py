"""What composing micro-batches gains on the seeded generator, and how long it takes.

    python perf/planner_compose.py            the gates "with composition", about 3 minutes
    python perf/planner_compose.py --smoke    seconds; one small case
    python perf/planner_compose.py --times    the search on 48 layers

A bin of the generator (what one rank works through in a micro-batch) is a sample, and a cell holds
one. Imbalance is simulated (rows mode: max / mean rows of a rank, reordering and one replica slot);
times are measured: the least processor time of one thread, which other work on the machine changes
little, and the median wall time. `once` composes by all experts and plans; `twice`
composes again by the nodes of that plan's layouts and plans from them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from harness import write_lines
from planner_inputs import SEEDS, generator_rows, make_plan

from relibra import Budgets, Composition, Samples, compose, composed_loads, expert_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class ComposeRecord:
    """Figures of one load matrix; imbalance is max / mean rows of a rank.

    Args:
        kind: of the generator.
        ep: G, in nodes of 8.
        order: of the samples.
        seed: of the batch.
        before_mean: planned as the micro-batches came.
        once_mean: composed by all experts.
        once_p99: of single instances.
        twice_mean: composed again by nodes.
        twice_p99: of single instances.
        eplb_mean: EPLB with the batch's own loads, on the micro-batches as they came.
        eplb_composed_mean: the same on the composition `once`.
        none_composed_mean: no balancing, on the composition `once`.
        compose_ms: wall time of both compositions.
    """

    kind: str
    ep: int
    order: str
    seed: int
    before_mean: float
    once_mean: float
    once_p99: float
    twice_mean: float
    twice_p99: float
    eplb_mean: float
    eplb_composed_mean: float
    none_composed_mean: float
    compose_ms: float


def bins_as_samples(rows_MLGE: np.ndarray) -> tuple[Samples, Composition, Budgets]:
    """Samples of a load matrix, the composition that it is, and one sample a cell."""
    micro_batches, layers, ranks, experts = rows_MLGE.shape
    rows = np.ascontiguousarray(rows_MLGE.transpose(0, 2, 1, 3)).reshape(-1, layers, experts)
    bins = np.arange(len(rows))
    tokens = np.full(len(rows), 8192)
    return (
        Samples(rows, tokens),
        Composition(bins // ranks, bins % ranks, np.zeros(micro_batches, int), ranks),
        Budgets(micro_batches, tokens=8192, count=1, least_count=1),
    )


def record(kind: str, ep: int, order: str, seed: int, **settings: object) -> ComposeRecord:
    """Compose, plan, compose by nodes, plan."""
    rows = generator_rows(kind, ep=ep, order=order, seed=seed, **settings)
    samples, current, budgets = bins_as_samples(rows)
    options = {"loss_normalisation": "step", "num_threads": 1}
    once = compose(samples, ep, budgets, current=current, **options)
    once_rows = composed_loads(once, samples).rows_MLGE
    plan = make_plan(once_rows)
    nodes = expert_nodes(plan.layouts, plan.topology)
    twice = compose(samples, ep, budgets, current=once, projection=nodes, **options)
    for each in (once, twice):
        check(each, budgets)
    again = make_plan(composed_loads(twice, samples).rows_MLGE, layout=plan.layouts)
    eplb = [make_plan(each, "eplb_oracle").report.imbalance_mean for each in (rows, once_rows)]
    return ComposeRecord(
        kind,
        ep,
        order,
        seed,
        before_mean=make_plan(rows).report.imbalance_mean,
        once_mean=plan.report.imbalance_mean,
        once_p99=plan.report.imbalance_p99,
        twice_mean=again.report.imbalance_mean,
        twice_p99=again.report.imbalance_p99,
        eplb_mean=eplb[0],
        eplb_composed_mean=eplb[1],
        none_composed_mean=make_plan(once_rows, "none").report.imbalance_mean,
        compose_ms=once.report.elapsed_ms + twice.report.elapsed_ms,
    )


def check(composition: Composition, budgets: Budgets) -> None:
    """Raises AssertionError unless every cell of every micro-batch has its one sample."""
    bins = composition.micro_batch_J * composition.num_cells + composition.cell_J
    assert np.array_equal(np.sort(bins), np.arange(len(bins))), "samples lost or doubled"
    assert composition.num_micro_batches == budgets.micro_batches


def records(*, smoke: bool = False) -> Iterator[ComposeRecord]:
    """All cases of the gates: three kinds at EP 64 and EP 16, both orders, seeds 0-2."""
    if smoke:
        yield record("medium", 16, "grouped", 0, layers=2, micro_batches=8)
        return
    for kind in ("medium", "qwenlike", "volatile"):
        for ep in (16, 64):
            for order in ("grouped", "random"):
                for seed in SEEDS:
                    yield record(kind, ep, order, seed)


# Area, kinds, EP, figure, must, stretch.
LIMITS = (
    ("EP 64 mean", ("medium",), 64, "mean", 1.015, 1.010),
    ("EP 64 p99", ("medium",), 64, "p99", 1.030, 1.020),
    ("EP 64 mean", ("qwenlike", "volatile"), 64, "mean", 1.020, 1.010),
    ("EP 64 p99", ("qwenlike", "volatile"), 64, "p99", 1.035, 1.020),
    ("EP 16 mean", ("medium", "qwenlike", "volatile"), 16, "mean", 1.005, None),
)


def limits(found: list[ComposeRecord], *, stage: str = "twice") -> Iterator[dict[str, object]]:
    """One line a gate: the worst of seeds and kinds in `grouped` order, `random` beside it.

    Args:
        found: all of `records()`.
        stage: "once" or "twice".
    """
    for name, kinds, ep, figure, must, stretch in LIMITS:
        worst = {
            order: max(
                getattr(one, f"{stage}_{figure}")
                for one in found
                if one.kind in kinds and one.ep == ep and one.order == order
            )
            for order in ("grouped", "random")
        }
        yield {
            "area": "with composition",
            "name": f"{name}, {' / '.join(kinds)}",
            "stage": stage,
            "kind": "simulated",
            "value": worst["grouped"],
            "other": worst["random"],
            "must": must,
            "stretch": stretch,
        }


def compose_ms(
    projection: int | None, *, layers: int = 48, ep: int = 64, threads: int = 1, repeats: int = 5
) -> tuple[float, float]:
    """Milliseconds of one composition from the grouped order: processor (least), wall (median).

    Args:
        projection: features, None for all (layer, expert).
        layers: L.
        ep: G, and the cells.
        threads: of the search; processor time is that of all.
        repeats: timed calls after one warm-up.
    """
    rows = generator_rows("medium", ep=ep, layers=layers)
    samples, current, budgets = bins_as_samples(rows)
    wall, processor = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter(), time.process_time()
        compose(
            samples,
            ep,
            budgets,
            current=current,
            loss_normalisation="step",
            projection=projection,
            num_threads=threads,
        )
        wall.append((time.perf_counter() - start[0]) * 1e3)
        processor.append((time.process_time() - start[1]) * 1e3)
    return min(processor[1:]), statistics.median(wall[1:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one small case")
    parser.add_argument("--times", action="store_true", help="only the times, 48 layers")
    parser.add_argument("--json", metavar="FILE", help="append the figures as JSON lines")
    args = parser.parse_args(arguments)
    lines: list[dict[str, object]] = []
    if args.times:
        for projection in (None, 1024, 512, 256):
            for threads in (1, 2):
                cpu, wall = compose_ms(projection, threads=threads)
                figures = {"threads": threads, "cpu_ms": cpu, "wall_ms": wall}
                lines.append({"projection": projection} | figures)
                print(
                    f"projection {projection or 'none'}, {threads} thread(s): processor "
                    f"{cpu:.0f} ms, wall {wall:.0f} ms",
                    flush=True,
                )
    else:
        found = []
        for one in records(smoke=args.smoke):
            found.append(one)
            lines.append(dict(vars(one)))
            print(
                f"{one.kind} EP {one.ep} {one.order} seed {one.seed}: as it came "
                f"{one.before_mean:.4f}, once {one.once_mean:.4f} ({one.once_p99:.4f}), twice "
                f"{one.twice_mean:.4f} ({one.twice_p99:.4f}); EPLB {one.eplb_mean:.4f} -> "
                f"{one.eplb_composed_mean:.4f}; {one.compose_ms:.0f} ms",
                flush=True,
            )
        if not args.smoke:
            for stage in ("once", "twice"):
                for line in limits(found, stage=stage):
                    lines.append(line)
                    print(
                        f"{line['name']}, {stage}: {line['value']:.4f} (random order "
                        f"{line['other']:.4f}), must {line['must']}, stretch {line['stretch']}"
                    )
    write_lines(args.json, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
