"""Random uses of replica synchronisation, with what every rank must find in its memory.

Everything follows from a seed, so that each rank knows all plans, weights and gradients.
"""

import contextlib
import dataclasses
import time

import numpy as np
import torch
import torch.distributed as dist

from relibra_kernels.reference.home_reduce import home_reduce
from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.arena_layout import ArenaLayout
from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.lockstep import Lockstep
from relibra_kernels.transport.lockstep_group import LocalGroup
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine import HostEngine
from relibra_kernels.transport.sync_engine_local import InlineEngine, LocalEngine
from relibra_kernels.transport.sync_report import UseKey

NUM_HOME, NUM_SLOTS, NUM_LAYERS = 3, 2, 3
FIELDS = {"w13": (torch.bfloat16, (6, 8)), "b2": (torch.bfloat16, (5,))}
GRADS = dict.fromkeys(FIELDS, torch.float32)


def arena_layout(num_ranks):
    weights = SlotLayout.of(FIELDS)
    return ArenaLayout(weights, weights.as_dtype(GRADS), num_ranks, NUM_SLOTS)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Uses in the order of the domain.

    Attributes:
        num_ranks: P.
        num_uses: how many.
        order: ``forward-backward``, ``recompute`` or ``1f1b``.
        kind: of the plans: ``random``, ``empty``, ``one-way`` or ``one-home``.
        seed: of everything.
        max_delay_s: of a random pause on one rank.
        delays: share of the places where a rank may pause that it does.
    """

    num_ranks: int
    num_uses: int
    order: str = "forward-backward"
    kind: str = "random"
    seed: int = 0
    max_delay_s: float = 0.0
    delays: float = 0.05

    def keys(self):
        """Key of every use; a use that repeats a forward is a recompute."""
        keys, micro_batch, flight = [], 0, []

        def forward(m):
            keys.extend(UseKey("m", 0, "train", m, layer, "forward") for layer in range(NUM_LAYERS))

        def backward(m):
            for layer in reversed(range(NUM_LAYERS)):
                if self.order == "recompute":
                    keys.append(UseKey("m", 0, "train", m, layer, "forward"))
                keys.append(UseKey("m", 0, "train", m, layer, "backward"))

        while len(keys) < self.num_uses:
            forward(micro_batch)
            flight.append(micro_batch)
            micro_batch += 1
            if self.order != "1f1b" or len(flight) > 2:
                backward(flight.pop(0))
        return keys[: self.num_uses]

    def lists(self, n):
        """Push and pull lists of every rank in use n."""
        rng = np.random.default_rng([self.seed, 1, n])
        pushes, pulls = ([[] for _ in range(self.num_ranks)] for _ in range(2))
        fill = {"empty": 0.15, "one-home": 1.0}.get(self.kind, rng.choice([0.0, 0.3, 0.7, 1.0]))
        one_home = int(rng.integers(self.num_ranks))
        for rank in range(self.num_ranks):
            for slot in range(NUM_SLOTS):
                home_rank = int(rng.integers(self.num_ranks))
                home_rank = one_home if self.kind == "one-home" else home_rank
                home_slot = int(rng.integers(NUM_HOME))
                skip = self.kind == "one-way" and home_rank >= rank
                if rng.random() < fill and not skip:
                    pushes[home_rank].append([home_slot, rank, slot])
                    pulls[rank].append([slot, home_rank, home_slot])
        return [_int32(one) for one in pushes], [_int32(one) for one in pulls]

    def weights(self, layer, rank, version=0):
        """Home weights by field: row i of the slot says layer, expert, version and row."""
        found = {}
        for number, (name, (dtype, shape)) in enumerate(FIELDS.items()):
            rng = np.random.default_rng([self.seed, 2, layer, rank, version, number])
            found[name] = torch.tensor(rng.normal(size=(NUM_HOME, *shape))).to(dtype)
        return found

    def grads(self, n, rank):
        """Replica gradients of a rank by field, ``[S, ...]``, of magnitudes that do not commute."""
        found = {}
        for number, (name, (_, shape)) in enumerate(FIELDS.items()):
            rng = np.random.default_rng([self.seed, 3, n, rank, number])
            values = rng.normal(size=(NUM_SLOTS, *shape)) * 10.0 ** rng.integers(-4, 5)
            found[name] = torch.tensor(values, dtype=torch.float32)
        return found

    def pause(self, n, rank, place):
        """Sometimes a rank is slow."""
        rng = np.random.default_rng([self.seed, 4, n, rank, place])
        if self.max_delay_s and rng.random() < self.delays:
            time.sleep(float(rng.random() * self.max_delay_s))

    def sums(self):
        """Home gradients ``[layer][rank][field]`` of all uses, by one process."""
        total = [[zero_grads() for _ in range(self.num_ranks)] for _ in range(NUM_LAYERS)]
        for n, key in enumerate(self.keys()):
            if key.direction == "backward":
                pushes, _ = self.lists(n)
                replica = [self.grads(n, rank) for rank in range(self.num_ranks)]
                for name in FIELDS:
                    home = [one[name] for one in total[key.layer]]
                    home_reduce([one[name] for one in replica], home, pushes)
        return total


def zero_grads():
    return {name: torch.zeros(NUM_HOME, *shape) for name, (_, shape) in FIELDS.items()}


def _int32(entries):
    return torch.tensor(entries, dtype=torch.int32).reshape(-1, 3)


@contextlib.contextmanager
def shared(rank, num_ranks, timeout_s=10.0, generation=1):
    """`ReplicaSync` over shared memory of the default group."""
    layout = arena_layout(num_ranks)
    heap = CpuShmHeap(dist.group.WORLD if num_ranks > 1 else None, timeout_s=20.0)
    arena = heap.alloc(layout.nbytes, generation)
    engine = HostEngine(arena, layout, timeout_s=timeout_s)
    sync = ReplicaSync(arena, layout, range(num_ranks), rank, engine, timeout_s=timeout_s)
    try:
        yield sync
    finally:
        sync.close()
        heap.close(peers_alive=False)


@contextlib.contextmanager
def virtual(num_ranks, timeout_s=10.0, generation=1):
    """All ranks in this process: their lockstep, collectives, and `ReplicaSync` by rank."""
    layout, lockstep, words = arena_layout(num_ranks), Lockstep(num_ranks), {}
    heaps, syncs = LocalHeap.ranks(num_ranks), []
    for rank, heap in enumerate(heaps):
        arena = heap.alloc(layout.nbytes, generation)
        inner = InlineEngine(arena, layout, timeout_s=timeout_s)
        engine = LocalEngine(inner, lockstep, words, range(num_ranks))
        syncs.append(
            ReplicaSync(arena, layout, range(num_ranks), rank, engine, timeout_s=timeout_s)
        )
    try:
        yield lockstep, LocalGroup(lockstep), syncs
    finally:
        for sync, heap in zip(syncs, heaps, strict=True):
            sync.close()
            heap.close(peers_alive=False)
        lockstep.close()


STEP = 40  # uses between two changes of the weights


def run_schedule(schedule, sync, rank, *, barrier, after_use=None):
    """All uses on one rank, one prefetched; checks weights, returns the home gradients by layer.

    Args:
        schedule: the uses.
        sync: `ReplicaSync` of this rank.
        rank: of the domain, which is the EP group.
        barrier: called where weights change.
        after_use: called with (n, key, gradients or None).
    """
    keys, flight, total = schedule.keys(), {}, [zero_grads() for _ in range(NUM_LAYERS)]

    def submit(n):
        key, (pushes, pulls) = keys[n], schedule.lists(n)
        home = schedule.weights(key.layer, rank, n // STEP)
        flight[n] = sync.submit_push(key, home, pushes[rank], pulls[rank], plan_hash="p")

    for n, key in enumerate(keys):
        if n % STEP == 0:
            sync.join()
            barrier()
            submit(n)
        schedule.pause(n, rank, 0)
        if n + 1 < len(keys) and (n + 1) % STEP:
            submit(n + 1)
        use = flight.pop(n)
        _check_weights(schedule, n, key, sync.weights(use), schedule.lists(n)[1][rank])
        schedule.pause(n, rank, 1)
        sync.retire(use)
        grads = None
        if key.direction == "backward":
            grads = schedule.grads(n, rank)
            for name, slots in sync.grad_slots(use).items():
                slots.fill_(float("nan"))  # what nobody may add
                slots.copy_(grads[name])
            schedule.pause(n, rank, 2)
            sync.publish_grads(use)
            sync.home_reduce(use, total[key.layer])
        if after_use is not None:
            after_use(n, key, grads)
    sync.join()
    return total


def _check_weights(schedule, n, key, slots, pulls):
    for slot, home_rank, home_slot in pulls.tolist():
        need = schedule.weights(key.layer, home_rank, n // STEP)
        for name, held in slots.items():
            rows = (held[slot] == need[name][home_slot]).reshape(len(held[slot]), -1).all(1)
            assert rows.all(), f"use {n}, {key}: rows of {name} in slot {slot}: {rows.tolist()}"
