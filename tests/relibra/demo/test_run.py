"""The demo as a whole, on four processes."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from relibra.dealing import deal_loads
from relibra.demo import run
from relibra.demo.records import StepRecord, imbalance
from relibra.demo.report import PICTURE_FILE, REPORT_FILE, TRACE_FILE
from relibra.demo.settings import DemoSettings
from relibra.demo.table import STEP_COLUMNS, step_cells
from relibra.demo.trainer import Trainer
from relibra.trace import RoutingTrace

SMALL = DemoSettings(steps=4, num_prompts=16, samples_per_prompt=4)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    run.check_libraries()
    return run.run_training(DemoSettings(steps=2), folder, quiet=True), folder


def test_a_healthy_run_passes_and_says_what_it_judged(healthy):
    made, _ = healthy
    assert made["passed"], made["failed_checks"]
    names = {check["name"] for check in made["checks"]}
    assert {"gradient-vs-control", "parameters-vs-control", "rollout-log-probs"} <= names
    assert not any(name.startswith("reward") for name in names)  # judged with 80 steps only
    assert [record["step"] for record in made["steps"]] == [0, 1]


def test_balancing_really_happened(healthy):
    for record in healthy[0]["steps"]:
        assert record["rank_imbalance"] < record["rank_imbalance_none"]
        assert record["replicas"] > 0
        assert record["moves"] >= record["cross_node_moves"] > 0
        assert record["push_bytes"] == record["replicas"] * 3 * 64 * 64 * 4


def test_trace_report_and_picture_are_written(healthy):
    made, folder = healthy
    assert json.loads((folder / REPORT_FILE).read_text())["checks"] == made["checks"]
    assert (folder / PICTURE_FILE).stat().st_size > 10_000
    trace = RoutingTrace.load(folder / TRACE_FILE)
    assert trace.num_samples == 2 * 512
    assert trace.num_rows == 2 * 512 * 9
    assert (trace.num_layers, trace.top_k, trace.num_experts) == (2, 2, 16)


def test_the_trace_gives_back_the_loads_of_the_run(healthy):
    made, folder = healthy
    loads = deal_loads(RoutingTrace.load(folder / TRACE_FILE), 4, 128)
    rank_rows = loads.totals_MLE.reshape(2, 4, 2, 4, 4).sum(
        -1
    )  # steps, M, L, G of experts in order
    none = [record["rank_imbalance_none"] for record in made["steps"]]
    assert [imbalance(rows) for rows in rank_rows] == none
    assert rank_rows[-1].tolist() == made["rank_rows_last_step"]["none"].tolist()


@pytest.mark.parametrize(
    ("inject", "caught_by"),
    [
        ("drop-replica-grad", "gradient-vs-control"),
        pytest.param("stale-replica", "gradient-vs-control", marks=pytest.mark.slow),
        ("moments-not-moved", "parameters-vs-control"),
        ("export-by-position", "rollout-log-probs"),
    ],
)
def test_each_injected_fault_is_caught_by_the_right_check(tmp_path, inject, caught_by):
    settings = dataclasses.replace(SMALL, inject=inject)
    made = run.run_training(settings, tmp_path, quiet=True)
    assert not made["passed"]
    assert caught_by in made["failed_checks"]
    assert len(made["steps"]) < settings.steps  # the run stopped at the first failed check
    assert (tmp_path / REPORT_FILE).exists()


def test_same_seed_same_table_times_aside(tmp_path):
    settings = dataclasses.replace(SMALL, steps=2)
    first, second = (run.run_training(settings, tmp_path, quiet=True)["steps"] for _ in range(2))
    times = [column.is_time for column in STEP_COLUMNS]

    def rows(steps):
        table = [step_cells(StepRecord(**step)) for step in steps]
        return [[c for c, skip in zip(row, times, strict=True) if not skip] for row in table]

    assert rows(first) == rows(second)


def test_a_rank_that_dies_in_a_step_is_named(tmp_path, monkeypatch):
    healthy_step = Trainer.step

    def step(self, number):
        if number == 1 and torch.distributed.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return healthy_step(self, number)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(RuntimeError, match="rank 2 of 4 failed:\ndied with exit code -9"):
        run.run_training(SMALL, tmp_path, quiet=True)
