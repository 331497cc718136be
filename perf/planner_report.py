"""Tables of the planner's gates, of its baselines, and of its time by size."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from harness import write_lines
from planner_gates import Gate, groups
from planner_inputs import generator_rows, make_plan
from planner_scaling import scaling
from rich.console import Console
from rich.table import Table

from relibra.load_matrix import LoadMatrix
from relibra.planner import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterable


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return str(int(value)) if float(value).is_integer() and abs(value) >= 2 else f"{value:.4f}"


def _held(held: bool | None) -> str:
    return {None: "-", True: "yes", False: "no"}[held]


def gate_table(gates: Iterable[Gate]) -> Table:
    table = Table(title="gates of the planner (limits are upper ones but where >= is written)")
    for heading, options in (
        ("area", {}),
        ("figure", {}),
        ("kind", {}),
        ("value", {"justify": "right"}),
        ("random order", {"justify": "right"}),
        ("must", {"justify": "right"}),
        ("stretch", {"justify": "right"}),
        ("status", {"no_wrap": True}),
        ("stretch holds", {}),
    ):
        table.add_column(heading, **options)  # type: ignore[arg-type]
    area = None
    for gate in gates:
        sign = ">= " if gate.at_least else ""
        table.add_row(
            gate.area if gate.area != area else "",
            gate.name,
            gate.kind,
            _figure(gate.value),
            _figure(gate.random),
            sign + _figure(gate.must) if gate.must is not None else "-",
            sign + _figure(gate.stretch) if gate.stretch is not None else "-",
            gate.status,
            _held(gate.holds(gate.stretch)),
        )
        area = gate.area
    return table


def baseline_lines(*, smoke: bool) -> list[dict[str, object]]:
    """Every strategy on the same loads, in both orders; seed 1 is the batch before seed 0."""
    lines: list[dict[str, object]] = []
    for ep in (16,) if smoke else (8, 16, 32, 64):
        for order in ("grouped", "random"):
            rows, before = (generator_rows("medium", ep=ep, order=order, seed=s) for s in (0, 1))
            previous = {"train": LoadMatrix(before)}
            for strategy in STRATEGIES:
                report = make_plan(rows, strategy, previous=previous).report
                lines.append({"loads": f"medium E128 EP{ep} {order}", **report.as_dict()})
    return lines


def baseline_table(lines: list[dict[str, object]]) -> Table:
    """Mean (p99) imbalance, one row a strategy, one column a load matrix."""
    loads = list(dict.fromkeys(str(line["loads"]) for line in lines))
    table = Table(title="imbalance of ranks, mean (p99), simulated")
    table.add_column("strategy", no_wrap=True)
    for name in loads:
        table.add_column(name, justify="right")
    for strategy in dict.fromkeys(str(line["strategy"]) for line in lines):
        cells = [
            f"{line['imbalance_mean']:.4f} ({line['imbalance_p99']:.3f})"
            for line in lines
            if line["strategy"] == strategy
        ]
        table.add_row(strategy, *cells)
    return table


def report_gates(only: list[str] | None, path: str | None, *, smoke: bool) -> int:
    """Prints gates and baselines. Exit code 1 when a "must" fails.

    Args:
        only: names of groups; None for all and the table of baselines.
        path: of the JSON lines; None writes none.
        smoke: small sizes, whose figures say nothing about the gates.
    """
    known = groups(smoke=smoke)
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        raise SystemExit(f"error: --only: need some of {', '.join(known)}, got {unknown}")
    gates: list[Gate] = []
    for name in only or known:
        start = time.perf_counter()
        gates += known[name]()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if smoke:
        print("smoke: small sizes, so no figure below says whether a gate holds")
    _print(gate_table(gates))
    lines = [gate.line() for gate in gates]
    if only is None:
        baselines = baseline_lines(smoke=smoke)
        _print(baseline_table(baselines))
        lines += baselines
    write_lines(path, lines)
    failed = [gate for gate in gates if gate.status == "FAIL"]
    missed = [gate for gate in gates if gate.holds(gate.stretch) is False]
    waiting = [gate for gate in gates if gate.value is None]
    print(f"{len(gates)} gates: {len(failed)} fail, {len(waiting)} not built yet; ", end="")
    print(f"the stretch value is missed by {len(missed)}")
    for gate in failed:
        print(f"FAIL {gate.area}, {gate.name}: {_figure(gate.value)}, must {_figure(gate.must)}")
    return int(bool(failed)) if not smoke else 0


def report_scaling(path: str | None, *, smoke: bool) -> int:
    """Prints the growth of the planner's time with each dimension."""
    lines = scaling(smoke=smoke)
    table = Table(title="planner time, each dimension doubled (measured, processor seconds)")
    for heading in ("L", "M", "E", "G", "plan s", "split + report s", "peak GB", "exponents"):
        table.add_column(heading, justify="right")
    for i, line in enumerate(lines):
        last = i + 1 == len(lines) or lines[i + 1]["doubled"] != line["doubled"]
        table.add_row(
            *(str(line[name]) for name in ("layers", "micro_batches", "experts", "ranks")),
            f"{line['plan_cpu_s']:.3f}",
            f"{line['split_cpu_s']:.3f}",
            f"{line['peak_gb']:.2f}",
            f"{line['doubled']}: plan {line['plan_exponent']:.2f}, split "
            f"{line['split_exponent']:.2f}"
            if last
            else "",
        )
    _print(table)
    write_lines(path, lines)
    return 0
