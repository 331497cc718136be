"""Tables of plan reports for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra.plan_report import PlanReport

LEGEND = """\
imbalance  max / mean of rows over ranks; mean: sum of the maxima / sum of the means; p99 and max:
           of single (micro-batch, layer) instances; instances without rows are left out
gap        sum of the fullest ranks / bound; replic.: the fullest node shared evenly by its ranks;
           total: an even share of everything (1 is optimal); layout: sum of the fullest nodes /
           the least that any layout allows
push       weights copied to replicas in one forward of all micro-batches and layers
moved      experts whose home differs from the layout that the batch starts from, all layers
worst rank most rows of a rank in one instance
*          for comparison only, cannot be executed"""


def plan_table(reports: Sequence[PlanReport], report_only: Sequence[str] = ()) -> Table:
    """One row a strategy.

    Args:
        reports: what to compare, in order.
        report_only: names of strategies that cannot be executed; they get a star.

    Returns:
        A table of rich.
    """
    in_bytes = any(report.push_bytes is not None for report in reports)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("strategy", no_wrap=True)
    for name in (
        "imbalance\nmean",
        "\np99",
        "\nmax",
        "gap\nreplic.",
        "\nlayout",
        "\ntotal",
        "\nreplicas",
        "push\nbytes" if in_bytes else "push\nexperts",
        "moved\nexperts",
        "worst\nrank",
        "planner\nms",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        pushed = str(report.replicas)
        if report.push_bytes is not None:
            pushed = format_bytes(report.push_bytes)
        table.add_row(
            report.strategy + ("*" if report.strategy in report_only else ""),
            f"{report.imbalance_mean:.3f}",
            f"{report.imbalance_p99:.3f}",
            f"{report.imbalance_max:.3f}",
            f"{report.gap_replication:.3f}",
            f"{report.gap_layout:.3f}",
            f"{report.gap_total:.3f}",
            f"{report.replicas}",
            pushed,
            f"{report.moved_experts}",
            f"{report.worst_rank_rows}",
            f"{report.planner_ms:.1f}",
        )
    return table


def format_bytes(num_bytes: int) -> str:
    """A size in the largest decimal unit that leaves a number of at least 1.

    Args:
        num_bytes: bytes.

    Example:
        >>> format_bytes(0), format_bytes(9_437_184), format_bytes(2_500_000_000)
        ('0 B', '9.4 MB', '2.5 GB')
    """
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
