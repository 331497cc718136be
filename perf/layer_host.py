"""What a planned layer costs the host: Python's time of `relibra.BalancedMoE`, with no device.

The code of a GPU runs on CPU tensors: Triton's launches reach a stand-in GPU and compute nothing,
ops check no values, replicas go through the engine of GPUs with a library and streams that do
nothing. Not counted: exchanges over gloo, and the CPU bodies that stand in for the kernels which
build index tables. A small layer, so that the few torch ops left cost what a call costs; a GPU's
launches, events and NCCL calls come on top.
"""

import argparse
import contextlib
import functools
import itertools
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import summary, write_lines
from replica_host import QuietLibrary, QuietStreams

import relibra
from relibra.domain_sync import DomainSync
from relibra.testing.plans import make_plan
from relibra_kernels.ops import backend, direct_ops, routing
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.testing.stub_gpu import use_stub_gpu
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.triton_ops import configs

ARCH = "sm_90"
HIDDEN, EXPERT, NUM_EXPERTS, TOP_K, TOKENS = 128, 192, 16, 4, 64
NUM_LAYERS, NUM_MICRO_BATCHES = 6, 4
GLOO, STAND_INS, REST = "exchanges over gloo", "CPU bodies of table kernels", "the rest"
NOT_COUNTED = (GLOO, STAND_INS)
DIRECTIONS = ("forward", "backward")

# Part -> functions that belong to it, as "module:attribute".
PARTS = {
    "tables": ["relibra.step_tables:StepTables.get"],
    "use and order": [
        "relibra.use:Use.handle",
        *(f"relibra.movers:GroupMovers.{name}"
          for name in ("enter_experts", "enter_backward", "leave_backward")),
    ],
    "checks of arguments": ["relibra.balanced_moe:check_call"],
    "dispatch": [
        "relibra.layer_passes:start_tokens",
        "relibra.layer_passes:dispatch_grads",
        "relibra.token_exchange:PendingTokens.wait",
    ],
    "combine": [
        *(f"relibra.layer_passes:start_{name}" for name in ("output", "dx", "dscores")),
        "relibra.token_exchange:PendingSum.wait",
    ],
    "replicas": [
        *(f"relibra.movers:GroupMovers.{name}"
          for name in ("push", "release_weights", "replica_grads", "reduce")),
    ],
    "weight gradients": ["relibra.layer_passes:weight_grads"],
    "launches": [
        *(f"relibra_kernels.triton_ops.{module}:{name}" for module, name in (
            ("expert_up", "expert_up"),
            ("grouped_gemm", "grouped_gemm"),
            ("combine", "combine"),
            ("expert_down_backward", "expert_down_backward"),
            ("grouped_gemm_wgrad", "expert_wgrad"),
            ("row_scores", "row_scores"),
            ("dispatch", "build_route"),
            ("build_rows", "build_rows"),
        )),
    ],
}  # fmt: skip


class Clock:
    """Processor time of this thread by part; what a part calls from another is not part of it."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def noting(self, into: list[dict[str, float]], share: int) -> Iterator[None]:
        """Adds the microseconds of the block by part, each divided by ``share``."""
        self._found, self._open, self._since = {}, [REST], time.thread_time()
        yield
        self._switch()
        self._open = []
        into.append({name: 1e6 * seconds / share for name, seconds in self._found.items()})

    def counted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time belongs to a part."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if not self._open:
                return function(*arguments, **options)
            self._switch()
            self._open.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self._switch()
                self._open.pop()

        return run

    def _switch(self) -> None:
        now = time.thread_time()
        last = self._open[-1]
        self._found[last] = self._found.get(last, 0.0) + now - self._since
        self._since = now


class _Work:
    """A collective whose wait is not counted."""

    def __init__(self, work: dist.Work, clock: Clock) -> None:
        self.wait = clock.counted(GLOO, work.wait)


def stand_in(clock: Clock) -> None:
    """Makes this process take CPU tensors for those of a GPU; there is no way back."""
    use_stub_gpu(ARCH)
    for found in pkgutil.iter_modules(import_module("relibra_kernels.ops").__path__):
        module: Any = import_module(f"relibra_kernels.ops.{found.name}")
        for name, value in (("use_triton", True), ("checks_values", False)):
            if hasattr(module, name):
                setattr(module, name, lambda *_, value=value: value)
    on_cpu = clock.counted(STAND_INS, backend.on_cpu)

    def with_error_word(kernel: Any, reference: Any, *arguments: Any) -> Any:
        kernel(*arguments, backend.error_word(arguments[0]))
        return on_cpu(reference, *arguments)

    routing.with_error_word = with_error_word
    exchange = clock.counted(GLOO, dist.all_to_all_single)
    dist.all_to_all_single = lambda *args, **options: _Work(exchange(*args, **options), clock)


def watch_parts(clock: Clock) -> None:
    """Times every part from here on, which itself takes about a microsecond a call."""
    for part, places in PARTS.items():
        for place in places:
            module, path = place.split(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, import_module(module))
            setattr(owner, name, clock.counted(part, getattr(owner, name)))
    for name, body in vars(direct_ops).items():
        setattr(direct_ops, name, clock.counted("checks of ops", body))


def _replicas(rank: int, num_ranks: int) -> DomainSync:
    """Replicas over memory of this process, whose copies, words and sums nobody makes."""
    heaps = LocalHeap.ranks(num_ranks)

    def make_engine(arena: Any, layout: Any) -> CudaEngine:
        library: Any = QuietLibrary()
        streams: Any = QuietStreams()
        engine = CudaEngine(arena, layout, timeout_s=60.0, library=library, streams=streams)
        library.is_quiet = True
        return engine

    return DomainSync(
        lambda: heaps[rank], make_engine, tuple(range(num_ranks)), rank, 2, timeout_s=60.0
    )


class Layers:
    """A stack of layers under a plan, on one rank of a node.

    Args:
        rank: this one.
        num_ranks: G; several need a process group.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        shape = relibra.ModelShape(
            NUM_EXPERTS, TOP_K, tuple(range(NUM_LAYERS)), HIDDEN, EXPERT, "bfloat16"
        )
        topology = relibra.Topology(1, num_ranks)
        routes = [_routes(np.random.default_rng([1, one])) for one in range(num_ranks)]
        loads = relibra.LoadMatrix.stack([relibra.LoadMatrix.from_rows(one) for one in routes])
        self.plan = make_plan(
            np.random.default_rng(2), {"train": loads}, topology, shape, replica_slots=2, fill=1.0
        )
        group = dist.group.WORLD if num_ranks > 1 else None
        self.runtime = relibra.Runtime(
            group,
            topology,
            replica_slots=2,
            transport="dist",
            grad_mode="main_grad",
            block_rows=configs.block_rows(ARCH),
            kernels="triton",
        )
        self.runtime.checks_order = False  # as over NCCL
        if num_ranks > 1:
            self.runtime.domain_sync = _replicas(rank, num_ranks)
            self.runtime.domain_sync.counts = self.runtime.replica_counts
        sizes = {"num_ranks": num_ranks, "rank": rank, "dtype": torch.bfloat16}
        self.model = torch.nn.ModuleList(
            relibra.BalancedMoE(NUM_EXPERTS, HIDDEN, EXPERT, layer=i, **sizes)
            for i in range(NUM_LAYERS)
        )
        for param in self.model.parameters():
            param.main_grad = torch.zeros(param.shape)
        self.runtime.attach(self.model)
        self.routes = routes[rank]
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        self.scores = torch.zeros(TOKENS, TOP_K, requires_grad=True)
        self.dy = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)

    def run(self, clock: Clock, times: dict[str, list[dict[str, float]]]) -> None:
        """One optimizer step; adds times of a layer, means over the stack."""
        with self.runtime.step(self.plan, {"train": self.routes}) as step:
            for m in range(NUM_MICRO_BATCHES):
                noting = clock.noting(times["forward"], NUM_LAYERS)
                with noting, step.forward(micro_batch=m):
                    y = self.x
                    for moe in self.model:
                        y = moe(y, self.scores)
                with clock.noting(times["backward"], NUM_LAYERS):
                    y.backward(self.dy)


def _routes(rng: np.random.Generator) -> list[relibra.DispatchRows]:
    size = (TOKENS, NUM_LAYERS, NUM_EXPERTS)
    ids = (rng.random(size).argsort(-1)[..., :TOP_K] for _ in range(NUM_MICRO_BATCHES))
    return [relibra.DispatchRows(one.astype(np.int32), num_experts=NUM_EXPERTS) for one in ids]


def _rank(rank: int, num_ranks: int, rounds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    torch.set_num_threads(1)
    clock = Clock()
    stand_in(clock)
    layers, found = Layers(rank, num_ranks), {}
    for name in ("whole", "parts"):
        found[name] = {direction: list[dict[str, float]]() for direction in DIRECTIONS}
        if name == "parts":
            watch_parts(clock)
        for number in range(rounds + 1):
            layers.run(clock, found[name])
            if number == 0:  # compiles
                for times in found[name].values():
                    times.clear()
    layers.runtime.close()
    return found


def host_us(num_ranks: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Microseconds of the host for a layer, by direction.

    Args:
        num_ranks: G, on one node.
        rounds: steps of 6 layers and 4 micro-batches.

    Returns:
        Direction -> ``total``, one a micro-batch, measured with nothing else; ``parts``, their
        medians, measured in steps of their own; ``apart``, what is not counted.
    """
    if num_ranks == 1:
        found = _rank(0, 1, rounds)
    else:
        found = run_ranks(num_ranks, _rank, rounds, timeout=600.0)[0]
    lines = {}
    for direction in DIRECTIONS:
        whole, parts = (found[name][direction] for name in ("whole", "parts"))
        names = dict.fromkeys(itertools.chain(*parts))
        medians = {name: _median([one.get(name, 0.0) for one in parts]) for name in names}
        lines[direction] = {
            "total": [_counted(one) for one in whole],
            "parts": {name: us for name, us in medians.items() if name not in NOT_COUNTED},
            "apart": {name: us for name, us in medians.items() if name in NOT_COUNTED},
        }
    return lines


def main(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """`bench_moe_layer.py --host`: prints, and returns, a line a direction and group size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true", help="this measurement")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="sizes of the group")
    parser.add_argument("--rounds", type=int, default=10, help="training steps of each kind")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line a result")
    options, lines = parser.parse_args(arguments), []
    for num_ranks in options.ranks:
        for direction, found in host_us(num_ranks, options.rounds).items():
            line = {"bench": "moe_layer", "group": "host", "name": direction, "device": "none"}
            line["case"] = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
            line["kind"] = "measured on a CPU: Python's own time, no driver and no device"
            line |= {"least_us": min(found["total"]), **summary(found["total"])}
            lines.append(line | {"parts_us": found["parts"], "not_counted_us": found["apart"]})
            print(f"{direction:9} of a layer, {line['case']}: {line['least_us']:.0f} us of the "
                  f"host at least, median {line['median_us']:.0f} us")  # fmt: skip
            for title, parts in (("with timers", found["parts"]), ("apart", found["apart"])):
                by_size = sorted(parts.items(), key=lambda one: -one[1])
                texts = [f"{name} {us:.0f}" for name, us in by_size]
                print(f"    {title}: {', '.join(texts)}" if texts else "", flush=True)
    write_lines(options.json, lines)
    return lines


def _counted(by_part: dict[str, float]) -> float:
    return sum(us for name, us in by_part.items() if name not in NOT_COUNTED)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
