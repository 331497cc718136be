"""A failure after the vote of a step does not reach back into it, on no rank."""

import contextlib
import threading
import time

import pytest
import torch
from moe_world import World
from replica_training import make, run_step

from relibra import agreement
from relibra_kernels.errors import PlanError, ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.watchdog import AbortGate

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=1, tokens=9, replica_slots=1, dtype=torch.float64
)
TIMEOUT_S = 4.0  # the watchdog looks eight times as often
PLAN = WORLD.random_plan(fill=1.0)
VOTE = "end of optimizer step 0"


def keep(found, model):
    """The parameters when the experts have moved to the layout of the plan."""
    found.extend(param.detach().clone() for param in model.parameters())


class _LateVote:
    """A vote that ends on this rank later than on its peers, as over NCCL, and may be killed."""

    def __init__(self, is_aborted, patience_s):
        self.is_aborted, self.killed, self.patience_s = is_aborted, threading.Event(), patience_s
        self._gather = agreement.gather_tensor

    def __call__(self, x, group, what):
        found = self._gather(x, group, what)
        if what == VOTE:
            deadline = time.monotonic() + 10 * TIMEOUT_S
            while not self.is_aborted() and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.killed.wait(self.patience_s):
                raise agreement.sync_error(what, group, RuntimeError("aborted"))
        return found


def run_vote(rank, num_ranks, is_held):
    """Rank 0 leaves the vote, updates its weights and fails; rank 1 is in the vote meanwhile."""
    if not is_held:
        AbortGate.holding = lambda self: contextlib.nullcontext()
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = []
    (kind,) = runtime.domain_sync._kinds.values()
    patience_s = TIMEOUT_S / 2 if is_held else 10 * TIMEOUT_S  # four looks of the watchdog, or all
    late = _LateVote(kind.sync.is_aborted, patience_s)
    runtime.domain_sync.on_abort._abort = late.killed.set
    if rank == 1:
        agreement.gather_tensor = late
    error = None
    try:
        run_step(WORLD, rank, runtime, model, PLAN, entered=lambda: keep(before, model))
        optimizer.step()
        if rank == 0:
            runtime.domain_sync.abort()  # of the next step
    except ReplicaSyncError as caught:
        error = str(caught)
    is_killed_later = late.killed.wait(10 * TIMEOUT_S)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    with pytest.raises(ReplicaSyncError):
        kind.sync.check()
    return error, changed, is_killed_later


def test_a_later_failure_does_not_end_the_vote_of_a_slower_rank():
    for error, changed, is_killed_later in run_ranks(2, run_vote, True):
        assert error is None
        assert all(changed), "every rank updated its parameters"
        assert is_killed_later, "collectives of the next step are ended"


def test_mutation_a_vote_that_a_later_failure_ends_is_caught():
    (fast, changed, _), (slow, unchanged, _) = run_ranks(2, run_vote, False)
    assert fast is None
    assert all(changed)
    assert VOTE in slow
    assert not any(unchanged)


def run_pending(rank, num_ranks):
    """Rank 0 fails when it has nothing more to wait for, and no wait of rank 1 meets it."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    before = []
    finish = runtime.domain_sync.finish

    def failing(model):
        finish(model)
        if rank == 0:
            runtime.domain_sync.abort()
            finish(model)

    runtime.domain_sync.finish = failing
    with pytest.raises(ReplicaSyncError) as caught:
        run_step(WORLD, rank, runtime, model, PLAN, entered=lambda: keep(before, model))
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.close()
    return str(caught.value), same


def test_a_failure_before_the_vote_is_every_rank_s():
    own, other = run_ranks(2, run_pending)
    assert "this rank failed elsewhere" in own[0]
    assert "refused by rank(s) [0]" in other[0] or "rank 0 failed first" in other[0]
    assert own[1]
    assert other[1]


def run_own_error(rank, num_ranks):
    """The end of the step fails on rank 1, and not by a wait."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=20.0)
    before = []
    if rank == 1:
        runtime.domain_sync.finish = lambda model: {}[model]
    with pytest.raises((KeyError, PlanError)) as caught:
        run_step(WORLD, rank, runtime, model, PLAN, entered=lambda: keep(before, model))
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    runtime.close()
    return caught.type, str(caught.value), same


def test_what_fails_before_the_vote_is_told_whatever_it_is():
    (other, message, same), (own, _, own_same) = run_ranks(2, run_own_error)
    assert (other, own) == (PlanError, KeyError)
    assert "refused by rank(s) [1]; rank 1: KeyError: 'actor'" in message
    assert same
    assert own_same
