"""Which CUDA library of replica synchronisation a process uses, or why it has none.

The shared library if it was built and loads, else the shipped cubins by cuda.bindings, else by
CuPy. What does not load keeps its reason, and whoever needs it is told.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import relibra_kernels
from relibra_kernels.transport.cuda_library import REMEDY, SharedLibrary
from relibra_kernels.transport.cuda_library_cubins import (
    BindingsDriver,
    CubinLibrary,
    CupyDriver,
    Driver,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra_kernels.transport.cuda_library import CudaLibrary

PACKAGE = Path(relibra_kernels.__file__).parent
LIBRARY, CUBINS = "librelibra_cuda.so", "replica_sync.fatbin"
DRIVERS: dict[str, Callable[[], Driver]] = {
    "cuda.bindings": BindingsDriver,
    "cupy": CupyDriver,
}
_MIN_CAPABILITY = (8, 0)


def load_library(device: torch.device) -> CudaLibrary:
    """The library for a device, the same one at every call.

    Args:
        device: that the caller's thread uses; its context is made where there is none.

    Raises:
        RuntimeError: none can be had; names each way and why it does not work.
    """
    return _load(PACKAGE, device)


def why_not(device: torch.device) -> str:
    """Why no library can be had for a device; "" where nothing is against it; starts no GPU work.

    Example:
        >>> why_not(torch.device("cpu"))
        'the CUDA kernels need a CUDA device, got cpu'
    """
    if device.type != "cuda":
        return f"the CUDA kernels need a CUDA device, got {device}"
    try:
        found = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:
        return f"{device} does not work: {' '.join(str(error).split())}"
    if found < _MIN_CAPABILITY:
        need, got = (".".join(map(str, one)) for one in (_MIN_CAPABILITY, found))
        return f"the CUDA kernels need compute capability {need}, got {got}"
    return "" if how(PACKAGE)[0] else "; ".join(how(PACKAGE)[1])


def how(folder: Path) -> tuple[str, list[str]]:
    """The way that a library would be loaded, "" for none, and why not a better one.

    Args:
        folder: where the build put its files.

    Example:
        >>> how(Path("/nowhere"))[0]
        ''
    """
    library, reason = _shared(folder)
    if library is not None:
        return library.name, []
    reasons = [reason]
    if not (folder / CUBINS).is_file():
        return "", [*reasons, f"{CUBINS} was not built: {REMEDY}"]
    for name in DRIVERS:
        if _is_installed(name):
            return f"{CUBINS} by {name}", reasons
        reasons.append(f"{name} is not installed")
    return "", [*reasons, REMEDY]


@functools.cache
def _load(folder: Path, device: torch.device) -> CudaLibrary:
    library, reason = _shared(folder)
    if library is not None:
        return library
    reasons = [reason]
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # a module is loaded into the current context
    for name, driver in DRIVERS.items():
        try:
            if not (folder / CUBINS).is_file():
                raise RuntimeError(f"{CUBINS} was not built: {REMEDY}")
            return CubinLibrary(folder / CUBINS, driver())
        except (ImportError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
    raise RuntimeError("no CUDA library of replica synchronisation: " + "; ".join(reasons))


@functools.cache
def _shared(folder: Path) -> tuple[SharedLibrary | None, str]:
    if not (folder / LIBRARY).is_file():
        return None, f"{LIBRARY} was not built"
    try:
        return SharedLibrary(folder / LIBRARY), ""
    except RuntimeError as error:
        return None, str(error)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
