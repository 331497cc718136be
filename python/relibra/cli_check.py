"""`relibra check`: whether a file of routing, counts or a plan can be used, and what is in it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relibra.cli_input import add_command, console, layer_numbers, print_json, whole_number
from relibra.formats import FORMATS, load_routing
from relibra.formats.npz import list_npz, read_npz
from relibra.formats.trace_file import open_trace
from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra_kernels.errors import PlanError, TraceError, TraceWarning

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from relibra.trace import RoutingTrace

_SUMMARY = "check a file of recorded routing, counts or a plan"
_EPILOG = """\
Routing of a rollout engine does not say which model it is of: pass all four sizes. A .safetensors
trace says it itself; from an .npz trace the sizes are read where they are not passed.

examples:
  relibra check reply.json --num-layers 6 --moe-layers 1-5 --top-k 4 --num-experts 16
  relibra check trace.safetensors
  relibra check plan.npz

exit codes: 0 usable, 1 refused or a warning, 2 bad usage or no such file
"""
_MODEL = ("num_layers", "moe_layers", "top_k", "num_experts")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks wrong.

    Args:
        kind: `"error"` or `"warning"`.
        message: what was needed and what was found.
        code: code of the check; "" for plans and counts.
        sample: sample number, if one.
        layer: decoder layer number, if one.
        row: row of the sample, if one.
    """

    kind: str
    message: str
    code: str = ""
    sample: int | None = None
    layer: int | None = None
    row: int | None = None


def add_parser(subparsers: Any) -> None:
    """Adds the command.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` gave.
    """
    parser = add_command(subparsers, "check", _SUMMARY, _EPILOG)
    parser.set_defaults(run=run)
    positive = whole_number(1)
    parser.add_argument("file", type=Path, metavar="FILE", help="routing, counts or a plan")
    parser.add_argument("--num-layers", type=positive, metavar="N", help="decoder layers")
    parser.add_argument("--moe-layers", type=layer_numbers, metavar="A-B", help="such as 1-5")
    parser.add_argument("--top-k", type=positive, metavar="K", help="choices a token")
    parser.add_argument("--num-experts", type=positive, metavar="E", help="experts of a layer")
    names = ["auto", *(each.NAME for each in FORMATS)]
    parser.add_argument("--format", choices=names, default="auto", help="(default auto)")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: parsed arguments.

    Returns:
        0 usable, 1 refused or a warning.

    Raises:
        OSError: no such file.
        ValueError: sizes of the model that are missing or no sizes.
    """
    if not args.file.is_file():
        raise FileNotFoundError(f"FILE: need a file, got {args.file}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            contents = _read(args)
            findings: list[Finding] = []
        except TraceError as error:
            contents = {}
            findings = [_finding("error", error)]
        except PlanError as error:
            contents = {}
            findings = [Finding("error", str(error))]
    findings += [
        _finding("warning", each.message)
        for each in caught
        if isinstance(each.message, TraceWarning)
    ]
    if args.json:
        listed = [vars(finding) for finding in findings]
        print_json(
            {"command": "check", "file": args.file.name, "ok": not findings}
            | {"contents": contents, "findings": listed}
        )
    else:
        _print(args.file.name, contents, findings)
    return 1 if findings else 0


def _read(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the file in the way that fits it, and says what is in it."""
    path, given = args.file, [name for name in _MODEL if getattr(args, name) is not None]
    members = list_npz(path) if path.suffix == ".npz" else {}
    if "home_slot_expert" in members:
        return _describe_plan(StepPlan.load(path))
    if "rows_MLGE" in members:
        return _describe_loads(LoadMatrix(read_npz(path, ("rows_MLGE",))["rows_MLGE"]))
    brings_model = path.suffix == ".safetensors" or "cu_seqlens" in members
    if brings_model and set(given) <= {"num_experts"} and args.format in ("auto", "relibra"):
        return _describe_trace(open_trace(path, args.num_experts))
    missing = [f"--{name.replace('_', '-')}" for name in _MODEL if name not in given]
    if missing:
        raise ValueError(f"{', '.join(missing)}: need the sizes of the model, got none")
    model = {name: getattr(args, name) for name in _MODEL}
    return _describe_trace(load_routing(path, format=args.format, **model))


def _describe_trace(trace: RoutingTrace) -> dict[str, Any]:
    return {
        "kind": "routing",
        "samples": trace.num_samples,
        "rows": trace.num_rows,
        "rows_known": int(trace.valid.sum()),
        "rows_unknown": int((~trace.valid).sum()),
        "moe_layers": list(trace.moe_layers),
        "top_k": trace.top_k,
        "num_experts": trace.num_experts,
        "dtype": str(trace.ids.dtype),
        "has_last_row": trace.has_last_row,
        "notes": list(trace.notes),
    }


def _describe_loads(loads: LoadMatrix) -> dict[str, Any]:
    return {
        "kind": "counts",
        "micro_batches": loads.num_micro_batches,
        "layers": loads.num_layers,
        "ranks": loads.num_ranks,
        "num_experts": loads.num_experts,
        "rows": int(loads.totals_MLE.sum()),
        "notes": [],
    }


def _describe_plan(plan: StepPlan) -> dict[str, Any]:
    return {
        "kind": "plan",
        "strategy": plan.strategy,
        "cost": plan.config.cost,
        "nodes": plan.topology.num_nodes,
        "ranks": plan.topology.num_ranks,
        "moe_layers": list(plan.shape.moe_layers),
        "num_experts": plan.shape.num_experts,
        "passes": {name: one.num_micro_batches for name, one in plan.passes.items()},
        "imbalance_mean": plan.report.imbalance_mean,
        "replicas": plan.report.replicas,
        "static_copies": int((plan.static_slot_expert_LGX >= 0).sum()),
        "hash": plan.hash,
        "notes": [],
    }


def _finding(kind: str, problem: TraceError | TraceWarning | str | Warning) -> Finding:
    place = {name: getattr(problem, name, None) for name in ("sample", "layer", "row")}
    return Finding(kind, str(problem), getattr(problem, "code", ""), **place)


def _print(name: str, contents: dict[str, Any], findings: Sequence[Finding]) -> None:
    out = console()
    for finding in findings:
        out.print(f"{finding.kind}: {finding.message}", soft_wrap=True)
    for note in contents.get("notes", []):
        out.print(f"note: {note}", soft_wrap=True)
    facts = [
        f"{key.replace('_', ' ')} {_short(value)}"
        for key, value in contents.items()
        if key not in ("kind", "notes")
    ]
    if contents:
        out.print(f"{contents['kind']}: {', '.join(facts)}", soft_wrap=True)
    errors = any(finding.kind == "error" for finding in findings)
    verdict = "refused" if errors else "usable, with warnings" if findings else "ok"
    out.print(f"{name}: {verdict}", soft_wrap=True)


def _short(value: object) -> str:
    """Runs of layer numbers as `1-5`, and floats with four decimals."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and len(value) > 2 and value[-1] - value[0] == len(value) - 1:
        return f"{value[0]}-{value[-1]}"
    return str(value)
