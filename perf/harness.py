"""What every benchmark shares: interleaved timing, medians, and a record of the machine.

A benchmark passes a correctness gate before it calls `measure`; timings are compared as ratios of
medians inside one run, because absolute times drift with the load of the machine.
"""

import functools
import json
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import triton


def measure(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 15, warm_up: int = 2
) -> dict[str, dict[str, float]]:
    """Time several functions side by side, one call each in turn.

    With a GPU the time is the device's, between two events, behind a buffer that empties its L2.

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
            elapsed = timed(run)
            if number >= warm_up:
                times[name].append(elapsed)
    return {name: summary(values) for name, values in times.items()}


def summary(times_us: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90.

    Example:
        >>> summary([3.0, 1.0, 2.0])["median_us"]
        2.0
    """
    return {
        "median_us": statistics.median(times_us),
        "p10_us": float(np.quantile(times_us, 0.1)),
        "p90_us": float(np.quantile(times_us, 0.9)),
    }


def sustain(
    candidates: Mapping[str, Sequence[Callable[[], object]]],
    *,
    seconds: float = 1.0,
    passes: int = 2,
    log: "GpuLog | None" = None,
) -> dict[str, dict[str, float]]:
    """Time functions under load: calls back to back until the time is over, in turns.

    On a GPU a time is the device's, from event to event of neighbouring calls, so launches by the
    host count where they are slower than the device. Nothing empties L2: a candidate is a list of
    functions on buffers of their own, called in rotation.

    Args:
        candidates: name -> functions that do the same on different buffers.
        seconds: of each candidate, in all passes together; at least two calls a pass.
        passes: turns of each candidate, in alternation.
        log: where clocks and power of the GPU come from.

    Returns:
        name -> medians as in `measure`, "calls", "sustained_s" and what the log saw.

    Example:
        >>> found = sustain({"nothing": [lambda: None]}, seconds=0)["nothing"]
        >>> found["calls"]
        4
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for _ in range(passes):
        for name, runs in candidates.items():
            begin = time.monotonic()
            times[name] += _load(runs, seconds / passes)
            spans[name].append((begin, time.monotonic()))
    found = {}
    for name, values in times.items():
        lasted = sum(end - begin for begin, end in spans[name])
        found[name] = summary(values) | {"calls": len(values), "sustained_s": round(lasted, 3)}
        found[name] |= log.between(spans[name]) if log else {}
    return found


def _load(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Microseconds of each call of one uninterrupted stretch."""
    for run in runs:  # compiles, fills caches
        run()
    gpu, calls, done = torch.cuda.is_available(), 2, 0
    found: list[float] = []
    end = time.monotonic() + seconds
    while not done or time.monotonic() < end:
        batch = [runs[(done + i) % len(runs)] for i in range(calls)]
        found += _gpu_times(batch) if gpu else [timed(run) for run in batch]
        done += calls
        calls = min(200, max(2, int(1e5 / max(found[-1], 1.0))))  # about 0.1 s between syncs
        if not gpu:
            calls = 2
    return found


def _gpu_times(batch: Sequence[Callable[[], object]]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batch) + 1)]
    events[0].record()
    for run, event in zip(batch, events[1:], strict=True):
        run()
        event.record()
    events[-1].synchronize()
    pairs = zip(events, events[1:], strict=False)
    return [float(one.elapsed_time(other)) * 1e3 for one, other in pairs]


class GpuLog:
    """Clocks, power and temperature of the first GPU, read by nvidia-smi ten times a second.

    A context; without nvidia-smi it sees nothing.
    """

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    NAMES = ("sm_mhz", "memory_mhz", "power_w", "celsius")

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "GpuLog":
        device = str(os.environ.get("CUDA_VISIBLE_DEVICES", "0")).split(",")[0] or "0"
        query = f"--query-gpu={','.join(self.FIELDS)}"
        form = "--format=csv,noheader,nounits"
        command = ["nvidia-smi", "-i", device, query, form, "--loop-ms=100"]
        if torch.cuda.is_available():
            try:
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            except OSError:
                return self
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.add(time.monotonic(), line)

    def add(self, when: float, line: str) -> None:
        """Notes one line; lines that hold no numbers are left out."""
        try:
            values = [float(word) for word in line.split(",")]
        except ValueError:
            return
        if len(values) == len(self.NAMES):
            self.samples.append((when, values))

    def between(self, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Medians inside of some stretches of `time.monotonic`; nothing without a sample.

        Example:
            >>> log = GpuLog()
            >>> log.add(1.0, "1980, 3201, 690.5, 61")
            >>> log.between([(0.5, 2.0)])["power_w"]
            690.5
        """
        inside = [values for when, values in self.samples if any(a <= when <= b for a, b in spans)]
        if not inside:
            return {}
        columns = zip(*inside, strict=True)
        return {
            name: statistics.median(column)
            for name, column in zip(self.NAMES, columns, strict=True)
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()


def peak_rates(
    device: torch.device, dtype: torch.dtype, *, seconds: float, log: GpuLog | None = None
) -> tuple[float, float]:
    """What this machine reaches: a dense matmul's operations and a copy's bytes a second.

    Args:
        device: a GPU, or the CPU with small operands.
        dtype: of the matmul.
        seconds: sustained, of each.
        log: see `sustain`.
    """
    size, num_bytes = (8192, 2**31) if device.type == "cuda" else (384, 2**24)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target, product = torch.empty_like(source), torch.empty_like(a)
    runs = {
        "matmul": [lambda: torch.mm(a, b, out=product)],
        "copy": [lambda: target.copy_(source)],
    }
    found = sustain(runs, seconds=seconds, log=log)
    flops = 2 * size**3 / found["matmul"]["median_us"] * 1e6
    return flops, num_bytes / found["copy"]["median_us"] * 1e6


def timed(run: Callable[[], object]) -> float:
    """Microseconds of one call: of the host, or of the GPU where there is one."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _l2_flusher().zero_()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


@functools.cache
def _l2_flusher() -> torch.Tensor:
    """More bytes than any L2 holds."""
    return torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def machine() -> dict[str, object]:
    """Versions, processor and commit, to be written beside every number."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "triton": triton.__version__,
        "gpu": _gpu(),
    }


@functools.cache
def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write_lines(path: str | None, rows: list[dict[str, object]]) -> None:
    """Append one JSON line a row, each with the machine; nothing without a path."""
    if path is None:
        return
    about = machine()
    with Path(path).open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, "machine": about}) + "\n")


def _gpu() -> str | None:
    """Name, clocks and power as nvidia-smi gives them; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    fields = "name,clocks.sm,clocks.mem,clocks.max.sm,power.draw"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return torch.cuda.get_device_name()
    return done.stdout.strip() or torch.cuda.get_device_name()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
