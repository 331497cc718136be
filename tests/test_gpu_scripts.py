"""The scripts for a GPU machine, as far as they run without one."""

import json
import os
import re
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


STUB = """#!/bin/bash
# Stands for a Python with a GPU and without tools to build; NATIVE=1: nothing is built yet.
while [ $# -gt 0 ]; do
  [ "$1" = --json ] && json=$2
  all="$all $1" && shift
done
case "$all" in
  *is_available*) printf 'torch 2.11.0 Triton 3.6.0\\nNVIDIA H200\\n' ;;
  *_planner*) exit "${NATIVE:-0}" ;;
  *pybind11*) exit 1 ;;
  *gpu_first*)
    sleep "${FIRST_SLEEP:-0}"
    echo '{"check": "B2", "passed": true, "reason": ""}' >"$json"
    exit "${FIRST:-0}" ;;
  *-m\\ pytest*)
    echo "pytest:$all"
    case "$all" in *heap*) exit "${SYNC:-0}" ;; esac
    exit "${TESTS:-0}" ;;
  *gpu_table*) exec "$REAL" perf/gpu_table.py "$OUT" ;;
  *bench_*) echo '{"bench": "b", "case": "c", "name": "relibra", "median_us": 2}' >>"$json" ;;
esac
"""
SANITIZERS = ["sanitizer memcheck", "sanitizer racecheck", "sanitizer synccheck"]
STEPS = [
    *("first on a GPU", "build", "sync tests, 8 local ranks", "other tests marked gpu"),
    *(*SANITIZERS, "bench_replica_sync", "bench_moe_layer", "bench_grouped_gemm"),
    *("bench_combine", "bench_permute"),
]


SANITIZER = """#!/bin/bash
echo "sanitizer:$*"
while [ "$1" != "$PYTHON" ]; do shift; done
"$@" || exit 9
exit "${SANITIZER:-0}"
"""


def run_check(tmp_path: Path, **env: str) -> tuple[int, dict[str, str], str]:
    """Exit status, step -> verdict, output of `gpu_check.sh` with a stub for Python."""
    stub, out = tmp_path / "python", tmp_path / "out"
    stub.write_text(STUB)
    stub.chmod(0o755)
    done = run(
        "bash", "perf/gpu_check.sh", PYTHON=str(stub), REAL=sys.executable, OUT=str(out), **env
    )
    lines = (out / "gpu_steps.txt").read_text().splitlines()
    assert lines[0] == "torch 2.11.0 Triton 3.6.0 NVIDIA H200 "
    return done.returncode, {one[:28].strip(): one[28:51].strip() for one in lines[1:]}, done.stdout


def test_gpu_check_runs_its_steps_in_order_and_ends_with_the_table(tmp_path):
    status, steps, text = run_check(tmp_path)
    assert status == 0
    assert list(steps) == STEPS
    assert {steps.pop(name) for name in SANITIZERS} == {"not found"}
    assert set(steps.values()) == {"pass"}
    assert "the native parts are there" in text
    table = text.split("torch 2.11.0 Triton 3.6.0 NVIDIA H200")[1]
    assert "first on a GPU: 1 of 1 pass" in table
    assert table.count("b c relibra") == 5


def test_gpu_check_leaves_out_what_is_not_built(tmp_path):
    status, steps, text = run_check(tmp_path, NATIVE="1", PATH=with_sanitizer(tmp_path))
    assert status == 0
    assert list(steps) == STEPS
    assert "needs pybind11 and setuptools" in text
    assert steps.pop("build") == "left out"
    needed = ["sync tests, 8 local ranks", *SANITIZERS, "bench_replica_sync"]
    assert {steps.pop(name) for name in needed} == {"left out (not built)"}
    assert set(steps.values()) == {"pass"}


def test_the_shares_of_gpu_check_fit_its_nine_minutes():
    text = (ROOT / "perf/gpu_check.sh").read_text()
    found = re.findall(r'^ *(?:step|gpu_tests) "([^"]+)" (\d+) ', text, re.M)
    times = {"sanitizer $tool": 3, "bench_$bench": 2}  # in loops
    assert {name for name, _ in found} >= times.keys()
    budget = int(re.findall(r"BUDGET:-(\d+)", text)[0])
    assert sum(int(limit) * times.get(name, 1) for name, limit in found) <= budget <= 540


def pytest_runs(text: str) -> list[set[str]]:
    """Files of each run of pytest."""
    return [set(re.findall(r"tests/\S+\.py", line)) for line in text.splitlines()
            if line.startswith("pytest:")]  # fmt: skip


def test_gpu_check_runs_every_file_with_a_test_marked_gpu_once(tmp_path):
    _, _, text = run_check(tmp_path)
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text())
    }
    sync, other = pytest_runs(text)
    assert sync | other == marked
    assert sync & other == set()
    assert "tests/relibra_kernels/test_heap_torch_symm.py" in sync


def with_sanitizer(tmp_path: Path) -> str:
    """PATH with a stand-in for compute-sanitizer."""
    tool = tmp_path / "bin/compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    return f"{tool.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(("status", "verdict"), [("0", "pass"), ("9", "FAIL")])
def test_gpu_check_runs_the_kernels_of_replica_sync_under_the_sanitizer(tmp_path, status, verdict):
    path = with_sanitizer(tmp_path)
    exit_status, steps, text = run_check(tmp_path, PATH=path, SANITIZER=status)
    assert {steps[name] for name in SANITIZERS} == {verdict}
    assert exit_status == (verdict != "pass")
    lines = [line for line in text.splitlines() if line.startswith("sanitizer:")]
    tools = [line.split("--tool ")[1].split()[0] for line in lines]
    assert tools == ["memcheck", "racecheck", "synccheck"]
    for line, files in zip(lines, pytest_runs(text)[2:], strict=True):
        assert "--error-exitcode 9" in line
        assert files
        assert all("sync" in file for file in files)


FAILING = {"FIRST": "first on a GPU", "SYNC": "sync tests, 8 local ranks"}
FAILING |= {"TESTS": "other tests marked gpu"}


@pytest.mark.parametrize("failing", [("FIRST", "1"), ("SYNC", "1"), ("TESTS", "1"), ("TESTS", "5")])
def test_gpu_check_fails_with_a_step_and_runs_the_others(tmp_path, failing):
    status, steps, _ = run_check(tmp_path, **dict([failing]))
    step = FAILING[failing[0]]
    assert status == 1
    assert steps.pop(step) == ("FAIL (no test found)" if failing[1] == "5" else "FAIL")
    assert "FAIL" not in "".join(steps.values())
    assert len(steps) == len(STEPS) - 1


def test_gpu_check_stops_what_hangs_and_says_what_had_no_time(tmp_path):
    status, steps, _ = run_check(tmp_path, BUDGET="6", FIRST_SLEEP="60")
    assert status == 1
    assert re.fullmatch(r"FAIL \(over [56] s\)", steps.pop("first on a GPU"))
    assert {steps.pop(name) for name in SANITIZERS} == {"not found"}
    assert set(steps.values()) == {"NOT RUN (no time left)"}


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


def test_a_check_that_crashes_fails_and_the_others_go_on(tmp_path):
    text = (ROOT / "perf/gpu_first.py").read_text()
    checks = """import os
CHECKS = {
    "fine": (FP32, lambda p: None),
    "crash": (FP32, lambda p: os._exit(7)),
    "after": (FP32, lambda p: None),
}
"""
    script, out = tmp_path / "first.py", tmp_path / "first.json"
    script.write_text(
        text.replace('if __name__ == "__main__":', checks + 'if __name__ == "__main__":')
    )
    command = (sys.executable, str(script), "--device", "cpu", "--json", str(out))
    done = run(*command, TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stderr[-2000:]
    results = {one["check"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert {name: one["passed"] for name, one in results.items()} == {
        "fine": True,
        "crash": False,
        "after": True,
    }
    assert results["crash"]["reason"] == "exit status 7"
    assert "FAIL exit status 7" in done.stdout


def test_the_table_shows_steps_failures_and_rates(tmp_path):
    (tmp_path / "gpu_steps.txt").write_text("torch 2.11\nbuild pass 3 s\n")
    checks = [{"check": "B2", "passed": False, "reason": "off"}, {"check": "F1", "passed": True}]
    (tmp_path / "gpu_first.json").write_text("".join(json.dumps(c) + "\n" for c in checks))
    row = {"bench": "combine", "case": "x", "name": "relibra", "median_us": 12.0, "gb_per_s": 3500}
    (tmp_path / "bench_combine.json").write_text(json.dumps(row) + "\n")
    rows = [
        {"bench": "replica_sync", "case": case, "name": name, "median_us": 7.0}
        for case in ("m P=8 ring", "m P=8 1 to 1")
        for name in ("local sm", "copy")
    ]
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / "bench_replica_sync.json").write_text(text)
    done = run(sys.executable, "perf/gpu_table.py", str(tmp_path))
    assert re.findall(r"replica_sync (.*\S) +7.0 us", done.stdout) == ["m P=8 ring local sm"]
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


def test_without_stored_times_nothing_passes_as_a_comparison(tmp_path):
    row = {"bench": "combine", "case": "x", "name": "relibra", "median_us": 1.0}
    (tmp_path / "bench_combine.json").write_text(json.dumps(row) + "\n")
    command = sys.executable, "perf/compare_results.py", str(tmp_path)
    done = run(*command, str(tmp_path / "stored"))
    assert done.returncode == 3
    assert "NOT COMPARED" in done.stdout
    assert "nothing is slower" not in done.stdout
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored/bench_combine.json").write_text(json.dumps(row | {"case": "y"}) + "\n")
    assert run(*command, str(tmp_path / "stored")).returncode == 3


def test_results_that_one_side_lacks_are_named(tmp_path):
    rows = [
        {"bench": "combine", "case": case, "name": "relibra", "median_us": 1.0} for case in "abc"
    ]
    for folder, chosen in (("new", rows[:2]), ("stored", rows[1:])):
        (tmp_path / folder).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (tmp_path / folder / "bench_combine.json").write_text(text)
    done = run(
        sys.executable, "perf/compare_results.py", str(tmp_path / "new"), str(tmp_path / "stored")
    )
    assert done.returncode == 0
    assert "stored, but not in this run: 1\n  combine c" in done.stdout
    assert "without a stored one: 1\n  combine a" in done.stdout
    assert "1 of 2 results compared" in done.stdout


def test_no_new_results_are_an_error(tmp_path):
    done = run(sys.executable, "perf/compare_results.py", str(tmp_path), str(tmp_path))
    assert done.returncode == 1
    assert "need bench_*.json" in done.stderr
