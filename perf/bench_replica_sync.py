"""Replica synchronisation: weight push, gradient reduce and whole use beside the bound of the link.

    python perf/bench_replica_sync.py [--smoke] [--json FILE]
    python perf/bench_replica_sync.py --host      # what a use costs Python, with no device behind
    torchrun --standalone --nproc-per-node=gpu perf/bench_replica_sync.py     # several GPUs

Bound, before any code. With B bytes of one expert, e(g) experts that rank g sends and i(g) that it
gets, a link carries each direction at BW, and copying takes no operations:

    push          max over g of max(e(g), i(g)) * 2 B' / BW          B' = 3 D F elements, bf16
    home reduce   the same with e and i exchanged, 4 B' (fp32)       one addition an element: hidden
    whole use     both, one after the other; with prefetch the push of the next use may overlap

BW is NVLink4's nominal 450 GB/s a direction where ranks are GPUs. Where all ranks share a memory
(shared memory of a CPU, all ranks on one GPU) there is no link, and what is compared with is a copy
of the same sizes in the same run: each rank copies as many bytes as it sends, at the same time, and
a use is a push's copy, then a reduce's. More than 100 % of it is possible: a sum writes what it has
just read, and uses overlap. What a CPU reaches says nothing about a GPU.

A pattern of replicas is carried out and checked first (the content of every row, gradients bit for
bit); then providers and engines are timed in turns. A time is that of the slowest rank from a
common start to its end, with the host's part; on a GPU, of pushes and reduces over the protocol, it
is the stream's own. Medians, and ratios inside of one run.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from harness import summary, write_lines
from replica_host import host_us
from replica_movers import (
    CopyMover,
    DistMover,
    Mover,
    NotHereError,
    local_mover,
    provider_mover,
)
from replica_problem import MODEL_NAMES, Pattern, Problem, patterns, problems

from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.cuda_options import PUSH_FORMS
from relibra_kernels.transport.rank_messages import RefusedError

NVLINK4_GB_PER_S = 450.0
GROUPS = ("push", "home reduce", "whole use")
START_S = 0.02  # from the message to the common start
MAX_TRIES = 8  # of a run that a rank begins late

Line = dict[str, Any]


class Ranks:
    """The processes of a run.

    Args:
        rank: of this one.
        count: of processes, 1 where all ranks are virtual.
        strict: whether a run that a process begins late is made again.
    """

    def __init__(self, rank: int, count: int, *, strict: bool) -> None:
        self.rank, self.count, self.begin = rank, count, time.monotonic()
        self.strict, self.lead_s = strict and count > 1, START_S if count > 1 else 0.0

    def gather(self, value: Any) -> list[Any]:
        """One value of each process."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def timed(self, before: Callable[[], None], run: Callable[[], float | None]) -> float:
        """Microseconds from a start that all processes agree on to the end of the last one.

        Where the slowest rank's device knows its own seconds, those.

        Processes of one machine share `time.monotonic`. A run that one of them begins late, since
        the machine was busy, does not count.

        Args:
            before: what goes before and is not timed.
            run: what this process does.
        """
        for _ in range(MAX_TRIES):
            before()
            start = max(self.gather(time.monotonic() + self.lead_s))
            late = self.strict and time.monotonic() > start
            time.sleep(max(start - time.monotonic(), 0))
            seconds = run()
            own = time.monotonic() - start if seconds is None else seconds
            ends = self.gather((late, own))
            if not any(late for late, _ in ends):
                return float(max(seconds for _, seconds in ends)) * 1e6
            self.lead_s = min(2 * self.lead_s, 1.0)
        raise RuntimeError(f"timing: {MAX_TRIES} runs in turn began late: the machine is too busy")

    def is_over(self, budget: float | None) -> bool:
        """Whether the first process has run for its seconds."""
        return bool(self.gather(budget is not None and time.monotonic() - self.begin > budget)[0])


def run_process(rank: int, count: int, options: argparse.Namespace) -> list[Line]:
    """All cases, on one process of the run; lines on the first one."""
    ranks, lines = Ranks(rank, count, strict=not options.smoke), list[Line]()
    for problem in problems(options.models, options.ranks, options.device):
        with ExitStack() as stack:
            movers = _movers(problem, ranks, options, stack)
            for pattern in patterns(problem.num_ranks, few=options.smoke):
                if ranks.is_over(options.budget):
                    _say(ranks, f"no time left for: {problem.model} {pattern.name}")
                    continue
                found = _run_pattern(problem, pattern, movers, ranks, options)
                if rank == 0:
                    lines += found
                    write_lines(options.json, found)
    return lines


def _movers(
    problem: Problem, ranks: Ranks, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Mover | None]:
    """Name -> mover; None where this process only waits."""
    uses, found = options.uses, dict[str, Mover | None]()
    forms = PUSH_FORMS if problem.device.type == "cuda" else ("",)
    for name, form in itertools.product(options.providers, forms):
        title = f"{name} {form}".strip()
        if name == "dist":
            found[name] = found.get(name) or DistMover(problem, ranks.rank)
        elif name == "local" and ranks.rank:  # the first process has all ranks, the others wait
            found[title] = None
        else:
            try:
                if name == "local":
                    mover = local_mover(problem, uses, form)
                else:
                    mover = provider_mover(name, problem, ranks.rank, uses, form)
                found[title] = stack.enter_context(mover)
            except (RefusedError, NotHereError) as error:
                _say(ranks, f"{title}: left out: {str(error)[:300]}")
    mine = range(problem.num_ranks) if ranks.count == 1 else range(ranks.rank, ranks.rank + 1)
    found["copy"] = CopyMover(problem, mine)
    return found


def _run_pattern(
    problem: Problem,
    pattern: Pattern,
    movers: Mapping[str, Mover | None],
    ranks: Ranks,
    options: argparse.Namespace,
) -> list[Line]:
    """Gate, then rounds of all movers in turns."""
    for mover in filter(None, movers.values()):
        mover.take(pattern)
    lines = []
    megabytes = problem.weight_bytes / 1e6
    _say(ranks, f"{problem.model} ({megabytes:.3g} MB an expert), P={problem.num_ranks}, "
         f"{pattern.name}: gate passed; measured on {options.where}")  # fmt: skip
    for group in options.groups:
        times: dict[str, list[float]] = {name: [] for name in movers}
        for number in range(1 + options.rounds):
            for name, mover in movers.items():
                micro = _one(group, mover, ranks)
                if number:  # the first one warms up
                    times[name].append(micro)
        lines += _lines(problem, pattern, group, times, options)
    for line in lines:
        _say(ranks, _text(line))
    return lines


def _one(group: str, mover: Mover | None, ranks: Ranks) -> float:
    """Microseconds from the common start to the end of the slowest rank."""
    micro = ranks.timed(*(mover.timed()[group] if mover else (_nothing, _nothing)))
    return micro / (mover.num_uses if mover and group == "whole use" else 1)


def _nothing() -> None:
    pass


def _lines(
    problem: Problem,
    pattern: Pattern,
    group: str,
    times: Mapping[str, Sequence[float]],
    options: argparse.Namespace,
) -> list[Line]:
    copied = statistics.median(times["copy"])
    out, into = pattern.out_and_in(problem.num_ranks)
    most = max(*out, *into)
    sizes = {"push": problem.weight_bytes, "home reduce": problem.grad_bytes}
    num_bytes = most * sizes.get(group, sum(sizes.values()))
    linked = num_bytes / NVLINK4_GB_PER_S / 1e3
    bound = linked if options.has_links else copied
    lines = []
    for name, values in times.items():
        line: Line = {"bench": "replica_sync", "group": group, "name": name}
        line |= {"case": f"{problem.model} P={problem.num_ranks} {pattern.name}"}
        line |= {"device": problem.device.type, "kind": f"measured on {options.where}"}
        line |= {"expert_bytes": problem.weight_bytes, "bytes_of_busiest_rank": num_bytes}
        line |= summary(values)
        micro = line["median_us"]
        line |= {"gb_per_s": num_bytes / micro / 1e3, "percent_of_bound": 100 * bound / micro}
        line |= {"bound": "NVLink4's 450 GB/s" if options.has_links else "a copy in this run"}
        lines.append(line | {"ratio_to_copy": micro / copied})
    return lines


def _text(line: Line) -> str:
    return (
        f"  {line['group']:12} {line['name']:22} {line['median_us'] / 1e3:9.3f} ms "
        f"(p10 {line['p10_us'] / 1e3:.3f}, p90 {line['p90_us'] / 1e3:.3f}) "
        f"{line['gb_per_s']:7.2f} GB/s of the busiest rank, "
        f"{line['percent_of_bound']:4.0f} % of {line['bound']}"
    )


def run_host(options: argparse.Namespace) -> list[Line]:
    """What a use costs the host; see `replica_host`."""
    lines = []
    for replicas in (2, 8):
        for direction, times in host_us(replicas, options.rounds).items():
            line: Line = {"bench": "replica_sync", "group": "host", "name": direction}
            line |= {"case": f"P=8, {replicas} replicas out and in", "device": "none"}
            line |= {"kind": "measured on a CPU: Python's own time, no driver and no device"}
            lines.append(line | {"least_us": min(times)} | summary(times))
            print(f"{direction:9} use, {line['case']}: {min(times):4.0f} us of the host at least, "
                  f"median {lines[-1]['median_us']:.0f} us")  # fmt: skip
    write_lines(options.json, lines)
    return lines


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, and what follows from the machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="one tiny expert, few patterns, one round")
    add("--host", action="store_true", help="only the host's part of a use, with no device")
    add("--models", nargs="+", choices=MODEL_NAMES, default=MODEL_NAMES, metavar="NAME")
    add("--ranks", type=int, default=4, help="P; under torchrun the processes")
    add("--providers", nargs="+", metavar="NAME", help="default: all that may work here")
    add("--groups", nargs="+", choices=GROUPS, default=GROUPS, metavar="NAME")
    add("--rounds", type=int, default=10, help="timed runs of each")
    add("--uses", type=int, default=8, help="uses in a timed run of whole uses")
    add("--budget", type=float, help="seconds after which no further pattern begins")
    add("--json", metavar="FILE", help="append one JSON line a result")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.models, options.rounds, options.uses = ("smoke",), 1, 2
    on_gpu = torch.cuda.is_available()
    launched = "LOCAL_RANK" in os.environ
    options.processes = (
        int(os.environ["WORLD_SIZE"]) if launched else 1 if on_gpu else options.ranks
    )
    options.ranks = options.processes if launched else options.ranks
    options.has_links = on_gpu and launched
    options.device = torch.device("cpu")
    if on_gpu:
        options.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    defaults = ("torch_symm", "nvshmem", "dist") if options.has_links else ("local",)
    options.providers = options.providers or (defaults if on_gpu else ("cpu_shm", "local", "dist"))
    name = torch.cuda.get_device_name(options.device) if on_gpu else ""
    options.where = name or "CPU shared memory, never a figure of a GPU"
    return options


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    """Runs the benchmark; returns its lines."""
    options = parse(arguments)
    if options.host:
        return run_host(options)
    if options.ranks < 2:
        sys.exit(f"error: --ranks: need at least 2, got {options.ranks}")
    if options.has_links:
        torch.cuda.set_device(options.device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        try:
            return run_process(dist.get_rank(), dist.get_world_size(), options)
        finally:
            dist.destroy_process_group()
    if options.processes == 1:
        return run_process(0, 1, options)
    lines: list[Line] = run_ranks(options.processes, run_process, options, timeout=3600)[0]
    return lines


if __name__ == "__main__":
    main()
