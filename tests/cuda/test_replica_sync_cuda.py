"""The CUDA library of replica synchronisation without a GPU: it loads, and what its binaries hold.

Compiled, not run: what needs a GPU is tested in perf/gpu_check.sh.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import triton

import relibra_kernels
from relibra_kernels.transport import sync_types as st

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "cuda/replica_sync"
PACKAGE = Path(relibra_kernels.__file__).parent
LIBRARY = PACKAGE / "librelibra_cuda.so"
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KERNELS = ["rs_push_kernel", "rs_push_tma_kernel", "rs_reduce_kernel"]
KERNELS += ["rs_wait_kernel", "rs_publish_kernel"]
NO_DRIVER = {35, 100, 801}  # driver missing or too old; no device; not supported
LEFT_OUT = json.loads((PACKAGE / "_build_info.json").read_text())["cuda_left_out"]

needs_library = pytest.mark.skipif(bool(LEFT_OUT), reason=f"librelibra_cuda.so: {LEFT_OUT}")


@cache
def dump(option: str, file: Path = LIBRARY) -> str:
    """What cuobjdump of the Triton wheel says about the library."""
    command = [str(CUOBJDUMP), option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


FAULT, ITEM = np.zeros(1, st.FAULT), np.zeros(64, np.uint8)
fault, item = ctypes.c_void_p(FAULT.ctypes.data), ctypes.c_void_p(ITEM.ctypes.data)
# Function of the C ABI -> arguments of a call that would launch something.
CALLS = {
    "rs_push": (item, 1, fault, 1, 32, None),
    "rs_wait": (item, 1, ctypes.c_uint64(0), 1, ctypes.c_uint64(1), fault, None),
    "rs_publish": (item, 1, fault, None),
    "rs_reduce": (item, 1, fault, 1, 32, None),
    "rs_push_tma": (item, 1, fault, 1, None),
    "rs_push_copy_engine": (item, 1, fault, None),
    "rs_wait_values": (item, 1, None),
}


# --- the library ----------------------------------------------------------------------------------


@needs_library
def test_the_library_loads_without_a_driver_and_calls_return_a_code() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    assert library.rs_abi_version() == st.ABI_VERSION
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("a driver is there: these calls would use null addresses")
    for name, arguments in CALLS.items():
        assert getattr(library, name)(*arguments) in NO_DRIVER, name


@needs_library
def test_impossible_arguments_return_their_code_before_anything_is_launched() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    assert library.rs_push(item, 1, None, 1, 32, None) == 100
    assert library.rs_push(item, -1, fault, 1, 32, None) == 100
    assert library.rs_push(item, 1, fault, 0, 32, None) == 100
    assert library.rs_reduce(item, 1, fault, 1, 513, None) == 100
    assert library.rs_push_copy_engine(item, 1, None, None) == 100
    assert library.rs_push(item, 0, fault, 1, 32, None) == 0
    assert library.rs_wait_values(item, -1, None) == 100


@needs_library
def test_the_library_needs_no_driver_library_and_exports_the_abi_alone() -> None:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("no readelf on PATH")
    read = [tool, "--wide", "--dynamic", "--dyn-syms", str(LIBRARY)]
    text = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert "libc.so.6" in needed
    assert [name for name in needed if name.startswith(("libcuda", "libnv"))] == []
    exported = set(re.findall(r"FUNC +GLOBAL +DEFAULT +\d+ (\w+)", text))
    declared = set(re.findall(r"RS_API int (rs_\w+)", (SOURCES / "c_api.h").read_text()))
    assert declared == {"rs_abi_version", *CALLS}
    assert exported == declared


# --- registers and spills -------------------------------------------------------------------------


def resources(file: Path = LIBRARY) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(Architecture, kernel) -> (registers, stack bytes, local bytes)."""
    found, arch = {}, ""
    pattern = r"arch = (\w+)|Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    for match in re.finditer(pattern, dump("--dump-resource-usage", file)):
        arch = match[1] or arch
        if match[2]:
            found[arch, match[2]] = (int(match[3]), int(match[4]), int(match[5]))
    return found


@needs_library
def test_no_kernel_spills() -> None:
    table = resources()
    assert {kernel for _, kernel in table} == set(KERNELS)
    archs = sorted({arch for arch, _ in table})
    print(f"\n{'registers/stack bytes':22}", *(f"{arch:>8}" for arch in archs))  # noqa: T201
    for kernel in KERNELS:
        cells = [f"{table[arch, kernel][0]}/{table[arch, kernel][1]}" for arch in archs]
        print(f"{kernel:22}", *(f"{cell:>8}" for cell in cells))  # noqa: T201
    assert {key: used for key, used in table.items() if used[1] or used[2]} == {}
    # Two blocks of 512 threads fit an SM's 65536 registers.
    assert all(regs <= 64 for (_, kernel), (regs, *_) in table.items() if "tma" not in kernel)


@needs_library
def test_the_file_of_cubins_holds_the_same_kernels() -> None:
    assert resources(PACKAGE / "replica_sync.fatbin") == resources()


# --- accesses to signal words ---------------------------------------------------------------------


def function_bodies(text: str) -> dict[str, str]:
    """Name of every C++ function -> text between its braces."""
    found = {}
    for match in re.finditer(r"\b(\w+)\([^;{}()]*(?:\([^()]*\)[^;{}()]*)*\)\s*(?:const )?\{", text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if match[1] not in {"if", "for", "while", "switch"}:
            found[match[1]] = text[match.end() : end]
    return found


def accesses(bodies: dict[str, str], function: str) -> dict[str, int]:
    """Loads and stores of signal words in a function and in what it calls."""
    text = bodies[function]
    total = {op: len(re.findall(rf"\bcontext\.{op}_word\(", text)) for op in ("load", "store")}
    for name in re.findall(r"\b(\w+)(?:<[^<>;]*>)?\(", text):
        if name in bodies and name not in {function, "load_word", "store_word"}:
            for op, count in accesses(bodies, name).items():
                total[op] += count
    return total


def in_source() -> dict[str, dict[str, int]]:
    """Kernel -> accesses to signal words as the source has them."""
    text = (SOURCES / "bodies.hpp").read_text()
    for name in ("push.cu", "push_tma.cu", "reduce.cu", "wait.cu"):
        text += (SOURCES / name).read_text()
    bodies = function_bodies(re.sub(r"//[^\n]*|^#[^\n]*", "", text, flags=re.MULTILINE))
    return {kernel: accesses(bodies, kernel) for kernel in KERNELS}


def in_ptx(ptx: str) -> dict[str, dict[str, int]]:
    """Kernel -> accesses to signal words as the compiler made them."""
    parts = re.split(r"\.entry (\w+)\(", ptx)
    kernels = dict(zip(parts[1::2], parts[2::2], strict=True))
    loads, stores = r"\bld\.acquire\.sys\.\w*b64\b", r"\b(?:st|red)\.release\.sys\.\w*b64\b"
    return {
        name: {"load": len(re.findall(loads, text)), "store": len(re.findall(stores, text))}
        for name, text in kernels.items()
    }


FORBIDDEN = (
    r"\.gpu\b|\bmembar\b|\bfence\.(?!proxy)|\bvolatile\.|\bld\.relaxed|\b(?:st|red|atom)\.\w+\.cta"
)


def test_the_source_has_the_accesses_that_the_protocol_needs() -> None:
    """Abort word and wait word, abort words of the ranks, one word a slot: nothing else."""
    assert in_source() == {
        "rs_push_kernel": {"load": 1, "store": 1},
        "rs_push_tma_kernel": {"load": 1, "store": 1},
        "rs_reduce_kernel": {"load": 1, "store": 0},
        "rs_wait_kernel": {"load": 2, "store": 1},
        "rs_publish_kernel": {"load": 1, "store": 1},
    }


@needs_library
def test_every_access_to_a_signal_word_has_the_scope_of_the_system() -> None:
    ptx = dump("--dump-ptx")
    if ".entry" not in ptx:
        pytest.skip("the library was built without PTX (RELIBRA_CUDA_ARCHS)")
    assert in_ptx(ptx) == in_source()
    assert re.findall(FORBIDDEN, ptx) == []
    # Counters of arrivals and codes of records are 32-bit, and of the same scope.
    assert {m[1] for m in re.finditer(r"\b(?:atom|red)\.[\w.]*?\.(sys|gpu|cta)\b", ptx)} == {"sys"}


@pytest.mark.parametrize(
    "line",
    [
        "ld.acquire.gpu.b64 %rd1,[%rd2];",
        "membar.gl;",
        "fence.acq_rel.sys;",
        "ld.volatile.u64 %rd1;",
    ],
)
def test_the_rule_finds_what_it_forbids(line: str) -> None:
    assert re.findall(FORBIDDEN, line)


@needs_library
def test_bulk_copies_are_complete_before_the_word_is_released() -> None:
    ptx = dump("--dump-ptx")
    if ".entry" not in ptx:
        pytest.skip("the library was built without PTX (RELIBRA_CUDA_ARCHS)")
    tma = re.split(r"\.entry \w+\(", ptx[ptx.index(".entry rs_push_tma_kernel(") :])[1]
    order = [
        r"cp\.async\.bulk\.global\.shared::cta\.bulk_group",
        r"cp\.async\.bulk\.wait_group 0",
        r"fence\.proxy\.async\.global",
        r"atom\.add\.acq_rel\.sys",
        r"st\.release\.sys\.b64",
    ]
    places = [re.search(instruction, tma) for instruction in order]
    assert all(places)
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)


# --- other compilers ------------------------------------------------------------------------------


@cache
def toolkit() -> Path | None:
    """Root of nvcc's toolkit."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    done = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.MULTILINE)
    return Path(found[1]) if found else None


def libcudacxx() -> list[Path]:
    """Folders of libcu++: of nvcc's toolkit, or of the wheel nvidia-cuda-cccl."""
    wheel = Path(triton.__file__).parents[1] / "nvidia/cu13"
    roots = [root for root in (toolkit(), wheel) if root is not None]
    found = [root for root in roots if (root / "include/cccl/cuda/atomic").is_file()]
    return [found[0] / "include/cccl", found[0] / "include"] if found else []


def test_the_source_compiles_with_nvrtc() -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    if not libcudacxx():
        pytest.skip("no libcu++ headers: put nvcc on PATH, or pip install nvidia-cuda-cccl")
    file = SOURCES / "fatbin/kernels.cu"
    try:
        error, program = nvrtc.nvrtcCreateProgram(file.read_bytes(), file.name.encode(), 0, [], [])
    except RuntimeError as reason:
        pytest.skip(f"no NVRTC library: {str(reason)[:80]}")
    include = [ROOT / "cuda", *libcudacxx()]
    options = ["--std=c++17", "--gpu-architecture=sm_90a", *(f"-I{path}" for path in include)]
    encoded = [option.encode() for option in options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(error) == 0, log.decode()[:2000]
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    assert size > 1000


def nvshmem_root() -> Path | None:
    """Folder of NVSHMEM: NVSHMEM_HOME, or the wheel's in this environment."""
    homes = [Path(os.environ["NVSHMEM_HOME"])] if "NVSHMEM_HOME" in os.environ else []
    wheels = [Path(triton.__file__).parents[1] / "nvidia/nvshmem"]
    return next((home for home in homes + wheels if (home / "include/nvshmem.h").is_file()), None)


@pytest.mark.timeout(400)
def test_the_nvshmem_example_compiles_and_links(tmp_path: Path) -> None:
    home, nvcc = nvshmem_root(), shutil.which("nvcc")
    if home is None:
        pytest.skip("NVSHMEM is not there: pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    built = tmp_path / "libnvshmem_example.so"
    flags = ["-std=c++17", "-O3", "-rdc=true", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    for arch in (80, 90, 100):
        flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    paths = [f"-I{ROOT / 'cuda'}", "-isystem", str(home / "include"), f"-L{home / 'lib'}"]
    paths += ["-Xlinker", "-rpath", "-Xlinker", str(home / "lib")]
    libraries = ["-lnvshmem_device", "-l:libnvshmem_host.so.3"]
    source = str(SOURCES / "examples/nvshmem_device.cu")
    command = [nvcc, *flags, *paths, source, "-o", str(built), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
    version = ctypes.CDLL(str(built)).rs_nvshmem_version()
    assert version >= 30405, f"need NVSHMEM 3.4.5 or newer, got {version}"
