"""Memory of peer dispatch: it grows with the needs of steps, and is given back."""

import functools
import itertools
import threading

import pytest
import torch

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.peer_dispatch import PeerDispatch
from relibra_kernels.transport.row_sync import RowWay
from relibra_kernels.transport.sync_engine import HostEngine
from relibra_kernels.transport.sync_report import UseKey

WAY = RowWay("x", UseKey("m", 0, "train", 0, 1, "tokens"), [0, 0])


TIMEOUT_S = 2.0  # where somebody waits in vain


def two_ranks(timeout_s=60.0, **options):
    """Two ranks whose heaps are made once an arena, as their ranks do one after the other."""
    made = []

    def heaps(rank):
        for number in itertools.count():
            if number == len(made):
                made.append(LocalHeap.ranks(2))
            yield made[number][rank]

    def engine(arena, layout):
        return HostEngine(arena, layout, timeout_s=timeout_s)

    return [
        PeerDispatch(
            functools.partial(next, heaps(rank)),
            engine,
            (0, 1),
            rank,
            timeout_s=timeout_s,
            **options,
        )
        for rank in range(2)
    ]


def test_buffers_grow_by_a_quarter_and_never_shrink():
    (peer, other), before = two_ranks(generation=65535), set(threading.enumerate())
    generations, sizes = [], []
    for need in ({"x": 8192}, {"x": 100, "y": 50}, {"x": 8200}, {"x": 10000}, {}):
        for one in (other, peer):
            total = one.reserve(need)
        generations.append(peer.sync.arena.generation)
        sizes.append((peer.sync.layout.capacity("x"), peer.sync.layout.capacity("y")))
        assert peer.report()["total"] == total == peer.sync.arena.nbytes
    assert sizes == [(8192, 0), (8192, 1024), (10240, 1024), (10240, 1024), (10240, 1024)]
    assert generations == [65535, 1, 2, 2, 2]
    for one in (other, peer):
        one.close(peers_alive=True)
        one.close(peers_alive=True)
    assert peer.report() == {}
    assert set(threading.enumerate()) <= before, "its watchdogs and streams have ended"
    with pytest.raises(RuntimeError, match="need receive buffers, got none"):
        peer.over(WAY).start(torch.zeros(0, 1), [0, 0], [0, 0])


def test_memory_without_an_engine_is_given_back():
    (heap,) = LocalHeap.ranks(1)

    def engine(arena, layout):
        raise RuntimeError("no kernel for this GPU")

    peer = PeerDispatch(lambda: heap, engine, [0], 0, timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="no kernel for this GPU"):
        peer.reserve({"x": 1024})
    heap.alloc(1024, 2)  # refused while an arena is open
    heap.close()


def test_sizes_that_differ_are_refused_with_both():
    """comm-08: nobody goes on with buffers that a peer takes for larger ones."""
    first, second = two_ranks()
    first.reserve({"x": 8192})
    with pytest.raises(ReplicaSyncError, match=r"nbytes.*rank 0: \d+.*rank 1: \d+"):
        second.reserve({"x": 4096})
    first.close(peers_alive=True)


def test_rows_and_news_of_a_failure():
    first, second = two_ranks()
    for one in (first, second):
        one.reserve({"x": 4096})
    x = torch.arange(6.0).view(3, 2)
    rows = first.over(WAY).start(x, [2, 1], [2, 1])
    assert second.over(RowWay("x", WAY.key, [2, 1])).start(x, [1, 2], [1, 2]).wait().shape == (3, 2)
    assert rows.wait().tolist() == [[0, 1], [2, 3], [0, 1]]
    first.finish()
    second.abort()
    with pytest.raises(ReplicaSyncError, match="stopped, since rank 1 failed first"):
        first.over(WAY).exchange(x, [2, 1], [2, 1])
    with pytest.raises(ReplicaSyncError, match="stopped, since this rank failed elsewhere"):
        second.finish()
    for one in (first, second):
        one.close(peers_alive=False)


def test_a_peer_that_left_its_step_ends_the_waits_when_it_closes():
    first, second = two_ranks()
    for one in (first, second):
        one.reserve({"x": 4096})
    second.leave()
    second.close(peers_alive=True)
    with pytest.raises(ReplicaSyncError, match="stopped, since rank 1 failed first"):
        first.finish()
    first.close(peers_alive=False)


def test_ranks_that_left_a_step_and_met_give_memory_back_and_end_nothing_else():
    ended, ranks = [], two_ranks(on_abort=lambda: ended.append(1))
    freed = []
    for one in ranks:
        one.reserve({"x": 4096})
        heap, sync, watchdog = one._open
        watchdog._pause_s = 0.01
        free = heap._free
        heap._free = lambda peers_alive, free=free: freed.append(peers_alive) or free(peers_alive)
        one.leave()
    rows = ranks[0].over(WAY).start(torch.zeros(3, 2), [2, 1], [2, 1])
    for one in ranks:
        one.meet()
    with pytest.raises(ReplicaSyncError, match="stopped"):
        rows.wait()
    for one in ranks:
        one.close(peers_alive=True)
    assert (ended, freed) == ([], [True, True])


def test_memory_is_not_given_back_while_rows_may_come():
    """A step that all ranks left with a message on its way: it is read before buffers grow."""
    ranks = two_ranks(TIMEOUT_S)
    for one in ranks:
        one.reserve({"x": 1024})
    x = torch.arange(6.0).view(3, 2)
    flight = [
        ranks[0].over(WAY).start(x, [2, 1], [2, 1]),
        ranks[1].over(RowWay("x", WAY.key, [2, 1])).start(x, [1, 2], [1, 2]),
    ]
    for one in ranks:
        one.reserve({"x": 4096})
    assert flight[0].wait().tolist() == [[0, 1], [2, 3], [0, 1]]
    ranks[0].over(WAY).start(x, [2, 1], [2, 1])
    with pytest.raises(ReplicaSyncError, match="waited 2 s in vain for rank 1"):
        ranks[0].reserve({"x": 8192})
    for one in ranks:
        one.close(peers_alive=False)
