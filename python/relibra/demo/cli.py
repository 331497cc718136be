"""``relibra demo``: arguments, exit codes and what is printed around the table."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from relibra.demo.settings import FULL_RUN_STEPS, INJECTIONS, QUICK_RUN_STEPS, DemoSettings
from relibra_kernels.errors import PlanError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable

_EPILOG = """\
examples:
  relibra demo                        80 steps of reinforcement learning, about 1.5 minutes
  relibra demo --quick                10 steps; reward gates are not judged
  relibra demo --inject stale-replica a fault that the checks must catch: exit code 1
  relibra demo --trace FILE           replay a routing file through MoE layers instead

exit codes: 0 all checks passed, 1 a check failed or a rank died, 2 bad usage
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``demo`` command.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` gave.

    Returns:
        The parser of the command.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="reinforcement learning of a small MoE model, balanced, on this machine's CPU",
        description="Reinforcement learning of a small MoE language model across 4 processes laid "
        "out as 2 nodes x 2 ranks: rollout, recorded routing, plan, expert reordering, replicas, "
        "training step; every step is compared with an unbalanced control.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help=f"{QUICK_RUN_STEPS} steps")
    length.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"training steps (default {FULL_RUN_STEPS}); with --trace the first N micro-batches",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same table (default 0)")
    parser.add_argument("--json", action="store_true", help="print the report instead of a table")
    parser.add_argument(
        "--out", type=Path, default=Path("relibra-demo"), help="output folder (default %(default)s)"
    )
    parser.add_argument("--inject", choices=INJECTIONS, help="fault that a check must catch")
    replay = parser.add_argument_group("replay of a routing file")
    replay.add_argument("--trace", type=Path, metavar="FILE", help=".safetensors or .npz file")
    replay.add_argument("--hidden-size", type=int, default=64, help="D (default %(default)s)")
    replay.add_argument("--expert-size", type=int, default=64, help="F (default %(default)s)")
    replay.add_argument("--num-experts", type=int, help="E (default: largest id + 1)")
    replay.add_argument(
        "--micro-batch-sequences", type=int, default=8, metavar="B", help="(default %(default)s)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments of :func:`add_parser`.

    Returns:
        0 all checks passed, 1 a check failed or a rank died, 2 bad usage or a missing library.
    """
    from relibra.demo.model import DemoSetupError

    try:
        args.out.mkdir(parents=True, exist_ok=True)
        start = _prepare_replay(args) if args.trace is not None else _prepare_training(args)
    except (DemoSetupError, TraceError, PlanError, ValueError, OSError) as error:
        print(f"relibra demo: {error}", file=sys.stderr)
        return 2
    try:
        report = start()
    except (RuntimeError, TimeoutError) as error:
        Console().show_cursor(True)  # a killed rank 0 cannot end its progress bar
        print(f"relibra demo: {error}", file=sys.stderr)
        return 1
    if args.json:
        from relibra.demo.report import to_json

        print(to_json(report))
    else:
        _print_verdict(report, args.out)
    return 0 if report["passed"] else 1


def _prepare_training(args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    from relibra.demo.run import check_libraries, run_training

    steps = QUICK_RUN_STEPS if args.quick else args.steps
    steps = FULL_RUN_STEPS if steps is None else steps
    settings = DemoSettings(steps=steps, seed=args.seed, inject=args.inject)
    check_libraries()
    return partial(run_training, settings, args.out, quiet=args.json)


def _prepare_replay(args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    from relibra.demo.model import import_demo_library
    from relibra.demo.replay import load_batch, run_replay
    from relibra.demo.replay_layers import ReplaySettings

    if args.inject is not None:
        raise ValueError("--inject: need the training demo, got it together with --trace")
    settings = ReplaySettings(
        seed=args.seed,
        hidden_size=args.hidden_size,
        expert_size=args.expert_size,
        micro_batch_sequences=args.micro_batch_sequences,
        max_micro_batches=QUICK_RUN_STEPS if args.quick else args.steps,
    )
    import_demo_library("matplotlib")
    batch = load_batch(args.trace, settings, args.num_experts)
    return partial(run_replay, batch, settings, args.out, quiet=args.json)


def _print_verdict(report: dict[str, Any], folder: Path) -> None:
    print()
    for check in report["checks"]:
        mark = "ok  " if check["passed"] else "FAIL"
        place = "" if check["step"] is None else f"  (step {check['step']})"
        print(
            f"{mark}  {check['name']:38} {check['value']:10.4g}  "
            f"{check['relation']} {check['limit']:g}{place}"
        )
    print(f"\n{report['seconds']:.0f} s; files are in {folder}: {', '.join(report['files'])}")
    inject = report["settings"].get("inject")
    if not report["passed"]:
        cause = f" (injected fault: {inject})" if inject else ""
        print(f"FAILED: {', '.join(report['failed_checks'])}{cause}")
    elif inject:
        print(f"the injected fault {inject} was NOT caught")
    else:
        print("all checks passed")
