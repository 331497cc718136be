"""`relibra simulate` as a user calls it."""

import json
import os
import re

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


def test_every_constant_can_be_set(capsys) -> None:
    values = {"nic_gb_per_s": 20, "hbm_gb_per_s": 1000, "expert_size": 512, "num_layers": 12,
              "block_rows": 64, "dispatch_bytes": 1, "window_s": 0.001, "in_flight": 3}  # fmt: skip
    sets = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    code, out, _ = run(
        capsys, "--generator", "medium", *SMALL, "--strategy", "relibra", "--json", *sets,
        "--config", "row_multiple=16", "--config", "max_fan_out=none", "--static-copies", "2",
        "--horizon-steps", "3", "--recompute", "full",
    )  # fmt: skip
    assert code == 0
    said = json.loads(out)["assumptions"]
    assert said["model"] == "Qwen3-30B-A3B (changed)"
    assert said["hardware"]["hbm_gb_per_s"] == 1000
    for name in ("block_rows", "dispatch_bytes", "window_s", "in_flight"):
        assert said[name] == values[name]
    planner = said["planner"]
    assert (planner["row_multiple"], planner["max_fan_out"]) == (16, None)
    assert (planner["static_copies"], planner["horizon_steps"]) == (2, 3)
    assert planner["full_recompute"] is True
    assert said["recompute"] == "full"


def test_stages_and_groups(capsys) -> None:
    layers = [word if word != "1" else "2" for word in SMALL[:8]] + SMALL[8:]
    arguments = ["--generator", "medium", *layers, "--strategy", "relibra", "--order", "random"]
    code, out, _ = run(capsys, *arguments, "--pp", "2", "--edp", "2")
    assert code == 0
    assert "2 pipeline stages, 2 EP groups" in out
    assert "with one layout" in out


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
        (["--generator", "medium", "--set", "nic"], "--set: need FIELD=VALUE, got 'nic'"),
        (["--generator", "medium", "--set", "x=1"], "--set: need a field of hardware: gemm_tflop"),
        (
            ["--generator", "medium", "--set", "top_k=x"],
            "--set: need an integer for top_k, got 'x'",
        ),
        (["--generator", "medium", "--set", "nic_gb_per_s=-1"], "nic_gb_per_s: need a number 0.0"),
        (["--generator", "medium", "--set", "block_rows=0"], "block_rows: need 1 to"),
        (["--generator", "medium", "--set", "domain_ranks=4"], "need --ranks-per-node"),
        (["x.npz", "--set", "top_k=4"], "--set: need --model for top_k"),
        (["--generator", "medium", "--ep", "8.5"], "--ep: need integers"),
        (["--generator", "medium", "--ep", "inf"], "--ep: need integers"),
        (["--generator", "medium", "--overlap", "0.5,1"], "--overlap: need one number"),
        (["--generator", "medium", "--overlap", "nan"], "overlap: need 0..1"),
        (["--generator", "medium", *SMALL, "--pp", "2"], "pipeline_stages: need at most 1 simul"),
        (["--generator", "medium", "--edp", "9999"], "data_parallel: need"),
        (["--generator", "medium", "--cost", "x"], "--cost: need one of"),
        (["--generator", "medium", "--config", "seed=1"], "--config: need --seed for seed"),
        (["--generator", "medium", "--config", "x=1"], "--config: need one of allow_filler, tol"),
        (["--generator", "medium", "--strategy", "best"], "strategy: need one of none"),
        (["--generator", "medium", "--order", "sorted"], "--order: need one of"),
        (["--generator", "medium", "--dispatch", "x", *SMALL], "dispatch: need one of flat"),
        (["missing.npz"], "missing.npz"),
        (["--generator", "medium", "--tokens", "99999999999999"], "tokens: need 20 to 16777216"),
        (["--generator", "medium", "--repeat", "2"], "--repeat: need a trace, got --generator"),
        (["--generator", "medium", "--num-experts", "8"], "--num-experts: need a trace, got"),
        (["x.npz", "--layers", "1"], "--layers: need --generator, got the file x.npz"),
        (["x.npz", "--micro-batches", "1"], "--micro-batches: need --generator, got the file"),
    ],
)
def test_bad_usage(capsys, arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/gain.png", "--plot: need a folder .*none to write gain.png, got none"),
        (".", "--plot: need a name ending in one of .*png"),
        ("gain.npz", "--plot: need a name ending in one of .*png"),
        ("folder.png", "--plot: need a file to write, got the folder"),
        ("pipe.png", "--plot: need a plain file to write, got .*pipe.png"),
    ],
)
def test_a_picture_that_cannot_be_written_costs_no_simulation(
    capsys, tmp_path, monkeypatch, name: str, message: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    monkeypatch.setattr("relibra.cli_simulate.simulate", lambda *_, **__: pytest.fail("simulated"))
    code, out, err = run(capsys, "--generator", "medium", "--plot", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert re.search(message, err), err


def test_a_batch_without_rows(capsys, tmp_path) -> None:
    np.savez(tmp_path / "c.npz", rows_MLGE=np.zeros((2, 2, 4, 8), np.int32))
    file = [str(tmp_path / "c.npz"), "--model", "gpt-oss-20b", "--ep", "4", "--reroute", "0,10"]
    code, out, _ = run(capsys, *file, "--json")
    assert code == 0
    said = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    steps = said["batches"][0]["strategies"]["relibra"]["step"]
    gross = {one["throughput_ratio_to_none"] for one in steps if not one["net"]}
    assert gross == {1.0}
    assert run(capsys, *file)[0] == 0


def test_repeated_names_and_sizes_count_once(capsys) -> None:
    code, out, _ = run(
        capsys, "--generator", "medium", *SMALL, "--ep", "2,2", "--order", "random,random",
        "--strategy", "none", "--strategy", "all", "--json",
    )  # fmt: skip
    assert code == 0
    batches = json.loads(out)["batches"]
    assert [batch["num_ranks"] for batch in batches] == [2]
    assert {"lpt", "eplb", "relibra"} <= set(batches[0]["strategies"])


def test_groups_of_a_trace_of_many_micro_batches(capsys, tmp_path) -> None:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((160, 2, 32)), axis=2)[:, :, :4].astype(np.uint8)
    np.savez(tmp_path / "t.npz", routed_experts=ids, cu_seqlens=np.arange(0, 161, 10))
    code, out, err = run(
        capsys, str(tmp_path / "t.npz"), "--ep", "2", "--edp", "2", "--order", "grouped,composed",
        "--strategy", "relibra", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert len(json.loads(out)["batches"]) == 2
