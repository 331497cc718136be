"""The table while it grows: colours and a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from relibra.demo.records import StepRecord


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        title: One or two words.
        width: Characters; titles and values are set right.
        is_time: Whether equal runs may print different values.
    """

    title: str
    width: int
    is_time: bool = False


STEP_COLUMNS = (
    Column("step", 4),
    Column("reward", 6),
    Column("rank imbalance", 14),
    Column("node imbalance", 14),
    Column("replicas", 8),
    Column("moves (node)", 12),
    Column("plan ms", 7, is_time=True),
    Column("push MB", 7),
    Column("d grad", 7),
    Column("d param", 7),
    Column("d logp", 7),
)
STEP_LEGEND = (
    "imbalance: max / mean rows of a rank (node), without balancing -> balanced; moves: experts "
    "with a new home rank (of these, on a new node);\nd: difference to the unbalanced control "
    "(gradient: relative norm, parameters: largest), of rollout and training log-probs: largest"
)


def step_cells(record: StepRecord) -> list[str]:
    """Text of one step, one entry a column of ``STEP_COLUMNS``."""
    return [
        str(record.step),
        f"{record.reward:.3f}",
        f"{record.rank_imbalance_none:.3f} -> {record.rank_imbalance:.3f}",
        f"{record.node_imbalance_none:.3f} -> {record.node_imbalance:.3f}",
        str(record.replicas),
        f"{record.moves} ({record.cross_node_moves})",
        f"{record.times.get('planner_ms', 0.0):.1f}",
        f"{record.push_bytes / 1e6:.2f}",
        f"{record.gradient_difference:.1e}",
        f"{record.parameter_difference:.1e}",
        f"{record.log_prob_difference:.1e}",
    ]


class LiveTable:
    """Prints one row at a time; rows scroll above a progress bar on a terminal.

    Args:
        columns: Columns of the table.
        num_rows: Rows that will come, for the progress bar.
        quiet: Print nothing at all.
        stream: Where to print, standard output by default.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        num_rows: int,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._columns, self._num_rows, self._quiet = columns, num_rows, quiet
        self._stream = stream or sys.stdout
        self._progress: Progress | None = None

    @contextlib.contextmanager
    def open(self, legend: str = "") -> Iterator[LiveTable]:
        """Print the header and keep the progress bar alive inside the block."""
        console = Console(file=self._stream, highlight=False)
        if self._quiet:
            yield self
            return
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self._progress.add_task("training", total=self._num_rows)
        with self._progress or contextlib.nullcontext():
            if legend:
                self._print(legend, "dim")
            self._print(self._line([column.title for column in self._columns]), "bold")
            yield self
        self._progress = None

    def add(self, cells: Sequence[str], *, good: bool = True) -> None:
        """Print a row.

        Args:
            cells: Text of each column.
            good: False marks the row on a terminal.
        """
        if self._quiet:
            return
        self._print(self._line(cells), "" if good else "bold red")
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])
            self._progress.refresh()

    def _line(self, cells: Sequence[str]) -> str:
        pairs = zip(self._columns, cells, strict=True)
        return "  ".join(cell.rjust(column.width) for column, cell in pairs)

    def _print(self, text: str, style: str) -> None:
        if self._progress is None:
            print(text, file=self._stream, flush=True)
        else:
            # As a Text: a style given to print() would also colour the bar below.
            self._progress.console.print(Text(text, style), soft_wrap=True)
