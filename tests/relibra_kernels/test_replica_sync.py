"""The protocol of replica synchronisation on forked ranks over shared memory, and its errors."""

import dataclasses
import time

import numpy as np
import pytest
import torch.distributed as dist
from sync_world import FIELDS, NUM_LAYERS, Schedule, run_schedule, shared, zero_grads

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.launch import RankError, run_ranks
from relibra_kernels.transport.replica import DistReplica
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine import HostEngine
from relibra_kernels.transport.sync_items import SyncItems, Use
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.sync_types import WAIT_ITEM


def run_and_compare(rank, num_ranks, schedule):
    """Gradients of the protocol and of `DistReplica` on the same uses."""
    other = [zero_grads() for _ in range(NUM_LAYERS)]
    plain = DistReplica(dist.group.WORLD)

    def by_messages(n, key, grads):
        if grads is not None:
            pushes, pulls = schedule.lists(n)
            pairs = [(grads[name], other[key.layer][name]) for name in FIELDS]
            plain.reduce(pairs, pushes[rank], pulls[rank], what=str(key))

    with shared(rank, num_ranks) as sync:
        total = run_schedule(schedule, sync, rank, barrier=dist.barrier, after_use=by_messages)
    return total, other


def check_schedule(schedule, **options):
    """Both equal the sum of one process, bit for bit."""
    expected = schedule.sums()
    found = run_ranks(schedule.num_ranks, run_and_compare, schedule, **options)
    for rank, results in enumerate(found):
        for by in results:
            for layer in range(NUM_LAYERS):
                for field in FIELDS:
                    need = expected[layer][rank][field]
                    assert_equal_bits(f"rank {rank} layer {layer}", by[layer][field], need)


CASES = {
    "forward-backward": Schedule(4, 90),
    "recompute": Schedule(4, 80, order="recompute", seed=1),
    "1f1b": Schedule(4, 80, order="1f1b", seed=2),
    "nearly-empty": Schedule(4, 60, kind="empty", seed=3),
    "one-way": Schedule(4, 60, kind="one-way", seed=4),
    "all-slots-from-one-home": Schedule(4, 60, kind="one-home", seed=5),
    "delays": Schedule(4, 60, order="1f1b", seed=6, max_delay_s=0.02),
    "three-ranks": Schedule(3, 60, seed=7),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_by_content_and_gradients_bit_for_bit(name):
    check_schedule(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward-backward", "recompute", "1f1b"])
@pytest.mark.parametrize("kind", ["random", "empty", "one-way", "one-home"])
def test_ten_thousand_uses(order, kind):
    schedule = Schedule(4, 10_000 // 12 + 1, order, kind, seed=11, max_delay_s=0.02)
    check_schedule(schedule, timeout=600)


def no_weight_credit():
    """Mutation: a push does not wait until its buffer was read."""
    SyncItems.weight_credits = lambda self, use: np.zeros(0, WAIT_ITEM)


def no_wait_for_weights():
    """Mutation: weights are read before they have come."""
    SyncItems.weights_there = lambda self, use: np.zeros(0, WAIT_ITEM)


def no_wait_for_gradients():
    """Mutation: gradients are added before they are there."""
    SyncItems.grads_there = lambda self, use: np.zeros(0, WAIT_ITEM)


def no_gradient_credit():
    """Mutation: gradients are overwritten before they were added."""
    slow_sums()
    SyncItems.grad_credits = lambda self, use, peers: np.zeros(0, WAIT_ITEM)


def early_retire():
    """Mutation: the buffer is given back when its weights have come."""
    original, retire = ReplicaSync.weights, ReplicaSync.retire

    def weights(self, use):
        slots = original(self, use)
        retire(self, use)
        return slots

    ReplicaSync.weights, ReplicaSync.retire = weights, lambda self, use: None


def descending_sums():
    """Mutation: replicas are added in the order of falling ranks."""
    original = SyncItems.reduced

    def reduced(self, use, home_grads):
        turned = dataclasses.replace(use, pushes=use.pushes[::-1])
        return original(self, turned, home_grads)

    SyncItems.reduced = reduced


def one_hash():
    """Mutation: words do not tell plans and experts apart."""
    Use.hash_of = lambda self, copy: 0


MUTANTS = [
    no_weight_credit,
    no_wait_for_weights,
    no_wait_for_gradients,
    no_gradient_credit,
    early_retire,
    descending_sums,
]


def run_mutant(rank, num_ranks, mutant, schedule):
    mutant()
    return run_and_compare(rank, num_ranks, schedule)


def slow_sums():
    """No mutation: gradients are added late, which the protocol allows."""
    original = HostEngine.reduce

    def reduce(self, stream, items, keep):
        self._run(stream, lambda: time.sleep(0.02))
        original(self, stream, items, keep)

    HostEngine.reduce = reduce


def check_mutant(mutant, max_delay_s):
    schedule = Schedule(4, 60, kind="one-home", seed=12, max_delay_s=max_delay_s, delays=0.4)
    expected = schedule.sums()
    for rank, (total, _) in enumerate(run_ranks(4, run_mutant, mutant, schedule)):
        for layer in range(NUM_LAYERS):
            for field in FIELDS:
                need = expected[layer][rank][field]
                assert_equal_bits(f"rank {rank}", total[layer][field], need)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant):
    """Every rank is slow now and then, or its sums are, so that a missing wait shows."""
    found = r"rows of|ReplicaSyncError|rank \d: first difference"
    with pytest.raises((RankError, AssertionError), match=found):
        check_mutant(mutant, 0.0 if mutant is no_gradient_credit else 0.03)


def test_late_sums_are_allowed():
    check_mutant(slow_sums, 0.0)


def run_diverged(rank, num_ranks):
    """Rank 0 has another plan than the others; they see it by the hash alone."""
    one_hash()
    with shared(rank, num_ranks) as sync:
        key = UseKey("m", 0, "train", 0, rank, "forward")
        push, pull = Schedule(num_ranks, 1, kind="one-home").lists(0)
        weights = Schedule(num_ranks, 1).weights(0, rank)
        sync.weights(sync.submit_push(key, weights, push[rank], pull[rank]))
    return True


def test_mutant_one_hash_hides_a_diverged_use():
    assert all(run_ranks(2, run_diverged))
