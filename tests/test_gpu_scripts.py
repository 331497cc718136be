"""The scripts for a GPU machine, as far as they run without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "perf")])
    inherited = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=inherited | env, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_check_says_that_there_is_no_gpu(tmp_path):
    done = run("bash", "perf/gpu_check.sh", OUT=str(tmp_path / "out"), PYTHON=sys.executable)
    assert done.returncode == 2
    assert "no GPU: torch finds no CUDA device, nothing was checked (torch 2" in done.stderr
    assert not (tmp_path / "out").exists()


def test_gpu_check_is_valid_and_runs_what_exists():
    assert run("bash", "-n", "perf/gpu_check.sh").returncode == 0
    text = (ROOT / "perf/gpu_check.sh").read_text()
    assert "../shared" not in text
    benches = text.split("for bench in ")[1].split(";")[0].split()
    assert all((ROOT / f"perf/bench_{name}.py").is_file() for name in benches)
    assert (ROOT / "perf/gpu_first.py").is_file()


def test_the_first_checks_pass_in_the_interpreter(tmp_path):
    out = tmp_path / "first.json"
    command = (sys.executable, "perf/gpu_first.py", "--device", "cpu", "--json", str(out))
    done = run(*command, TRITON_INTERPRET="1")
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["check"] for one in results if not one["passed"]] == [], done.stdout
    assert len(results) == 11
    assert done.returncode == 0


def test_a_wrong_kernel_fails_its_check_and_the_others_still_run():
    code = """
import sys, torch
import gpu_first
from relibra_kernels.testing import bf16_interpreter
bf16_interpreter.install()
original = gpu_first.expert_up
def wrong(*args, **options):
    h, a = original(*args, **options)
    return h, a * 1.01
gpu_first.expert_up = wrong
names = [name for name in gpu_first.CHECKS if "fp32" in name and "B2" not in name]
print([gpu_first.run(name, torch.device("cpu"))["passed"] for name in names])
"""
    done = run(sys.executable, "-c", code, TRITON_INTERPRET="1")
    assert done.stdout.splitlines()[-1] == "[False, True, True]", done.stderr[-2000:]


def test_the_table_shows_steps_failures_and_rates(tmp_path):
    (tmp_path / "gpu_steps.txt").write_text("torch 2.11\nbuild pass 3 s\n")
    checks = [{"check": "B2", "passed": False, "reason": "off"}, {"check": "F1", "passed": True}]
    (tmp_path / "gpu_first.json").write_text("".join(json.dumps(c) + "\n" for c in checks))
    row = {"bench": "combine", "case": "x", "name": "relibra", "median_us": 12.0, "gb_per_s": 3500}
    (tmp_path / "bench_combine.json").write_text(json.dumps(row) + "\n")
    done = run(sys.executable, "perf/gpu_table.py", str(tmp_path))
    assert done.stdout.splitlines()[:4] == [
        "torch 2.11",
        "build pass 3 s",
        "first on a GPU: 1 of 2 pass",
        "  FAIL B2: off",
    ]
    assert "12.0 us 3500 GB/s" in done.stdout


@pytest.mark.parametrize(
    ("time", "status", "message"),
    [(104.0, 0, "nothing is slower"), (106.0, 1, "too slow:\ncombine x")],
)
def test_a_slower_result_is_found(tmp_path, time, status, message):
    for folder, value in (("new", time), ("stored", 100.0)):
        (tmp_path / folder).mkdir()
        row = {"bench": "combine", "case": "x", "name": "relibra", "median_us": value}
        (tmp_path / folder / "bench_combine.json").write_text(json.dumps(row) + "\n")
    done = run(
        sys.executable, "perf/compare_results.py", str(tmp_path / "new"), str(tmp_path / "stored")
    )
    assert done.returncode == status
    assert message in done.stdout


def test_no_new_results_are_an_error(tmp_path):
    done = run(sys.executable, "perf/compare_results.py", str(tmp_path), str(tmp_path))
    assert done.returncode == 1
    assert "need bench_*.json" in done.stderr
