"""What ranks tell each other about a step that failed, through a store and without collectives."""

import threading
import time

import torch.distributed as dist

from relibra.departures import Departures


def departures(store, rank, num_ranks=3):
    """Those of one rank of a group, without the group."""
    found = Departures(None)
    found._store, found._rank, found._size = store, rank, num_ranks
    return found


def test_reasons_come_before_silence_and_are_taken_back():
    store = dist.HashStore()
    ranks = [departures(store, rank) for rank in range(3)]
    ranks[2].note(KeyError("x" * 1000), "optimizer step 3")
    told = ranks[0].told()
    assert told.startswith("rank 2 left optimizer step 3 by KeyError: 'xxx")
    assert len(told) <= 400
    ranks[2].forget()
    assert ranks[0].told() == "no word so far from rank(s) [1, 2]"
    assert ranks[1].told() == "no word so far from rank(s) [2]", "rank 0 has said that it waits"
    for rank in ranks:
        rank.forget()
    assert ranks[2].told() == "no word so far from rank(s) [0, 1]"


def test_a_later_runtime_over_the_same_group_takes_reasons_back():
    store = dist.HashStore()
    departures(store, 1).note(ValueError("odd \udcff"), "optimizer step 3")
    assert departures(store, 0, 2).told() == "rank 1 left optimizer step 3 by ValueError: odd ?"
    departures(store, 1).forget()
    assert departures(store, 0, 2).told() == "no word so far from rank(s) [1]"
    assert store.num_keys() == 1, "what rank 0 said; nothing else is left"


def test_one_rank_has_nobody_to_ask():
    alone = Departures(None)
    alone.note(ValueError(), "a step")
    alone.forget()
    assert alone.told() == ""


class _DeadStore:
    """Of a process that answers no more, or is gone."""

    def __init__(self, end=None):
        self.end = end

    def _ask(self, *_):
        if self.end is None:
            raise RuntimeError("Connection reset by peer")
        self.end.wait()

    set = check = get = delete_key = _ask


def test_a_dead_store_does_not_hold_up_the_error():
    end = threading.Event()
    for store in (_DeadStore(end), _DeadStore()):
        since = time.monotonic()
        rank = departures(store, 0)
        rank.forget()
        rank.note(ValueError("mine"), "a step")
        assert rank.told() == ""
        assert time.monotonic() - since < 20, "one second and what a busy machine adds"
    end.set()
