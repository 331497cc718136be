"""What goes wrong in replica synchronisation is an error that names rank, use and peer, in time."""

import dataclasses
import logging
import threading
import time

import pytest
import torch
from forked import told_in_fork
from sync_world import FIELDS, NUM_HOME, Schedule, arena_layout, shared, zero_grads

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_engine import PUSH, HostEngine
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.sync_types import ErrorCode, SyncOp
from relibra_kernels.transport.watchdog import Watchdog

KEY = UseKey("actor", 3, "train", 2, 7, "forward")
TIMEOUT_S = 4.0  # where somebody waits in vain
PLENTY_S = 60.0  # where nobody does, however busy the machine is
HOME = Schedule(1, 1).weights(7, 0)


def int32(entries):
    return torch.tensor(entries, dtype=torch.int32).reshape(-1, 3)


NOTHING = int32([])


def submit(sync, push=(), pull=(), key=KEY, **options):
    return sync.submit_push(key, HOME, int32(list(push)), int32(list(pull)), **options)


def one_replica(sync, rank, **options):
    """Home slot 1 of rank 0 goes to replica slot 0 of rank 1."""
    push = [[1, 1, 0]] if rank == 0 else []
    return submit(sync, push, [[0, 0, 1]] if rank == 1 else [], **options)


def failing(sync, run):
    """The error of a call and its seconds."""
    start = time.monotonic()
    with pytest.raises(ReplicaSyncError) as caught:
        run()
    return str(caught.value), caught.value.details, time.monotonic() - start


def run_diverged(rank, num_ranks, what):
    options = {"plan_hash": "a", "experts": lambda rank, slot: 10 * rank + slot}
    key = KEY
    if rank == 0 and what == "plan":
        options["plan_hash"] = "b"
    if rank == 0 and what == "expert":
        options["experts"] = lambda rank, slot: 99
    if rank == 0 and what == "layer":
        key = dataclasses.replace(KEY, layer=8)
    with shared(rank, num_ranks, PLENTY_S) as sync:
        use = one_replica(sync, rank, key=key, **options)
        if rank == 1:
            return failing(sync, lambda: sync.weights(use))
        return failing(sync, lambda: wait_for_abort(sync))


def wait_for_abort(sync):
    while not sync.is_aborted():
        time.sleep(0.001)
    sync.check()


@pytest.mark.parametrize("what", ["plan", "expert", "layer"])
def test_a_diverged_plan_is_named_at_once(what):
    other, (message, details, seconds) = run_ranks(2, run_diverged, what)
    assert seconds < PLENTY_S / 2
    assert details.code == ErrorCode.MISMATCH
    assert (details.peer, details.slot, details.expert, details.key) == (0, 0, 1, KEY)
    assert "micro-batch 2, layer 7, forward, replica slot 0, expert 1" in message
    assert "another plan, layer, use or expert of rank 0" in message
    assert "stopped, since rank 1 failed first" in other[0]


def run_missing(rank, num_ranks, operation):
    """Rank 0 does not do its part; the error of rank 1."""
    with shared(rank, num_ranks, TIMEOUT_S) as sync:
        if operation == "weights":
            if rank == 0:
                return failing(sync, lambda: wait_for_abort(sync))
            use = one_replica(sync, rank)
            return failing(sync, lambda: sync.weights(use))
        if operation == "weight credit":
            for _ in range(2 if rank == 1 else 1):
                use = submit(sync, [[0, 0, 0]] if rank == 1 else [], [[0, 1, 0]] * (rank == 0))
                sync.weights(use), sync.retire(use)
            if rank == 0:
                return failing(sync, lambda: wait_for_abort(sync))
            submit(sync, [[0, 0, 0]]), submit(sync, [[0, 0, 0]])
            return failing(sync, sync.join)
        if operation == "gradient credit":  # rank 0 never adds what rank 1 publishes
            for _ in range(sync.layout.grad_buffers):
                use = one_replica(sync, rank)
                sync.weights(use), sync.retire(use)
                if rank == 1:
                    sync.grad_slots(use), sync.publish_grads(use)
            use = one_replica(sync, rank)
            sync.weights(use), sync.retire(use)
            return failing(
                sync, lambda: wait_for_abort(sync) if rank == 0 else sync.grad_slots(use)
            )
        push = [[0, 0, 0]] if rank == 1 else []
        use = submit(sync, push, [[0, 1, 0]] if rank == 0 else [])
        sync.weights(use), sync.retire(use), sync.grad_slots(use)
        if rank == 0:  # never publishes its gradient
            return failing(sync, lambda: wait_for_abort(sync))
        sync.publish_grads(use), sync.home_reduce(use, zero_grads())
        return failing(sync, sync.join)


@pytest.mark.parametrize(
    ("operation", "op", "words"),
    [
        ("weights", SyncOp.WEIGHTS, "use of replica weights"),
        ("weight credit", SyncOp.WEIGHT_CREDIT, "replica push"),
        ("gradients", SyncOp.GRADS, "home reduce"),
        ("gradient credit", SyncOp.GRAD_CREDIT, "replica gradients"),
    ],
)
def test_a_missing_rank_is_named_within_twice_the_time_out(operation, op, words):
    _, (message, details, seconds) = run_ranks(2, run_missing, operation)
    assert seconds < 2 * TIMEOUT_S
    assert (details.code, details.operation, details.peer) == (ErrorCode.TIMEOUT, op, 0)
    assert details.rank == 1
    assert details.expected > details.observed
    assert f"{words}" in message
    assert "optimizer step 3, train, micro-batch 2, layer 7" in message
    assert "waited 4 s in vain for rank 0" in message
    assert "retired (uses): rank 0: " in message
    assert "full[0]: " in message


def run_abort(rank, num_ranks):
    with shared(rank, num_ranks, PLENTY_S) as sync:
        if rank == 0:
            time.sleep(0.1)
            sync.abort()
            return failing(sync, sync.check)
        use = one_replica(sync, rank)
        return failing(sync, lambda: sync.weights(use))


def test_an_abort_ends_the_waits_of_peers_at_once():
    own, (message, details, seconds) = run_ranks(2, run_abort)
    assert "this rank failed elsewhere" in own[0]
    assert "stopped, since rank 0 failed first" in message
    assert details.code == ErrorCode.PEER_ABORTED
    assert seconds < PLENTY_S / 2


def run_watched(rank, num_ranks):
    messages, calls = [], []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("relibra_kernels.transport.watchdog").addHandler(handler)
    with shared(rank, num_ranks, TIMEOUT_S) as sync:
        watchdog = Watchdog(sync, lambda: calls.append(1))
        if rank == 1:
            use = one_replica(sync, rank)
            failing(sync, lambda: sync.weights(use))
        deadline = time.monotonic() + PLENTY_S / 2
        while not calls and time.monotonic() < deadline:
            time.sleep(0.01)
        watchdog.close()
        return messages, calls, failing(sync, sync.check)[0]


def test_the_watchdog_warns_and_brings_news():
    idle, waiting = run_ranks(2, run_watched)
    assert idle[0] == []
    assert len(waiting[0]) == 1
    assert "in WEIGHTS of optimizer step 3, train, micro-batch 2, layer 7, forward" in waiting[0][0]
    assert "for ranks [0]; words:" in waiting[0][0]
    assert idle[1] == waiting[1] == [1]
    assert "since rank 1 failed first" in idle[2]


def alone(generation=1, arena=None, timeout_s=PLENTY_S):
    """A domain of one rank, and its heap."""
    layout = arena_layout(1)
    (heap,) = LocalHeap.ranks(1)
    arena = arena or heap.alloc(layout.nbytes, generation)
    engine = HostEngine(arena, layout, timeout_s=timeout_s)
    return ReplicaSync(arena, layout, [0], 0, engine, timeout_s=timeout_s), heap


def test_a_forked_child_has_no_streams_and_ends_no_wait_of_its_parent():
    sync, heap = alone()
    use = submit(sync, [[2, 0, 1]], [[1, 0, 2]])
    sync.weights(use), sync.retire(use)
    need = (
        "the engine of replica synchronisation: need process PARENT, which made it and runs its "
        "threads, got process CHILD, a fork of it"
    )
    assert need in told_in_fork(lambda: submit(sync, [[2, 0, 1]], [[1, 0, 2]]))
    assert need in told_in_fork(sync.join)
    assert told_in_fork(sync.abort) == told_in_fork(sync.close) == "nothing"
    for _ in range(3):
        use = submit(sync, [[2, 0, 1]], [[1, 0, 2]])
        sync.weights(use), sync.retire(use)
    sync.join(), sync.close(), heap.close()


def test_words_of_another_generation_are_not_there_yet():
    sync, heap = alone()
    for _ in range(5):
        use = submit(sync, [[2, 0, 1]], [[1, 0, 2]])
        sync.weights(use), sync.retire(use)
    later, _ = alone(arena=dataclasses.replace(sync.arena, generation=2), timeout_s=0.5)
    for buffer in range(2):
        for view in later.buffer(buffer).values():
            view.fill_(-1)
    use = submit(later, [], [[1, 0, 2]])  # nobody pushes in this generation
    with pytest.raises(ReplicaSyncError, match="in vain for rank 0"):
        later.weights(use)
    third, _ = alone(arena=dataclasses.replace(sync.arena, generation=3))
    use = submit(third, [[2, 0, 1]], [[1, 0, 2]])
    for name, slots in third.weights(use).items():
        assert torch.equal(slots[1], HOME[name][2])
    for one in (sync, later, third):
        one.close()
    heap.close()


@pytest.mark.parametrize("ends_by", ["time-out", "abort", "close"])
def test_a_host_s_event_that_never_comes_is_not_waited_for(ends_by):
    """A host that fails before it sets the event of its weights."""
    sync, heap = alone(timeout_s=0.5 if ends_by == "time-out" else PLENTY_S)
    use = submit(sync, [[2, 0, 1]], ready=threading.Event())
    sync.weights(use)
    since = time.monotonic()
    if ends_by == "abort":
        sync.abort()
    if ends_by != "close":
        sync.retire(use)  # waits for the push
    sync.close()
    assert time.monotonic() - since < PLENTY_S / 2, "a moment and what a busy machine adds"
    message = "need its event to be set" if ends_by != "abort" else "this rank failed elsewhere"
    with pytest.raises(ReplicaSyncError, match=message):
        sync.check()
    heap.close()


def test_packed_weights_wait_for_their_event_at_most_the_time_out():
    sync, heap = alone(timeout_s=0.5)
    apart = {name: torch.stack([w, w], -1)[..., 0] for name, w in HOME.items()}
    with pytest.raises(ReplicaSyncError, match=r"set within 0\.5 s"):
        sync.submit_push(KEY, apart, NOTHING, NOTHING, ready=threading.Event())
    sync.close(), heap.close()


def test_a_stream_that_starts_while_the_watchdog_looks():
    class Starts:
        """A stream whose look lets another one start, as on another thread."""

        @property
        def error(self):
            engine._threads.setdefault("other", Idle())

    class Idle:
        error = None

        def close(self):
            pass

    sync, heap = alone()
    engine = sync.engine
    engine._threads["one"] = Starts()
    assert engine.failure() is None
    assert set(engine._threads) == {"one", "other"}
    heap.close()


def test_uses_go_in_order_and_not_too_far_ahead():
    sync, heap = alone()
    first, second = submit(sync), submit(sync)
    with pytest.raises(RuntimeError, match="need fewer than 2 uses that are not retired"):
        submit(sync)
    with pytest.raises(RuntimeError, match="weights: need use 0, the oldest .* got use 1"):
        sync.weights(second)
    sync.weights(first), sync.retire(first)
    with pytest.raises(RuntimeError, match="retire: need use 1"):
        sync.retire(first)
    sync.grad_slots(first)
    with pytest.raises(RuntimeError, match="need a use without gradients"):
        sync.grad_slots(first)
    sync.close(), heap.close()


def test_wrong_arguments_are_refused():
    sync, heap = alone()
    for push, pull, name in (
        ([[NUM_HOME, 0, 0]], [], "push_list"),
        ([[0, 0, 2]], [], "push_list"),
        ([[0, 1, 0]], [], "push_list"),
        ([], [[2, 0, 0]], "pull_list"),
        ([], [[0, 5, 0]], "pull_list"),
    ):
        with pytest.raises(ValueError, match=f"{name}: need replica slots below 2"):
            submit(sync, push, pull)
    wrong = {name: torch.zeros(NUM_HOME, *shape) for name, (_, shape) in FIELDS.items()}
    with pytest.raises(ValueError, match="weights: need the fields"):
        sync.submit_push(KEY, wrong, NOTHING, NOTHING)
    use = submit(sync, [[0, 0, 0]], [[0, 0, 0]])
    sync.weights(use), sync.retire(use), sync.grad_slots(use), sync.publish_grads(use)
    for grads, error in (
        ({n: g.bfloat16() for n, g in zero_grads().items()}, TypeError),
        ({n: g[..., :-1].contiguous() for n, g in zero_grads().items()}, ValueError),
    ):
        with pytest.raises(error, match="home_grad: need"):
            sync.home_reduce(use, grads)
    with pytest.raises(ValueError, match="domain: need 1 ranks"):
        ReplicaSync(sync.arena, sync.layout, [0, 1], 0, sync.engine, timeout_s=1.0)
    with pytest.raises(ValueError, match="arena: need"):
        ReplicaSync(
            sync.arena, dataclasses.replace(sync.layout, num_slots=9), [0], 0, sync.engine,
            timeout_s=1.0,
        )  # fmt: skip
    sync.close(), heap.close()


def run_broken_thread(rank, num_ranks):
    """A call that raises on a thread of rank 0, as for want of memory."""
    with shared(rank, num_ranks, PLENTY_S) as sync:
        if rank == 1:
            use = one_replica(sync, rank)
            return failing(sync, lambda: sync.weights(use))
        sync.engine._run(PUSH, lambda: 1 // 0)
        message, _, seconds = failing(sync, lambda: wait_for_abort(sync))
        return message, None, seconds


def test_an_exception_on_a_thread_is_told_to_all():
    own, (message, _, seconds) = run_ranks(2, run_broken_thread)
    assert "a call of stream 'push' failed: ZeroDivisionError" in own[0]
    assert "stopped, since rank 0 failed first" in message
    assert seconds < PLENTY_S / 2
