"""Tables of plan reports."""

import io

import pytest
from rich.console import Console

from relibra.plan_report import PlanReport
from relibra.report import format_bytes, plan_table


def make_report(**changes):
    values = dict.fromkeys(PlanReport.__dataclass_fields__, 0)
    values |= {"strategy": "relibra", "cost": "rows", "hash": "", "push_bytes": None}
    return PlanReport(**{**values, **changes})


def text_of(table):
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def test_every_figure_stands_in_its_row():
    report = make_report(
        imbalance_mean=1.0394, imbalance_p99=1.112, imbalance_max=1.129, gap_replication=1.001,
        gap_layout=1.039, gap_total=1.04, replicas=6422, worst_rank_rows=577, planner_ms=98.46,
        moved_experts=19,
    )  # fmt: skip
    row = text_of(plan_table([report])).splitlines()[-2].split()
    assert row == [
        "relibra", "1.039", "1.112", "1.129", "1.001", "1.039", "1.040", "6422", "6422", "19",
        "577", "98.5",
    ]  # fmt: skip


def test_pushes_in_bytes_and_stars():
    table = text_of(plan_table([make_report(push_bytes=9_437_184), make_report()], ["relibra"]))
    assert "9.4 MB" in table
    assert "relibra*" in table


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (10**15, "1.0 PB"), (10**19, "10000.0 PB")],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text
