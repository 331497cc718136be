"""What the commands share: arguments, terminals, and reading loads from a file."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from relibra.array_files import clip
from relibra.dealing import deal_loads, deal_rows
from relibra.formats.npz import list_npz, read_npz
from relibra.formats.trace_file import open_trace
from relibra.limits import MAX_LAYERS
from relibra.load_matrix import LoadMatrix
from relibra.token_sample import TokenSample

if TYPE_CHECKING:
    from pathlib import Path

    from relibra.trace import RoutingTrace

# Width of output that goes to a file or a pipe, and the least that shows every table whole.
_PIPE_COLUMNS, _LEAST_COLUMNS = 120, 104
# A layer, or the first and the last of some; never more digits than any number needs.
_LAYERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


@dataclass(frozen=True)
class LoadsFile:
    """Loads read from a file, with what a report must say of them.

    Args:
        loads: gathered loads.
        moe_layers: decoder layer numbers.
        top_k: K; None where the file has counts only.
        description: the file in words, one fact an item.
        notes: what was assumed.
        sample: tokens of the batch, where they were asked for.
    """

    loads: LoadMatrix
    moe_layers: tuple[int, ...]
    top_k: int | None
    description: dict[str, object]
    notes: tuple[str, ...] = ()
    sample: TokenSample | None = None


def read_loads(
    path: Path,
    num_ranks: int,
    *,
    sequences: int | None = None,
    num_experts: int | None = None,
    sample_tokens: int = 0,
) -> LoadsFile:
    """Reads a trace and deals its sequences, or reads counts.

    Args:
        path: `.safetensors` trace, `.npz` with `routed_experts` and `cu_seqlens`, or `.npz` with
            `rows_MLGE`.
        num_ranks: G.
        sequences: sequences of a micro-batch; None is one a rank.
        num_experts: E; None is what the file says or shows.
        sample_tokens: tokens to take as a sample, spread evenly over the trace; 0 is none.

    Raises:
        OSError: no such file.
        ValueError: a file or a number that does not fit (TraceError and PlanError are ValueErrors).
    """
    if path.suffix == ".npz" and "rows_MLGE" in list_npz(path):
        loads = LoadMatrix(read_npz(path, ("rows_MLGE",))["rows_MLGE"])
        if num_experts not in (None, loads.num_experts):
            raise ValueError(
                f"--num-experts: need {loads.num_experts} like rows_MLGE of {path.name}, "
                f"got {num_experts}"
            )
        if sequences is not None:
            raise ValueError(
                f"--micro-batch-sequences: need a trace, got counts (rows_MLGE) in {path.name}"
            )
        if sample_tokens:
            raise ValueError(f"--token-sample: need a trace, got counts (rows_MLGE) in {path.name}")
        shape = list(loads.rows_MLGE.shape)
        described: dict[str, object] = {"shape": shape, "order": "as in the file"}
        note = "counts do not say K; a plan file names 1, or that of --model"
        return LoadsFile(loads, tuple(range(loads.num_layers)), None, described, (note,))
    trace = open_trace(path, num_experts)
    per = num_ranks if sequences is None else sequences
    loads = deal_loads(trace, num_ranks, per)
    described = {
        "sequences": trace.num_samples,
        "tokens": trace.num_rows,
        "sequences_per_micro_batch": per,
        "last_micro_batch_sequences": (trace.num_samples - 1) % per + 1,
        "order": "as in the file",
    }
    notes = trace.notes
    if not trace.valid.all():
        notes += (
            f"{int((~trace.valid).sum())} tokens have no known routing and are not planned for",
        )
    sample = _sample(trace, num_ranks, per, sample_tokens) if sample_tokens else None
    return LoadsFile(loads, trace.moe_layers, trace.top_k, described, notes, sample)


def _sample(trace: RoutingTrace, num_ranks: int, sequences: int, tokens: int) -> TokenSample:
    """Tokens with known routing, evenly spread over the trace, with the ranks that send them."""
    rank = np.full(trace.num_rows, -1, np.int32)
    for ranks in deal_rows(trace, num_ranks, sequences):
        for number, rows in enumerate(ranks):
            rank[rows.source_row] = number
    known = np.flatnonzero(trace.valid)
    places = np.linspace(0, len(known) - 1, min(tokens, len(known))).astype(np.int64)
    chosen = known[places]
    return TokenSample(trace.ids[chosen].astype(np.int32), rank[chosen])


def add_command(subparsers: Any, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    """Adds a command whose help ends with examples.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` gave.
        name: of the command.
        summary: one line.
        epilog: examples and exit codes, printed as they are.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def whole_number(minimum: int) -> Any:
    """An argparse type: integers from `minimum` on.

    Args:
        minimum: smallest number accepted.

    Example:
        >>> whole_number(1)("8")
        8
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            got = clip(repr(text))
            raise argparse.ArgumentTypeError(f"need an integer of at least {minimum}, got {got}")
        return value

    return parse


def layer_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: layer numbers such as `1-5` or `0,2,4-6`.

    Args:
        text: the argument.

    Example:
        >>> layer_numbers("0,2,4-6")
        (0, 2, 4, 5, 6)
    """
    layers: list[int] = []
    for piece in text.split(","):
        found = _LAYERS.fullmatch(piece.strip())
        if found is None:
            layers = []
            break
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= MAX_LAYERS:
            raise argparse.ArgumentTypeError(f"need numbers below {MAX_LAYERS}, got {last}")
        layers += range(first, last + 1)
        if first > last or len(layers) > MAX_LAYERS:
            layers = []
            break
    if not layers or layers != sorted(set(layers)):
        got = clip(repr(text))
        raise argparse.ArgumentTypeError(f"need rising numbers such as 1-5 or 0,2,4, got {got}")
    return tuple(layers)


def console() -> Console:
    """Standard output, wide enough for every table: a narrow terminal wraps, no figure is cut."""
    width = _PIPE_COLUMNS
    if sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns, _LEAST_COLUMNS)
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Writes one JSON document to standard output.

    Args:
        value: plain values.
    """
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
