"""What a use of replica synchronisation costs the host: Python's time, with no device behind it.

A forward use is `submit_push`, `weights` and `retire`; a backward use has `grad_slots`,
`publish_grads` and `home_reduce` as well. The engine of GPUs is given streams and a library that do
nothing, so that what is left is the protocol and the engine's bookkeeping without a call of a
driver. One rank of several; each use has as many replicas out as in, and a key, weights and lists
as layers in micro-batches have them.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from relibra_kernels import native
from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.arena_layout import ArenaLayout
from relibra_kernels.transport.cuda_library import SharedLibrary
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_report import UseKey

FIELDS = {"w13": (8, 4), "w2": (4, 4)}  # the size of an expert does not matter here
NUM_HOME, NUM_LAYERS, NUM_MICRO_BATCHES = 16, 8, 4


class _Event:
    """Has passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, until: "_Event") -> float:
        return 0.0


class QuietStreams:
    """`DeviceStreams` that run nothing; a copy is made at once."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def handle(self, stream: str) -> int:
        return 0

    def record(self, stream: str, event: Any = None) -> Any:
        return event or _Event()

    def wait(self, stream: str, event: Any) -> None:
        pass

    def clock(self, stream: str) -> Any:
        return _Event()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    zeros = pinned

    def copy(self, stream: str, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


class QuietLibrary:
    """The host build for the engine's self-test; nothing once it is quiet."""

    name = "nothing"

    def __init__(self) -> None:
        self.host = SharedLibrary(Path(native.replica_sync().__file__))
        self.is_quiet = False

    def _call(self, name: str, *arguments: int) -> None:
        if not self.is_quiet:
            getattr(self.host, name)(*arguments)

    def push(self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int) -> None:
        self._call("push", items, n, fault, 1, 1, stream)

    def push_tma(self, items: int, n: int, fault: int, blocks: int, stream: int) -> None:
        self._call("push_tma", items, n, fault, 1, stream)

    def push_copy_engine(self, items: int, n: int, fault: int, stream: int) -> None:
        self._call("push_copy_engine", items, n, fault, stream)

    def wait(
        self, items: int, n: int, use: int, op: int, timeout_ns: int, fault: int, stream: int
    ) -> None:
        self._call("wait", items, n, use, op, timeout_ns, fault, stream)

    def wait_values(self, items: int, n: int, stream: int) -> None:
        self._call("wait_values", items, n, stream)

    def publish(self, items: int, n: int, fault: int, stream: int) -> None:
        self._call("publish", items, n, fault, stream)

    def reduce(
        self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int
    ) -> None:
        self._call("reduce", items, n, fault, 1, 1, stream)


@contextlib.contextmanager
def _one_rank(num_ranks: int, num_slots: int) -> Iterator[ReplicaSync]:
    weights = SlotLayout.of({name: (torch.bfloat16, shape) for name, shape in FIELDS.items()})
    grads = weights.as_dtype(dict.fromkeys(FIELDS, torch.float32))
    layout = ArenaLayout(weights, grads, num_ranks, num_slots)
    heaps, library = LocalHeap.ranks(num_ranks), QuietLibrary()
    arenas = [heap.alloc(layout.nbytes, 1) for heap in heaps]
    engine = CudaEngine(arenas[0], layout, timeout_s=60.0, library=library, streams=QuietStreams())
    library.is_quiet = True
    sync = ReplicaSync(arenas[0], layout, range(num_ranks), 0, engine, timeout_s=60.0)
    try:
        yield sync
    finally:
        sync.close()
        for heap in heaps:
            heap.close(peers_alive=False)


def host_us(replicas: int, rounds: int, num_ranks: int = 8) -> dict[str, list[float]]:
    """Microseconds of the host for a use of a layer, by direction.

    Args:
        replicas: of this rank's experts elsewhere, and of others' experts here.
        rounds: steps of 8 layers and 4 micro-batches.
        num_ranks: P.

    Returns:
        Direction -> processor time of this thread, the median over the uses of each round. The
        least of them is that of a core that nobody else keeps busy.
    """
    others = range(1, num_ranks)
    pushes = [[i % NUM_HOME, others[i % len(others)], i // len(others)] for i in range(replicas)]
    pulls = [[i, others[i % len(others)], i % NUM_HOME] for i in range(replicas)]

    def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(NUM_HOME, *shape, dtype=dtype) for name, shape in FIELDS.items()}

    layers = [tensors(torch.bfloat16) for _ in range(NUM_LAYERS)]
    home_grads = [tensors(torch.float32) for _ in range(NUM_LAYERS)]
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    with _one_rank(num_ranks, replicas) as sync:
        for step in range(rounds):
            lists = {
                at: [torch.tensor(one, dtype=torch.int32).reshape(-1, 3) for one in (pushes, pulls)]
                for at in itertools.product(range(NUM_MICRO_BATCHES), range(NUM_LAYERS))
            }
            for direction, times in found.items():
                micro = []
                for (micro_batch, layer), both in lists.items():
                    key = UseKey("model", step, "train", micro_batch, layer, direction)
                    begin = time.thread_time()
                    use = sync.submit_push(key, layers[layer], *both, plan_hash=f"{step:016x}")
                    sync.weights(use)
                    if direction == "backward":
                        sync.grad_slots(use)
                    sync.retire(use)
                    if direction == "backward":
                        sync.publish_grads(use)
                        event = sync.home_reduce(use, home_grads[layer])
                        sync.wait_event(event)
                    micro.append(1e6 * (time.thread_time() - begin))
                times.append(sorted(micro)[len(micro) // 2])
    return found
