"""Tables and JSON of a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra.simulate import BatchResult
    from relibra.simulate_input import Source
    from relibra.simulate_settings import SimulateSettings

LEGEND = """\
imbal.     max / mean of rows over ranks: sum of the maxima / sum of the means
step       milliseconds of forward and backward of all micro-batches and simulated layers; a2a, GEMM
           (padded to tiles) and push (what the dense part does not hide) are parts of it; with
           pipeline stages the parts add up over all stages, the step has the stages at once
x none     throughput / throughput of none; gross leaves out what balancing costs; net has pushes,
           replica gradients, static copies, planning, composing (order composed), and the moves of
           experts from the contiguous layout, as in a first batch, none of it hidden
x eplb     net throughput / throughput of EPLB placed for this very batch (eplb_oracle)
x ideal    net step / step with equal rows on all ranks
peak rows  most rows of a rank in one micro-batch and layer, padded to tiles
GB         of the fullest rank, with all MoE layers that it has of the model: saved activations;
           total with buffers of a layer, home experts with their optimizer state and replica
           slots, without dense weights; ! more than the GPU has (out of memory)
plan       milliseconds of planning, measured here (the clock, or the processor if that is less);
           with pipeline stages a stage's share
*          for comparison only, cannot be executed; copies of EPLB are paid for (weights out and
           gradients home of each new copy), bounds move nothing"""


def main_table(batch: BatchResult) -> Table:
    """Strategies of one group size and order at the overlap of the first table.

    Args:
        batch: the results.
    """
    heads = (
        "imbal.\nmean", "\np99", "step\nms", "a2a\nms", "GEMM\nms", "push\nms", "x none\ngross",
        "\nnet", "x eplb\nnet", "x ideal\nnet", "peak\nrows", "GB\nactiv.", "\ntotal", "plan\nms",
    )  # fmt: skip
    table = _table(heads)
    for name, one in batch.results.items():
        parts, report = one.cost.parts(), one.plan.report
        step_s = one.step_s[batch.overlap, True, "max"]
        table.add_row(
            name + ("" if one.plan.is_executable else "*"),
            f"{report.imbalance_mean:.3f}",
            f"{report.imbalance_p99:.3f}",
            _ms(step_s),
            _ms(parts["all_to_all"]),
            _ms(parts["gemm"]),
            _ms(parts["exposed_push"]),
            f"{batch.ratio(name, net=False):.3f}",
            f"{batch.ratio(name):.3f}",
            f"{batch.ratio(name, 'eplb_oracle'):.3f}",
            f"{1 / batch.ratio(name, 'ideal'):.3f}",
            f"{one.memory.rows_padded}",
            f"{one.memory.activation_bytes / 1e9:.1f}",
            f"{one.memory.total_bytes / 1e9:.1f}" + ("" if one.memory.fits else "!"),
            f"{1e3 * one.planner_s:.0f}",
        )
    return table


def overlap_table(batch: BatchResult, overlaps: Sequence[float]) -> Table:
    """Throughput ratios to none by overlap, with and without imbalance of the dense part.

    Args:
        batch: the results.
        overlaps: of RDMA and NVLink.
    """
    heads = [f"ov. {overlap:g}\ngross" for overlap in overlaps]
    heads += [f"ov. {overlap:g}\nnet" for overlap in overlaps]
    heads += ["dense\neven", "\nnet"]
    table = _table(heads)
    for name, one in batch.results.items():
        cells = [
            batch.ratio(name, overlap=overlap, net=net)
            for net in (False, True)
            for overlap in overlaps
        ]
        cells += [batch.ratio(name, net=net, dense="mean") for net in (False, True)]
        star = "" if one.plan.is_executable else "*"
        table.add_row(name + star, *(f"{cell:.3f}" for cell in cells))
    return table


def reroute_table(batch: BatchResult, shares: Sequence[float]) -> Table:
    """Net throughput ratio to none and imbalance when rows do not follow the plan.

    Args:
        batch: the results.
        shares: percentages.
    """
    heads = [f"{share:g} %\nx none" for share in shares]
    heads += [f"{share:g} %\nimbal." for share in shares]
    table = _table(heads)
    for name, one in batch.results.items():
        ratios = [batch.rerouted_ratio(name, share) for share in shares]
        imbalances = [one.rerouted[share][1] for share in shares]
        star = "" if one.plan.is_executable else "*"
        table.add_row(name + star, *(f"{cell:.3f}" for cell in (*ratios, *imbalances)))
    return table


def as_json(
    source: Source, settings: SimulateSettings, batches: Sequence[BatchResult]
) -> dict[str, Any]:
    """The whole simulation as plain values.

    Args:
        source: the batch.
        settings: choices.
        batches: results.
    """
    first = next(iter(batches[0].results.values()))
    return {
        "command": "simulate",
        "simulated": True,
        "input": source.describe(),
        "assumptions": {
            **settings.cost(batches[0].num_ranks, first.plan.shape).assumptions(),
            "topology": {
                str(ranks): str(settings.topology(ranks)) for ranks in dict.fromkeys(settings.ep)
            },
            "pipeline_stages": settings.pipeline_stages,
            "data_parallel_groups": settings.data_parallel,
            "planner_cost_mode": settings.planner.cost,
            "planner": settings.planner.as_dict(),
            "layers_simulated": first.plan.shape.num_layers,
            "rerouted_rows": "choose experts like the whole batch, executed at home",
        },
        "batches": [
            {
                "num_ranks": batch.num_ranks,
                "order": batch.order,
                "left_out": batch.left_out,
                "strategies": {name: result_as_dict(batch, name) for name in batch.results},
            }
            for batch in batches
        ],
    }


def result_as_dict(batch: BatchResult, strategy: str) -> dict[str, Any]:
    """Everything about one strategy on one batch, as plain values.

    Args:
        batch: the results.
        strategy: name.
    """
    one = batch.results[strategy]
    steps = [
        {
            "overlap": overlap,
            "net": net,
            "dense_imbalance": dense == "max",
            "seconds": seconds,
            "throughput_ratio_to_none": batch.ratio(
                strategy, overlap=overlap, net=net, dense=dense
            ),
            "throughput_ratio_to_eplb_oracle": batch.ratio(
                strategy, "eplb_oracle", overlap=overlap, net=net, dense=dense
            ),
            "step_to_ideal": 1
            / batch.ratio(strategy, "ideal", overlap=overlap, net=net, dense=dense),
        }
        for (overlap, net, dense), seconds in one.step_s.items()
    ]
    rerouted = [
        {
            "percent": share,
            "seconds": seconds,
            "imbalance_mean": imbalance,
            "worst_rank_rows": rows,
            "throughput_ratio_to_none": batch.rerouted_ratio(strategy, share),
        }
        for share, (seconds, imbalance, rows) in one.rerouted.items()
    ]
    return {
        "is_executable": one.plan.is_executable,
        "report": one.plan.report.as_dict(),
        "seconds_by_part": one.cost.parts(),
        "move_s": one.move_s,
        "static_s": one.static_s,
        "planner_s_measured": one.planner_s,
        "step": steps,
        "reroute": rerouted,
        "memory": one.memory.as_dict(),
    }


def _ms(seconds: float) -> str:
    """Milliseconds with at most one decimal, none from 1000 on."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("strategy", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table
