import pytest
import torch
import torch.distributed as dist

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.dispatch import FlatDispatch


def sends(rank, num_ranks):
    """Rows from `rank` to each rank: uneven, with zeros, and one rank that sends nothing."""
    return [0 if rank == 1 else (rank + 2 * other) % 4 for other in range(num_ranks)]


def exchange_there_and_back(rank, num_ranks, dtype):
    dispatch = FlatDispatch(dist.group.WORLD)
    send = sends(rank, num_ranks)
    receive = [sends(other, num_ranks)[rank] for other in range(num_ranks)]
    numbers = 100 * rank + torch.arange(sum(send))
    x = numbers[:, None].expand(-1, 3).to(dtype)  # not contiguous
    there = dispatch.exchange(x, send, receive, what="tokens")
    back = dispatch.start(there, receive, send, what="outputs").wait()
    assert torch.equal(back, x)
    return there[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float64])
def test_rows_travel_by_rank_and_back(dtype):
    num_ranks = 3
    received = run_ranks(num_ranks, exchange_there_and_back, dtype)
    for rank, found in enumerate(received):
        expected = []
        for source in range(num_ranks):
            send = sends(source, num_ranks)
            first = 100 * source + sum(send[:rank])
            expected += range(first, first + send[rank])
        assert found == torch.tensor(expected).to(dtype).tolist()


def test_nothing_moves_at_all():
    def fn(rank, num_ranks):
        none = [0] * num_ranks
        return (
            FlatDispatch(dist.group.WORLD).exchange(torch.empty(0, 4), none, none, what="x").shape
        )

    assert run_ranks(2, fn) == [(0, 4)] * 2


def test_a_group_of_some_ranks():
    def fn(rank, num_ranks):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        dispatch = FlatDispatch(groups[rank % 2])
        x = torch.tensor([[10.0 * rank], [10.0 * rank + 1]])
        with pytest.raises(
            ValueError, match="group: need a process group that this process belongs to"
        ):
            FlatDispatch(groups[1 - rank % 2])
        return dispatch.exchange(x, [1, 1], [1, 1], what="x").flatten().tolist()

    assert run_ranks(4, fn) == [[0, 20], [10, 30], [1, 21], [11, 31]]


def test_one_rank_moves_nothing():
    x = torch.ones(2, 3)
    assert FlatDispatch(None).exchange(x, [2], [2], what="x") is x


@pytest.mark.parametrize(
    ("x", "send", "receive", "message"),
    [
        (torch.ones(2, 3), [1, 1], [2], "send_splits: need 1 counts, got 2"),
        (torch.ones(2, 3), [2], [2, 0], "recv_splits: need 1 counts, got 2"),
        (torch.ones(2, 3), [-2], [2], "send_splits: need at least 0, got -2"),
        (torch.ones(2, 3), [3], [3], r"x: need 3 rows \(sum of send_splits\), got \[2, 3\]"),
        (torch.ones(2, 3), [2], [3], r"recv_splits: need \[2\] with one rank, got \[3\]"),
    ],
)
def test_wrong_splits_are_refused(x, send, receive, message):
    with pytest.raises(ValueError, match=message):
        FlatDispatch(None).exchange(x, send, receive, what="x")


def test_a_peer_that_does_not_come_is_an_error_that_names_the_use():
    def fn(rank, num_ranks):
        if rank == 1:
            return None  # and stays until rank 0 has told
        dispatch = FlatDispatch(dist.group.WORLD)
        with pytest.raises(ReplicaSyncError) as caught:
            dispatch.exchange(torch.ones(2, 1), [1, 1], [1, 1], what="step 3 layer 5: tokens")
        assert isinstance(caught.value.__cause__, RuntimeError)
        return str(caught.value)

    message = run_ranks(2, fn, group_timeout=2.0)[0]
    assert message.startswith("exchange of step 3 layer 5: tokens failed on rank 0 of 2: ")
