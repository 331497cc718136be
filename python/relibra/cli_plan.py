"""`relibra plan`: what each strategy would make of a recorded rollout batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from relibra.cli_input import (
    LoadsFile,
    add_command,
    console,
    print_json,
    read_loads,
    whole_number,
)
from relibra.plan_config import PlannerConfig
from relibra.planner import STRATEGIES as known_strategies
from relibra.planner import plan_step
from relibra.report import LEGEND, plan_table
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    import argparse

    from relibra.plan import StepPlan

STRATEGIES = (
    "none", "lpt", "eplb_oracle", "replicate_only", "reorder_only", "relibra", "ideal",
)  # fmt: skip

_SUMMARY = "compare strategies on the routing of a recorded rollout batch"
_EPILOG = """\
TRACE is a .safetensors trace of ReLibra, an .npz file with routed_experts [rows, L, K] and
cu_seqlens, or an .npz file with the counts rows_MLGE [M, L, G, E]. Nothing is executed: the figures
are simulated from counts of rows, and only the planner's time is measured.

examples:
  relibra plan trace.npz --nodes 4 --ranks-per-node 8 --micro-batch-sequences 8
  relibra plan trace.safetensors --nodes 2 --ranks-per-node 8 --hidden-size 2048 --expert-size 768
  relibra plan counts.npz --nodes 8 --ranks-per-node 8 --strategy relibra --out plan.npz

exit codes: 0 planned, 2 bad usage or a file that cannot be used
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` gave.
    """
    parser = add_command(subparsers, "plan", _SUMMARY, _EPILOG)
    parser.set_defaults(run=run)
    add = parser.add_argument
    positive = whole_number(1)
    add("trace", type=Path, metavar="TRACE", help="file with routing or counts")
    add("--nodes", type=positive, required=True, metavar="N", help="NVLink domains")
    add("--ranks-per-node", type=positive, required=True, metavar="P", help="G = N * P ranks")
    add(
        "--strategy",
        action="append",
        metavar="NAME",
        help=f"one or more, separated by commas (default: {', '.join(STRATEGIES)})",
    )
    add("--replica-slots", type=whole_number(0), default=1, metavar="S", help="(default 1)")
    add(
        "--micro-batch-sequences",
        type=positive,
        metavar="B",
        help="sequences of a micro-batch, a multiple or divisor of G (default: one a rank); a "
        "short last micro-batch is kept",
    )
    add("--num-experts", type=positive, metavar="E", help="(default: largest id + 1)")
    add("--hidden-size", type=positive, metavar="D", help="with --expert-size: pushes in bytes")
    add("--expert-size", type=positive, metavar="F", help="with --hidden-size: pushes in bytes")
    add("--dtype", default="bfloat16", help="of the expert weights (default %(default)s)")
    add("--seed", type=whole_number(0), default=0, help="of the layout search (default 0)")
    add("--threads", type=whole_number(0), default=0, help="0 = all; the plan is the same")
    add("--out", type=Path, metavar="plan.npz", help="write the plan of relibra, or the only one")
    add("--with-quota", action="store_true", help="with --out: also the split by source rank")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: parsed arguments.

    Returns:
        0; what cannot be planned raises.

    Raises:
        OSError, ValueError: a file or argument that cannot be used.
    """
    names = _strategies(args.strategy)
    saved = _name_to_save(args, names)
    if (args.hidden_size is None) != (args.expert_size is None):
        raise ValueError("--hidden-size, --expert-size: need both or neither, got one")
    _keep_input(args)
    topology = Topology(args.nodes, args.ranks_per_node)
    file = read_loads(
        args.trace,
        topology.num_ranks,
        sequences=args.micro_batch_sequences,
        num_experts=args.num_experts,
    )
    shape = ModelShape(
        file.loads.num_experts,
        file.top_k or 1,
        file.moe_layers,
        args.hidden_size,
        args.expert_size,
        args.dtype,
    )
    config = PlannerConfig(
        replica_slots=args.replica_slots, seed=args.seed, num_threads=args.threads
    )
    plans = []
    with _progress() as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            loads = {"train": file.loads}
            plans.append(plan_step(loads, topology, model=shape, config=config, strategy=name))
            progress.advance(task)
    if saved is not None:
        plans[names.index(saved)].save(args.out, with_quota=args.with_quota)
    if args.json:
        print_json(_as_json(args, file, plans))
    else:
        _print(args, file, plans)
    return 0


def _strategies(asked: list[str] | None) -> list[str]:
    if asked is None:
        return list(STRATEGIES)
    names = list(dict.fromkeys(name.strip() for text in asked for name in text.split(",")))
    for name in names:
        check_choice("--strategy", name, tuple(known_strategies))
    return names


def _name_to_save(args: argparse.Namespace, names: list[str]) -> str | None:
    """The strategy whose plan `--out` gets."""
    if args.out is None:
        if args.with_quota:
            raise ValueError("--with-quota: need --out, got none")
        return None
    if len(names) == 1:
        return names[0]
    if "relibra" not in names:
        raise ValueError(f"--out: need relibra or a single strategy, got {', '.join(names)}")
    return "relibra"


def _keep_input(args: argparse.Namespace) -> None:
    """Refuses to write the plan over the file it is made from, by whatever name."""
    both = args.out is not None and args.out.exists() and args.trace.exists()
    if both and args.out.samefile(args.trace):
        raise ValueError(f"--out: need another file than TRACE, got {args.out}")


def _progress() -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    return Progress(
        TextColumn("planning {task.description:16}"),
        BarColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _as_json(args: argparse.Namespace, file: LoadsFile, plans: list[StepPlan]) -> dict[str, Any]:
    loads = file.loads
    return {
        "command": "plan",
        "simulated": True,
        "cost": plans[0].config.cost,
        "input": {"file": args.trace.name, **file.description, "notes": list(file.notes)},
        "num_micro_batches": loads.num_micro_batches,
        "num_layers": loads.num_layers,
        "num_experts": loads.num_experts,
        "top_k": file.top_k,
        "num_nodes": args.nodes,
        "ranks_per_node": args.ranks_per_node,
        "replica_slots": args.replica_slots,
        "strategies": {
            plan.strategy: {**plan.report.as_dict(), "is_executable": plan.is_executable}
            for plan in plans
        },
        "out": None if args.out is None else str(args.out),
    }


def _print(args: argparse.Namespace, file: LoadsFile, plans: list[StepPlan]) -> None:
    out, loads = console(), file.loads
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in file.description.items()]
    out.print(f"{args.trace.name}: {', '.join(facts)}", soft_wrap=True)
    for note in file.notes:
        out.print(f"note: {note}", soft_wrap=True)
    top_k = "" if file.top_k is None else f", K {file.top_k}"
    out.print(
        f"{loads.num_micro_batches} micro-batches, {loads.num_layers} MoE layers, "
        f"E {loads.num_experts}{top_k}; {args.nodes} node{'s' * (args.nodes > 1)} x "
        f"{args.ranks_per_node} ranks, S {args.replica_slots}"
    )
    out.print(
        f"cost mode {plans[0].config.cost}; simulated from counts, only planner ms is measured"
    )
    report_only = [plan.strategy for plan in plans if not plan.is_executable]
    out.print(plan_table([plan.report for plan in plans], report_only))
    out.print(LEGEND, soft_wrap=True)
    if args.out is not None:
        out.print(f"wrote {args.out}", soft_wrap=True)
