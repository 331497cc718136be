"""Messages between all ranks: everybody goes on with equal facts, or everybody raises."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from lost_rank import survivors_tell

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.rank_messages import RefusedError, agree, exchange, step

TIMEOUT_S = 4.0  # and the machine may hold up a rank that comes


def world():
    return Ranks.of(dist.group.WORLD)


def on(num_ranks, body):
    return run_ranks(num_ranks, lambda rank, size: body(rank), timeout=60)


def error_of(call):
    with pytest.raises(ReplicaSyncError) as caught:
        call()
    return caught.value


def test_every_rank_gets_every_message_in_order():
    def body(rank):
        return [
            exchange(world(), {"rank": rank, "turn": turn}, what="x", timeout_s=20)
            for turn in range(20)
        ]

    expected = [[{"rank": rank, "turn": turn} for rank in range(4)] for turn in range(20)]
    assert on(4, body) == [expected] * 4


def test_a_message_that_is_too_long():
    def body(rank):
        with pytest.raises(ValueError, match="message: need at most 4096 bytes, got 5009"):
            exchange(world(), {"x": "a" * 5000}, what="x", timeout_s=20)

    on(2, body)


def test_equal_facts_and_different_ones():
    def body(rank):
        same = agree(world(), {"size": 8, "name": "a"}, what="set-up", timeout_s=20)
        error = error_of(
            lambda: agree(world(), {"size": 8 + rank // 2}, what="set-up", timeout_s=20)
        )
        assert not isinstance(error, RefusedError)
        return same, str(error)

    for same, told in on(3, body):
        assert same == [{"size": 8, "name": "a"}] * 3
        assert told == (
            "set-up: need the same size on all ranks, got rank 0: 8, rank 1: 8, rank 2: 9"
        )


def test_a_fault_is_told_to_all_and_is_the_cause_where_it_happened():
    def body(rank):
        def do():
            if rank:
                raise OSError(f"no disk at rank {rank}")

        error = error_of(lambda: step(world(), do, what="saving", timeout_s=20))
        assert isinstance(error, RefusedError)
        assert isinstance(error.__cause__, OSError) == bool(rank)
        return str(error)

    assert set(on(3, body)) == {
        "saving: failed on rank(s) [1, 2] of 3; rank 1: OSError: no disk at rank 1; "
        "rank 2: OSError: no disk at rank 2"
    }


def test_long_faults_of_many_ranks_fit_a_message():
    def body(rank):
        def do():
            raise RuntimeError('"\\é\x01' * 5000)

        return str(error_of(lambda: step(world(), do, what="saving", timeout_s=20)))

    assert all("failed on rank(s) [0, 1] of 2" in told for told in on(2, body))


@pytest.mark.parametrize("lost", [0, 1])
def test_comm_02_a_missing_rank_is_named_by_all_that_came(lost, tmp_path):
    def body(rank):
        if rank == lost:
            return None
        start = time.monotonic()
        told = error_of(lambda: exchange(world(), {}, what="x", timeout_s=TIMEOUT_S))
        assert time.monotonic() - start > 0.9 * TIMEOUT_S
        return told

    for rank, told in survivors_tell(3, lost, body, tmp_path).items():
        assert told.startswith(f"x: rank {rank} of 3 waited 4 s in vain for rank(s) [{lost}] ("), (
            told
        )


def test_a_killed_rank_is_named_long_before_the_time_out(tmp_path):
    def body(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        told = error_of(lambda: exchange(world(), {}, what="x", timeout_s=50))
        assert time.monotonic() - start < 25
        return told

    for rank, told in survivors_tell(3, 1, body, tmp_path).items():
        assert told.startswith(f"x: rank {rank} of 3 waited"), told
        assert "in vain for rank(s) [1] (" in told
