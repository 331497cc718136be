import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from relibra_kernels.testing import launch
from relibra_kernels.testing.launch import RankError, run_ranks


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """Other test processes make folders of their own at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leftovers():
    folder = tempfile.gettempdir()
    return {name for name in os.listdir(folder) if name.startswith("relibra_ranks_")}


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_in_rank_order_with_closures_and_tensors():
    scale = torch.tensor([10.0])

    def fn(rank, num_ranks, offset):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        return rank, num_ranks, scale * rank + offset, total.item(), torch.get_num_threads()

    before = leftovers()
    for rank, (own, size, tensor, total, threads) in enumerate(run_ranks(3, fn, 0.5)):
        assert (own, size, tensor.item(), total, threads) == (rank, 3, 10 * rank + 0.5, 3.0, 1)
    assert leftovers() <= before


def test_one_rank_and_autograd_after_use_in_the_parent():
    (torch.randn(300, 300, requires_grad=True) @ torch.randn(300, 300)).sum().backward()

    def fn(rank, num_ranks):
        x = torch.randn(300, 300, requires_grad=True)
        (x @ x).sum().backward()
        return x.grad.shape

    assert run_ranks(1, fn) == [(300, 300)]
    assert run_ranks(2, fn) == [(300, 300)] * 2


def test_ranks_may_finish_at_different_times():
    def fn(rank, num_ranks):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        time.sleep(0.3 if rank == 0 else 0)
        return rank

    assert run_ranks(2, fn) == [0, 1]


def test_the_first_failure_is_raised_with_its_traceback_and_the_others_are_ended():
    def fn(rank, num_ranks, folder):
        (Path(folder) / str(rank)).write_text(str(os.getpid()))
        dist.barrier()
        if rank == 1:
            raise ValueError("expected failure")
        time.sleep(100)

    start, before = time.monotonic(), leftovers()
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(
            RankError, match="(?s)rank 1 of 3 failed.*in fn.*expected failure"
        ) as caught:
            run_ranks(3, fn, folder)
        pids = [int((Path(folder) / str(rank)).read_text()) for rank in range(3)]
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - start < 50, "nobody sleeps to the end"
    assert not any(is_running(pid) for pid in pids)
    assert leftovers() <= before


def test_an_error_that_cannot_be_sent_still_shows_its_traceback():
    class Odd(Exception):
        def __reduce__(self):
            raise TypeError("no")

    def fn(rank, num_ranks):
        raise Odd("odd one")

    with pytest.raises(RankError, match="odd one") as caught:
        run_ranks(1, fn)
    assert caught.value.__cause__ is None


def test_a_rank_that_dies_is_named():
    def fn(rank, num_ranks):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(RankError, match="(?s)rank 0 of 2 failed.*died with exit code -9"):
        run_ranks(2, fn)


def test_a_hang_names_the_silent_ranks_and_shows_where_they_stand():
    def waits_for_ever(rank, num_ranks):
        if rank != 1:
            time.sleep(100)

    start = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"(?s)ranks \[0, 2\] of 3 gave no answer within 5 s.*waits_for_ever"
    ):
        run_ranks(3, waits_for_ever, timeout=5.0)
    assert time.monotonic() - start < 50, "nobody sleeps to the end"


def test_a_collective_fails_after_the_time_out_of_the_group():
    def fn(rank, num_ranks):
        if rank == 0:
            return None  # and stays until rank 1 has told
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        return time.monotonic() - start

    seconds = run_ranks(2, fn, group_timeout=2.0)[1]
    assert 1.5 < seconds < 30, "not the 60 s of the run"


def test_a_slow_start_is_no_failure_of_the_group(monkeypatch):
    join = launch._join_group

    def late(job, rank):
        time.sleep(3.0 if rank == 1 else 0.0)
        join(job, rank)

    monkeypatch.setattr(launch, "_join_group", late)
    assert run_ranks(2, lambda rank, num_ranks: rank, group_timeout=2.0) == [0, 1]


@pytest.mark.parametrize("place", [0, 3, 4, 40, -1])
def test_a_message_that_changes_on_its_way_is_no_result(place, monkeypatch):
    seal = launch._sealed

    def damaged(message):
        sealed = bytearray(seal(message))
        sealed[place] ^= 0x20
        return bytes(sealed)

    monkeypatch.setattr(launch, "_sealed", damaged)
    need = (
        r"rank 0 of 1 failed:\nits message of \d+ bytes was damaged on its way: "
        r"need CRC-32 0x[0-9a-f]{8}, got 0x[0-9a-f]{8}$"
    )
    with pytest.raises(RankError, match=need):
        run_ranks(1, lambda rank, num_ranks: torch.full((8,), 32))


def half_sent(end):
    def send(pipe, message):
        os.write(pipe.fileno(), (len(message)).to_bytes(8, "little") + message[:-9])
        end()

    return send


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_dies_while_it_sends_is_named(code, monkeypatch):
    monkeypatch.setattr(launch, "_send", half_sent(lambda: os._exit(code)))
    with pytest.raises(RankError, match=f"rank 0 of 1 failed:\ndied with exit code {code}$"):
        run_ranks(1, lambda rank, num_ranks: rank)


@pytest.mark.parametrize("end", [signal.pause, lambda: os.kill(os.getpid(), signal.SIGSTOP)])
def test_a_rank_that_hangs_while_it_sends_is_named_in_time(end, monkeypatch):
    monkeypatch.setattr(launch, "_send", half_sent(end))
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 1 gave no answer within 5 s"):
        run_ranks(1, lambda rank, num_ranks: rank, timeout=5.0)


def test_large_results_of_several_ranks():
    found = run_ranks(3, lambda rank, num_ranks: bytes([rank]) * (30_000_000 + rank))
    assert found == [bytes([rank]) * (30_000_000 + rank) for rank in range(3)]


class Unloadable:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise OSError("not here")


def test_a_result_that_cannot_be_loaded_names_its_rank():
    need = "(?s)rank 0 of 1 failed:\nits result cannot be loaded:.*OSError: not here"
    with pytest.raises(RankError, match=need) as caught:
        run_ranks(1, lambda rank, num_ranks: Unloadable())
    assert isinstance(caught.value.__cause__, OSError)


def test_ranks_do_not_wait_for_ever_for_one_that_never_started(monkeypatch):
    monkeypatch.setattr(launch, "_raise_hang", lambda *_: time.sleep(2))  # the caller sleeps on
    join = launch._join_group
    monkeypatch.setattr(launch, "_join_group", lambda job, rank: rank or join(job, rank))
    with pytest.raises(RankError, match="TimeoutError: not all 2 ranks started"):
        run_ranks(2, lambda rank, num_ranks: time.sleep(60 * rank), timeout=3.0)


def test_a_wrong_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="num_ranks: need at least 1, got 0"):
        run_ranks(0, print)
