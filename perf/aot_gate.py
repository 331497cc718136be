"""Compiles every kernel ahead of time for sm_80, sm_90 and sm_100, and judges the binaries.

    python perf/aot_gate.py [--fast] [--triton-path DIR] [--out FILE]

Needs no GPU and no driver. It must pass with Triton 3.7.1. Another version:

    pip install --no-deps --target DIR triton==3.6.0
    python perf/aot_gate.py --triton-path DIR

Registers, stack and shared memory are those of the compiler; nothing runs. Results are kept by
version of Triton.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aot_cases
from aot_cubin import judge, read

from relibra_kernels.testing.stub_gpu import use_stub_gpu

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "perf/results/aot.json"


def compile_rows(arch: str, fast: bool, only: str) -> list[dict[str, object]]:
    """All cases of an architecture in this process, one result each."""
    launches = use_stub_gpu(arch)
    rows = []
    for name, model, setting in aot_cases.cases(arch, fast, only):
        kernel, start = aot_cases.KERNELS[name], time.perf_counter()
        row: dict[str, object] = {"kernel": name, "model": model, "arch": arch}
        row |= {"option": setting.option, "D": setting.hidden_size, "F": setting.expert_size}
        launches.clear()
        try:
            kernel.launch(setting)
            (launch,) = (one for one in launches if one.kernel == kernel.function)
            binary = read(launch.cubin, launch.shared_bytes)
            row |= {"registers": binary.registers, "stack": binary.stack, "shared": binary.shared}
            row |= {"opcodes": binary.opcodes, "wrong": judge(binary, kernel.needs(setting))}
        except Exception as error:  # any failure of the compiler is a result
            row |= {"wrong": [f"{type(error).__name__}: {str(error).strip()[-300:]}"]}
        row["seconds"] = round(time.perf_counter() - start, 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def run_worker(arch: str, args: argparse.Namespace, cache: str) -> list[dict[str, object]]:
    """Compiles for an architecture in a process of its own, without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [
        *([args.triton_path] if args.triton_path else []),
        str(ROOT / "python"),
        str(ROOT / "perf"),
    ]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--worker", arch, "--only", args.only]
    command += ["--fast"] if args.fast else []
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arch}: the compiling process failed\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def missing_rows(
    rows: list[dict[str, object]], expected: list[tuple[str, str, str, str]]
) -> list[str]:
    """Cases without a result, and results without a case."""
    found = [tuple(str(row[key]) for key in ("arch", "kernel", "model", "option")) for row in rows]
    gone = [" ".join(key) for key in expected if key not in found]
    return gone + [" ".join(key) for key in found if key not in expected or found.count(key) > 1]


def version_of(triton_path: str | None) -> str:
    """Version of the Triton that the workers import."""
    env = os.environ | ({"PYTHONPATH": triton_path} if triton_path else {})
    code = "import triton; print(triton.__version__)"
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def store(path: Path, version: str, rows: list[dict[str, object]]) -> None:
    """Replaces the results of one version of Triton; one line a result."""
    known = json.loads(path.read_text()) if path.exists() else {}
    plain = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    known[version] = plain
    parts = []
    for name in sorted(known):
        lines = ",\n".join(json.dumps(row) for row in known[name])
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def report(rows: list[dict[str, object]]) -> None:
    """One line a result."""
    for row in rows:
        wrong = "; ".join(row["wrong"]) if isinstance(row["wrong"], list) else ""
        option = f" [{row['option']}]" if row["option"] else ""
        title = f"{row['arch']:7}{row['kernel']}{option}"
        print(
            f"{title:38}{row['model']:16} {row.get('registers', '-'):>4} registers "
            f"{row.get('stack', '-'):>3} B stack {row.get('shared', '-'):>7} B shared "
            f"{'FAIL ' + wrong if wrong else 'ok'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="one model, no options")
    parser.add_argument("--only", metavar="NAME", default="", help="kernels that begin so")
    parser.add_argument("--triton-path", metavar="DIR", help="folder of another Triton")
    parser.add_argument("--out", type=Path, help=f"default {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--cache", help="folder that keeps compiled kernels between runs")
    parser.add_argument("--jobs", type=int, default=min(3, os.cpu_count() or 1))
    parser.add_argument("--worker", metavar="ARCH", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        compile_rows(args.worker, args.fast, args.only)
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as fresh, ThreadPoolExecutor(args.jobs) as pool:
        cache = args.cache or fresh
        jobs = [pool.submit(run_worker, arch, args, cache) for arch in aot_cases.ARCHS]
        rows = [row for job in jobs for row in job.result()]
    version = version_of(args.triton_path)
    report(rows)
    expected = aot_cases.expected_keys(args.fast, args.only)
    missing = missing_rows(rows, expected)
    if not (args.fast or args.only) and len(expected) != aot_cases.NUM_ROWS:
        missing.append(f"need {aot_cases.NUM_ROWS} cases, got {len(expected)}")
    failed = [row for row in rows if row["wrong"]]
    if args.out or not (args.fast or args.only):
        store(args.out or RESULTS, version, rows)
    print(
        f"Triton {version}: {len(rows)} binaries in {time.perf_counter() - start:.0f} s, "
        f"{len(failed)} fail, {len(missing)} missing {missing or ''}"
    )
    sys.exit(bool(failed or missing))


if __name__ == "__main__":
    main()
