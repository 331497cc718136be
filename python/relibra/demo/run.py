"""Runs the demo: starts the ranks, prints the table, judges, writes the report."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relibra.demo import judge, plots, report
from relibra.demo.model import DemoSetupError, import_demo_library
from relibra.demo.table import STEP_COLUMNS, STEP_LEGEND, LiveTable, step_cells
from relibra_kernels.testing.launch import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from relibra.demo.records import StepLoads, StepRecord
    from relibra.demo.settings import DemoSettings
    from relibra.demo.trainer import Trainer

_START_TIMEOUT_S, _STEP_TIMEOUT_S = 120.0, 15.0


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank brings back.

    Attributes:
        records: Finished steps, equal on all ranks but for times.
        loads: Rows of all ranks by step.
        ids: uint8 ``[B, r, L, K]`` of this rank by step.
        greedy_fraction: On the held-out prompts; None when a check stopped the run.
    """

    records: list[StepRecord]
    loads: list[StepLoads]
    ids: list[npt.NDArray[np.uint8]]
    greedy_fraction: float | None


def check_libraries() -> None:
    """Import the optional libraries before anything is started.

    Raises:
        DemoSetupError: One is missing or too old.
    """
    import_demo_library("matplotlib")
    transformers = import_demo_library("transformers")
    version = re.match(r"\d+", str(transformers.__version__))
    if version is None or int(version[0]) < 5:
        raise DemoSetupError(
            f"the demo needs transformers >= 5, found {transformers.__version__}; "
            "install it with: pip install relibra-kernels[demo]"
        )
    transformers.logging.set_verbosity_error()
    # Lazily imported classes: load them once, before the ranks are forked.
    _ = transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM


def train_on_rank(rank: int, num_ranks: int, settings: DemoSettings, quiet: bool) -> RankResult:
    """Body of one process: all steps, stopped by the first check that fails.

    Args:
        rank: This process.
        num_ranks: Processes.
        settings: Sizes and hyper-parameters.
        quiet: Whether rank 0 prints no table.
    """
    from relibra.demo.trainer import Trainer

    assert num_ranks == settings.num_ranks
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    trainer = Trainer(settings, group)
    table = LiveTable(STEP_COLUMNS, settings.steps, quiet=quiet or rank > 0)
    with table.open(STEP_LEGEND):
        return _train(trainer, settings, table)


def _train(trainer: Trainer, settings: DemoSettings, table: LiveTable) -> RankResult:
    result = RankResult([], [], [], None)
    for step in range(settings.steps):
        outcome = trainer.step(step)
        good = all(check.passed for check in judge.judge_step(outcome.record))
        table.add(step_cells(outcome.record), good=good)
        result.records.append(outcome.record)
        result.loads.append(outcome.loads)
        result.ids.append(outcome.ids_BrLK)
        # Rank 0 decides: a rank that left the loop alone would leave its peers waiting.
        verdict = torch.tensor([int(good)])
        dist.broadcast(verdict, src=0)
        if not verdict.item():
            return result
    return dataclasses.replace(result, greedy_fraction=trainer.greedy_fraction())


def run_training(settings: DemoSettings, folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run the reinforcement learning demo and write its folder.

    Args:
        settings: Sizes and hyper-parameters.
        folder: Where trace, report and picture go; it exists.
        quiet: Print no table.

    Returns:
        The report; ``passed`` is the verdict, ``failed_checks`` names what failed.

    Raises:
        RuntimeError: A rank failed or died; names it.
    """
    start = time.perf_counter()
    timeout = _START_TIMEOUT_S + _STEP_TIMEOUT_S * settings.steps
    ranks = run_ranks(settings.num_ranks, train_on_rank, settings, quiet, timeout=timeout)
    seconds = time.perf_counter() - start
    first: RankResult = ranks[0]
    made = make_report(first, settings, seconds)
    report.build_trace([rank.ids for rank in ranks], settings).save(folder / report.TRACE_FILE)
    report.write_report(folder, made)
    plots.write_picture(folder / report.PICTURE_FILE, first.loads, first.records)
    return made


def make_report(result: RankResult, settings: DemoSettings, seconds: float) -> dict[str, Any]:
    """Judge a run and put everything into one JSON-able report.

    Args:
        result: Of rank 0.
        settings: What was run.
        seconds: Duration.
    """
    if result.greedy_fraction is None:
        checks = judge.judge_step(result.records[-1])
    else:
        checks = judge.judge_run(result.records, result.greedy_fraction)
    failed = [check for check in checks if not check.passed]
    return {
        "command": "demo",
        "passed": not failed,
        "failed_checks": [check.name for check in failed],
        "settings": dataclasses.asdict(settings),
        "checks": [check.as_dict() for check in checks],
        "greedy_fraction": result.greedy_fraction,
        "steps": [record.as_dict() for record in result.records],
        "rank_rows_last_step": {
            "none": result.loads[-1].none_MLG,
            "relibra": result.loads[-1].balanced_MLG,
        },
        "seconds": seconds,
        "mean_stage_seconds": _mean_times(result.records),
        "files": [report.TRACE_FILE, report.REPORT_FILE, report.PICTURE_FILE],
        "environment": report.environment(),
    }


def _mean_times(records: Sequence[StepRecord]) -> dict[str, float]:
    return {
        name: sum(record.times[name] for record in records) / len(records)
        for name in records[0].times
    }
