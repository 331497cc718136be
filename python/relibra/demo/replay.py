"""``relibra demo --trace``: a routing file replayed through MoE layers, balanced against not.

Both sides see the same tokens and weights; one runs the planner's plan, the other the plan of
strategy ``none``. Outputs and gradients must agree, in logical expert order.

Letters: M micro-batches, L MoE layers, G ranks, T tokens of this rank, D model dim, E experts.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relibra.dealing import deal_rows
from relibra.demo import plots, report
from relibra.demo.control import Difference
from relibra.demo.judge import Check
from relibra.demo.records import StepLoads
from relibra.demo.replay_layers import PASS, ReplayBatch, ReplaySettings, ReplaySide
from relibra.demo.table import Column, LiveTable
from relibra.formats.trace_file import open_trace
from relibra.load_matrix import LoadMatrix
from relibra.plan_config import PlannerConfig
from relibra.planner import plan_step
from relibra.shape import ModelShape
from relibra_kernels.errors import TraceError
from relibra_kernels.testing.launch import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# With combine="exact" outputs are bitwise independent of the plan. Gradients are summed in an order
# that depends on it, with more rounding the more layers a file holds.
MAX_OUTPUT_DIFFERENCE = 0.0
MAX_GRADIENT_DIFFERENCE = 1e-5
_START_TIMEOUT_S, _MICRO_BATCH_TIMEOUT_S = 120.0, 60.0

COLUMNS = (
    Column("micro-batch", 11),
    Column("rows a layer", 12),
    Column("rank imbalance", 14),
    Column("node imbalance", 14),
    Column("replicas", 8),
    Column("none ms", 8, is_time=True),
    Column("relibra ms", 10, is_time=True),
    Column("d output", 8),
    Column("d input grad", 12),
)
LEGEND = (
    "imbalance: max / mean rows of a rank (node), without balancing -> balanced; ms: forward and "
    "backward on this CPU;\nd: norm of the difference of both sides / norm"
)


@dataclasses.dataclass(frozen=True)
class MicroBatchResult:
    """One line of the replay table.

    Attributes:
        output_difference: Norm of the difference of both outputs / norm, worst rank.
        input_grad_difference: The same of the gradient of the tokens.
        none_ms: Forward and backward without balancing, slowest rank.
        balanced_ms: Forward and backward with balancing, slowest rank.
    """

    output_difference: float
    input_grad_difference: float
    none_ms: float
    balanced_ms: float


def load_batch(path: Path, settings: ReplaySettings, num_experts: int | None) -> ReplayBatch:
    """Read a routing file, deal its sequences to the ranks and plan both sides.

    Args:
        path: ``.safetensors`` or ``.npz`` trace file.
        settings: Sizes and topology.
        num_experts: E; None is what the file says, or its largest id + 1.

    Raises:
        OSError: No such file.
        TraceError: Not a usable trace, or one with rows whose routing is unknown.
        ValueError: Settings that do not fit the trace.
    """
    trace = open_trace(path, num_experts)
    topology = settings.topology
    dealt = deal_rows(trace, topology.num_ranks, settings.micro_batch_sequences)
    rows = list(zip(*dealt[: settings.max_micro_batches], strict=True))
    unknown = sum(int((part.kind == part.KIND_UNKNOWN).sum()) for ranks in rows for part in ranks)
    if unknown:
        raise TraceError(
            f"{path.name}: need routing for every token to replay it, got {unknown} tokens without",
            code="unset_rows",
        )
    loads = {PASS: LoadMatrix.stack([LoadMatrix.from_rows(parts) for parts in rows])}
    shape = ModelShape(
        trace.num_experts,
        trace.top_k,
        trace.moe_layers,
        settings.hidden_size,
        settings.expert_size,
        "float32",
    )
    # One thread: the ranks are forked from this process, and OpenMP does not survive a fork.
    config = PlannerConfig(settings.replica_slots, seed=settings.seed, num_threads=1)
    alone = PlannerConfig(0, num_threads=1)
    plan = plan_step(loads, topology, model=shape, config=config)
    none = plan_step(loads, topology, model=shape, config=alone, strategy="none")
    source = {
        "file": path.name,
        "sequences": trace.num_samples,
        "tokens": trace.num_rows,
        "moe_layers": trace.moe_layers,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "notes": trace.notes,
    }
    return ReplayBatch(rows, plan, none, source)


def replay_on_rank(
    rank: int, num_ranks: int, batch: ReplayBatch, settings: ReplaySettings, quiet: bool
) -> tuple[list[MicroBatchResult], float]:
    """Body of one process.

    Args:
        rank: This process.
        num_ranks: Processes.
        batch: Rows and plans.
        settings: Sizes.
        quiet: Whether rank 0 prints no table.

    Returns:
        Results by micro-batch, and the difference of the weight gradients of all micro-batches.
    """
    torch.set_num_threads(1)
    balanced = ReplaySide(batch, batch.plan, settings)
    none = ReplaySide(batch, batch.none, settings)
    generator = torch.Generator().manual_seed(settings.seed * num_ranks + rank)
    results = []
    loads = _loads(batch)
    table = LiveTable(COLUMNS, len(batch.rows[rank]), quiet=quiet or rank > 0)
    with table.open(LEGEND), balanced.step, none.step:
        for index, rows in enumerate(batch.rows[rank]):
            size = (rows.num_rows, settings.hidden_size)
            x_TD, dy_TD = torch.randn(2, *size, generator=generator)
            got, balanced_ms = balanced.run(index, x_TD, dy_TD)
            need, none_ms = none.run(index, x_TD, dy_TD)
            gaps = [Difference.of({n: got[n]}, {n: need[n]}).relative for n in need]
            results.append(MicroBatchResult(*_worst([*gaps, none_ms, balanced_ms])))
            table.add(_cells(index, loads, batch, results[-1]))
    weights = Difference.of(balanced.gradients(), none.gradients()).relative
    return results, _worst([weights])[0]


def run_replay(
    batch: ReplayBatch, settings: ReplaySettings, folder: Path, *, quiet: bool = False
) -> dict[str, Any]:
    """Replay a batch on all ranks and write report and picture.

    Args:
        batch: From :func:`load_batch`.
        settings: Sizes.
        folder: Where report and picture go; it exists.
        quiet: Print no table.

    Returns:
        The report; ``passed`` is the verdict.

    Raises:
        RuntimeError: A rank failed or died; names it.
    """
    start = time.perf_counter()
    num_ranks, num_micro_batches = settings.topology.num_ranks, len(batch.rows[0])
    timeout = _START_TIMEOUT_S + _MICRO_BATCH_TIMEOUT_S * num_micro_batches
    ranks = run_ranks(num_ranks, replay_on_rank, batch, settings, quiet, timeout=timeout)
    results, weights = ranks[0]
    made = _make_report(results, weights, batch, settings)
    made["seconds"] = time.perf_counter() - start
    report.write_report(folder, made)
    plots.write_picture(folder / report.PICTURE_FILE, [_loads(batch)])
    return made


def _make_report(
    results: Sequence[MicroBatchResult],
    weights: float,
    batch: ReplayBatch,
    settings: ReplaySettings,
) -> dict[str, Any]:
    output = max(result.output_difference for result in results)
    inputs = max(result.input_grad_difference for result in results)
    imbalances = _loads(batch).imbalances()
    checks = [
        Check("output-vs-none", output, "<=", MAX_OUTPUT_DIFFERENCE),
        Check("input-gradient-vs-none", inputs, "<=", MAX_GRADIENT_DIFFERENCE),
        Check("weight-gradient-vs-none", weights, "<=", MAX_GRADIENT_DIFFERENCE),
        Check(
            "rank-imbalance",
            imbalances["rank_imbalance"],
            "<=",
            imbalances["rank_imbalance_none"],
        ),
    ]
    failed = [check for check in checks if not check.passed]
    return {
        "command": "demo --trace",
        "passed": not failed,
        "failed_checks": [check.name for check in failed],
        "settings": dataclasses.asdict(settings),
        "trace": batch.source,
        "checks": [check.as_dict() for check in checks],
        "micro_batches": [dataclasses.asdict(result) for result in results],
        "imbalance": imbalances,
        "plan": batch.plan.report.as_dict(),
        "none": batch.none.report.as_dict(),
        "files": [report.REPORT_FILE, report.PICTURE_FILE],
        "environment": report.environment(),
    }


def _loads(batch: ReplayBatch) -> StepLoads:
    none, plan = (p.passes[PASS].slot_rows_MLGn.sum(-1) for p in (batch.none, batch.plan))
    return StepLoads(none, plan, batch.plan.topology)


def _cells(index: int, loads: StepLoads, batch: ReplayBatch, result: MicroBatchResult) -> list[str]:
    part = slice(index, index + 1)
    one = StepLoads(loads.none_MLG[part], loads.balanced_MLG[part], loads.topology).imbalances()
    replicas = batch.plan.passes[PASS].replica_slot_expert_MLGS[index]
    return [
        str(index),
        str(int(loads.none_MLG[index, 0].sum())),
        f"{one['rank_imbalance_none']:.3f} -> {one['rank_imbalance']:.3f}",
        f"{one['node_imbalance_none']:.3f} -> {one['node_imbalance']:.3f}",
        str(int((replicas >= 0).sum())),
        f"{result.none_ms:.0f}",
        f"{result.balanced_ms:.0f}",
        f"{result.output_difference:.1e}",
        f"{result.input_grad_difference:.1e}",
    ]


def _worst(values: Sequence[float]) -> list[float]:
    """Largest value of all ranks, element by element; collective."""
    gathered = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
    gathered[dist.get_rank()] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(gathered)
    worst: list[float] = gathered.amax(dim=0).tolist()
    return worst
