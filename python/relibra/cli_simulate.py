"""`relibra simulate`: what balancing would gain on a cluster, from routing or a generator."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from relibra.cli_input import add_command, console, print_json, whole_number
from relibra.cli_settings import (
    COST_FIELDS,
    Platform,
    add_planner_flags,
    planner_config,
    platform,
)
from relibra.formats.npz import list_npz, read_npz
from relibra.formats.trace_file import open_trace
from relibra.load_matrix import LoadMatrix
from relibra.planner import STRATEGIES
from relibra.presets import MODELS, ModelPreset, find_model
from relibra.simulate import simulate
from relibra.simulate_input import COMPOSED, CountsSource, Source, SyntheticSource, TraceSource
from relibra.simulate_plots import check_picture, write_picture
from relibra.simulate_report import LEGEND, as_json, main_table, overlap_table, reroute_table
from relibra.simulate_settings import SimulateSettings
from relibra.synthetic import KINDS
from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from relibra.simulate import BatchResult

# Shown unless --strategy says otherwise; names that the planner does not have are left out.
_DEFAULT = (
    "none", "lpt", "locality_only", "history", "donor_only", "eplb", "eplb_oracle",
    "eplb_micro_batch", "lplb_like", "reorder_only", "replicate_only", "relibra",
    "force_balanced", "ideal",
)  # fmt: skip
_GENERATOR_MODEL = "Qwen3-30B-A3B"
# Flags that only a trace or only the generator has, with the field that takes the latter.
_OF_TRACES = ("micro_batch_sequences", "repeat", "num_experts")
_OF_GENERATOR = {
    "micro_batches": "num_micro_batches", "layers": "num_layers", "tokens": "tokens"
}  # fmt: skip
_PLOTTED = ("none", "lpt", "history", "eplb_oracle", "replicate_only", "relibra", "ideal")

_SUMMARY = "what balancing would gain on a cluster, from recorded or synthetic routing"
_EPILOG = """\
FILE is a .safetensors trace of ReLibra, an .npz file with routed_experts [rows, L, K] and
cu_seqlens, or an .npz file with the counts rows_MLGE [M, L, G, E] (one EP size, one order).
Everything is simulated with the constants of a hardware preset; only planning time is measured.

examples:
  relibra simulate trace.npz --ep 8,16,32 --model gpt-oss-20b --hardware H200
  relibra simulate --generator medium --ep 8,16,32,64 --plot gain.png
  relibra simulate trace.npz --ep 32 --set nic_gb_per_s=21 --reroute 0,5,10,30 --json
  relibra simulate --generator medium --ep 16 --model Qwen3-235B-A22B --pp 4 --edp 2

exit codes: 0 done, 2 bad usage or a file that cannot be used
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` gave.
    """
    parser = add_command(subparsers, "simulate", _SUMMARY, _EPILOG)
    parser.set_defaults(run=run)
    add, positive = parser.add_argument, whole_number(1)
    add("file", type=Path, nargs="?", metavar="FILE", help="file with routing or counts")
    add("--generator", metavar="KIND", help=f"instead of FILE: {', '.join(KINDS)}")
    add("--ep", default="8,16,32", metavar="LIST", help="EP sizes (default %(default)s)")
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)} (default: by E and K)")
    add("--ranks-per-node", type=positive, metavar="P", help="(default: the hardware's domain)")
    add("--strategy", action="append", metavar="NAMES", help="separated by commas, or all")
    add(
        "--order", action="append", metavar="NAME", help="grouped, random (default: both), composed"
    )
    add("--dispatch", default="flat", metavar="NAME", help="flat (default) or two_hop")
    add("--combine", default="reduced", metavar="NAME", help="reduced (default) or exact")
    add("--pp", type=positive, default=1, metavar="N", help="pipeline stages of G ranks each "
        "that share the layers (default 1)")  # fmt: skip
    add("--edp", type=positive, default=1, metavar="N", help="EP groups that hold the same experts "
        "(default 1)")  # fmt: skip
    add("--overlap", default="0.5", metavar="X", help="of the first table (default 0.5)")
    add("--reroute", metavar="LIST", help="percentages of rows that do not follow the plan")
    add("--micro-batch-sequences", type=positive, metavar="B", help="of a trace (default: one "
        "a rank)")  # fmt: skip
    add("--repeat", type=positive, metavar="R", help="a trace's token stands for R (default 1)")
    add("--num-experts", type=positive, metavar="E", help="of a trace (default: that of "
        "--model, else largest id + 1)")  # fmt: skip
    add("--micro-batches", type=positive, metavar="M", help="of the generator (16)")
    add("--layers", type=positive, metavar="L", help="of the generator (4)")
    add("--tokens", type=positive, metavar="T", help="a rank, generator (8192)")
    add_planner_flags(parser, cost="time")
    add("--plot", type=Path, metavar="FILE.png", help="draw the results (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: parsed arguments.

    Returns:
        0; what cannot be simulated raises.

    Raises:
        OSError, ValueError: a file or argument that cannot be used.
    """
    if args.plot is not None:
        check_picture(args.plot)
    target = platform(args, _named_model(args))
    source, model = _source(args, target)
    settings = SimulateSettings(
        model,
        target.hardware,
        ep=_whole_numbers("--ep", args.ep),
        ranks_per_node=args.ranks_per_node,
        strategies=_strategies(args.strategy),
        overlap=_number("--overlap", args.overlap),
        reroute=() if args.reroute is None else _numbers("--reroute", args.reroute),
        dispatch=args.dispatch,
        combine=args.combine,
        recompute=args.recompute,
        planner=planner_config(args),
        pipeline_stages=args.pp,
        data_parallel=args.edp,
        cost_fields=target.cost_fields,
    )
    orders = _names(args.order)
    for order in orders or ():
        known = source.orders if len(source.orders) == 1 else (*source.orders, COMPOSED)
        check_choice("--order", order, known)
    with Console(stderr=True).status("") as status:
        shown = status.update if sys.stderr.isatty() else None
        batches = simulate(source, settings, orders=orders, progress=shown)
    if args.plot is not None:
        write_picture(args.plot, batches, _PLOTTED, _title(args, settings))
    if args.json:
        print_json(as_json(source, settings, batches))
    else:
        _print(source, settings, batches)
        if args.plot is not None:
            console().print(f"wrote {args.plot}", soft_wrap=True)
    return 0


def _named_model(args: argparse.Namespace) -> ModelPreset | None:
    """The preset asked for; the generator has one by default, `--set` may then change it."""
    if args.model is None and args.generator is not None:
        return find_model(_GENERATOR_MODEL)
    return None if args.model is None else find_model(args.model)


def _source(args: argparse.Namespace, target: Platform) -> tuple[Source, ModelPreset]:
    """What to simulate, and the model: the asked one, or the first with the E and K of the file."""
    model = target.model
    if (args.file is None) == (args.generator is None):
        raise ValueError("FILE, --generator: need exactly one of them")
    if args.generator is not None:
        check_choice("--generator", args.generator, tuple(KINDS))
        _refuse(args, _OF_TRACES, "a trace", f"--generator {args.generator}")
        assert model is not None
        given = {to: getattr(args, name) for name, to in _OF_GENERATOR.items()}
        return SyntheticSource(
            args.generator,
            num_experts=model.num_experts,
            top_k=model.top_k,
            seed=args.seed,
            **{name: value for name, value in given.items() if value is not None},
        ), model
    name = args.file.name
    _refuse(args, _OF_GENERATOR, "--generator", f"the file {name}")
    if args.file.suffix == ".npz" and "rows_MLGE" in list_npz(args.file):
        if model is None:
            raise ValueError(f"--model: need one for counts, which do not say K: {_known()}")
        _refuse(args, _OF_TRACES, "a trace", f"counts (rows_MLGE) in {name}")
        loads = LoadMatrix(read_npz(args.file, ("rows_MLGE",))["rows_MLGE"])
        return CountsSource(loads, model.top_k, name), model
    known = None if model is None else model.num_experts
    trace = open_trace(args.file, args.num_experts or known)
    if model is None:
        sizes = (trace.num_experts, trace.top_k)
        alike = [one for one in MODELS.values() if (one.num_experts, one.top_k) == sizes]
        if not alike:
            raise ValueError(
                f"--model: need one, none has the {sizes[0]} experts and K {sizes[1]} of {name}: "
                f"{_known()}"
            )
        model = alike[0]
    if model.top_k != trace.top_k:
        raise ValueError(
            f"--model: need K {trace.top_k} like {name}, {model.name} has {model.top_k}"
        )
    source = TraceSource(trace, args.micro_batch_sequences, args.repeat or 1, args.seed, name)
    return source, model


def _refuse(args: argparse.Namespace, names: Iterable[str], need: str, got: str) -> None:
    """Refuses flags that would have no effect."""
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: need {need}, got {got}")


def _known() -> str:
    return ", ".join(MODELS)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: need numbers separated by commas, got {text!r}") from None


def _number(name: str, text: str) -> float:
    values = _numbers(name, text)
    if len(values) != 1:
        raise ValueError(f"{name}: need one number, got {text!r}")
    return values[0]


def _whole_numbers(name: str, text: str) -> tuple[int, ...]:
    values = _numbers(name, text)
    if not all(value.is_integer() for value in values):
        raise ValueError(f"{name}: need integers separated by commas, got {text!r}")
    return tuple(dict.fromkeys(int(value) for value in values))


def _names(asked: Sequence[str] | None) -> tuple[str, ...] | None:
    if asked is None:
        return None
    return tuple(dict.fromkeys(name.strip() for text in asked for name in text.split(",")))


def _strategies(asked: Sequence[str] | None) -> tuple[str, ...] | None:
    names = _names(asked)
    if names is None:
        return tuple(name for name in _DEFAULT if name in STRATEGIES)
    return None if "all" in names else names


def _print(source: Source, settings: SimulateSettings, batches: Sequence[BatchResult]) -> None:
    out = console()
    facts = source.describe()
    out.print(", ".join(f"{key} {value}" for key, value in facts.items()), soft_wrap=True)
    for line in _assumptions(settings):
        out.print(line, soft_wrap=True)
    for batch in batches:
        topology = settings.topology(batch.num_ranks)
        out.print(
            f"\nEP {batch.num_ranks} ({topology}), order {batch.order}, overlap {batch.overlap:g}"
        )
        out.print(main_table(batch))
        out.print("throughput / throughput of none by overlap; dense even: no dense imbalance")
        out.print(overlap_table(batch, settings.overlaps))
        if settings.reroute:
            out.print("rows that do not follow the plan, net:")
            out.print(reroute_table(batch, settings.reroute))
        for name, reason in batch.left_out.items():
            out.print(f"left out: {name}: {reason}", soft_wrap=True)
    out.print(LEGEND, soft_wrap=True)


def _title(args: argparse.Namespace, settings: SimulateSettings) -> str:
    """The main assumptions in a line."""
    what = args.file.name if args.generator is None else f"generator {args.generator}"
    more = ""
    if settings.pipeline_stages * settings.data_parallel > 1:
        more = f", PP {settings.pipeline_stages}, EDP {settings.data_parallel}"
    return (
        f"{what}, {settings.model.name}, {settings.hardware.name}{more}, dispatch "
        f"{settings.dispatch}, combine {settings.combine}, recompute {settings.recompute}, "
        f"planner cost mode {settings.planner.cost}"
    )


def _assumptions(settings: SimulateSettings) -> list[str]:
    """What every number of the run depends on."""
    hardware, model = settings.hardware, settings.model
    rates = [
        f"{each.name} {getattr(hardware, each.name):g}"
        for each in fields(hardware)
        if each.name not in ("name", "sources")
    ]
    return [
        "all seconds are simulated (cost model of times), only planning is measured",
        f"hardware {hardware.name}: {', '.join(rates)}",
        f"model {model.name}: D {model.hidden_size}, F {model.expert_size}; dispatch "
        f"{settings.dispatch}, combine {settings.combine}, recompute {settings.recompute}; "
        f"{settings.pipeline_stages} pipeline stages, {settings.data_parallel} EP groups",
        f"cost model: {', '.join(_constants(settings))}",
        f"planner cost mode {settings.planner.cost}, S {settings.planner.replica_slots}, static "
        f"copies {settings.planner.static_copies}, horizon {settings.planner.horizon_steps}",
        *(
            ["relibra plans all EP groups with one layout, the others plan each group alone"]
            if settings.data_parallel > 1
            else []
        ),
    ]


def _constants(settings: SimulateSettings) -> list[str]:
    """Fields of the cost model that `--set` takes."""
    cost = settings.cost(settings.ep[0], settings.model.shape())
    values = {name: getattr(cost, name) for name in COST_FIELDS}
    return [f"{name} {'dense part' if one is None else f'{one:g}'}" for name, one in values.items()]
