"""The benchmarks of the GEMM kernels and of the layer, as far as they run without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "perf"))

import bench_grouped_gemm  # noqa: E402
import bench_moe_layer  # noqa: E402
import harness  # noqa: E402
import kernel_baselines  # noqa: E402
import kernel_layer  # noqa: E402
import kernel_report  # noqa: E402
import kernel_shapes  # noqa: E402

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def problem(dtype=torch.float32, distribution="medium"):
    shape = kernel_shapes.LayerShape("test", 24, distribution, 64, 64, 32, 2)
    return kernel_shapes.LayerProblem(shape, CPU, dtype)


# ---- shapes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("distribution", kernel_shapes.DISTRIBUTIONS)
@pytest.mark.parametrize("model", kernel_shapes.MODEL_NAMES)
def test_a_rank_has_its_share_of_rows_in_home_slots_and_a_replica(model, distribution):
    shape = kernel_shapes.model_shape(model, 8192, distribution)
    rows, wanted = np.array(shape.slot_rows), 8192 * shape.top_k
    assert len(rows) == shape.num_experts // 8 + 1
    if distribution == "uniform":
        assert rows.sum() == wanted
        assert rows.max() - rows.min() <= 1
    else:
        assert 0.8 * wanted <= rows.sum() <= wanted
        assert rows.max() > 2 * np.median(rows)  # skewed


def test_sizes_are_those_of_the_models():
    found = {
        name: (s.hidden, s.expert, s.num_experts, s.top_k)
        for name in kernel_shapes.MODEL_NAMES
        for s in [kernel_shapes.model_shape(name, 8192, "medium")]
    }
    assert found == {
        "Qwen3-30B-A3B": (2048, 768, 128, 8),
        "Qwen3-235B-A22B": (4096, 1536, 128, 8),
        "GLM-4.5-Air": (4096, 1408, 128, 8),
        "DeepSeek-V3": (7168, 2048, 256, 8),
        "gpt-oss-120b": (2880, 2880, 128, 4),
    }


def test_the_replica_of_the_coolest_rank_takes_what_is_missing():
    load = np.full(16, 10)
    load[6:8] = 2, 3  # rank 3
    load[9] = 12  # the hottest
    assert kernel_shapes.balanced_rank(load, 19) == [2, 3, 12]
    assert kernel_shapes.balanced_rank(load, 9) == [2, 3, 4]


def test_operations_are_6_and_12_a_row():
    p = problem()
    parts, unit = kernel_shapes.costs(p), p.num_real * 64 * 64
    assert kernel_shapes.total(parts, "F", (1.0, 1e30))[0] == 6 * unit
    assert kernel_shapes.total(parts, "B", (1.0, 1e30))[0] == 12 * unit


def test_the_bound_is_the_slower_of_operations_and_bytes_kernel_by_kernel():
    cost = kernel_shapes.Cost
    parts = {"F1": cost(10, 1), "F2": cost(1, 10), "F3": cost(0, 5), "B1": cost(99, 99)}
    assert kernel_shapes.total(parts, "F", (1.0, 1.0)) == (11, 25e6)


def test_bytes_of_the_weight_gradients():
    p = problem()
    grads = 4 * 3 * 64 * 64 * (2 * 4 + 1)  # 4 home slots read and written, the replica written
    rows = 4 * (2 * p.shape.num_received * 64 + p.num_real * 3 * 64)
    assert min(p.slot_rows) > 0
    assert kernel_shapes.costs(p)["B2 expert_wgrad"].num_bytes == grads + rows


# ---- problem and candidates ----------------------------------------------------------------------
def test_built_tables_are_the_given_ones():
    p = problem()
    built = kernel_layer.build_tables(p)
    for name in ("token_choice_to_row", "row_to_token", "row_to_choice", "tiles"):
        assert torch.equal(getattr(built, name), getattr(p.tables, name)), name
    spots, offsets = kernel_baselines.build_index(p)
    assert torch.equal(spots, p.compact_spot)
    assert torch.equal(offsets, p.offsets)


def test_half_of_the_tiles_read_the_replica_base():
    p = problem()
    family = p.tiles("half")[:, 0] >> 24
    assert family.tolist() == [0, 2] * (len(family) // 2) + [0] * (len(family) % 2)
    assert torch.equal(p.tiles("half")[:, 1:], p.tiles()[:, 1:])
    assert int(p.tiles("all home")[:, 0].max()) < 1 << 24


def test_the_reference_is_the_gradient_of_a_dense_layer():
    p = problem()
    ref = kernel_shapes.reference(p)
    leaves = [t.detach().double().requires_grad_() for t in (p.x, p.scores, p.w13, p.w2)]
    x, scores, w13, w2 = leaves
    y = torch.zeros_like(x)
    for token, choice in torch.nonzero(p.ids >= 0).tolist():
        slot = int(p.ids[token, choice])
        gate, up = (w13[slot] @ x[token]).chunk(2)
        row = w2[slot] @ (torch.nn.functional.silu(gate) * up) * scores[token, choice]
        y = y.index_add(0, torch.tensor([token]), row[None])
    grads = torch.autograd.grad(y, leaves, p.dy.double())
    back = kernel_shapes.send_back
    expected = [back(p, y), back(p, grads[0]), *grads[1:]]
    for name, need in zip(("out", "dx_sum", "dscores", "dw13", "dw2"), expected, strict=True):
        assert kernel_report.difference(ref[name].double(), need) < 1e-12, name


@pytest.mark.parametrize("package", kernel_baselines.PACKAGES.items())
def test_an_absent_baseline_is_named(package, capsys):
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert kernel_baselines.installed() == []
    assert f"{package[0]}: not installed (package {package[1]})" in capsys.readouterr().out


@on_cpu
def test_a_baseline_that_fails_is_named_and_the_others_run(capsys):
    with mock.patch.object(bench_moe_layer, "installed", return_value=["Liger fused_moe"]):
        bench_moe_layer.main(["--smoke"])
    out = capsys.readouterr().out
    assert "Liger fused_moe        left out: ModuleNotFoundError" in out
    assert out.count("relibra  ") >= 3


# ---- gate ----------------------------------------------------------------------------------------
def wrong_by(factor):
    def combine(*arguments):
        return torch.ops.relibra.combine.default(*arguments) * factor

    return combine


@on_cpu
def test_a_wrong_result_ends_the_script_before_any_number(capsys):
    ops = mock.Mock(wraps=torch.ops.relibra)
    ops.combine = wrong_by(1.0001)
    with (
        mock.patch.object(kernel_layer, "ops", ops),
        pytest.raises(SystemExit, match="forward, relibra: result 0: calc_diff .* need below"),
    ):
        bench_moe_layer.main(["--smoke"])
    assert "ms (p10" not in capsys.readouterr().out


def test_nan_fails_the_gate():
    p = problem()
    nan = torch.full((2, 2), torch.nan)
    candidate = kernel_report.Candidate("relibra", [lambda: [nan]])
    group = kernel_report.Group("g", [torch.zeros(2, 2)], [candidate], 1.0, 1.0)
    with pytest.raises(AssertionError, match="calc_diff nan"):
        kernel_report.check(p, group, candidate)


@pytest.mark.parametrize(("name", "passes"), [("relibra", False), ("torch grouped_mm", True)])
def test_only_baselines_may_round_more_often(name, passes):
    p = problem(torch.bfloat16)
    need = torch.ones(4)
    got = need * 1.007  # calc_diff 2.4e-5
    assert 1e-5 < kernel_report.calc_diff(got, need) < 4e-5
    candidate = kernel_report.Candidate(name, [lambda: [got]])
    group = kernel_report.Group("g", [need], [candidate], 1.0, 1.0)
    if passes:
        assert kernel_report.check(p, group, candidate) > 1e-5
    else:
        with pytest.raises(AssertionError, match="need below 1e-05"):
            kernel_report.check(p, group, candidate)


def test_differences_are_taken_by_chunks():
    a = torch.ones(5, 3)
    b = a.clone()
    b[4, 2] = 2
    with mock.patch.object(kernel_report, "CHUNK", 6):
        assert kernel_report.difference(a, b) > kernel_report.calc_diff(a, b)
    with pytest.raises(ValueError, match="shape: need"):
        kernel_report.difference(a, b[:1])


# ---- scripts -------------------------------------------------------------------------------------
@on_cpu
@pytest.mark.parametrize(
    ("bench", "groups"), [(bench_grouped_gemm, 5), (bench_moe_layer, 4)], ids=["gemm", "layer"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_smoke_writes_a_line_a_result_and_a_plot(bench, groups, dtype, tmp_path, capsys):
    out, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--smoke", "--dtype", dtype, "--json", str(out), "--plot", str(figure)]
    bench.main(arguments)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["group"] for line in lines}) == groups
    for line in lines:
        assert line["device"] == "cpu"
        assert line["p10_us"] <= line["median_us"] <= line["p90_us"]
        assert line["percent_of_bound"] > 0
        assert {"commit", "torch", "triton"} <= line["machine"].keys()
    assert {"relibra", "torch grouped_mm"} <= {line["name"] for line in lines}
    assert figure.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "on CPU (times of this CPU, not of a GPU)" in text
    assert "left out" not in text.replace("), left out", "")  # absent packages only


@on_cpu
def test_nothing_begins_after_the_budget(capsys):
    bench_moe_layer.main(["--smoke", "--budget", "0"])
    out = capsys.readouterr().out
    assert "no time left for: smoke T=24 medium" in out
    assert "ms (p10" not in out


@on_cpu
@pytest.mark.parametrize("name", ["grouped_gemm", "moe_layer"])
def test_the_kernels_pass_the_gate_in_the_interpreter(name):
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "perf")])
    env = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, f"perf/bench_{name}.py", "--backend", "triton"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("gate passed") >= 6
    assert "ms (p10" not in done.stdout


# ---- timing --------------------------------------------------------------------------------------
def test_buffers_are_used_in_rotation():
    calls: list[str] = []
    runs = {name: [lambda n=name, i=i: calls.append(f"{n}{i}") for i in (0, 1)] for name in "ab"}
    found = harness.sustain(runs, seconds=0)
    warm_and_timed = ["a0", "a1", "a0", "a1"], ["b0", "b1", "b0", "b1"]
    assert calls == [*warm_and_timed[0], *warm_and_timed[1]] * 2
    assert found["a"]["calls"] == found["b"]["calls"] == 4


def test_a_point_lasts_as_long_as_asked():
    found = harness.sustain({"a": [lambda: None]}, seconds=0.05)["a"]
    assert 0.05 <= found["sustained_s"] < 1
    assert found["calls"] > 4


class FakeEvent:
    """The device's clock stands at 2 ms a call."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


def test_on_a_gpu_the_time_is_between_events():
    def run():
        FakeEvent.now += 2.0

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "Event", FakeEvent),
    ):
        found = harness.sustain({"a": [run]}, seconds=0)["a"]
    assert (found["median_us"], found["p10_us"], found["p90_us"]) == (2000, 2000, 2000)


def test_the_log_keeps_what_was_seen_during_a_point():
    log = harness.GpuLog()
    for when, line in ((0, "1, 1, 1, 1"), (1, "1980, 3201, 600, 60"), (2, "1900, 3201, 700, 62")):
        log.add(when, line)
    log.add(1.5, "[N/A], 3201, 600, 60")
    assert log.between([(0.5, 3)])["sm_mhz"] == 1940
    assert log.between([(5, 6)]) == {}


def test_verdicts_of_an_h200(capsys):
    line = {"group": "forward", "name": "relibra", "tflops": 530.0, "must_tflops": 520}
    kernel_report.compare_must([line, {**line, "tflops": 500.0}], "NVIDIA H200")
    kernel_report.compare_must([line], "NVIDIA A100")
    kernel_report.compare_bases(
        [
            {"name": "relibra, all home", "median_us": 100.0},
            {"name": "relibra, half replica", "median_us": 102.0},
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "  forward: must 520 TFLOP/s: reached",
        "  forward: must 520 TFLOP/s: not reached",
        "  half of the tiles from the replica base: +2.0 % time against all home",
    ]
