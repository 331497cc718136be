"""What moves the experts of a `Problem`: the protocol over each provider, messages, and copies.

A mover drives the ranks of this process: one rank of several processes, or all of them.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from replica_problem import Fields, Pattern, Problem, check_sums, check_weights, patterns

from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.provider_choice import ProviderOptions, choose_provider
from relibra_kernels.transport.replica import DistReplica
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.symmetric_heap import Arena
from relibra_kernels.transport.sync_engine import PUSH, REDUCE, HostEngine, SyncEngine
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_report import UseKey

TIMEOUT_S = 60.0
HOLD_CYCLES = 4_000_000  # of a GPU, a rank: streams wait so long for the host to give them all

# What goes before and is not timed; what is timed, and returns the device's seconds where it knows
# them, None where the host's are meant.
Timed = tuple[Callable[[], None], Callable[[], "float | None"]]


class Mover(Protocol):
    """One way to carry out a pattern."""

    name: str
    num_uses: int  # in a timed run of whole uses

    def take(self, pattern: Pattern) -> None:
        """From now on this pattern; ends with the gate."""
        ...

    def timed(self) -> Mapping[str, Timed]:
        """Group -> `Timed`."""
        ...


class SyncMover:
    """`ReplicaSync` of the ranks of this process, one call of each rank in turn.

    Args:
        name: of the provider.
        problem: sizes.
        syncs: rank -> its side of the protocol.
        uses: a timed run of whole uses has so many.
    """

    def __init__(
        self, name: str, problem: Problem, syncs: Mapping[int, ReplicaSync], uses: int
    ) -> None:
        self.name, self.problem, self.syncs, self.num_uses = name, problem, syncs, uses
        self.weights = {rank: problem.weights(rank) for rank in syncs}
        self.home_grads = {rank: problem.home_grads(rank) for rank in syncs}
        self._number = 0
        self._open: dict[int, Any] = {}  # uses of a timed push
        self._graded: dict[int, Any] = {}

    def take(self, pattern: Pattern) -> None:
        """See `Mover`."""
        self._finish()
        self.lists = {rank: pattern.lists(rank) for rank in self.syncs}
        self.home_grads = {rank: self.problem.home_grads(rank) for rank in self.syncs}
        grads = {rank: self.problem.grads(rank) for rank in self.syncs}
        for check in (True, False):  # twice: every buffer holds finite gradients from now on
            uses = self._submit()
            for rank, views in self._weights(uses).items():
                check_weights(self.problem, pattern, rank, views)
            self._retire(uses)
            for rank, sync in self.syncs.items():
                for name, slots in sync.grad_slots(uses[rank]).items():
                    slots.copy_(grads[rank][name])
            self._reduce(uses)
            if check:
                self._synchronize()
                for rank, found in self.home_grads.items():
                    check_sums(self.problem, pattern, rank, found)

    def timed(self) -> Mapping[str, Timed]:
        """See `Mover`."""
        return {
            "push": (self._finish, self._push),
            "home reduce": (self._before_reduce, self._home_reduce),
            "whole use": (self._finish, self._whole),
        }

    def _finish(self) -> None:
        """Retires what a timed push left."""
        if self._open:
            self._retire(self._open)
            self._join()

    def _push(self) -> float | None:
        self._hold()
        since = self._clocks(PUSH)
        self._open = self._submit()
        until = self._clocks(PUSH)
        self._weights(self._open)
        self._synchronize()
        return self._seconds(since, until)

    def _before_reduce(self) -> None:
        self._finish()
        self._graded = self._submit()
        self._weights(self._graded)
        self._retire(self._graded)
        for rank, sync in self.syncs.items():
            sync.grad_slots(self._graded[rank])
        self._join()
        self._synchronize()

    def _home_reduce(self) -> float | None:
        self._hold()
        since = self._clocks(REDUCE)
        self._publish_and_reduce(self._graded)
        until = self._clocks(REDUCE)
        self._join()
        self._synchronize()
        return self._seconds(since, until)

    def _hold(self) -> None:
        """On a GPU nothing begins before the host has given it everything."""
        if self.problem.device.type != "cuda":
            return
        torch.cuda._sleep(HOLD_CYCLES * len(self.syncs))
        event = torch.cuda.Event()
        event.record()
        for sync in self.syncs.values():
            for stream in (PUSH, REDUCE):
                sync.engine.wait_event(stream, event)

    def _clocks(self, stream: str) -> list[Any]:
        return [sync.engine.clock(stream) for sync in self.syncs.values()]

    def _seconds(self, since: list[Any], until: list[Any]) -> float | None:
        """Of the slowest rank's stream, on a GPU."""
        if self.problem.device.type != "cuda":
            return None
        ranks = zip(self.syncs.values(), since, until, strict=True)
        return max(sync.engine.seconds(a, b) for sync, a, b in ranks)

    def _whole(self) -> None:
        """Uses back to back, the next one's weights ahead, as a backward pass makes them."""
        ahead = self._submit()
        for number in range(self.num_uses):
            uses, ahead = ahead, self._submit() if number + 1 < self.num_uses else {}
            self._weights(uses)
            self._retire(uses)
            for rank, sync in self.syncs.items():
                sync.grad_slots(uses[rank])
            self._publish_and_reduce(uses)
        self._join()
        self._synchronize()

    def _submit(self) -> dict[int, Any]:
        key = UseKey("bench", 0, "train", self._number, 0, "backward")
        self._number += 1
        return {
            rank: sync.submit_push(key, self.weights[rank], *self.lists[rank])
            for rank, sync in self.syncs.items()
        }

    def _weights(self, uses: Mapping[int, Any]) -> dict[int, Fields]:
        return {rank: sync.weights(uses[rank]) for rank, sync in self.syncs.items()}

    def _retire(self, uses: Mapping[int, Any]) -> None:
        for rank, sync in self.syncs.items():
            sync.retire(uses[rank])
        self._open = {}

    def _reduce(self, uses: Mapping[int, Any]) -> None:
        self._publish_and_reduce(uses)
        self._join()

    def _publish_and_reduce(self, uses: Mapping[int, Any]) -> None:
        for rank, sync in self.syncs.items():
            sync.publish_grads(uses[rank])
        for rank, sync in self.syncs.items():
            sync.home_reduce(uses[rank], self.home_grads[rank])

    def _join(self) -> None:
        for sync in self.syncs.values():
            sync.join()

    def _synchronize(self) -> None:
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize(self.problem.device)


class DistMover:
    """Point-to-point messages, without prefetch: what the layer does without a provider.

    Args:
        problem: sizes.
        rank: of this process.
    """

    name = "dist"
    num_uses = 1

    def __init__(self, problem: Problem, rank: int) -> None:
        self.problem, self.rank = problem, rank
        self.transport = DistReplica(dist.group.WORLD)
        self.weights, self.grads = problem.weights(rank), problem.grads(rank)
        slots = {name: grad.shape for name, grad in self.grads.items()}
        self.slots = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=problem.device)
            for name, shape in slots.items()
        }

    def take(self, pattern: Pattern) -> None:
        """See `Mover`."""
        self.lists = pattern.lists(self.rank)
        self.home_grads = self.problem.home_grads(self.rank)
        self._push()
        self._home_reduce()
        check_weights(self.problem, pattern, self.rank, self.slots)
        check_sums(self.problem, pattern, self.rank, self.home_grads)

    def timed(self) -> Mapping[str, Timed]:
        """See `Mover`."""

        def whole() -> None:
            self._push()
            self._home_reduce()

        return {
            "push": (lambda: None, self._push),
            "home reduce": (lambda: None, self._home_reduce),
            "whole use": (lambda: None, whole),
        }

    def _push(self) -> None:
        pairs = [(self.weights[name], self.slots[name]) for name in self.slots]
        self.transport.push(pairs, *self.lists, what="bench")
        self._synchronize()

    def _home_reduce(self) -> None:
        pairs = [(self.grads[name], self.home_grads[name]) for name in self.slots]
        self.transport.reduce(pairs, *self.lists, what="bench")
        self._synchronize()

    def _synchronize(self) -> None:
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize(self.problem.device)


class CopyMover:
    """The bound where there is no link: every rank copies as many bytes inside its own memory.

    A push is the bytes that the rank sends. A reduce reads r replicas' gradients and k sums and
    writes the sums, (r + 2k) gradients of traffic: a copy of half as many bytes has the same.

    Args:
        problem: sizes.
        ranks: of this process.
    """

    name = "copy"
    num_uses = 1

    def __init__(self, problem: Problem, ranks: range) -> None:
        self.problem, self.ranks = problem, ranks
        most = max(max(self._sizes(pattern)) for pattern in patterns(problem.num_ranks))
        make = {"dtype": torch.uint8, "device": problem.device}
        self.source, self.target = torch.zeros(most, **make), torch.ones(most, **make)

    def take(self, pattern: Pattern) -> None:
        """See `Mover`; nothing to check."""
        sizes = self._sizes(pattern)
        self.pushed, self.reduced = sizes[: len(self.ranks)], sizes[len(self.ranks) :]

    def _sizes(self, pattern: Pattern) -> list[int]:
        """Bytes of each rank's push, then of each rank's reduce."""
        out, _ = pattern.out_and_in(self.problem.num_ranks)
        pairs = [pattern.reduced(rank) for rank in self.ranks]
        pushed = [out[rank] * self.problem.weight_bytes for rank in self.ranks]
        return pushed + [(r + 2 * k) * self.problem.grad_bytes // 2 for r, k in pairs]

    def timed(self) -> Mapping[str, Timed]:
        """See `Mover`."""

        def push() -> None:
            self._copy(self.pushed)

        def reduce() -> None:
            self._copy(self.reduced)

        def whole() -> None:
            push()
            reduce()

        return {
            "push": (lambda: None, push),
            "home reduce": (lambda: None, reduce),
            "whole use": (lambda: None, whole),
        }

    def _copy(self, sizes: list[int]) -> None:
        for size in filter(None, sizes):
            assert size <= len(self.source)
            if self.problem.device.type == "cuda":
                self.target[:size].copy_(self.source[:size])
            else:  # glibc's memcpy
                ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), size)
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize(self.problem.device)


class NotHereError(Exception):
    """An engine pushes in another form than it was asked to."""


@contextlib.contextmanager
def provider_mover(
    name: str, problem: Problem, rank: int, uses: int, form: str = ""
) -> Iterator[SyncMover]:
    """The protocol between processes; collective.

    Args:
        name: of the provider.
        problem: sizes.
        rank: of this process.
        uses: see `SyncMover`.
        form: of a push on a GPU.

    Raises:
        RefusedError, NotHereError: it does not work here, on any rank.
    """
    options = ProviderOptions(timeout_s=TIMEOUT_S, nvshmem_is_free=True, **_cuda(form))
    choice = choose_provider(name, dist.group.WORLD, problem.device, options)
    assert choice.make_heap is not None
    assert choice.make_engine is not None
    heap = choice.make_heap()
    arena, all_are_done = heap.alloc(problem.layout.nbytes, 1), False
    try:
        sync = _sync(arena, problem, rank, choice.make_engine(arena, problem.layout), form)
        try:
            yield SyncMover(f"{name} {form}".strip(), problem, {rank: sync}, uses)
            dist.barrier()
            all_are_done = True
        finally:
            sync.close()
    finally:
        heap.close(peers_alive=all_are_done)


@contextlib.contextmanager
def local_mover(problem: Problem, uses: int, form: str = "") -> Iterator[SyncMover]:
    """All ranks in this process.

    Args:
        problem: sizes.
        uses: see `SyncMover`.
        form: of a push on a GPU.

    Raises:
        NotHereError: the GPU does not have this form.
    """
    layout = problem.layout
    with contextlib.ExitStack() as stack:
        syncs = {}
        for rank, heap in enumerate(LocalHeap.ranks(problem.num_ranks, problem.device)):
            arena = heap.alloc(layout.nbytes, 1)
            stack.callback(heap.close)
            engine: SyncEngine
            if problem.device.type == "cpu":
                engine = HostEngine(arena, layout, timeout_s=TIMEOUT_S)
            else:
                engine = CudaEngine(arena, layout, timeout_s=TIMEOUT_S, options=_cuda(form)["cuda"])
            syncs[rank] = _sync(arena, problem, rank, engine, form)
            stack.callback(syncs[rank].close)
        yield SyncMover(f"local {form}".strip(), problem, syncs, uses)


def _cuda(form: str) -> dict[str, Any]:
    """Options of a GPU."""
    return {"cuda": CudaOptions(push=form)} if form else {}


def _sync(arena: Arena, problem: Problem, rank: int, engine: SyncEngine, form: str) -> ReplicaSync:
    """One rank's side; closes the engine where it does not have the form."""
    if (found := getattr(engine, "push_form", form)) != form:
        engine.close()
        raise NotHereError(f"pushes are {found} on this machine")
    domain = range(problem.num_ranks)
    return ReplicaSync(arena, problem.layout, domain, rank, engine, timeout_s=TIMEOUT_S)
