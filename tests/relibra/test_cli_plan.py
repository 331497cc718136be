"""`relibra plan`: figures, files, and refusals without a traceback."""

import json
import os

import numpy as np
import pytest

from relibra.cli import main
from relibra.cli_plan import STRATEGIES
from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.trace import RoutingTrace


@pytest.fixture
def counts(tmp_path):
    """Counts of 2 micro-batches, 3 layers, 4 ranks, 8 experts, experts 0 and 1 busy."""
    rows = np.random.default_rng(0).integers(0, 20, (2, 3, 4, 8))
    rows[..., :2] += 100
    np.savez(tmp_path / "counts.npz", rows_MLGE=rows)
    return tmp_path / "counts.npz"


def run(*arguments):
    return main(["plan", *(str(one) for one in arguments)])


def run_json(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


NODES = ("--nodes", 2, "--ranks-per-node", 2)


@pytest.mark.parametrize(
    ("nodes", "none", "relibra"), [(1, 1.53, 1.01), (2, 2.05, 1.03), (4, 2.95, 1.07)]
)
def test_imbalance_of_the_public_trace(shared_dir, capsys, nodes, none, relibra):
    path = shared_dir / "data/routing/gptoss20b_routing.npz"
    made = run_json(
        capsys, path, "--num-experts", 32, "--nodes", nodes, "--ranks-per-node", 8,
        "--micro-batch-sequences", 8, "--replica-slots", 1, "--strategy", "none,relibra",
    )  # fmt: skip
    assert made["strategies"]["none"]["imbalance_mean"] == pytest.approx(none, abs=0.0055)
    assert made["strategies"]["relibra"]["imbalance_mean"] <= relibra
    assert (made["num_micro_batches"], made["num_layers"], made["top_k"]) == (11, 24, 4)
    assert made["cost"] == "rows"
    assert made["simulated"] is True


def test_all_strategies_are_compared_by_default(counts, capsys):
    made = run_json(capsys, counts, *NODES)
    assert list(made["strategies"]) == list(STRATEGIES)
    not_executable = {name for name, one in made["strategies"].items() if not one["is_executable"]}
    assert not_executable == {"eplb_oracle", "ideal"}
    means = {name: one["imbalance_mean"] for name, one in made["strategies"].items()}
    assert means["ideal"] <= means["relibra"] <= means["none"]
    assert run(counts, *NODES) == 0
    assert " ideal* " in capsys.readouterr().out


def test_one_table_with_all_figures(counts, capsys):
    assert run(counts, *NODES, "--strategy", "none,relibra") == 0
    text = capsys.readouterr().out
    for word in (
        "imbalance", "p99", "max", "replic.", "layout", "total", "replicas", "experts",
        "worst", "planner", "cost mode rows", "simulated", "order as in the file",
    ):  # fmt: skip
        assert word in text
    lines = [line for line in text.splitlines() if line.startswith((" none", " relibra"))]
    assert [line.split()[0] for line in lines] == ["none", "relibra"]
    assert all(len(line.split()) == 12 and len(line) <= 104 for line in lines)


def test_bytes_need_the_sizes_of_an_expert(counts, capsys):
    sizes = ("--hidden-size", 1000, "--expert-size", 100)
    made = run_json(capsys, counts, *NODES, "--strategy", "relibra", *sizes)["strategies"][
        "relibra"
    ]
    assert made["replicas"] > 0
    assert made["push_bytes"] == made["replicas"] * 3 * 1000 * 100 * 2
    made = run_json(capsys, counts, *NODES, "--strategy", "relibra")["strategies"]["relibra"]
    assert made["push_bytes"] is None
    assert run(counts, *NODES, "--hidden-size", 64) == 2
    assert "--hidden-size, --expert-size: need both" in capsys.readouterr().err


def test_relibra_is_never_worse_than_none(counts, capsys):
    made = run_json(capsys, counts, *NODES, "--strategy", "none", "--strategy", "relibra")
    figures = made["strategies"]
    assert figures["relibra"]["imbalance_mean"] < figures["none"]["imbalance_mean"]


def test_out_writes_the_plan_of_relibra(counts, tmp_path, capsys):
    out = tmp_path / "plan.npz"
    made = run_json(
        capsys, counts, *NODES, "--strategy", "none,relibra", "--out", out, "--with-quota"
    )
    loads = LoadMatrix(np.load(counts)["rows_MLGE"])
    plan = StepPlan.load(out, {"train": loads})
    assert plan.strategy == "relibra"
    assert plan.hash == made["strategies"]["relibra"]["hash"]
    assert "quota" in np.load(out).files
    assert made["out"] == str(out)


def test_time_mode_needs_and_uses_the_sizes_of_the_model(counts, tmp_path, capsys):
    out = tmp_path / "plan.npz"
    np.savez(counts, rows_MLGE=np.load(counts)["rows_MLGE"] * 100)
    made = run_json(
        capsys, counts, *NODES, "--strategy", "none,relibra", "--cost", "time", "--hardware",
        "h200", "--hidden-size", 4096, "--expert-size", 1024, "--set", "slot_us=2", "--out", out,
    )  # fmt: skip
    assert made["cost"] == "time"
    assert made["planner"]["hardware"] == "H200"
    one = made["strategies"]["relibra"]
    assert one["imbalance_mean"] < made["strategies"]["none"]["imbalance_mean"]
    held = StepPlan.load(out).passes["train"].slot_rows_MLGn[..., -1]  # S = 1
    assert (held > 0).sum() == one["replicas"] > 0
    assert (held[held > 0] >= 1024).all()
    assert not (held % 128).any()
    assert run(counts, *NODES, "--cost", "time", "--hidden-size", 64, "--expert-size", 64) == 0
    assert "cost mode time (H100, no dense part, recompute none)" in capsys.readouterr().out


def test_a_preset_gives_k_e_and_sizes(tmp_path, capsys):
    ids = np.argsort(np.random.default_rng(0).random((40, 2, 31)), axis=2)[:, :, :4]
    np.savez(tmp_path / "t.npz", routed_experts=ids, cu_seqlens=[0, 20, 40])
    arguments = (tmp_path / "t.npz", *NODES, "--strategy", "relibra", "--model", "GPT-OSS-20B")
    made = run_json(capsys, *arguments)
    assert (made["num_experts"], made["top_k"], made["input"]["notes"]) == (32, 4, [])
    one = made["strategies"]["relibra"]
    assert one["push_bytes"] == one["replicas"] * 3 * 2880 * 2880 * 2


def test_static_copies_and_settings_reach_the_planner(counts, tmp_path, capsys):
    out = tmp_path / "plan.npz"
    made = run_json(
        capsys, counts, *NODES, "--strategy", "relibra", "--static-copies", 2, "--out", out,
        "--horizon-steps", 3, "--config", "max-fan-out=1", "--config", "allow_filler=false",
    )  # fmt: skip
    plan = StepPlan.load(out, {"train": LoadMatrix(np.load(counts)["rows_MLGE"])})
    assert (plan.static_slot_expert_LGX >= 0).any()
    assert plan.config.static_copies == made["planner"]["static_copies"] == 2
    assert (plan.config.horizon_steps, plan.config.max_fan_out) == (3, 1)
    assert plan.config.allow_filler is False
    assert made["strategies"]["relibra"]["hash"] == plan.hash


def test_planning_from_the_layouts_of_a_plan_moves_nothing(counts, tmp_path, capsys):
    out, again = tmp_path / "plan.npz", tmp_path / "again.npz"
    one = ("--strategy", "relibra", "--out")
    assert run(counts, *NODES, *one, out) == 0
    assert run(counts, *NODES, *one, again, "--layout", out) == 0
    assert "starts from the layouts of plan.npz" in capsys.readouterr().out
    loads = {"train": LoadMatrix(np.load(counts)["rows_MLGE"])}
    first, second = StepPlan.load(out, loads), StepPlan.load(again, loads)
    assert second.base_layouts == first.layouts == second.layouts
    assert first.report.moved_experts > 0
    assert second.report.moved_experts == 0


def test_a_token_sample_is_taken_from_a_trace(tmp_path, capsys):
    rng = np.random.default_rng(0)
    pair = rng.integers(0, 8, (800, 1))  # experts e and e + 8 are always chosen together
    ids = np.stack([pair, pair + 8], axis=2)
    np.savez(tmp_path / "t.npz", routed_experts=ids, cu_seqlens=np.arange(0, 801, 50))
    out = tmp_path / "plan.npz"
    made = run_json(
        capsys, tmp_path / "t.npz", *NODES, "--strategy", "relibra", "--token-sample", 400,
        "--out", out,
    )  # fmt: skip
    assert made["token_sample"] == 400
    home = StepPlan.load(out).layouts[0].home_rank_E // 2
    assert (home[:8] == home[8:]).all()  # one node each
    assert run(tmp_path / "t.npz", *NODES, "--strategy", "none", "--token-sample", 9999) == 0
    assert "token sample: 800 tokens" in capsys.readouterr().out


def test_out_of_a_single_strategy(counts, tmp_path):
    out = tmp_path / "plan.npz"
    assert run(counts, *NODES, "--strategy", "none", "--out", out) == 0
    assert StepPlan.load(out).strategy == "none"


def test_the_plan_is_not_written_over_its_input(counts, capsys):
    before = counts.read_bytes()
    link = counts.with_name("link.npz")
    link.symlink_to(counts)
    for out in (counts, counts.parent / "." / ".." / counts.parent.name / counts.name, link):
        assert run(counts, *NODES, "--strategy", "none", "--out", out) == 2
        assert "--out: need another file than TRACE" in capsys.readouterr().err
    assert counts.read_bytes() == before
    plan = counts.with_name("plan.npz")
    one = (counts, *NODES, "--strategy", "reorder_only", "--out", plan)
    assert run(*one) == 0
    assert run(*one) == 0  # over an earlier plan, but not over the one it starts from
    capsys.readouterr()
    assert run(*one, "--layout", plan) == 2
    assert "--out: need another file than --layout" in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_is_not_made(counts, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "pipe.npz")
    monkeypatch.setattr("relibra.cli_plan.plan_step", lambda *_, **__: pytest.fail("planned"))
    for name, message in (
        ("none/plan.npz", "--out: need a folder"),
        (".", "--out: need a file to write, got the folder"),
        ("pipe.npz", "--out: need a plain file to write, got"),
    ):
        assert run(counts, *NODES, "--out", tmp_path / name) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "pipe.npz").is_fifo()


def test_a_trace_of_ours(tmp_path, capsys):
    ids = np.stack([np.arange(60) % 6, np.arange(1, 61) % 6], axis=-1)[:, None]
    trace = RoutingTrace(ids, np.arange(60) != 3, [0, 20, 40, 60], moe_layers=[7], num_experts=8)
    trace.save(tmp_path / "t.safetensors")
    made = run_json(
        capsys, tmp_path / "t.safetensors", *NODES, "--strategy", "none",
        "--micro-batch-sequences", 2,
    )  # fmt: skip
    assert (made["num_experts"], made["num_micro_batches"]) == (8, 2)
    assert made["input"]["last_micro_batch_sequences"] == 1
    assert made["input"]["notes"] == ["1 tokens have no known routing and are not planned for"]


def test_the_number_of_experts_is_said_when_it_is_a_guess(tmp_path, capsys):
    ids = (np.arange(40) % 7).reshape(40, 1, 1)
    np.savez(tmp_path / "t.npz", routed_experts=ids, cu_seqlens=[0, 20, 40])
    made = run_json(capsys, tmp_path / "t.npz", *NODES, "--strategy", "none")
    assert made["num_experts"] == 7
    assert made["input"]["notes"] == ["num_experts = 7 is the largest id + 1 of t.npz"]
    assert made["input"]["sequences_per_micro_batch"] == 4
    made = run_json(capsys, tmp_path / "t.npz", *NODES, "--strategy", "none", "--num-experts", 8)
    assert (made["num_experts"], made["input"]["notes"]) == (8, [])


def write(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        ("none.npz", (), "none.npz"),
        ("text.npz", (), "bad_encoding: text.npz: need a zip file"),
        ("text.safetensors", (), "bad_encoding: text.safetensors: need a whole safetensors file"),
        ("text.json", (), "need a .safetensors or .npz trace file, got '.json'"),
        ("other.npz", (), "other.npz: need routed_experts, got a"),
        ("nan.npz", (), "rows_MLGE: need integers, got float64 array [1, 1, 4, 8] with nan at"),
        ("negative.npz", (), "rows_MLGE: need values in 0..2147483647, got -1"),
        ("object.npz", (), "need plain numbers, got pickled objects"),
        ("flat.npz", (), "rows_MLGE: need shape [any, any, any, any]"),
        ("counts.npz", ("--nodes", "3"), "4"),  # plan-03: ranks that do not fit the topology
        ("counts.npz", ("--strategy", "magic"), "--strategy: need one of"),
        ("counts.npz", ("--with-quota",), "--with-quota: need --out"),
        ("counts.npz", ("--num-experts", "9"), "--num-experts: need 8"),
        ("counts.npz", ("--micro-batch-sequences", "2"), "--micro-batch-sequences: need a trace"),
        ("counts.npz", ("--dtype", "int3"), "dtype: need one of"),
        ("counts.npz", ("--cost", "money"), "--cost: need one of"),
        ("counts.npz", ("--cost", "time"), "--cost time: need --model, or --hidden-size"),
        ("counts.npz", ("--set", "slot_us=1"), "--set: need --cost time, got rows"),
        ("counts.npz", ("--hardware", "H200"), "--hardware: need --cost time, got rows"),
        ("counts.npz", ("--hardware", "TPU"), "hardware: need one of H100"),
        ("counts.npz", ("--model", "GPT-5"), "model: need one of Qwen3-30B-A3B"),
        ("counts.npz", ("--model", "GLM-4.5-Air"), "--num-experts: need 8 like rows_MLGE"),
        (
            "counts.npz",
            ("--model", "GLM-4.5-Air", "--hidden-size", "8", "--expert-size", "8"),
            "--model: need it without --hidden-size",
        ),
        ("trace.npz", ("--model", "GLM-4.5-Air"), "--model: need K 1 like trace.npz"),
        ("counts.npz", ("--config", "tolerance=2"), "tolerance: need 0 <= tolerance < 1, got 2"),
        ("counts.npz", ("--config", "tolerance"), "--config: need FIELD=VALUE, got 'tolerance'"),
        ("counts.npz", ("--config", "pass_weight=3"), "--config: need one of allow_filler"),
        ("counts.npz", ("--config", "static_copies=3"), "--config: need --static-copies for"),
        ("counts.npz", ("--config", "allow_filler=1"), "need true or false for allow_filler"),
        ("counts.npz", ("--config", "move_rows=1.5"), "need an integer for move_rows, got '1.5'"),
        ("counts.npz", ("--recompute", "half"), "--recompute: need one of"),
        ("counts.npz", ("--static-copies", "2", "--replica-slots", "0"), "static_copies: need rep"),
        ("counts.npz", ("--token-sample", "9"), "--token-sample: need a trace, got counts"),
        ("counts.npz", ("--layout", "gone.npz"), "--layout: need a plan file, got gone.npz"),
        ("counts.npz", ("--strategy", "none,lpt", "--out", "p.npz"), "--out: need relibra"),
        ("trace.npz", ("--micro-batch-sequences", "3"), "need a multiple or a divisor of 4 ranks"),
        ("trace.npz", ("--num-experts", "3"), "need ids in 0..2, got 3"),
        ("trace.npz", ("--num-experts", "2000000000"), "num_experts: need 1 to 65536, got 2000000"),
        ("trace.npz", ("--nodes", "100000000"), "need at most 1048576 ranks, got 100000000 x 2"),
        ("trace.npz", ("--micro-batch-sequences", "9" * 30), "need 1 to 2147483648, got 999"),
        ("slot_ids.npz", (), "id_range: slot_ids.npz: need ids and K that fit 65536 experts"),
        ("no_batch.npz", (), "rows_MLGE: need at least one micro-batch, got shape [0, 1, 4, 8]"),
        ("no_batch.npz", ("--strategy", "eplb_oracle"), "rows_MLGE: need at least one micro-batch"),
    ],
)
def test_what_cannot_be_used_is_2_in_one_line(counts, tmp_path, capsys, file, arguments, message):
    for name in ("text.npz", "text.safetensors", "text.json"):
        write(tmp_path, name, b"hello, this is not what the name says")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "nan.npz", rows_MLGE=np.full((1, 1, 4, 8), np.nan))
    np.savez(tmp_path / "negative.npz", rows_MLGE=np.full((1, 1, 4, 8), -1))
    np.savez(tmp_path / "object.npz", rows_MLGE=np.array([{}], object))
    np.savez(tmp_path / "flat.npz", rows_MLGE=np.zeros(8, int))
    ids = (np.arange(8) % 4).reshape(8, 1, 1)
    np.savez(tmp_path / "trace.npz", routed_experts=ids, cu_seqlens=[0, 4, 8])
    slots = ids + 2_000_000_000
    np.savez(tmp_path / "slot_ids.npz", routed_experts=slots, cu_seqlens=[0, 4, 8])
    np.savez(tmp_path / "no_batch.npz", rows_MLGE=np.zeros((0, 1, 4, 8), int))
    assert run(tmp_path / file, *NODES, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("relibra plan: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
