"""Planner time and memory by size: the largest cases, and each dimension doubled.

    python perf/planner_scaling.py L M E G      one size in this process, as a JSON line

Every size runs in a process of its own, so that the peak of its memory is its own. Loads are made
in place; time starts with the finished counts.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology

BASE = {"layers": 12, "micro_batches": 16, "experts": 128, "ranks": 32}
DOUBLINGS = 3
TOKENS, TOP_K = 8192, 8


def make_rows(layers: int, micro_batches: int, experts: int, ranks: int) -> np.ndarray:
    """Lognormal popularity of the layer and of groups of sources; int32 `[M, L, G, E]`.

    Eight ranks in a micro-batch answer the same prompt, as in `grouped` order of the generator.
    """
    rng = np.random.default_rng(0)
    rows = np.empty((micro_batches, layers, ranks, experts), np.int32)
    model = 0.9 * rng.standard_normal((layers, 1, experts), np.float32)
    for one in rows:
        group = 0.9 * rng.standard_normal((layers, -(-ranks // 8), experts), np.float32)
        log = model + np.repeat(group, 8, axis=1)[:, :ranks]
        share = np.exp(log + 0.35 * rng.standard_normal(one.shape, np.float32))
        np.rint(share * (TOKENS * TOP_K / share.sum(2, keepdims=True)), out=share)
        one[:] = share
    return rows


def measure_here(layers: int, micro_batches: int, experts: int, ranks: int) -> dict[str, object]:
    """Seconds of wall and processor time of the plan, then of its report, and peak memory.

    The report splits the rows of every use by source, so its time bounds what all splits take.
    """
    rows = make_rows(layers, micro_batches, experts, ranks)
    start = time.perf_counter(), time.process_time()
    plan = plan_step(
        {"train": LoadMatrix(rows)},
        Topology(max(1, ranks // 8), min(8, ranks)),
        model=ModelShape(experts, TOP_K, range(layers)),
        config=PlannerConfig(num_threads=min(2, os.cpu_count() or 1)),
    )
    planned = time.perf_counter(), time.process_time()
    imbalance = plan.report.imbalance_mean
    split = time.perf_counter(), time.process_time()
    return {
        "layers": layers,
        "micro_batches": micro_batches,
        "experts": experts,
        "ranks": ranks,
        "plan_s": planned[0] - start[0],
        "plan_cpu_s": planned[1] - start[1],
        "split_s": split[0] - planned[0],
        "split_cpu_s": split[1] - planned[1],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "counts_gb": rows.nbytes / 1e9,
        "imbalance_mean": imbalance,
    }


def measure_size(layers: int, micro_batches: int, experts: int, ranks: int) -> dict[str, object]:
    """`measure_here` in a new process."""
    sizes = [str(size) for size in (layers, micro_batches, experts, ranks)]
    command = [sys.executable, str(Path(__file__).resolve()), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def scaling(*, smoke: bool) -> list[dict[str, object]]:
    """Each dimension doubled on its own from `BASE`; every line has the exponent of its dimension.

    The exponent is the slope of log(processor seconds) over log(size), from the first to the last.
    """
    lines: list[dict[str, object]] = []
    base = {name: size // 4 for name, size in BASE.items()} if smoke else BASE
    for name in base:
        series = []
        for doubling in range((1 if smoke else DOUBLINGS) + 1):
            sizes = base | {name: base[name] << doubling}
            series.append({"doubled": name, "size": sizes[name], **measure_size(**sizes)})
        factor = math.log(series[-1]["size"] / series[0]["size"])
        for time_name in ("plan_cpu_s", "split_cpu_s"):
            growth = math.log(series[-1][time_name] / series[0][time_name]) / factor
            for line in series:
                line[time_name.replace("_cpu_s", "_exponent")] = growth
        lines += series
    return lines


if __name__ == "__main__":
    print(json.dumps(measure_here(*(int(size) for size in sys.argv[1:]))))
