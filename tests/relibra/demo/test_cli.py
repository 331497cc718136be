import argparse
import json
import sys

import pytest

from relibra.demo import cli, run


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(prog="relibra")
    cli.add_parser(parser.add_subparsers())
    return parser


@pytest.fixture
def started(monkeypatch):
    """Settings that training was started with; nothing is trained."""
    seen = []

    def fake(settings, folder, *, quiet):
        seen.append((settings, quiet))
        return {"passed": settings.seed == 0, "failed_checks": ["gate"], "checks": []} | {
            "seconds": 1.0,
            "files": ["report.json"],
            "settings": {"inject": settings.inject},
        }

    monkeypatch.setattr(run, "run_training", fake)
    return seen


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [([], 80), (["--quick"], 10), (["--steps", "7"], 7)],
)
def test_length_of_the_run(parser, started, tmp_path, arguments, steps):
    args = parser.parse_args(["demo", "--out", str(tmp_path), *arguments])
    assert cli.run(args) == 0
    assert started[0][0].steps == steps


def test_a_failed_gate_exits_1_and_is_named(parser, started, tmp_path, capsys):
    args = parser.parse_args(
        ["demo", "--out", str(tmp_path), "--seed", "1", "--inject", "stale-replica"]
    )
    assert cli.run(args) == 1
    assert "FAILED: gate (injected fault: stale-replica)" in capsys.readouterr().out


def test_a_fault_that_nothing_caught_is_said(parser, started, tmp_path, capsys):
    args = parser.parse_args(["demo", "--out", str(tmp_path), "--inject", "stale-replica"])
    assert cli.run(args) == 0
    assert "NOT caught" in capsys.readouterr().out


def test_json_prints_the_report_and_nothing_else(parser, started, tmp_path, capsys):
    assert cli.run(parser.parse_args(["demo", "--json", "--out", str(tmp_path)])) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert started[0][1] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps: need an integer >= 1, got 0"),
        (["--seed", "-3"], "seed: need an integer in"),
        (["--trace", "missing.npz"], "missing.npz"),
        (["--trace", "missing.npz", "--hidden-size", "0"], "hidden_size: need an integer >= 1"),
        (["--trace", "x.npz", "--inject", "stale-replica"], "--inject: need the training demo"),
    ],
)
def test_bad_usage_exits_2_in_one_line(parser, started, tmp_path, capsys, arguments, message):
    args = parser.parse_args(["demo", "--out", str(tmp_path), *arguments])
    assert cli.run(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not started


@pytest.mark.parametrize("arguments", [["--quick", "--steps", "3"], ["--inject", "gremlin"]])
def test_the_parser_refuses_what_does_not_fit(parser, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["demo", *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("library", "arguments"),
    [("transformers", []), ("matplotlib", []), ("matplotlib", ["--trace", "routing.npz"])],
)
def test_a_missing_library_exits_2_with_the_remedy(
    parser, started, tmp_path, capsys, monkeypatch, library, arguments
):
    monkeypatch.setitem(sys.modules, library, None)
    assert cli.run(parser.parse_args(["demo", "--out", str(tmp_path), *arguments])) == 2
    error = capsys.readouterr().err
    assert f"needs {library}" in error
    assert "pip install relibra-kernels[demo]" in error


def test_a_rank_that_dies_exits_1(parser, tmp_path, capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("rank 2 died")

    monkeypatch.setattr(run, "run_training", broken)
    assert cli.run(parser.parse_args(["demo", "--out", str(tmp_path)])) == 1
    assert "rank 2 died" in capsys.readouterr().err
