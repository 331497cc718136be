"""The protocol of replica synchronisation: forked ranks over shared memory, and virtual ranks."""

import dataclasses
import functools
import time

import numpy as np
import pytest
import torch.distributed as dist
from sync_world import FIELDS, NUM_LAYERS, Schedule, run_schedule, shared, virtual, zero_grads

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.launch import RankError, run_ranks
from relibra_kernels.transport.lockstep_group import LocalReplica
from relibra_kernels.transport.replica import DistReplica
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine import HostEngine
from relibra_kernels.transport.sync_engine_local import InlineEngine
from relibra_kernels.transport.sync_items import SyncItems, Use
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.sync_types import WAIT_ITEM


def by_both(schedule, sync, plain, rank, barrier):
    """Gradients of the protocol and of messages on the same uses."""
    other = [zero_grads() for _ in range(NUM_LAYERS)]

    def by_messages(n, key, grads):
        if grads is not None:
            pushes, pulls = schedule.lists(n)
            pairs = [(grads[name], other[key.layer][name]) for name in FIELDS]
            plain.reduce(pairs, pushes[rank], pulls[rank], what=str(key))

    return run_schedule(schedule, sync, rank, barrier=barrier, after_use=by_messages), other


def run_and_compare(rank, num_ranks, schedule):
    """`cpu_shm`, and `dist` over gloo."""
    with shared(rank, num_ranks) as sync:
        return by_both(schedule, sync, DistReplica(dist.group.WORLD), rank, dist.barrier)


def run_locally(schedule):
    """All virtual ranks of `local`, by rank."""
    with virtual(schedule.num_ranks) as (lockstep, group, syncs):

        def run(rank):
            plain = LocalReplica(group, rank)
            barrier = functools.partial(group.gather, rank, None, "barrier")
            return by_both(schedule, syncs[rank], plain, rank, barrier)

        return lockstep.run(run)


def check_schedule(schedule, **options):
    """Processes equal the sum of one process, bit for bit."""
    check_sums(schedule, run_ranks(schedule.num_ranks, run_and_compare, schedule, **options))


def check_sums(schedule, found):
    expected = schedule.sums()
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


@pytest.mark.parametrize("name", ["forward-backward", "recompute", "1f1b", "one-way"])
def test_local_has_the_same_weights_and_gradients_on_eight_ranks(name):
    schedule = dataclasses.replace(CASES[name], num_ranks=8, num_uses=40)
    check_sums(schedule, run_locally(schedule))


def test_a_virtual_rank_submits_no_wait_before_what_it_waits_for(monkeypatch):
    """On one device such a wait could stand in front of the very push that ends it."""
    original, waits = InlineEngine.wait, []

    def wait(self, stream, items, use, op):
        words = self.load_words(items["word"].tolist())
        assert all(word >= int(item["at_least"]) for word, item in zip(words, items, strict=True))
        waits.append(op)
        original(self, stream, items, use, op)

    monkeypatch.setattr(InlineEngine, "wait", wait)
    run_locally(Schedule(4, 40, order="1f1b", kind="one-home", seed=13))
    assert {int(op) for op in waits} == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward-backward", "recompute", "1f1b"])
@pytest.mark.parametrize("kind", ["random", "empty", "one-way", "one-home"])
def test_ten_thousand_uses_on_eight_local_ranks(order, kind):
    schedule = Schedule(8, 10_000 // 12 + 1, order, kind, seed=12)
    check_sums(schedule, run_locally(schedule))


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
    slow_sums(0.1)  # on a busy machine too the others are faster
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


def slow_sums(seconds=0.02):
    """No mutation: gradients are added late, which the protocol allows."""
    original = HostEngine.reduce

    def reduce(self, stream, items, keep):
        self._run(stream, lambda: time.sleep(seconds))
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


# In lockstep weights are read at once after they have come, and gradients are added at once.
LOCAL_MUTANTS = [m for m in MUTANTS if m not in (early_retire, no_gradient_credit)]


def run_local_mutant(rank, num_ranks):
    LOCAL_MUTANTS[rank]()
    schedule = Schedule(4, 30, kind="one-home", seed=12)
    try:
        check_sums(schedule, run_locally(schedule))
    except (ReplicaSyncError, AssertionError) as error:
        return type(error).__name__
    return ""


def test_mutants_are_caught_in_lockstep():
    """One process a mutant; a virtual rank runs as far as it can, whatever its peers do."""
    found = run_ranks(len(LOCAL_MUTANTS), run_local_mutant)
    names = [mutant.__name__ for mutant in LOCAL_MUTANTS]
    assert all(found), dict(zip(names, found, strict=True))


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
