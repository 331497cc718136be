"""Gate, time, print, write and plot groups of candidates that compute the same."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import GpuLog, peak_rates, sustain, write_lines
from kernel_shapes import (
    DISTRIBUTIONS,
    MODEL_NAMES,
    TOKENS,
    LayerProblem,
    LayerShape,
    model_shape,
    small_shapes,
)

from relibra_kernels.testing.compare import calc_diff

# Against the fp32 reference, which itself rounds differently from a kernel in fp32.
MAX_DIFF = {torch.bfloat16: 1e-5, torch.float16: 1e-6, torch.float32: 1e-10}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BASELINE_FACTOR = 4  # baselines made of separate torch ops round every intermediate to bf16
LARGE = 4 << 30  # bytes
CHUNK = 1 << 26  # elements compared at once

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a group's results.

    Attributes:
        name: printed.
        runs: the same work on different buffers; the first one's results are checked.
        padded: results that are rows have padding.
        reset: called once before the check.
        is_bound: computes something else of the same cost, so there is nothing to check.
    """

    name: str
    runs: Sequence[Callable[[], Sequence[torch.Tensor]]]
    padded: bool = False
    reset: Callable[[], None] = lambda: None
    is_bound: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Candidates, what they must give, and what it costs at least."""

    name: str
    expected: Sequence[torch.Tensor]
    candidates: Sequence[Candidate]
    flops: float
    bound_us: float
    must_tflops: float | None = None  # of "relibra", on an H200


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest `calc_diff` of chunks, so that no copy in fp64 is larger than a chunk."""
    if found.shape != expected.shape:
        raise ValueError(f"shape: need {list(expected.shape)}, got {list(found.shape)}")
    if not found.numel():
        return 0.0
    step = max(1, CHUNK // max(1, found[0].numel()))
    parts = zip(found.split(step), expected.split(step), strict=True)
    diffs = [calc_diff(one, other) for one, other in parts]
    return float("nan") if any(d != d for d in diffs) else max(diffs)


def check(p: LayerProblem, group: Group, candidate: Candidate) -> float:
    """The correctness gate.

    Returns:
        The largest difference of any result.

    Raises:
        AssertionError: a result differs from the fp32 reference by more than rounding.
    """
    if candidate.is_bound:
        return 0.0
    candidate.reset()
    ours = candidate.name.startswith("relibra")
    worst, limit = 0.0, MAX_DIFF[p.dtype] * (1 if ours else BASELINE_FACTOR)
    found = candidate.runs[0]()
    for place, (got, need) in enumerate(zip(found, group.expected, strict=True)):
        rows = candidate.padded and len(got) == p.num_rows and len(need) == p.num_real
        diff = difference(got[p.real] if rows else got, need)
        if not diff < limit:
            raise AssertionError(
                f"{group.name}, {candidate.name}: result {place}: calc_diff {diff:.1e} from the "
                f"fp32 reference, need below {limit:.0e}"
            )
        worst = max(worst, diff)
    return worst


class Bench:
    """A benchmark script: options, machine rates, lines.

    Args:
        name: in the JSON lines.
        doc: of the script.
        arguments: of the command line; None takes those of the process.
    """

    def __init__(self, name: str, doc: str, arguments: Sequence[str] | None = None) -> None:
        self.name, self.begin = name, time.monotonic()
        self.options = _options(doc, arguments)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.dtype = DTYPES[self.options.dtype or ("bf16" if self.on_gpu else "fp32")]
        self.gate_only = self.options.backend == "triton" and not self.on_gpu
        self.seconds = 0.0 if self.options.smoke else self.options.seconds
        if not self.on_gpu:
            self.seconds = min(self.seconds, 0.2)
        self.lines: list[Line] = []
        self.left_out: list[str] = []
        self.log = GpuLog()
        self.rates = (1.0, 1.0)

    def num_buffers(self, shape: LayerShape) -> int:
        """Copies of a problem that calls rotate over, so that none finds its inputs in L2.

        One where the inputs are far larger than any L2, and memory is short.
        """
        weights = (shape.num_home + 1) * 3 * shape.hidden * shape.expert
        large = (shape.num_received * shape.hidden + weights) * self.dtype.itemsize > LARGE
        return 2 if self.on_gpu and not large else 1

    def shapes(self) -> list[LayerShape]:
        """Points in the order in which they run: the published models once, then more."""
        o = self.options
        if not self.on_gpu:
            return small_shapes(o.smoke or self.gate_only)
        tokens = TOKENS if o.full else o.tokens
        return [
            model_shape(model, count, each)
            for count in tokens[: 1 if o.smoke else None]
            for each in DISTRIBUTIONS[: 1 if o.smoke else None]
            for model in o.models[: 1 if o.smoke else None]
        ]

    def problems(self, shape: LayerShape) -> list[LayerProblem]:
        """One a buffer."""
        return [
            LayerProblem(shape, self.device, self.dtype, seed, self.options.backend)
            for seed in range(self.num_buffers(shape))
        ]

    def run(self, groups_of: Callable[[list[LayerProblem]], Sequence[Group]]) -> None:
        """Runs every shape.

        Args:
            groups_of: the groups of a shape's problems; called inside of the time budget.
        """
        try:
            self._run_all(groups_of)
        except AssertionError as error:
            sys.exit(f"error: {error}")
        if self.left_out:
            print("no time left for: " + "; ".join(self.left_out))
        if self.options.plot and self.lines:
            plot(self.lines, self.options.plot)

    def _run_all(self, groups_of: Callable[[list[LayerProblem]], Sequence[Group]]) -> None:
        with self.log:
            if not self.gate_only:
                self._measure_rates()
            for shape in self.shapes():
                if self._is_over():
                    self.left_out.append(shape.case)
                    continue
                problems = self.problems(shape)
                rows = problems[0].num_real
                print(
                    f"{shape.case}: D {shape.hidden}, F {shape.expert}, {shape.num_home} home + 1 "
                    f"replica slot, {rows} rows, {str(self.dtype)[6:]}, on {self._where()}"
                )
                for group in groups_of(problems):  # a gate that fails ends the script
                    if self._is_over():
                        self.left_out.append(f"{shape.case} {group.name}")
                        continue
                    self._run_group(shape, problems[0], group)

    def _where(self) -> str:
        if not self.on_gpu:
            return "CPU (times of this CPU, not of a GPU)"
        return torch.cuda.get_device_name()

    def _measure_rates(self) -> None:
        self.rates = peak_rates(self.device, self.dtype, seconds=self.seconds, log=self.log)
        flops, num_bytes = self.rates
        print(
            f"measured on {self._where()}: dense matmul {flops / 1e12:.3g} TFLOP/s, copy "
            f"{num_bytes / 1e12:.3g} TB/s; the bounds below come from both"
        )

    def _is_over(self) -> bool:
        budget = self.options.budget
        return budget is not None and time.monotonic() - self.begin > budget

    def _run_group(self, shape: LayerShape, p: LayerProblem, group: Group) -> None:
        passed = {}
        for candidate in group.candidates:
            if self.gate_only and candidate.is_bound:
                continue
            title = f"  {group.name:26} {candidate.name:22}"
            try:
                diff = check(p, group, candidate)
            except Exception as error:
                if candidate.name.startswith("relibra"):
                    raise
                reason = f"{type(error).__name__}: {str(error).strip()[:160]}"
                print(f"{title} left out: {reason}")
                continue
            passed[candidate.name] = candidate
            if self.gate_only:
                print(f"{title} gate passed, calc_diff {diff:.1e}")
        if self.gate_only or not passed:
            return
        runs = {name: candidate.runs for name, candidate in passed.items()}
        found = sustain(runs, seconds=self.seconds, log=self.log)
        written = [self._line(shape, group, name, times) for name, times in found.items()]
        for line in written:
            print(_text(line))
        if self.on_gpu:
            compare_bases(written)
            compare_must(written, torch.cuda.get_device_name())
        self.lines += written
        write_lines(self.options.json, written)

    def _line(self, shape: LayerShape, group: Group, name: str, times: dict[str, float]) -> Line:
        micro = times["median_us"]
        about: Line = {"bench": self.name, "case": shape.case, "dtype": str(self.dtype)}
        about |= {"group": group.name, "name": name, "device": self.device.type, **times}
        about["tflops"] = group.flops / micro / 1e6
        about["percent_of_dense"] = 100e6 * group.flops / micro / self.rates[0]
        about["percent_of_bound"] = 100 * group.bound_us / micro
        if group.must_tflops and name == "relibra":
            about |= {"must_tflops": group.must_tflops}
        about |= {"dense_tflops": self.rates[0] / 1e12, "copy_tb_per_s": self.rates[1] / 1e12}
        return about


def compare_bases(lines: Sequence[Line]) -> None:
    """Prints what it costs to read half of the tiles from the replica base (need: below 1 %)."""
    times = {line["name"]: line["median_us"] for line in lines}
    if {"relibra, all home", "relibra, half replica"} <= times.keys():
        slower = 100 * (times["relibra, half replica"] / times["relibra, all home"] - 1)
        print(f"  half of the tiles from the replica base: {slower:+.1f} % time against all home")


def compare_must(lines: Sequence[Line], gpu: str) -> None:
    """Prints whether the rate that an H200 must reach is reached."""
    for line in lines if "H200" in gpu else ():
        if "must_tflops" in line:
            verdict = "reached" if line["tflops"] >= line["must_tflops"] else "not reached"
            print(f"  {line['group']}: must {line['must_tflops']:.0f} TFLOP/s: {verdict}")


def _text(line: Line) -> str:
    clocks = f", {line['sm_mhz']:.0f} MHz, {line['power_w']:.0f} W" if "sm_mhz" in line else ""
    return (
        f"  {line['group']:26} {line['name']:22} {line['median_us'] / 1e3:9.3f} ms "
        f"(p10 {line['p10_us'] / 1e3:.3f}, p90 {line['p90_us'] / 1e3:.3f}) "
        f"{line['tflops']:8.4g} TFLOP/s, {line['percent_of_dense']:.0f} % of dense, "
        f"{line['percent_of_bound']:.0f} % of the bound{clocks}"
    )


def _options(doc: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="one point, two calls a candidate")
    backends = ("auto", "triton", "reference")
    add("--backend", choices=backends, default="auto", help="triton on a CPU: gate only")
    add("--dtype", choices=list(DTYPES), help="default bf16 on a GPU, fp32 on a CPU")
    add("--models", nargs="+", choices=MODEL_NAMES, default=MODEL_NAMES, metavar="NAME")
    add("--tokens", nargs="+", type=int, default=TOKENS[:1], metavar="T", help="of a rank")
    add("--full", action="store_true", help=f"T = {', '.join(map(str, TOKENS))}")
    add("--seconds", type=float, default=1.0, help="sustained, a candidate and point")
    add("--budget", type=float, help="seconds after which no further group begins")
    add("--json", metavar="FILE", help="append one JSON line a result")
    add("--plot", metavar="FILE", help="draw bars of TFLOP/s (PNG, SVG or PDF)")
    return parser.parse_args(arguments)


def plot(lines: Sequence[Line], path: str) -> None:
    """TFLOP/s of every candidate, a panel a group; the mark is the bound.

    Args:
        lines: as written to JSON.
        path: the figure's file.
    """
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(line["group"] for line in lines))
    names = list(dict.fromkeys(line["name"] for line in lines))
    cases = list(dict.fromkeys(line["case"] for line in lines))
    figure = Figure(figsize=(2 + 1.2 * len(cases), 2.6 * max(1, len(groups))), layout="tight")
    axes = figure.subplots(max(1, len(groups)), 1, squeeze=False)[:, 0]
    width = 0.8 / max(1, len(names))
    for axis, group in zip(axes, groups, strict=False):
        for line in (one for one in lines if one["group"] == group):
            number = names.index(line["name"])
            x = cases.index(line["case"]) + number * width
            axis.bar(x, line["tflops"], width, color=f"C{number}")
            bound = line["tflops"] / line["percent_of_bound"] * 100
            axis.plot([x - width / 2, x + width / 2], [bound, bound], color="black")
        axis.set_title(f"{group} (measured on {lines[0]['device']})", fontsize=8)
        axis.set_ylabel("TFLOP/s")
        axis.set_xticks(range(len(cases)), cases, fontsize=6)
    handles = [axes[0].bar(0, 0, color=f"C{i}") for i in range(len(names))]
    axes[0].legend(handles, names, fontsize=6)
    figure.savefig(path, dpi=120)


def read_lines(path: str | Path) -> list[Line]:
    """JSON lines of a file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
