"""`relibra demo --trace`: routing files through balanced and unbalanced layers."""

import argparse
import json

import numpy as np
import pytest

from relibra.demo import cli, replay
from relibra.demo.inject import DropReplicaGrad
from relibra.trace import RoutingTrace


def routing(num_sequences=10, tokens=12, num_layers=3, num_experts=8, top_k=2):
    """Skewed random routing: low ids are hot."""
    rng = np.random.default_rng(0)
    noise = rng.random((num_sequences * tokens, num_layers, num_experts))
    ids = np.argsort(noise + 0.12 * np.arange(num_experts), axis=-1)[..., :top_k]
    return {
        "routed_experts": ids.astype(np.uint8),
        "cu_seqlens": np.arange(0, len(ids) + 1, tokens),
    }


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "routing.npz"
    np.savez(path, **routing())
    return path


@pytest.fixture
def demo(tmp_path):
    parser = argparse.ArgumentParser(prog="relibra")
    cli.add_parser(parser.add_subparsers())
    out = str(tmp_path / "out")
    return lambda *words: cli.run(parser.parse_args(["demo", "--out", out, *map(str, words)]))


def test_a_routing_file_is_replayed_and_both_sides_agree(demo, trace_file, tmp_path, capsys):
    sizes = ["--hidden-size", 16, "--expert-size", 24, "--micro-batch-sequences", 4]
    assert demo("--trace", trace_file, "--json", *sizes) == 0
    made = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in made["checks"]}
    assert checks["output-vs-none"]["value"] == 0.0  # bitwise
    assert checks["weight-gradient-vs-none"]["value"] < 1e-6
    assert made["imbalance"]["rank_imbalance"] < made["imbalance"]["rank_imbalance_none"]
    assert made["plan"]["replicas"] > 0
    assert len(made["micro_batches"]) == 3  # 4 + 4 + a short one of 2 sequences
    assert made["trace"]["num_experts"] == 8
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == made
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


def test_replica_gradients_that_stay_away_are_caught(demo, trace_file, monkeypatch, capfd):
    init = replay.ReplaySide.__init__

    def broken(self, *args):
        init(self, *args)
        DropReplicaGrad().install(self.runtime, self.stack)

    monkeypatch.setattr(replay.ReplaySide, "__init__", broken)
    assert demo("--trace", trace_file, "--steps", 1, "--hidden-size", 8, "--expert-size", 8) == 1
    output = capfd.readouterr().out
    assert "FAILED: weight-gradient-vs-none" in output
    assert output.splitlines()[2].split()[0] == "micro-batch"


def spoil(name):
    content = routing()
    if name == "duplicate ids":
        content["routed_experts"][7, 1] = [2, 2]
    elif name == "rows without a sequence":
        content["cu_seqlens"] = content["cu_seqlens"][:-1]
    return content


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("duplicate ids", "duplicate_id"),
        ("rows without a sequence", "cu_seqlens"),
    ],
)
def test_a_bad_file_exits_2_in_one_line(demo, tmp_path, capsys, name, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **spoil(name))
    assert demo("--trace", path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_tokens_without_routing_cannot_be_replayed(demo, tmp_path, capsys):
    content = routing()
    trace = RoutingTrace(
        content["routed_experts"],
        np.arange(120) != 5,
        content["cu_seqlens"],
        moe_layers=(0, 1, 2),
        num_experts=8,
    )
    trace.save(tmp_path / "routing.safetensors")
    assert demo("--trace", tmp_path / "routing.safetensors") == 2
    assert "got 1 tokens without" in capsys.readouterr().err


def test_a_file_that_is_no_trace_exits_2(demo, tmp_path, capsys):
    path = tmp_path / "noise.safetensors"
    path.write_bytes(b"\xff" * 64)
    assert demo("--trace", path) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-experts", 4], "id_range"),
        (["--micro-batch-sequences", 3], "need a multiple or a divisor of 4 ranks, got 3"),
    ],
)
def test_options_that_do_not_fit_the_file_exit_2(demo, trace_file, capsys, words, message):
    assert demo("--trace", trace_file, *words) == 2
    assert message in capsys.readouterr().err
