"""The benchmark of replica synchronisation and the check of its time model, on the CPU."""

import contextlib
import dataclasses
import itertools
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.sync_engine import HostEngine

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "perf"))  # scripts, not a package

import bench_replica_sync  # noqa: E402
import push_model  # noqa: E402
import replica_movers  # noqa: E402
import replica_problem  # noqa: E402

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def problem(num_ranks=3):
    return replica_problem.problems(("smoke",), num_ranks, CPU)[0]


@on_cpu
def test_smoke_times_every_provider_of_a_cpu_beside_a_copy(tmp_path, capfd):
    out = tmp_path / "bench.json"
    returned = bench_replica_sync.main(["--smoke", "--json", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["median_us"] for line in lines] == [line["median_us"] for line in returned]
    found = {(line["case"], line["group"], line["name"]) for line in lines}
    patterns = ("1 to 3", "ring", "two to one rank", "two homes to one")
    assert found == {
        (f"smoke P=4 {pattern}", group, name)
        for pattern in patterns
        for group in ("push", "home reduce", "whole use")
        for name in ("cpu_shm", "local", "dist", "copy")
    }
    for line in lines:
        assert line["kind"] == "measured on CPU shared memory, never a figure of a GPU"
        assert line["bound"] == "a copy in this run"
        assert 0 < line["p10_us"] <= line["median_us"] <= line["p90_us"]
        assert line["percent_of_bound"] > 0
        assert line["machine"]["gpu"] is None
    busiest = {line["case"]: line["bytes_of_busiest_rank"] for line in lines}
    both = 3 * 64 * 48 * (2 + 4)  # weights in bf16, gradients in fp32
    assert [busiest[f"smoke P=4 {pattern}"] // both for pattern in patterns] == [3, 1, 2, 2]
    assert capfd.readouterr().out.count("gate passed") == 4


def test_the_host_of_a_use_is_timed_without_a_device(tmp_path, capfd):
    out = tmp_path / "host.json"
    returned = bench_replica_sync.main(["--host", "--rounds", "2", "--json", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["least_us"] for line in lines] == [line["least_us"] for line in returned]
    found = [(line["case"], line["name"]) for line in lines]
    cases = [f"P=8, {n} replicas out and in" for n in (2, 8)]
    assert found == list(itertools.product(cases, ("forward", "backward")))
    for forward, backward in (lines[:2], lines[2:]):  # the same and more
        assert 0 < forward["least_us"] < backward["least_us"]
    assert capfd.readouterr().out.count("us of the host at least") == 4


@on_cpu
def test_nothing_begins_after_the_budget(capfd):
    arguments = ["--smoke", "--ranks", "2", "--providers", "dist", "--budget", "0"]
    assert bench_replica_sync.main(arguments) == []
    assert "no time left for: smoke ring" in capfd.readouterr().out


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_patterns_use_each_slot_once_and_their_lists_agree(num_ranks):
    for pattern in replica_problem.patterns(num_ranks):
        places = [one[2:] for one in pattern.replicas]
        assert len(set(places)) == len(places)
        assert all(owner != taker for owner, _, taker, _ in pattern.replicas)
        pushes = {(rank, *one) for rank in range(num_ranks) for one in tolist(pattern, rank, 0)}
        pulls = {(rank, *one) for rank in range(num_ranks) for one in tolist(pattern, rank, 1)}
        assert pushes == set(pattern.replicas)
        assert pulls == {(taker, slot, owner, home) for owner, home, taker, slot in pushes}


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_copy_moves_the_bytes_of_a_push_and_of_a_sum(num_ranks):
    small = problem(num_ranks)
    mover = replica_movers.CopyMover(small, range(num_ranks))
    mover.take(replica_problem.patterns(num_ranks)[num_ranks - 2])  # one expert to all others
    weight, grad, others = small.weight_bytes, small.grad_bytes, num_ranks - 1
    assert mover.pushed == [others * weight] + [0] * others
    assert mover.reduced == [(others + 2) * grad // 2] + [0] * others
    for _, run in mover.timed().values():
        run()
    assert int(mover.target.sum()) == len(mover.target) - max(mover.pushed[0], mover.reduced[0])


def tolist(pattern, rank, which):
    return pattern.lists(rank)[which].tolist()


@pytest.mark.parametrize("wrong", ["row", "sum", "order"])
def test_the_gate_finds_what_is_wrong(wrong):
    small, pattern = problem(), replica_problem.patterns(3)[1]  # one expert to two ranks
    with replica_movers.local_mover(small, 2) as mover:
        mover.take(pattern)  # passes
        slots = mover.syncs[1].weights(mover._submit()[1]) if wrong == "row" else {}
        if wrong == "row":
            slots["w2"][0, 5, 7] = 0.25
            with pytest.raises(AssertionError, match=r"rank 1, slot 0: rows \[5\] of w2"):
                replica_problem.check_weights(small, pattern, 1, slots)
            return
    found = small.home_grads(0)
    for taker in (2, 1) if wrong == "order" else (1,):
        for name, grad in small.grads(taker).items():
            found[name][0] += grad[0]
    with pytest.raises(AssertionError, match="not the sum of one process"):
        replica_problem.check_sums(small, pattern, 0, found)


class FakeEvent:
    """Holds the streams of a host engine until the device goes on."""

    gone = threading.Event()

    def record(self):
        pass

    def wait(self, timeout=10):
        return self.gone.wait(timeout)


def test_on_a_gpu_the_time_is_that_of_the_streams(monkeypatch):
    """Streams are held until the host has given them everything; their own clocks count."""
    with replica_movers.local_mover(problem(), 2) as mover:
        mover.take(replica_problem.patterns(3)[0])
        mover.problem = dataclasses.replace(mover.problem, device=torch.device("cuda"))
        held = []
        monkeypatch.setattr(torch.cuda, "_sleep", held.append)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        for sync in mover.syncs.values():
            ticks = itertools.count(sync.rank, 10 + sync.rank)
            monkeypatch.setattr(sync.engine, "clock", lambda stream, t=ticks: next(t))
            monkeypatch.setattr(sync.engine, "seconds", lambda a, b: b - a)
        threading.Timer(0.05, FakeEvent.gone.set).start()
        for group in ("push", "home reduce"):
            before, run = mover.timed()[group]
            before()
            assert run() == 12  # of the slowest of three ranks
        assert held == [3 * replica_movers.HOLD_CYCLES] * 2
        mover.problem = problem()


# ---- the time model ------------------------------------------------------------------------------
def lines(rate_gb_per_s, t0_us, models=replica_problem.MODEL_NAMES):
    """Times of a machine that follows the model."""
    found = []
    for model in models:
        for group, item in (("push", 2), ("home reduce", 4)):
            for pattern in replica_problem.patterns(4):
                most = max(map(max, pattern.out_and_in(4)))
                micro = t0_us + most * push_model._params(model) * item / rate_gb_per_s / 1e3
                case = f"{model} P=4 {pattern.name}"
                found.append({"name": "x", "group": group, "case": case, "median_us": micro})
    return found


@pytest.mark.parametrize("group", ["push", "home reduce"])
def test_a_machine_that_follows_the_model_is_predicted(group):
    result = push_model.compare(lines(380.0, 7.0), "x", group)
    assert result["gb_per_s"] == pytest.approx(380)
    assert result["t0_us"] == pytest.approx(7, abs=1e-3)
    assert len(result["points"]) == 5 * 6
    assert sum(point["given"] for point in result["points"]) == 2
    for values in push_model.summary(result).values():
        assert values == pytest.approx([1, 1, 1], abs=0.01)


def test_a_machine_that_does_not_is_shown_to_be_off():
    slow = lines(380.0, 7.0)
    for line in slow:
        line["median_us"] *= 2 if line["case"].endswith("ring") else 1
    found = push_model.summary(push_model.compare(slow, "x", "push"))
    assert found["ring"] == pytest.approx([0.5] * 3, abs=0.01)
    assert found["1 to 3"] == pytest.approx([1] * 3, abs=0.01)


def test_the_model_needs_two_sizes():
    with pytest.raises(ValueError, match="need two sizes of x, push"):
        push_model.compare(lines(380.0, 7.0, ("DeepSeek-V3",)), "x", "push")


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_given_back_together_unless_a_rank_failed(fails, monkeypatch):
    """NVSHMEM keeps what is given back alone, and a run makes one arena a size and form."""
    heap, closed = LocalHeap.ranks(2)[0], []
    monkeypatch.setattr(heap, "_free", closed.append)
    choice = SimpleNamespace(
        make_heap=lambda: heap,
        make_engine=lambda arena, layout: HostEngine(arena, layout, timeout_s=1.0),
    )
    monkeypatch.setattr(replica_movers, "choose_provider", lambda *_: choice)
    monkeypatch.setattr(replica_movers, "dist", SimpleNamespace(
        group=SimpleNamespace(WORLD=None), barrier=lambda: None))  # fmt: skip
    with contextlib.suppress(ValueError), replica_movers.provider_mover("x", problem(2), 0, 2):
        if fails:
            raise ValueError
    assert closed == [not fails]
