"""Ranks in threads of one process, each with the engine of GPUs on a fake GPU of its own."""

import threading

import torch
from fake_cuda import FakeLibrary, FakeStreams
from sync_world import Schedule, arena_layout

from relibra_kernels.transport.cuda_options import CudaOptions
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine_cuda import CudaEngine
from relibra_kernels.transport.sync_report import UseKey

KEY = UseKey("actor", 3, "train", 2, 7, "forward")
HOME = Schedule(1, 1).weights(7, 0)


def int32(entries):
    return torch.tensor(entries, dtype=torch.int32).reshape(-1, 3)


class LateSync(ReplicaSync):
    """For a compute stream that runs later than the caller: waits before a test reads memory."""

    def weights(self, use):
        found = super().weights(use)
        self.engine._streams.drain()
        return found

    def grad_slots(self, use):
        found = super().grad_slots(use)
        self.engine._streams.drain()
        return found


class World:
    """Ranks in threads over one local heap, each with a GPU of its own."""

    def __init__(self, num_ranks, *, timeout_s=20.0, library=FakeLibrary, is_late=False, lag_s=0.0,
                 **options):  # fmt: skip
        self.layout, self.num_ranks = arena_layout(num_ranks), num_ranks
        self.heaps = LocalHeap.ranks(num_ranks)
        arenas = [heap.alloc(self.layout.nbytes, 1) for heap in self.heaps]
        self.streams = [FakeStreams(lag_s=lag_s, is_late=is_late) for _ in arenas]
        self.libraries = [library() for _ in arenas]
        try:
            self.engines = [
                CudaEngine(arena, self.layout, timeout_s=timeout_s, options=CudaOptions(**options),
                           library=one, streams=streams)
                for arena, one, streams in zip(arenas, self.libraries, self.streams, strict=True)
            ]  # fmt: skip
        except BaseException:
            self._end_streams()
            raise
        kind = LateSync if is_late else ReplicaSync
        domain = range(num_ranks)
        self.syncs = [
            kind(arena, self.layout, domain, rank, engine, timeout_s=timeout_s)
            for rank, (arena, engine) in enumerate(zip(arenas, self.engines, strict=True))
        ]

    def run(self, body):
        """``body(rank, sync)`` on every rank; their results."""
        found = [None] * self.num_ranks

        def one(rank):
            try:
                found[rank] = body(rank, self.syncs[rank])
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), found
        return found

    def _end_streams(self):
        for one in self.streams:
            one.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for sync in self.syncs:
            sync.close()
        for heap in self.heaps:
            heap.close()
        self._end_streams()
        if error is None:
            assert [one.errors for one in self.streams] == [[]] * self.num_ranks


def one_replica(sync, rank, key=KEY, **options):
    """Home slot 1 of rank 0 goes to replica slot 0 of rank 1."""
    push = int32([[1, 1, 0]] if rank == 0 else [])
    return sync.submit_push(key, HOME, push, int32([[0, 0, 1]] if rank == 1 else []), **options)
