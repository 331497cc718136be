"""Where the CUDA kernels come from, and what is said where they cannot be had."""

import re
import shutil
import subprocess
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import FakeDriver, host_library

from relibra_kernels.transport import cuda_library_load
from relibra_kernels.transport.cuda_library import CudaCallError, SharedLibrary
from relibra_kernels.transport.cuda_library_cubins import (
    RING_BYTES,
    WAIT_THREADS,
    BindingsDriver,
    CubinLibrary,
    CupyDriver,
)
from relibra_kernels.transport.sync_types import WAIT_ITEM

SOURCES = Path(__file__).resolve().parents[2] / "cuda/replica_sync"
CPU = torch.device("cpu")


def test_a_shared_library_that_does_not_load_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"gone.so does not load \(.*No such file.*\): build"):
        SharedLibrary(tmp_path / "gone.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(RuntimeError, match=r"broken.so does not load \(.*file too short"):
        SharedLibrary(broken)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int rs_abi_version(void) { return 1; }", "need interface version 2, got 1"),
        ("int other(void) { return 2; }", "undefined symbol: rs_abi_version"),
        ("int rs_abi_version(void) { return 2; }", "undefined symbol: rs_push"),
    ],
)
def test_a_library_of_another_version_is_refused(tmp_path, source, message):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "old.c").write_text(source)
    made = tmp_path / "old.so"
    command = [compiler, "-shared", "-fPIC", str(tmp_path / "old.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    with pytest.raises(RuntimeError, match=f"old.so does not load .*{message}"):
        SharedLibrary(made)


def test_codes_of_calls_become_errors_with_their_meaning():
    with pytest.raises(CudaCallError, match="rs_publish returned 100: arguments that cannot be"):
        host_library().publish(0, 1, 0, 0)
    assert str(CudaCallError("rs_push", 35)).endswith("the driver is missing or too old")
    assert str(CudaCallError("cuModuleLoad", 10200)).endswith("10000 more than a CUresult")


@pytest.mark.parametrize(
    ("word", "at_least", "is_there"),
    [(7, 7, True), (6, 7, False), (2**63 + 8, 7, False), (3, 2**64 - 2, True)],
)
def test_a_stream_waits_for_a_signed_difference(word, at_least, is_there):
    words = np.array([9, word], np.uint64)
    address = words.ctypes.data
    items = np.array([(address, 9, 0, 0, 0), (address + 8, at_least, 0, 0, 0)], WAIT_ITEM)
    waiting = threading.Thread(target=host_library().wait_values, args=(items.ctypes.data, 2, 0))
    waiting.start()
    waiting.join(10 if is_there else 0.05)
    assert waiting.is_alive() != is_there
    words[1] = at_least  # as the host ends such a wait
    waiting.join(10)
    assert not waiting.is_alive()


def test_the_cubins_are_launched_as_the_launchers_in_the_source_do():
    wait, tma = ((SOURCES / name).read_text() for name in ("wait.cu", "push_tma.cu"))
    assert int(re.search(r"kWaitThreads = (\d+)", wait)[1]) == WAIT_THREADS
    stages, chunk = re.search(r"kStages = (\d+);\n.*kChunkBytes = (\d+)", tma).groups()
    assert int(stages) * int(chunk) == RING_BYTES


def test_cubins_without_a_kernel_or_a_feature(monkeypatch):
    with pytest.raises(RuntimeError, match="x.fatbin by fake driver does not load .*rs_wait_kern"):
        CubinLibrary(Path("x.fatbin"), FakeDriver(lacks=["wait"]))
    library = CubinLibrary(Path("x.fatbin"), FakeDriver())
    for call in (
        lambda: library.push_copy_engine(0, 1, 0, 0),
        lambda: library.wait_values(0, 1, 0),
    ):
        with pytest.raises(CudaCallError, match="801: not supported here"):
            call()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(CudaCallError, match="rs_push_tma returned 801"):
        library.push_tma(0, 1, 0, 1, 0)


class Told:
    """A driver module that notes its calls; those in ``fails`` return a code."""

    CUfunction_attribute = int

    def __init__(self, fails=()):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            results = [7] if name.startswith("cuModule") else []
            return (209 if name in self.fails else 0, *results)

        return call


def test_cuda_bindings_are_called_with_numbers():
    told = Told()
    library = CubinLibrary(Path("x.fatbin"), BindingsDriver(told))
    assert library.name == "x.fatbin by cuda.bindings"
    assert told.calls[0] == ("cuModuleLoad", b"x.fatbin")
    assert told.calls[1] == ("cuModuleGetFunction", 7, b"rs_push_kernel")
    library.reduce(4096, 1, 64, 32, 512, 5)
    name, function, *grid, shared, stream, arguments, extra = told.calls[-1]
    assert (name, function, grid) == ("cuLaunchKernel", 7, [32, 1, 1, 512, 1, 1])
    assert (shared, stream, extra) == (0, 5, 0)
    assert arguments > 0
    with pytest.raises(RuntimeError, match="cuModuleLoad returned 10209"):
        CubinLibrary(Path("x.fatbin"), BindingsDriver(Told({"cuModuleLoad"})))


def test_cupy_loads_by_its_raw_module():
    launched, allowed = [], []
    kernel = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=11))
    module = types.SimpleNamespace(get_function=lambda name: kernel)
    driver = types.SimpleNamespace(
        launchKernel=lambda *one: launched.append(one),
        funcSetAttribute=lambda *one: allowed.append(one),
    )
    cupy = types.SimpleNamespace(
        RawModule=lambda path: module, cuda=types.SimpleNamespace(driver=driver)
    )
    library = CubinLibrary(Path("x.fatbin"), CupyDriver(cupy))
    library.publish(4096, 2, 64, 9)
    assert launched[0][:9] == (11, 1, 1, 1, WAIT_THREADS, 1, 1, 0, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        for _ in range(2):
            library.push_tma(4096, 1, 64, 4, 9)
    assert allowed == [(11, 8, RING_BYTES)]
    assert launched[-1][:9] == (11, 4, 1, 1, 32, 1, 1, RING_BYTES, 9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place of build results, with no driver package installed."""
    monkeypatch.setattr(cuda_library_load, "_is_installed", lambda name: False)
    return tmp_path


def test_the_way_that_is_taken_and_why_no_better_one(folder, monkeypatch):
    assert cuda_library_load.how(folder) == (
        "",
        ["librelibra_cuda.so was not built", f"replica_sync.fatbin was not built: {REMEDY}"],
    )
    (folder / "replica_sync.fatbin").write_bytes(b"")
    way, reasons = cuda_library_load.how(folder)
    assert way == ""
    assert reasons[1:] == ["cuda.bindings is not installed", "cupy is not installed", REMEDY]
    monkeypatch.setattr(cuda_library_load, "_is_installed", lambda name: name == "cupy")
    assert cuda_library_load.how(folder)[0] == "replica_sync.fatbin by cupy"


REMEDY = (
    "build with nvcc on PATH (pip install -e . --no-build-isolation), or pip install cuda-bindings"
)


def test_what_is_loaded_and_what_is_told_if_nothing_is(folder, monkeypatch):
    monkeypatch.setattr(cuda_library_load, "PACKAGE", folder)
    drivers = {"cuda.bindings": lambda: FakeDriver(["push"]), "cupy": FakeDriver}
    monkeypatch.setattr(cuda_library_load, "DRIVERS", drivers)
    with pytest.raises(RuntimeError) as caught:
        cuda_library_load.load_library(CPU)
    for part in ("librelibra_cuda.so was not built", "cuda.bindings: replica_sync.fatbin was not"):
        assert part in str(caught.value)
    (folder / "replica_sync.fatbin").write_bytes(b"")
    library = cuda_library_load.load_library(CPU)
    assert library.name == "replica_sync.fatbin by fake driver"
    assert cuda_library_load.load_library(CPU) is library


def test_gpus_that_are_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    found = cuda_library_load.why_not(torch.device("cuda", 0))
    assert found == "the CUDA kernels need compute capability 8.0, got 7.5"

    def fail(device):
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    told = cuda_library_load.why_not(torch.device("cuda", 1))
    assert told == "cuda:1 does not work: driver too old more"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_library_load, "how", lambda folder: ("", ["one", "two"]))
    assert cuda_library_load.why_not(torch.device("cuda", 0)) == "one; two"
