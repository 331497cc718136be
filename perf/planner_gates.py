"""The quality and speed that the planner must have: one `Gate` a figure.

Imbalance is simulated (rows mode: max / mean rows of a rank, from counts); times and memory are
measured on this machine, in processor time of one thread where not said otherwise. Figures are the
worst over seeds 0-2, and over kinds and numbers of experts that a gate does not name. Loads in
`grouped` order decide; `random` order is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from planner_figures import Record, sweep
from planner_inputs import generator_rows, make_plan, trace_rows
from planner_later import later_gates
from planner_milp import NUM_INSTANCES, MilpRecord, run_instances
from planner_scaling import measure_size
from planner_times import first_piece_ms, proposals_per_second, whole_batch_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_BUILT = "not built yet"


@dataclass(frozen=True)
class Gate:
    """One figure and its limits.

    Args:
        area: row of the table of gates.
        name: what is measured.
        kind: "simulated" or "measured".
        value: the figure; None when the feature is not built.
        must: limit that has to hold; None when there is none.
        stretch: limit that is hoped for.
        at_least: limits are from below.
        random: the figure for samples in random order, for comparison.
    """

    area: str
    name: str
    kind: str
    value: float | None
    must: float | None = None
    stretch: float | None = None
    at_least: bool = False
    random: float | None = None

    def holds(self, limit: float | None) -> bool | None:
        """Whether a limit holds; None without a limit or a figure."""
        if limit is None or self.value is None:
            return None
        return self.value >= limit if self.at_least else self.value <= limit

    @property
    def status(self) -> str:
        """The verdict on `must`; a figure that is missing never passes."""
        if self.value is None:
            return NOT_BUILT
        held = self.holds(self.must)
        return "no must" if held is None else "pass" if held else "FAIL"

    def line(self) -> dict[str, object]:
        """For JSON."""
        held = self.holds(self.stretch)
        return {**vars(self), "status": self.status, "stretch_holds": held}


class Worst:
    """Largest figures of records by order."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    def __call__(self, field: str, order: str, **wanted: object) -> float | None:
        """None when no record matches; a tuple matches any of its values."""
        found = [
            float(getattr(record, field))
            for record in self.records
            if record.order == order and all(_fits(record, *item) for item in wanted.items())
        ]
        return max(found, default=None)

    def gate(
        self, area: str, name: str, field: str, limits: tuple[float | None, ...], **wanted: object
    ) -> Gate:
        """Limits are (must, stretch)."""
        grouped, random = (self(field, order, **wanted) for order in ("grouped", "random"))
        kind = "measured" if field.endswith("_us") else "simulated"
        return Gate(area, name, kind, grouped, *limits, random=random)


def _fits(record: Record, name: str, value: object) -> bool:
    return getattr(record, name) in (value if isinstance(value, tuple) else (value,))


def sweep_gates(records: list[Record]) -> Iterator[Gate]:
    """Balance in nodes and overall."""
    worst, sizes = Worst(records), tuple(sorted({record.ep for record in records}))
    wide = tuple(ep for ep in sizes if ep >= 16)
    area = "in node, S=1, EP>=16"
    yield worst.gate(area, "mean", "in_mean", (1.004, 1.0025), ep=wide)
    yield worst.gate(area, "p99", "in_p99", (1.03, 1.01), ep=wide)
    for experts in sorted({record.experts for record in records}):
        name = f"us an instance, E{experts}"
        yield worst.gate(area, name, "in_us", (10, 2), ep=wide, experts=experts)
    area = "in node, S=1, EP8"
    yield worst.gate(area, "mean", "in_mean", (1.0055, 1.0015), ep=8)
    yield worst.gate(area, "p99", "in_p99", (1.03, 1.012), ep=8)
    yield worst.gate(area, "us an instance", "in_us", (150, 50), ep=8)
    yield worst.gate("in node, S=2", "mean", "in2_mean", (1.002, 1.0005))
    yield worst.gate("in node, S=2", "max", "in2_max", (1.015, 1.002))
    area = "overall, medium E128, no composition"
    for ep, must in ((8, 1.0055), (16, 1.015), (32, 1.035), (64, 1.06)):
        if ep not in sizes:
            continue
        case = {"kind": "medium", "experts": 128, "ep": ep}
        yield worst.gate(area, f"mean, EP{ep}", "mean", (must, None), **case)
        name = f"mean above the node bound, EP{ep}"
        yield worst.gate(area, name, "above_node", (None, 0.002), **case)
    yield worst.gate("never worse than none", "layers that are, by rows", "worse_than_none", (0, 0))
    yield worst.gate("equal loads again", "moved experts", "moved_again", (0, 0))


def trace_gates(*, smoke: bool) -> Iterator[Gate]:
    """The GPT-OSS trace in file order."""
    area = "GPT-OSS, 8 sequences, S=1"
    for ep, must, stretch in ((8, 1.002, 1.001), (16, 1.012, 1.009), (32, 1.045, 1.038)):
        if not (smoke and ep > 8):
            mean = make_plan(trace_rows(ep, 8)).report.imbalance_mean
            yield Gate(area, f"mean, EP{ep}", "simulated", mean, must, stretch)
    area = "GPT-OSS, one sequence a rank, S=1"
    for ep, must in ((8, 1.002), (16, 1.006), (32, 1.007)):
        if not (smoke and ep > 8):
            mean = make_plan(trace_rows(ep, ep)).report.imbalance_mean
            yield Gate(area, f"mean, EP{ep}", "simulated", mean, must)


def milp_gates(records: list[MilpRecord], *, smoke: bool) -> Iterator[Gate]:
    """C against the optimum."""
    area, count = f"MILP, {len(records)} instances", len(records)
    least = None if smoke else NUM_INSTANCES
    ratio = np.array([record.ratio for record in records])
    below = sum(record.ours < record.best for record in records)
    alias = [r for r in records if r.slots >= r.shape[1] and r.ours != r.best]
    yield Gate(area, "instances planned", "simulated", count, least, None, at_least=True)
    yield Gate(area, "C below the optimum", "simulated", below, 0)
    close = float(np.mean(ratio <= 1.005))
    yield Gate(area, "part with C <= 1.005x", "simulated", close, 0.95, None, at_least=True)
    yield Gate(area, "largest C / optimum", "simulated", float(ratio.max()), 1.05, 1.002)
    yield Gate(area, "S >= H without the optimum", "simulated", len(alias), 0)


def flashlb_gate() -> Iterator[Gate]:
    """A case on which published planners stay far above the mean of 181.25."""
    rows = np.zeros((1, 1, 8, 8), np.int32)
    rows[0, 0, 0] = [600, 560, 120, 120, 20, 10, 10, 10]
    largest = make_plan(rows).report.worst_rank_rows
    yield Gate("FlashLB's case, 8 ranks", "largest rank", "simulated", largest, 182)


def time_gates(*, smoke: bool) -> Iterator[Gate]:
    """One core; the large sizes use two."""
    layers = 4 if smoke else 48
    rows = generator_rows("medium", ep=64, layers=layers)
    area = f"whole batch {layers}x32xE128 EP64, with split"
    seconds = whole_batch_seconds(rows)
    yield Gate(area, "s, load only", "measured", seconds, 0.6, 0.25)
    area = "first layer's plan after counts"
    yield Gate(area, "ms, no composition", "measured", first_piece_ms(rows), 20, 5)
    rate = proposals_per_second() / 1e6
    yield Gate("layout search", "M proposals / s / core", "measured", rate, 10, 20, at_least=True)
    if smoke:
        return
    for sizes in ((94, 64, 256, 128), (24, 512, 128, 16)):
        done = measure_size(*sizes)
        area = "scale {}x{}xE{} EP{}, 2 threads".format(*sizes)
        yield Gate(area, "s to the plan, wall", "measured", done["plan_s"], 5, 2)
        both = done["plan_s"] + done["split_s"]
        yield Gate(area, "s with split and report, wall", "measured", both, 5, None)
        yield Gate(area, "GB at most, whole process", "measured", done["peak_gb"], 2)


def groups(*, smoke: bool) -> dict[str, Callable[[], Iterator[Gate]]]:
    """Name -> what measures those gates."""
    return {
        "balance": lambda: sweep_gates(list(sweep(smoke=smoke))),
        "trace": lambda: trace_gates(smoke=smoke),
        "milp": lambda: milp_gates(run_instances(30 if smoke else NUM_INSTANCES), smoke=smoke),
        "flashlb": flashlb_gate,
        "time": lambda: time_gates(smoke=smoke),
        "later": lambda: (Gate(*values) for values in later_gates(smoke=smoke)),
    }
