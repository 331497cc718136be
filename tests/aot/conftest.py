"""Child processes without the interpreter, which this test process has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

collect_ignore = ["launch_child.py", "layer_child.py"]  # programs, not modules of tests


@pytest.fixture(scope="session")
def compiling_env(project_root: Path) -> dict[str, str]:
    """Environment of a process that compiles for a stand-in GPU; compiled kernels are kept."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(project_root / "python"), str(project_root / "perf")]
    inherited = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    env["PYTHONPATH"] = os.pathsep.join(inherited + paths)
    env["TRITON_CACHE_DIR"] = str(project_root / "build/triton-cache")
    return env | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def launch_results(project_root: Path, compiling_env: dict[str, str]):
    """What `launch_child.py` found on an architecture, run once each."""
    known: dict[str, dict] = {}

    def results(arch: str) -> dict:
        if arch not in known:
            command = [sys.executable, str(project_root / "tests/aot/launch_child.py"), arch]
            done = subprocess.run(command, env=compiling_env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            known[arch] = json.loads(done.stdout.splitlines()[-1])
        return known[arch]

    return results
