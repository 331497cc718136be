"""The time model of pushes against measured times: predicted over measured, without a fit.

    python perf/bench_replica_sync.py --providers cpu_shm --rounds 15 --json lines.json
    python perf/push_model.py lines.json [--name cpu_shm] [--out FILE]

`CostModel.push_seconds` of relibra.cost_model says t = t0 + max over ranks of max(out, in) * bytes
/ BW, for weights out and for gradients home. BW and t0 come from two points alone, one expert to
one rank in the smallest and in the largest size; every other size and pattern is then predicted.

What the model leaves out, so what a machine without links shows: ranks that push at the same time
share its cores and memory (`ring`, `two homes to one`), and a sum reads and writes the home's
gradients besides what comes over a link.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine
from replica_problem import patterns

from relibra.cost_model import CostModel
from relibra.presets import HARDWARE, MODELS
from relibra.topology import Topology

Line = dict[str, Any]
GROUPS = {"push": False, "home reduce": True}  # group -> whether gradients move
FIRST = "1 to 1"


def compare(
    lines: Sequence[Line], name: str, group: str, statistic: str = "median_us"
) -> dict[str, Any]:
    """Rate and t0 from two points, and every point beside its prediction.

    Args:
        lines: of `bench_replica_sync.py`.
        name: of the provider.
        group: `push` or `home reduce`.
        statistic: of the timed rounds.

    Raises:
        ValueError: fewer than two sizes, or a larger one that is faster.
    """
    chosen = [one for one in lines if (one["name"], one["group"]) == (name, group)]
    times = {tuple(one["case"].split(" ", 2)): one[statistic] for one in chosen}
    models = sorted({model for model, *_ in times}, key=lambda one: _params(one))
    (ranks,) = {ranks for _, ranks, _ in times} or {""}
    if len(models) < 2:
        raise ValueError(f"lines: need two sizes of {name}, {group}, got {models}")
    small, large = models[0], models[-1]
    item = 4 if GROUPS[group] else 2
    more_us = times[large, ranks, FIRST] - times[small, ranks, FIRST]
    if more_us <= 0:
        raise ValueError(f"lines: {large} is faster than {small} in {group} by {-more_us:.1f} us")
    rate = (_params(large) - _params(small)) * item / more_us / 1e3
    t0_us = times[small, ranks, FIRST] - _params(small) * item / rate / 1e3
    hardware = HARDWARE["H100"].with_values(push_gb_per_s=rate, push_latency_us=max(t0_us, 0.0))
    num_ranks = int(ranks.removeprefix("P="))
    points = []
    for pattern in patterns(num_ranks):
        out, into = (np.array(one) for one in pattern.out_and_in(num_ranks))
        for model in models:
            if (model, ranks, pattern.name) not in times:
                continue
            preset = MODELS[model]
            cost = CostModel(hardware, preset.shape(), Topology(1, num_ranks), preset)
            ends = (into, out) if GROUPS[group] else (out, into)
            seconds = float(cost.push_seconds(*ends, gradients=GROUPS[group]))
            measured = times[model, ranks, pattern.name]
            given = pattern.name == FIRST and model in (small, large)
            point = {"model": model, "pattern": pattern.name, "measured_us": round(measured, 1)}
            point |= {"predicted_us": round(seconds * 1e6, 1), "given": given}
            points.append(point | {"ratio": round(seconds * 1e6 / measured, 3)})
    return {"group": group, "gb_per_s": rate, "t0_us": t0_us, "points": points}


def summary(result: dict[str, Any]) -> dict[str, list[float]]:
    """Pattern -> least, median and largest of predicted over measured, given points left out."""
    by_pattern: dict[str, list[float]] = {}
    for point in result["points"]:
        if not point["given"]:
            by_pattern.setdefault(point["pattern"], []).append(point["ratio"])
    return {
        name: [min(found), round(statistics.median(found), 3), max(found)]
        for name, found in by_pattern.items()
    }


def _params(model: str) -> int:
    return 3 * MODELS[model].hidden_size * MODELS[model].expert_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the ratios; stores them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", help="JSON lines of bench_replica_sync.py")
    parser.add_argument("--name", default="cpu_shm", help="provider")
    parser.add_argument(
        "--statistic",
        choices=("median_us", "p10_us"),
        default="median_us",
        help="of the rounds; p10 where other work shares the machine",
    )
    parser.add_argument("--note", default="", help="about the run, for the file")
    parser.add_argument("--out", metavar="FILE", help="write everything as JSON")
    options = parser.parse_args(arguments)
    lines = [json.loads(line) for line in Path(options.lines).read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    try:
        results = [compare(lines, options.name, group, options.statistic) for group in GROUPS]
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(
        f"{options.name}, {', '.join(kinds)}, {options.statistic}; "
        "predicted over measured: least, median, largest"
    )
    for result in results:
        print(f"{result['group']}: {result['gb_per_s']:.2f} GB/s, t0 {result['t0_us']:.0f} us")
        for pattern, values in summary(result).items():
            print(f"  {pattern:18}", *(f"{value:6.2f}" for value in values))
    if options.out:
        about = {"command": "bench_replica_sync.py, then push_model.py", "kind": sorted(kinds)}
        about |= {"note": options.note, "provider": options.name, "statistic": options.statistic}
        about |= {"machine": machine()}
        for result in results:
            result["predicted_over_measured"] = summary(result)
        Path(options.out).write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
