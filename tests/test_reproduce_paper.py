"""`perf/reproduce_paper.py --smoke` has a row for every claim, and its error where published."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.xdist_group("paper"), pytest.mark.timeout(300)]  # the rows are made once


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper") / "rows.jsonl"
    command = [sys.executable, "perf/reproduce_paper.py", "--smoke", "--threads", "1", "--json"]
    done = subprocess.run(
        [*command, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("claim", "published"),
    [
        ("relibra / Megatron-like none, up to", [1.6, 1.6]),
        ("relibra / EPLB+ (given this batch), up to", [1.2, 1.2]),
        ("all models and kinds: relibra / Balanced", [0.90, 0.94]),
        ("medium: relibra / PopFetcher-like history", None),
        ("medium: relibra / LPLB+-like", None),
        ("ablation: + reordering / none", [1.15, 1.15]),
        ("ablation: + reordering + replication / none", [1.39, 1.39]),
        ("reordering / LPT", None),
        ("reordering / locality only", None),
        ("replication / placement only", None),
        ("replication / splitting only", None),
        ("imbalance of relibra, EP 8", [1.0, 1.08]),
        ("imbalance of none, EP 8", [1.51, 1.51]),
        ("hot experts shared with the next micro-batch", None),
        ("planning of a batch", None),
        ("reordering / batch time", [1.4, 2.1]),
        ("replica buffer / parameter memory", [0.13, 1.62]),
        ("exposed pushes and replica gradients / batch time", None),
        ("weight sync, relibra", [0.19, 0.32]),
        ("gradient return, relibra", [1.9, 2.4]),
        ("planning of a layer and micro-batch, relibra", None),
        ("donor_only (UltraEP-like) / none", [1.49, 1.49]),
    ],
)
def test_every_claim_has_a_row(rows, claim, published):
    found = [row for row in rows if claim in row["claim"]]
    assert found
    for row in found:
        assert row["kind"] == "simulated"
        assert row["published"] == published
        assert bool(row["error"]) == (published is not None)
        assert row["simulated"][0] <= row["simulated"][1]


def test_an_error_is_that_of_the_middle_or_of_the_best(rows):
    for row in rows:
        if row["published"] is None:
            continue
        middle = max if row["up_to"] else lambda pair: sum(pair) / 2
        expected = 100 * (middle(row["simulated"]) / middle(row["published"]) - 1)
        assert float(row["error"].split()[0]) == pytest.approx(expected, abs=0.5001)
