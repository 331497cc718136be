"""One rank alone leaves a step by its own exception, or is late: peers say who and why in time."""

import re
import time
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from late_rank import Told
from moe_world import World, collect_weight_grads, compare, reference
from replica_training import make, run_step
from shared_memory import leaked_segments

from relibra import layer_passes
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 3, num_experts=6, top_k=2, num_layers=2, micro_batches=2, tokens=9, replica_slots=1,
    dtype=torch.float64,
)  # fmt: skip
TIMEOUT_S = 4.0
VICTIM = 1
LATE = "late between layers, forward"
PLACES = ("in a forward", "between layers, backward")
OTHER_PLACES = ("between layers, forward", "in a backward")


class _HostError(Exception):
    """A host's own."""


def strike(place, model, when, told):
    """The rank raises at a place of its second micro-batch; undoes that."""
    calls = [0]

    def fail(*args):
        calls[0] += 1
        if calls[0] == 2:
            when.value = time.monotonic()
            if place == LATE:
                return told.wait_for(2)
            raise _HostError("broken")
        return None

    first, name = model.layers[0], {"in a forward": "start_output", "in a backward": "start_dx"}
    if place in name:
        original = getattr(layer_passes, name[place])
        failing = lambda *args: fail() or original(*args)  # noqa: E731
        setattr(layer_passes, name[place], failing)
        return lambda: setattr(layer_passes, name[place], original)
    if "forward" in place:
        return first.register_forward_hook(fail).remove
    hook = lambda moe, args, y: y.register_hook(fail) and None  # noqa: E731
    return first.register_forward_hook(hook).remove


def run_alone(rank, num_ranks, transport, places, when, told):
    """What this rank saw at each place: error, seconds, whether its parameters stayed."""
    found = {}
    for place in places:
        runtime, model = make(WORLD, rank, transport=transport, timeout_s=TIMEOUT_S)
        before = []

        def entered(model=model, before=before):
            before.extend(param.detach().clone() for param in model.parameters())

        undo = strike(place, model, when, told) if rank == VICTIM else lambda: None
        dist.barrier()
        with pytest.raises((ReplicaSyncError, _HostError)) as caught:
            run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0), entered=entered)
        seconds = time.monotonic() - when.value
        if place == LATE and rank != VICTIM:
            told.say()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        found[place] = (type(caught.value), str(caught.value), seconds, same)
        runtime.close()
        undo()
        dist.barrier()
    train_again(rank, transport)
    return found


def train_again(rank, transport):
    runtime, model = make(WORLD, rank, transport=transport, timeout_s=60.0)
    result = run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    collect_weight_grads(WORLD, runtime, model, result)
    compare(result, reference(WORLD, rank), "after a departure")
    runtime.close()


@pytest.mark.parametrize(
    ("transport", "places"),
    [
        ("dist", PLACES),
        ("cpu_shm", (*PLACES, LATE)),
        pytest.param("dist", (*OTHER_PLACES, LATE), marks=pytest.mark.slow),
        pytest.param("cpu_shm", OTHER_PLACES, marks=pytest.mark.slow),
    ],
)
def test_peers_name_the_rank_and_its_reason_in_time(transport, places):
    when = get_context("fork").Value("d", 0.0)
    ranks = run_ranks(3, run_alone, transport, places, when, Told(), timeout=110.0)
    for place in places:
        for rank, found in enumerate(ranks):
            kind, message, seconds, same = found[place]
            assert same, f"{place}: parameters of rank {rank} changed"
            if rank == VICTIM:
                assert kind is (ReplicaSyncError if place == LATE else _HostError)
                continue
            assert kind is ReplicaSyncError
            told = "rank 1 left optimizer step 0 of model 'actor' by _HostError: broken"
            if place == LATE:  # and maybe others, which the machine held up
                told = r"no word so far from rank\(s\) \[(\d, )*1\b"
            else:
                told = re.escape(told)
            assert re.search(told, message), f"{place}, rank {rank}: {message}"
            assert re.search(r"train, micro-batch \d, layer \d", message), message
            assert seconds < 2 * TIMEOUT_S, f"{place}, rank {rank}"
    assert leaked_segments() == []


def run_all_leave(rank, num_ranks):
    """Without a time-out of its own the runtime shares the store of its group with the next one."""
    for _ in range(2):
        runtime, model = make(WORLD, rank, transport="dist")
        plan, routes = WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}
        with pytest.raises(_HostError), runtime.step(plan, routes):
            raise _HostError("all")
        dist.barrier()
        told = runtime.departures.told()
        assert told.count("by _HostError: all") == 2, "of the two peers"
        dist.barrier()
        with runtime.step(plan, routes):
            assert runtime.departures.told() == ""
    return True


def test_a_rank_that_comes_back_takes_its_reason_back():
    assert all(run_ranks(3, run_all_leave))


def run_entering(rank, num_ranks):
    """Rank 1 fails alone while it enters a step, and tries again at once."""
    runtime, model = make(WORLD, rank, transport="cpu_shm", timeout_s=TIMEOUT_S)
    static = runtime.attachments["actor"].static
    send_weights = static.send_weights

    def fail(*_):
        static.send_weights = send_weights
        raise _HostError("broken")

    if rank == VICTIM:
        static.send_weights = fail
        with pytest.raises(_HostError):
            run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    with pytest.raises(ReplicaSyncError) as caught:
        run_step(WORLD, rank, runtime, model, WORLD.random_plan(fill=1.0))
    runtime.close()
    return str(caught.value)


def test_who_fails_while_it_enters_a_step_and_tries_again_at_once_is_named():
    told = "rank 1 left optimizer step 0 of model 'actor' by _HostError: broken"
    for rank, message in enumerate(run_ranks(3, run_entering)):
        assert rank == VICTIM or told in message, message
    assert leaked_segments() == []
