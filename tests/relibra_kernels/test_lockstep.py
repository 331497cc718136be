"""Virtual ranks in lockstep: whose turn it is, what ends them, and their collectives."""

import threading

import pytest
import torch
from forked import told_in_fork
from torch.utils.checkpoint import checkpoint

from relibra_kernels import thread_state
from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.thread_state import ThreadState
from relibra_kernels.transport.dispatch import FlatDispatch
from relibra_kernels.transport.lockstep import Lockstep
from relibra_kernels.transport.lockstep_group import LocalDispatch, LocalGroup, LocalReplica
from relibra_kernels.transport.replica import ReplicaTransport


@pytest.fixture
def steps():
    made = Lockstep(3)
    yield made
    made.close()


def test_one_rank_runs_at_a_time_in_the_order_of_the_ranks(steps):
    said, running = [], []

    def call(rank):
        for place in range(3):
            running.append(rank)
            assert running == [rank]
            said.append((place, rank))
            running.clear()
            steps.wait(lambda need=3 * (place + 1): len(said) >= need, "all of them")
        return rank, threading.current_thread().name.startswith("relibra-local")

    assert steps.run(call) == [(rank, True) for rank in range(3)]
    assert said == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (2, 1), (2, 2), (2, 0)]


def test_the_first_error_is_raised_and_says_who_failed(steps):
    def call(rank):
        if rank == 1:
            raise KeyError("rank 1")
        if rank == 2:
            raise ValueError("later")
        steps.wait(lambda: False, "rank 1")

    with pytest.raises(KeyError, match="rank 1") as caught:
        steps.run(call)
    assert caught.value.failed_ranks == [0, 1, 2]
    assert steps.run(lambda rank: rank) == [0, 1, 2]


def test_a_forked_child_has_no_ranks(steps):
    """Their threads stay with the parent: queued to them, a call would never run."""
    steps.run(lambda rank: rank)
    need = (
        "the virtual ranks: need process PARENT, which made it and runs its threads, got process "
        "CHILD, a fork of it; make a new one there"
    )
    assert told_in_fork(lambda: steps.run(lambda rank: rank)) == need
    assert told_in_fork(steps.close) == "nothing"
    assert steps.run(lambda rank: rank) == [0, 1, 2]


def test_ranks_that_others_wait_for_and_that_failed_are_named(steps):
    told = []

    def call(rank):
        if rank == 0:
            raise KeyError("lost")
        try:
            steps.wait(lambda: False, f"rank {rank - 1}")
        except ReplicaSyncError as error:
            told.append(str(error))
            steps.wait(lambda: False, "more")  # once stopped, never again

    with pytest.raises(KeyError):
        steps.run(call)
    text = "virtual ranks wait and none can go on: rank 1 waits for rank 0; rank 2 waits for "
    assert told == [f"{text}rank 1; rank 0 failed before (KeyError('lost'))"] * 2


def test_work_in_the_background_lets_a_rank_go_on(steps):
    left = [3]

    def work():
        has_left = left[0] > 0
        left[0] -= has_left
        return has_left

    steps.background.append(work)
    steps.run(lambda rank: steps.wait(lambda: not left[0], "the work"))
    left[0] = 2
    steps.wait(lambda: not left[0], "the work")
    with pytest.raises(ReplicaSyncError, match="nobody can go on: the caller waits for more work"):
        steps.wait(lambda: left[0] == 1, lambda: "more work")


def test_an_interrupt_of_the_caller_ends_all_ranks(steps):
    seen = []

    def interrupt():
        raise KeyboardInterrupt

    def call(rank):
        try:
            steps.wait(lambda: False, "the end")
        finally:
            seen.append(rank)

    steps.background.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps.run(call)
    assert seen == [0, 1, 2]
    steps.background.clear()
    assert steps.run(lambda rank: rank) == [0, 1, 2]


def test_a_rank_cannot_start_ranks(steps):
    with pytest.raises(RuntimeError, match="run: need the caller of the ranks, got rank 0"):
        steps.run(lambda rank: steps.run(lambda _: rank))
    for wrong in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match="num_ranks"):
            Lockstep(wrong)


def state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        thread_state.graph_task_id(),
        thread_state.keeps_graph(),
        thread_state.has_saved_tensor_hooks(),
    )


class Node(torch.autograd.Function):
    """Notes the state of the thread and of a rank in both directions."""

    @staticmethod
    def forward(ctx, x, look):
        ctx.look = look
        ctx.save_for_backward(x)
        look("forward")
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        (_,) = ctx.saved_tensors  # what a checkpoint makes again
        ctx.look("backward")
        return dy * 2, None


def test_ranks_find_the_state_of_the_caller(steps):
    seen = []

    def look(where):
        mine = state()
        assert steps.run(lambda rank: state()) == [mine] * 3
        seen.append((where, *mine))

    def body(x):
        look("body")
        return Node.apply(x, look) + 0

    for modes in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16, enabled=False),
    ):
        with modes:
            look("mode")
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(body, x, use_reentrant=False).sum()
    y.backward(retain_graph=True)
    assert [one[0] for one in seen[4:]] == ["body", "forward", "body", "forward", "backward"]
    tasks = [one[5] for one in seen[4:]]
    assert tasks[:2] == [-1, -1]
    assert tasks[2] == tasks[3] == tasks[4] >= 0
    assert [one[6] for one in seen[4:]] == [False, False, True, True, True]
    assert seen[4][7] is True
    look("after")
    assert seen[-1][5:] == (-1, False, False)


def test_a_state_is_given_back():
    with torch.no_grad():
        off = ThreadState.here()
    with off.carried():
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_rows_travel_as_over_a_process_group(steps):
    group, splits = LocalGroup(steps), torch.tensor([[1, 0, 2], [3, 1, 0], [0, 2, 1]])
    rows = [torch.arange(6 * int(one.sum())).view(-1, 6) + 1000 * r for r, one in enumerate(splits)]

    def call(rank):
        flat = LocalDispatch(group, rank)
        assert isinstance(flat, FlatDispatch)
        sent = rows[rank].clone()
        started = flat.start(sent, splits[rank].tolist(), splits[:, rank].tolist(), what="rows")
        got = started.wait()
        sent.fill_(-1)  # whoever has waited may write
        assert started.wait() is got
        return got, flat.exchange(torch.empty(0, 2), [0] * 3, [0] * 3, what="none")

    for rank, (got, none) in enumerate(steps.run(call)):
        pieces = [
            torch.split(one, split.tolist())[rank] for one, split in zip(rows, splits, strict=True)
        ]
        assert torch.equal(got, torch.cat(pieces))
        assert none.shape == (0, 2)


def test_rows_that_do_not_fit(steps):
    group = LocalGroup(steps)

    def call(rank):
        flat = LocalDispatch(group, rank)
        with pytest.raises(ValueError, match="send_splits: need 3 counts, got 1"):
            flat.start(torch.ones(1, 1), [1], [1, 0, 0], what="tokens")
        with pytest.raises(ValueError, match="x: need 1 rows"):
            flat.start(torch.ones(2, 1), [1, 0, 0], [1, 0, 0], what="tokens")
        return flat.exchange(torch.ones(3, 1), [1] * 3, [1 + rank // 2] * 3, what="tokens")

    text = "exchange of tokens: need the rows that rank 0 sends, 1, got 2 expected by rank 2"
    with pytest.raises(ReplicaSyncError, match=text):
        steps.run(call)


def test_ranks_in_different_collectives(steps):
    group = LocalGroup(steps)
    text = r"gather of b: need the same collective .* rank 1 here and ranks \[0\] in gather of a"
    with pytest.raises(ReplicaSyncError, match=text):
        steps.run(lambda rank: group.gather(rank, 0, "b" if rank == 1 else "a"))
    assert group.is_between


def test_replicas_by_copies(steps):
    group = LocalGroup(steps)
    int32 = lambda values: torch.tensor(values, dtype=torch.int32).reshape(-1, 3)  # noqa: E731
    pushes = [[[1, 0, 0], [1, 2, 1], [0, 1, 0]], [], [[0, 1, 1]]]  # home slot, rank, slot there
    pulls = [[[0, 0, 1]], [[0, 0, 0], [1, 2, 0]], [[1, 0, 1]]]

    def call(rank):
        plain = LocalReplica(group, rank)
        assert isinstance(plain, ReplicaTransport)
        home, replica = torch.arange(2.0).view(2, 1) + 10 * rank, torch.full((2, 1), -1.0)
        lists = int32(pushes[rank]), int32(pulls[rank])
        plain.push([(home, replica)], *lists, what="push")
        held = replica.flatten().tolist()
        total = torch.zeros(2, 1)
        plain.reduce([(replica + 1, total)], *lists, what="reduce")
        with pytest.raises(ValueError, match="push_list: need entries below"):
            plain.push([(home, replica)], int32([[0, 3, 0]]), lists[1], what="push")
        return held, total.flatten().tolist()

    assert steps.run(call) == [
        ([1.0, -1.0], [1.0, 4.0]),
        ([0.0, 20.0], [0.0, 0.0]),
        ([-1.0, 1.0], [21.0, 0.0]),
    ]
