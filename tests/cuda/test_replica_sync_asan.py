"""The native library of replica synchronisation under AddressSanitizer and UBSan.

Tests of the bodies, of the engines and of fake GPUs run again in a process in which every use of
memory that was freed, or that lies outside of its array, ends it.
"""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pybind11
import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZE += ["-fsanitize-recover=address", "-g1"]  # ends all the same, unless halt_on_error=0
SOURCES = {
    "plain_memory": ["cuda/tests/plain_memory.cpp"],
    "_replica_sync": ["cuda/bindings/replica_sync.cpp", "cuda/replica_sync/host_build.cpp"],
}
ENGINES = "tests/relibra_kernels/test_sync_engine_cuda"
SLOW_FILES = ("tests/cuda/test_replica_sync_host.py", f"{ENGINES}.py")
FILES = [f"{ENGINES}_errors.py", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_FILES)]
# One build for all of them; it takes 20 s of a CPU, and many times that where others work too.
pytestmark = [pytest.mark.xdist_group("asan"), pytest.mark.timeout(600)]

# Call -> what is said of it.
FAULTS = {
    "count, fault = 100, memory.fault": None,
    "count, fault = 100, np.array(Memory().fault)": "heap-use-after-free",  # words went with it
    "count, fault = 100, Memory().fault": None,
    "count, fault = 101, memory.fault": "heap-buffer-overflow",
}
SCRIPT = """
import sys
import native_asan
import numpy as np
from sync_memory import Memory, address
from relibra_kernels import native
from relibra_kernels.transport import sync_types as st
memory, home, grad = Memory(), np.zeros(100, np.float32), np.zeros(100, np.float32)
pointers = np.array([address(grad)], np.uint64)
for call in sys.argv[1:]:
    print("--", call, file=sys.stderr, flush=True)
    exec(call)
    item = (address(home), address(pointers), 1, st.ReduceKind.FP32_FROM_FP32, count)
    native.replica_sync().reduce(np.array([item], st.REDUCE_ITEM), fault)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process with AddressSanitizer, which finds the instrumented builds."""
    folder, compiler = tmp_path_factory.mktemp("asan"), os.environ.get("CXX", "g++")
    first = [located(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    includes = (sysconfig.get_paths()["include"], pybind11.get_include(), np.get_include())
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", *SANITIZE]
    flags += [f"-I{ROOT / 'cuda'}", *(f"-I{folder}" for folder in includes)]
    for name, sources in SOURCES.items():
        built = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        command = [compiler, *flags, *(str(ROOT / source) for source in sources), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
    paths = [folder, ROOT / "tests/helpers", ROOT / "python", os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_PRELOAD": " ".join(first),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
    }


def located(compiler: str, name: str) -> str:
    """Path of a library of the compiler."""
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"{compiler} has no {name}")
    return path


def test_a_use_of_memory_that_is_not_there_is_found(environment: dict[str, str]) -> None:
    go_on = environment | {"ASAN_OPTIONS": f"{environment['ASAN_OPTIONS']}:halt_on_error=0"}
    command = [sys.executable, "-c", SCRIPT, *FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, env=go_on, timeout=300)
    said = done.stderr.split("-- ")[1:]
    assert len(said) == len(FAULTS), done.stderr[-4000:]
    for text, (call, fault) in zip(said, FAULTS.items(), strict=True):
        assert text.startswith(f"{call}\n")
        found = set(re.findall(r"ERROR: AddressSanitizer: (\S+)", text))
        assert found == ({fault} if fault else set()), text[:4000]


@pytest.mark.parametrize("file", FILES)
def test_tests_of_bodies_and_engines_use_memory_that_is_there(
    environment: dict[str, str], file: str
) -> None:
    options = ["-q", "-p", "native_asan", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, file]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
