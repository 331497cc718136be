"""What every benchmark shares: interleaved timing, medians, and a record of the machine.

A benchmark passes a correctness gate before it calls `measure`; timings are compared as ratios of
medians inside one run, because absolute times drift with the load of the machine.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch


def measure(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 15, warm_up: int = 2
) -> dict[str, dict[str, float]]:
    """Time several functions side by side, one call each in turn.

    Args:
        candidates: name -> function without arguments.
        rounds: timed calls of each.
        warm_up: calls of each before timing.

    Returns:
        name -> ``{"median_us", "p10_us", "p90_us"}``.

    Example:
        >>> sorted(measure({"nothing": lambda: None}, rounds=3)["nothing"])
        ['median_us', 'p10_us', 'p90_us']
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warm_up + rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {
        name: {
            "median_us": statistics.median(values),
            "p10_us": float(np.quantile(values, 0.1)),
            "p90_us": float(np.quantile(values, 0.9)),
        }
        for name, values in times.items()
    }


def machine() -> dict[str, object]:
    """Versions, processor and commit, to be written beside every number."""
    root = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or "unknown",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def write_lines(path: str | None, rows: list[dict[str, object]]) -> None:
    """Append one JSON line a row, each with the machine; nothing without a path."""
    if path is None:
        return
    about = machine()
    with Path(path).open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, "machine": about}) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
