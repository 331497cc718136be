"""The command `relibra`. Exit codes: 0 done, 1 problems found, 2 bad usage or an unusable file."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING

from relibra import cli_check, cli_plan, doctor

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTION = """\
Balanced MoE training in reinforcement learning: routing recorded by the rollout is known before the
training step, so expert placement, replicas and row quotas are planned ahead of it."""

_EPILOG = """\
examples:
  relibra demo --quick
  relibra plan trace.npz --nodes 2 --ranks-per-node 8 --micro-batch-sequences 8
  relibra check reply.json --num-layers 6 --moe-layers 1-5 --top-k 4 --num-experts 16
  relibra doctor

exit codes: 0 done, 1 problems found, 2 bad usage or a file that cannot be used
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
    parser.add_argument("--version", action="version", version=f"relibra {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from relibra.demo import cli as demo  # only here: `import relibra.cli` stays light

    demo.add_parser(commands).set_defaults(run=demo.run)
    for command in (cli_plan, cli_check, doctor):
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
    except MemoryError as error:
        what = str(error) or "not enough memory"
        print(f"relibra {args.command}: error: sizes too large for memory: {what}", file=sys.stderr)
        return 2
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        print(f"relibra {args.command}: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # a damaged file can make a reader fail in any way
        name = type(error).__name__
        print(f"relibra {args.command}: error: {name}: {error}", file=sys.stderr)
        return 2
    return code
