"""`relibra plan`: what each strategy would make of a recorded rollout batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from relibra.array_files import check_output
from relibra.cli_input import (
    LoadsFile,
    add_command,
    console,
    print_json,
    read_loads,
    whole_number,
)
from relibra.cli_settings import Platform, add_planner_flags, planner_config, platform
from relibra.cost_model import CostModel
from relibra.plan import StepPlan
from relibra.planner import STRATEGIES as known_strategies
from relibra.planner import plan_step
from relibra.presets import MODELS, find_model
from relibra.report import LEGEND, plan_table
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    import argparse

    from relibra.layout import ExpertLayout
    from relibra.plan_config import PlannerConfig

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
  relibra plan counts.npz --nodes 8 --ranks-per-node 8 --strategy relibra --out plan.npz
  relibra plan trace.npz --nodes 4 --ranks-per-node 8 --cost time --model gpt-oss-20b
  relibra plan next.npz --nodes 4 --ranks-per-node 8 --layout plan.npz --static-copies 2

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
    add(
        "--micro-batch-sequences",
        type=positive,
        metavar="B",
        help="sequences of a micro-batch, a multiple or divisor of G (default: one a rank); a "
        "short last micro-batch is kept",
    )
    add("--num-experts", type=positive, metavar="E", help="(default: that of --model, else largest "
        "id + 1)")  # fmt: skip
    add("--model", metavar="NAME", help=f"sizes and dense part: {', '.join(MODELS)}")
    add("--hidden-size", type=positive, metavar="D", help="with --expert-size, without --model")
    add("--expert-size", type=positive, metavar="F", help="with --hidden-size, without --model")
    add("--dtype", default="bfloat16", help="of the expert weights (default %(default)s)")
    add_planner_flags(parser, cost="rows")
    add("--layout", type=Path, metavar="plan.npz", help="start from the layouts of this plan")
    add("--token-sample", type=whole_number(0), default=0, metavar="T", help="tokens of a trace "
        "that show which experts are chosen together (default 0; 2000 are enough): relibra then "
        "keeps those on one node")  # fmt: skip
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
    _check_out(args)
    config, target = planner_config(args), _platform(args)
    topology = Topology(args.nodes, args.ranks_per_node)
    preset_experts = None if target.model is None else target.model.num_experts
    file = read_loads(
        args.trace,
        topology.num_ranks,
        sequences=args.micro_batch_sequences,
        num_experts=args.num_experts or preset_experts,
        sample_tokens=args.token_sample,
    )
    shape = _shape(args, file, target)
    cost_model = _cost_model(shape, topology, config, target)
    layouts = None if args.layout is None else _layouts(args.layout)
    plans = []
    with _progress() as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            plans.append(
                plan_step(
                    {"train": file.loads},
                    topology,
                    model=shape,
                    layout=layouts,
                    config=config,
                    strategy=name,
                    cost_model=cost_model,
                    token_sample=file.sample,
                )
            )
            progress.advance(task)
    if saved is not None:
        plans[names.index(saved)].save(args.out, with_quota=args.with_quota)
    if args.json:
        print_json(_as_json(args, file, plans))
    else:
        _print(args, file, plans, target)
    return 0


def _platform(args: argparse.Namespace) -> Platform:
    """Checks the sizes of the model, and takes presets with what `--set` changes."""
    if (args.hidden_size is None) != (args.expert_size is None):
        raise ValueError("--hidden-size, --expert-size: need both or neither, got one")
    if args.model is not None and args.hidden_size is not None:
        raise ValueError("--model: need it without --hidden-size and --expert-size, got both")
    if args.cost == "time" and args.model is None and args.hidden_size is None:
        raise ValueError(
            "--cost time: need --model, or --hidden-size and --expert-size, got none; models: "
            + ", ".join(MODELS)
        )
    for name, given in (("--set", args.set), ("--hardware", args.hardware)):
        if given and args.cost != "time":
            raise ValueError(f"{name}: need --cost time, got {args.cost}")
    return platform(args, None if args.model is None else find_model(args.model))


def _shape(args: argparse.Namespace, file: LoadsFile, target: Platform) -> ModelShape:
    """Sizes of the MoE layers of the file."""
    top_k, sizes = file.top_k or 1, (args.hidden_size, args.expert_size)
    if target.model is not None:
        sizes = (target.model.hidden_size, target.model.expert_size)
        top_k = file.top_k or target.model.top_k
        if top_k != target.model.top_k:
            raise ValueError(
                f"--model: need K {top_k} like {args.trace.name}, {target.model.name} has "
                f"{target.model.top_k}"
            )
    return ModelShape(file.loads.num_experts, top_k, file.moe_layers, *sizes, args.dtype)


def _cost_model(
    shape: ModelShape, topology: Topology, config: PlannerConfig, target: Platform
) -> CostModel | None:
    if config.cost != "time":
        return None
    recompute = "full" if config.full_recompute else "none"
    return CostModel(
        target.hardware, shape, topology, target.model, recompute=recompute, **target.cost_fields
    )


def _layouts(path: Path) -> tuple[ExpertLayout, ...]:
    """Layouts that an earlier plan ends with."""
    if not path.is_file():
        raise FileNotFoundError(f"--layout: need a plan file, got {path}")
    return StepPlan.load(path).layouts


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


def _check_out(args: argparse.Namespace) -> None:
    """Refuses a path that cannot be written, or that the plan is made from, before planning."""
    if args.out is None:
        return
    for name, path in (("TRACE", args.trace), ("--layout", args.layout)):
        if path is not None and args.out.exists() and path.exists() and args.out.samefile(path):
            raise ValueError(f"--out: need another file than {name}, got {args.out}")
    try:
        check_output(args.out)
    except OSError as error:
        raise type(error)(f"--out: {error}") from None


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
        "planner": plans[0].config.as_dict(),
        "layout": None if args.layout is None else args.layout.name,
        "token_sample": 0 if file.sample is None else len(file.sample.ids_TLK),
        "strategies": {
            plan.strategy: {**plan.report.as_dict(), "is_executable": plan.is_executable}
            for plan in plans
        },
        "out": None if args.out is None else str(args.out),
    }


def _print(
    args: argparse.Namespace, file: LoadsFile, plans: list[StepPlan], target: Platform
) -> None:
    out, loads = console(), file.loads
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in file.description.items()]
    out.print(f"{args.trace.name}: {', '.join(facts)}", soft_wrap=True)
    for note in file.notes:
        out.print(f"note: {note}", soft_wrap=True)
    top_k = "" if file.top_k is None else f", K {file.top_k}"
    out.print(
        f"{loads.num_micro_batches} micro-batches, {loads.num_layers} MoE layers, "
        f"E {loads.num_experts}{top_k}; {args.nodes} node{'s' * (args.nodes > 1)} x "
        f"{args.ranks_per_node} ranks, S {args.replica_slots}, static copies {args.static_copies}"
    )
    mode = args.cost
    if mode == "time":
        model = "no dense part" if target.model is None else target.model.name
        mode += f" ({target.hardware.name}, {model}, recompute {args.recompute})"
    out.print(
        f"cost mode {mode}; simulated from counts, only planner ms is measured", soft_wrap=True
    )
    if args.layout is not None:
        out.print(f"starts from the layouts of {args.layout.name}", soft_wrap=True)
    if file.sample is not None:
        out.print(f"token sample: {len(file.sample.ids_TLK)} tokens, used by relibra")
    report_only = [plan.strategy for plan in plans if not plan.is_executable]
    out.print(plan_table([plan.report for plan in plans], report_only))
    out.print(LEGEND, soft_wrap=True)
    if args.out is not None:
        out.print(f"wrote {args.out}", soft_wrap=True)
