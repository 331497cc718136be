"""`relibra simulate` as a user calls it."""

import json

import numpy as np
import pytest

from relibra.cli import main

SMALL = ["--ep", "4", "--ranks-per-node", "2", "--micro-batches", "2", "--layers", "1"]
SMALL += ["--tokens", "256", "--proposals", "200", "--threads", "1"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["simulate", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_table_carries_its_assumptions(capsys) -> None:
    code, out, _ = run(
        capsys, "--generator", "medium", *SMALL, "--strategy", "relibra", "--reroute", "0,10"
    )
    assert code == 0
    for text in ("simulated", "only planning is measured", "nic_gb_per_s 42.5", "dispatch flat",
                 "cost mode", "order grouped", "order random", "overlap 0.5", "relibra", "ideal*",
                 "rows that do not follow the plan", "gross", "net"):  # fmt: skip
        assert text in out, text


def test_json(capsys) -> None:
    code, out, _ = run(
        capsys, "--generator", "stable", *SMALL, "--strategy", "relibra", "--json", "--order",
        "random", "--set", "nic_gb_per_s=25", "--hardware", "h200", "--dispatch", "two_hop",
    )  # fmt: skip
    assert code == 0
    said = json.loads(out)
    assert said["assumptions"]["hardware"]["nic_gb_per_s"] == 25
    assert said["assumptions"]["hardware"]["sources"]["nic_gb_per_s"] == "given by the caller"
    assert said["assumptions"]["dispatch"] == "two_hop"
    assert [batch["order"] for batch in said["batches"]] == ["random"]


def test_plot(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gain.png"
    code, out, _ = run(
        capsys, "--generator", "medium", *SMALL, "--strategy", "relibra", "--plot", str(path)
    )
    assert code == 0
    assert path.stat().st_size > 10_000
    assert f"wrote {path}" in out


def test_counts_and_traces(capsys, tmp_path) -> None:
    rng = np.random.default_rng(0)
    counts, trace = tmp_path / "counts.npz", tmp_path / "trace.npz"
    np.savez(counts, rows_MLGE=rng.integers(0, 99, (2, 1, 4, 128)).astype(np.int32))
    ids = np.argsort(rng.random((80, 2, 32)), axis=2)[:, :, :4].astype(np.uint8)
    np.savez(trace, routed_experts=ids, cu_seqlens=np.arange(0, 81, 10))
    common = ["--ep", "4", "--strategy", "relibra", "--proposals", "100", "--json"]
    code, out, _ = run(capsys, str(counts), *common, "--model", "Qwen3-30B-A3B")
    assert code == 0
    assert [batch["order"] for batch in json.loads(out)["batches"]] == ["as given"]
    code, out, _ = run(capsys, str(trace), *common)
    assert code == 0
    assert json.loads(out)["assumptions"]["model"] == "gpt-oss-20b"  # by E and K


def test_ideal_can_be_asked_for(capsys) -> None:
    """plan-15: users need the number to compare with."""
    code, out, _ = run(
        capsys, "--generator", "medium", *SMALL, "--strategy", "ideal", "--order", "grouped",
        "--json",
    )  # fmt: skip
    assert code == 0
    strategies = json.loads(out)["batches"][0]["strategies"]
    assert strategies["ideal"]["report"]["worst_rank_rows"] == 256 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "need exactly one"),
        (["x.npz", "--generator", "medium"], "need exactly one"),
        (["--generator", "wild"], "--generator: need one of"),
        (["--generator", "medium", "--model", "GPT-5"], "model: need one of Qwen3-30B-A3B, .*gpt-"),
        (
            ["--generator", "medium", "--hardware", "TPU"],
            "hardware: need one of H100, H200, B200, ",
        ),
        (["--generator", "medium", "--ep", "eight"], "--ep: need numbers"),
        (["--generator", "medium", "--set", "nic"], "--set: need FIELD=NUMBER, got 'nic'"),
        (["--generator", "medium", "--set", "x=1"], "hardware: need one of gemm_tflop_per_s"),
        (["--generator", "medium", "--strategy", "best"], "strategy: need one of none"),
        (["--generator", "medium", "--order", "sorted"], "--order: need one of"),
        (["--generator", "medium", "--dispatch", "x", *SMALL], "dispatch: need one of flat"),
        (["missing.npz"], "missing.npz"),
    ],
)
def test_bad_usage(capsys, arguments: list[str], message: str) -> None:
    import re

    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert re.search(message, err), err
