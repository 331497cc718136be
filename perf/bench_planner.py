"""Quality and time of planning, by strategy; the planner's gates; its time by size.

    python perf/bench_planner.py                          synthetic loads at 8 to 64 ranks
    python perf/bench_planner.py --every-strategy         all baselines and bounds
    python perf/bench_planner.py --force-balanced         a router forced to be balanced, and ideal
    python perf/bench_planner.py --rows loads.npz --nodes 8 --ranks-per-node 8 --num-threads 1
    python perf/bench_planner.py --smoke                  seconds; checks, small sizes
    python perf/bench_planner.py --gates                  every gate; minutes; needs ../shared
    python perf/bench_planner.py --gates --only trace milp
    python perf/bench_planner.py --scaling                each dimension doubled; a minute

Every plan is checked before its numbers are printed: the rules of a plan, the split by source
against its NumPy twin on sampled uses, the same plan for one and two threads, and never worse than
none. Imbalance is max / mean of rows over ranks; times are the median of the repeats in wall time
and the least in processor time, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import planner_report
from harness import write_lines
from rich.console import Console
from rich.table import Table

from relibra.load_matrix import LoadMatrix
from relibra.planner import STRATEGIES as EVERY_STRATEGY
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.source_split import split_rows_reference
from relibra.topology import Topology

STRATEGIES = ("none", "eplb_oracle", "relibra")
COLUMNS = {
    "imbalance_mean": "mean",
    "imbalance_p99": "p99",
    "imbalance_max": "max",
    "gap_replication": "gap repl",
    "gap_layout": "gap layout",
    "gap_total": "gap total",
}


@dataclass(frozen=True)
class Case:
    """Loads on a topology.

    Args:
        name: shown in the table.
        rows_MLGE: int32 `[M, L, G, E]`.
        topology: of the G ranks.
        config: of the planner.
        previous: rows of the batch before, for baselines that plan on history; None without.
    """

    name: str
    rows_MLGE: np.ndarray
    topology: Topology
    config: PlannerConfig
    previous: np.ndarray | None = None


def synthetic_rows(ranks: int, layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """Poisson rows around lognormal popularity: of the layer, the micro-batch's prompts, a rank."""
    shape = (32, layers, ranks, experts)
    log = 0.8 * np.random.default_rng(0).normal(size=(1, layers, 1, experts))  # of the model
    rng = np.random.default_rng([1, seed])
    log = log + 0.5 * rng.normal(size=(32, layers, 1, experts)) + 0.3 * rng.normal(size=shape)
    share = np.exp(log)
    share *= 65536 / share.sum(3, keepdims=True)
    return rng.poisson(share).astype(np.int32)


def make_cases(args: argparse.Namespace) -> list[Case]:
    config = PlannerConfig(replica_slots=args.replica_slots, num_threads=args.num_threads)
    if args.rows:
        with np.load(args.rows, allow_pickle=False) as file:
            rows = file["rows_MLGE"]
        return [Case(args.rows, rows, Topology(args.nodes, args.ranks_per_node), config)]
    if args.smoke:
        rows, before = (synthetic_rows(16, 2, 32, seed)[:4] for seed in (0, 1))
        small = replace(config, proposals=2000)
        return [Case("smoke, 16 ranks", rows, Topology(4, 4), small, before)]
    return [
        Case(
            f"synthetic, {ranks} ranks",
            synthetic_rows(ranks, 8, 128),
            Topology(nodes, 8),
            config,
            synthetic_rows(ranks, 8, 128, seed=1),
        )
        for nodes, ranks in ((1, 8), (2, 16), (4, 32), (8, 64))
    ]


def check_case(case: Case, loads: dict[str, LoadMatrix], shape: ModelShape) -> None:
    """Raises AssertionError where a plan is wrong; constructing a plan checks its rules."""
    plans = {
        threads: plan_step(
            loads, case.topology, model=shape, config=replace(case.config, num_threads=threads)
        )
        for threads in (1, 2)
    }
    plan = plans[1]
    assert plan.hash == plans[2].hash, "the plan depends on the number of threads"
    none = plan_step(loads, case.topology, model=shape, config=case.config, strategy="none")
    worst = [p.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0) for p in (plan, none)]
    assert (worst[0] <= worst[1]).all(), "worse than none"
    rng = np.random.default_rng(0)
    for _ in range(3):
        m, layer = rng.integers(len(case.rows_MLGE)), rng.integers(case.rows_MLGE.shape[1])
        view = plan.replica_plan("train", m, layer)
        twin = split_rows_reference(
            loads["train"].rows_MLGE[m, layer],
            view.slot_expert_Gn,
            view.slot_rows_Gn,
            case.topology.rank_to_rail_G,
        )
        assert np.array_equal(plan.source_quota("train", m, layer), twin), "split by source"


def measure(case: Case, repeats: int, strategies: tuple[str, ...]) -> list[dict[str, object]]:
    """One line of figures a strategy; without a batch before, EPLB on history is left out."""
    rows = np.ascontiguousarray(case.rows_MLGE, np.int32)
    shape = ModelShape(rows.shape[3], 1, range(rows.shape[1]))
    check_case(case, {"train": LoadMatrix(rows)}, shape)
    lines: list[dict[str, object]] = []
    previous = None
    if case.previous is not None:
        previous = {"train": LoadMatrix(np.ascontiguousarray(case.previous, np.int32))}
    for strategy in strategies:
        if strategy in ("eplb", "eplb_flat") and previous is None:
            continue
        wall, processor = [], []
        for _ in range(repeats):
            fresh = {"train": LoadMatrix(rows)}  # totals are counted again
            start = time.perf_counter(), time.process_time()
            plan = plan_step(
                fresh,
                case.topology,
                model=shape,
                config=case.config,
                strategy=strategy,
                previous=previous,
            )
            wall.append((time.perf_counter() - start[0]) * 1e3)
            processor.append((time.process_time() - start[1]) * 1e3)
        times = {"wall_ms": statistics.median(wall), "cpu_ms": min(processor)}
        threads = case.config.num_threads
        head = {"loads": case.name, "shape_MLGE": rows.shape, "num_threads": threads}
        lines.append(head | plan.report.as_dict() | times)
    return lines


def show(lines: list[dict[str, object]]) -> None:
    table = Table(title="planning, rows mode")
    for name in ("loads", "strategy"):
        table.add_column(name, no_wrap=True)
    for heading in (*COLUMNS.values(), "replicas", "wall ms", "cpu ms"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(
            str(line["loads"]),
            str(line["strategy"]),
            *(f"{line[name]:.4f}" for name in COLUMNS),
            str(line["replicas"]),
            f"{line['wall_ms']:.0f}",
            f"{line['cpu_ms']:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def chosen_strategies(args: argparse.Namespace) -> tuple[str, ...]:
    if args.every_strategy:
        return tuple(EVERY_STRATEGY)
    return STRATEGIES + (("force_balanced", "ideal") if args.force_balanced else ())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes, one repeat")
    parser.add_argument("--rows", help=".npz with rows_MLGE [M, L, G, E]")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--replica-slots", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every-strategy", action="store_true", help="all baselines and bounds")
    parser.add_argument(
        "--force-balanced", action="store_true", help="add the forced router and the ideal"
    )
    parser.add_argument("--gates", action="store_true", help="every gate of the planner")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="some groups of gates")
    parser.add_argument("--scaling", action="store_true", help="time with each dimension doubled")
    parser.add_argument("--json", metavar="FILE", help="append the figures as JSON lines")
    args = parser.parse_args(arguments)
    if args.gates:
        return planner_report.report_gates(args.only, args.json, smoke=args.smoke)
    if args.scaling:
        return planner_report.report_scaling(args.json, smoke=args.smoke)
    lines = []
    for case in make_cases(args):
        repeats = 1 if args.smoke else args.repeats
        lines += measure(case, repeats, chosen_strategies(args))
    show(lines)
    write_lines(args.json, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
