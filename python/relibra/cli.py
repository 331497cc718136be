"""The command `relibra`. Exit codes: 0 done, 1 problems found, 2 bad usage or an unusable file."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import traceback
from typing import TYPE_CHECKING

from relibra import cli_check, cli_plan, cli_simulate, doctor

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPECTED = (OSError, TypeError, ValueError, RuntimeError)

_DESCRIPTION = """\
Balanced MoE training in reinforcement learning: routing recorded by the rollout is known before the
training step, so expert placement, replicas and row quotas are planned ahead of it."""

_EPILOG = """\
examples:
  relibra demo --quick
  relibra plan trace.npz --nodes 2 --ranks-per-node 8 --micro-batch-sequences 8
  relibra simulate trace.npz --ep 8,16,32
  relibra check reply.json --num-layers 6 --moe-layers 1-5 --top-k 4 --num-experts 16
  relibra doctor

exit codes: 0 done, 1 problems found, 2 bad usage or a file that cannot be used
relibra --debug COMMAND ... also shows where in the code an error came from.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="relibra",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("relibra-kernels")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    parser.add_argument("--version", action="version", version=f"relibra {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from relibra.demo import cli as demo  # only here: `import relibra.cli` stays light

    demo.add_parser(commands).set_defaults(run=demo.run)
    for command in (cli_plan, cli_simulate, cli_check, doctor):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None is those of the process.

    Returns:
        The exit code.
    """
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away (`relibra plan ... | head`); keep the interpreter's exit quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    # Whatever a file or a number has broken, the caller gets one line and code 2.
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        print(
            f"relibra {args.command}: error: {_in_one_line(args.command, error)}", file=sys.stderr
        )
        return 2
    return code


def _in_one_line(command: str, error: Exception) -> str:
    """The message of an error; with its class where the message was not written for users."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        text = f"need more memory than there is{': ' * bool(text)}{text}"
    elif isinstance(error, RecursionError) or not isinstance(error, _EXPECTED):
        text = f"{type(error).__name__}{': ' * bool(text)}{text}"
    else:
        return text
    return f"{text} (`relibra --debug {command} ...` shows where)"
