"""`relibra doctor`: what is installed, what works on this machine, and how to get the rest.

Every probe answers with a value or with the reason why there is none; none of them raises. Only
what the CPU version needs decides the exit code: a machine without a GPU is healthy.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

import relibra_kernels
from relibra.cli_input import add_command, console, print_json
from relibra_kernels import native
from relibra_kernels.transport import cuda_library_load, nvshmem_library
from relibra_kernels.transport.heap_nvshmem import NvshmemHeap
from relibra_kernels.transport.heap_torch_symm import TorchSymmHeap

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

Status: TypeAlias = Literal["ok", "absent", "problem"]

_SUMMARY = "show what is installed and what works on this machine"
_EPILOG = """\
examples:
  relibra doctor
  relibra doctor --json

exit codes: 0 all that this version needs works, 1 something does not
"""
_PROBE_TIMEOUT_S = 20
_SHM = Path("/dev/shm")
_SMALL_SHM_BYTES = 2**28  # containers get 64 MiB unless asked


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    Args:
        name: what was looked at.
        status: `"ok"`, `"absent"` (not needed for the CPU) or `"problem"`.
        value: version, count or the reason.
        remedy: what to do about it; "" where there is nothing to do.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""


def add_parser(subparsers: Any) -> None:
    """Adds the command.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` gave.
    """
    add_command(subparsers, "doctor", _SUMMARY, _EPILOG).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: parsed arguments.

    Returns:
        0 if there is no problem, else 1.
    """
    groups = {
        "software": _software(),
        "machine": _machine(),
        "what works": _abilities(),
    }
    facts = [fact for group in groups.values() for fact in group]
    healthy = all(fact.status != "problem" for fact in facts)
    if args.json:
        listed = {
            _key(name): {_key(fact.name): _without_name(fact) for fact in group}
            for name, group in groups.items()
        }
        print_json({"command": "doctor", "ok": healthy, **listed})
        return 0 if healthy else 1
    out = console()
    for title, group in groups.items():
        out.print(title)
        for fact in group:
            mark = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}[fact.status]
            out.print(f"  {mark} {fact.name:24} {fact.value}", soft_wrap=True)
            if fact.remedy and fact.status != "ok":
                out.print(f"          remedy: {fact.remedy}", soft_wrap=True)
    out.print("all that this version needs works" if healthy else "see the problems above")
    return 0 if healthy else 1


def _key(name: str) -> str:
    return re.sub(r"\W+", "_", name.lower()).strip("_")


def _without_name(fact: Fact) -> dict[str, str]:
    return {name: value for name, value in asdict(fact).items() if name != "name"}


def _software() -> list[Fact]:
    """Versions, and the compiled parts."""
    cuda = torch.version.cuda
    return [
        Fact("python", "ok", f"{platform.python_version()} ({sys.executable})"),
        _package("relibra", ("relibra-kernels",), needed=True),
        Fact("torch", "ok", f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPU'}"),
        _package("triton", ("triton",), remedy="pip install triton"),
        Fact("numpy", "ok", np.__version__),
        _native_planner(),
        *_left_out_of_the_build(),
        _nvcc(),
        _package("NVSHMEM wheel", ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")),
        _package("nvshmem4py", ("nvshmem4py-cu13", "nvshmem4py-cu12")),
        *_nvshmem(),
        _package("transformers (demo)", ("transformers",), remedy="pip install '.[demo]'"),
        _package("matplotlib (demo)", ("matplotlib",), remedy="pip install '.[demo]'"),
    ]


def _package(
    name: str, distributions: tuple[str, ...], *, needed: bool = False, remedy: str = ""
) -> Fact:
    """Version of the first distribution that is installed."""
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        label = f" ({distribution})" if len(distributions) > 1 else ""
        return Fact(name, "ok", version + label)
    missing = f"not installed ({' or '.join(distributions)})"
    return Fact(name, "problem" if needed else "absent", missing, remedy)


def _native_planner() -> Fact:
    module, reason = native.load("relibra_kernels._planner")
    if module is not None:
        return Fact("native planner", "ok", str(Path(module.__file__).name))
    remedy = "pip install -e . --no-build-isolation"
    return Fact("native planner", "problem", f"does not load: {reason}", remedy)


def _left_out_of_the_build() -> list[Fact]:
    """What the build left out, as it recorded it."""
    path = Path(relibra_kernels.__file__).parent / "_build_info.json"
    try:
        info = json.loads(path.read_text("utf-8"))
        facts = [Fact("native compiler", "ok", str(info["compiler"]))]
        for name, key in (("native CUDA part", "cuda"), ("native NVSHMEM part", "nvshmem")):
            reason = str(info[f"{key}_left_out"])
            status: Status = "absent" if reason else "ok"
            facts.append(Fact(name, status, f"not built: {reason}" if reason else "built"))
        return facts
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no record of the native build: {type(error).__name__}"
        return [Fact("native build", "problem", reason, "pip install -e . --no-build-isolation")]


def _nvcc() -> Fact:
    path = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if path is None:
        return Fact("nvcc", "absent", "not on PATH, and CUDACXX is not set")
    text = _output_of([path, "--version"])
    release = re.search(r"release ([\d.]+)", text)
    if release is None:
        return Fact("nvcc", "absent", f"version unknown: {path} does not answer like nvcc")
    return Fact("nvcc", "ok", f"{release[1]} ({path})")


def _nvshmem() -> list[Fact]:
    """Release of the library, and whose instance it is."""
    facts = []
    try:
        found = nvshmem_library.NvshmemLibrary.open().version()
        facts.append(Fact("NVSHMEM library", "ok", ".".join(map(str, found))))
    except nvshmem_library.NvshmemError as error:
        remedy = nvshmem_library.REMEDY
        facts.append(Fact("NVSHMEM library", "absent", str(error), remedy))
    return [*facts, Fact("NVSHMEM owner", "ok", nvshmem_library.owner())]


def _machine() -> list[Fact]:
    """Cores, threads, shared memory and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = os.environ.get("OMP_NUM_THREADS")
    threads = f"{asked} (OMP_NUM_THREADS)" if asked else f"{cores} (OMP_NUM_THREADS is not set)"
    facts = [
        Fact("cpu cores", "ok", f"{cores} of {os.cpu_count()} for this process"),
        Fact("OpenMP threads", "ok", threads),
        _shared_memory(),
        _driver(),
    ]
    return [*facts, *_gpus()]


def _shared_memory() -> Fact:
    """Room for arenas of the ``cpu_shm`` transport and for data loaders."""
    name, remedy = str(_SHM), "containers: --shm-size or --ipc=host"
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return Fact(name, "absent", f"{error.strerror}: no cpu_shm transport", remedy)
    value = f"{usage.total / 2**20:.0f} MiB, {usage.free / 2**20:.0f} MiB free"
    if usage.total < _SMALL_SHM_BYTES:
        return Fact(name, "absent", f"{value}: little for cpu_shm arenas", remedy)
    return Fact(name, "ok", value)


def _gpus() -> list[Fact]:
    """Each GPU with its compute capability, and which of them reach each other's memory."""
    facts: list[Fact] = []
    if torch.version.cuda is None:
        reason = "this torch is built for the CPU only"
        return [Fact("gpu", "absent", reason), Fact("P2P matrix", "absent", reason)]
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index in range(count):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            facts.append(
                Fact(
                    f"gpu {index}",
                    "ok",
                    f"{properties.name}, sm_{properties.major}{properties.minor}, "
                    f"{memory:.0f} GiB, peers {_peers(index, count)}",
                )
            )
        matrix = "; ".join(f"{index}: {_peers(index, count)}" for index in range(count))
        if count == 0:
            facts.append(Fact("gpu", "absent", "torch sees no CUDA device"))
        status: Status = "ok" if count else "absent"
        facts.append(Fact("P2P matrix", status, matrix or "torch sees no CUDA device"))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        facts += [Fact("gpu", "absent", reason), Fact("P2P matrix", "absent", reason)]
    return facts


def _peers(index: int, count: int) -> str:
    """GPUs whose memory this one reaches directly."""
    reached = [
        str(other)
        for other in range(count)
        if other != index and torch.cuda.can_device_access_peer(index, other)
    ]
    return ", ".join(reached) or ("none: the only GPU" if count == 1 else "none")


def _driver() -> Fact:
    """CUDA version of the driver, asked without creating a context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Fact("CUDA driver", "absent", f"no libcuda.so.1: {str(error).splitlines()[0]}")
    version = ctypes.c_int(0)
    code = library.cuDriverGetVersion(ctypes.byref(version))
    if code != 0:
        return Fact("CUDA driver", "absent", f"cuDriverGetVersion returned {code}")
    supported = f"supports CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    try:
        first = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0]
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    except (OSError, IndexError):
        found = None
    return Fact("CUDA driver", "ok", (f"{found[0]}, " if found else "") + supported)


def _abilities() -> list[Fact]:
    """What can be done here with this version."""
    module, _ = native.load("relibra_kernels._planner")
    demo = [name for name in ("transformers", "matplotlib") if _package("", (name,)).status != "ok"]
    return [
        Fact("plan, check", *_yes_or("problem", module is not None, "needs the native planner")),
        Fact("train on CPU (gloo)", *_distributed("gloo", "problem")),
        Fact("demo", *_yes_or("absent", not demo, f"needs {' and '.join(demo)}")),
        Fact("NCCL", *_distributed("nccl", "absent")),
        Fact("GPU kernels", *_gpu_kernels()),
        Fact("cpu_shm transport", *_yes_or("absent", _SHM.is_dir(), f"there is no {_SHM}")),
        Fact("torch_symm transport", *_transport(TorchSymmHeap.why_not)),
        Fact("nvshmem transport", *_transport(NvshmemHeap.why_not)),
        Fact("kernels of both", *_replica_kernels()),
    ]


def _gpu_kernels() -> tuple[Status, str]:
    missing = [] if torch.cuda.is_available() else ["a CUDA device"]
    if _package("", ("triton",)).status != "ok":
        missing.append("triton")
    return _yes_or("absent", not missing, f"needs {' and '.join(missing)}")


def _replica_kernels() -> tuple[Status, str]:
    """How the CUDA kernels of replica synchronisation would be loaded."""
    way, reasons = cuda_library_load.how(cuda_library_load.PACKAGE)
    return ("ok", way) if way else ("absent", "; ".join(reasons))


def _transport(why_not: Callable[[torch.device], str]) -> tuple[Status, str]:
    """Whether one process could use it; with peers, `choose_provider` decides."""
    device = torch.device("cuda", 0)
    reason = why_not(device) or cuda_library_load.why_not(device)
    return _yes_or("absent", not reason, reason)


def _yes_or(otherwise: Status, works: bool, reason: str) -> tuple[Status, str]:
    return ("ok", "works") if works else (otherwise, reason)


def _distributed(backend: str, otherwise: Status) -> tuple[Status, str]:
    available = torch.distributed.is_available() and torch.distributed.is_backend_available(backend)
    return _yes_or(otherwise, available, f"this torch is built without {backend}")


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout
