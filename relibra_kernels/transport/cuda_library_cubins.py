"""The kernels of replica synchronisation from a file of cubins, where no shared library was built.

They are launched through cuda.bindings or CuPy; copy engines and waits without an SM are then not
to be had.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from relibra_kernels.transport.cuda_library import NOT_SUPPORTED, REMEDY, CudaCallError

if TYPE_CHECKING:
    from pathlib import Path

RING_BYTES = 4 * 32768  # shared memory of a block of rs_push_tma_kernel
WAIT_THREADS = 128  # a block of rs_wait_kernel and rs_publish_kernel
_DRIVER_CODE = 10000  # added to a code of the driver
_FUNCTION_ATTRIBUTE_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver(Protocol):
    """The few calls of the CUDA driver that a module of cubins needs; handles are integers."""

    name: str

    def load(self, path: Path) -> int:
        """A module in the current context."""
        ...

    def function(self, module: int, name: str) -> int:
        """A kernel of it."""
        ...

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """Lets a kernel use that much dynamic shared memory."""
        ...

    def launch(
        self, function: int, blocks: int, threads: int, shared: int, stream: int, arguments: int
    ) -> None:
        """A grid; ``arguments`` is the address of an array of addresses, read at once."""
        ...


class BindingsDriver:
    """`Driver` by ``cuda.bindings.driver``.

    Args:
        module: a stand-in for tests.
    """

    name = "cuda.bindings"

    def __init__(self, module: Any = None) -> None:
        self._cuda = module or importlib.import_module("cuda.bindings.driver")

    def load(self, path: Path) -> int:
        """See `Driver`."""
        return int(self._call("cuModuleLoad", str(path).encode()))

    def function(self, module: int, name: str) -> int:
        """See `Driver`."""
        return int(self._call("cuModuleGetFunction", module, name.encode()))

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """See `Driver`."""
        limit = self._cuda.CUfunction_attribute(_FUNCTION_ATTRIBUTE_SHARED)
        self._call("cuFuncSetAttribute", function, limit, num_bytes)

    def launch(
        self, function: int, blocks: int, threads: int, shared: int, stream: int, arguments: int
    ) -> None:
        """See `Driver`."""
        grid = (blocks, 1, 1, threads, 1, 1)
        self._call("cuLaunchKernel", function, *grid, shared, stream, arguments, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status):
            raise CudaCallError(name, _DRIVER_CODE + int(status))
        return results[0] if results else None


class CupyDriver:
    """`Driver` by CuPy: its ``RawModule`` loads the file.

    Args:
        module: a stand-in for tests.
    """

    name = "CuPy"

    def __init__(self, module: Any = None) -> None:
        self._cupy = module or importlib.import_module("cupy")
        self._modules: list[Any] = []

    def load(self, path: Path) -> int:
        """See `Driver`."""
        self._modules.append(self._cupy.RawModule(path=str(path)))
        return len(self._modules) - 1

    def function(self, module: int, name: str) -> int:
        """See `Driver`."""
        return int(self._modules[module].get_function(name).kernel.ptr)

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """See `Driver`."""
        self._cupy.cuda.driver.funcSetAttribute(function, _FUNCTION_ATTRIBUTE_SHARED, num_bytes)

    def launch(
        self, function: int, blocks: int, threads: int, shared: int, stream: int, arguments: int
    ) -> None:
        """See `Driver`."""
        grid = (blocks, 1, 1, threads, 1, 1)
        self._cupy.cuda.driver.launchKernel(function, *grid, shared, stream, arguments, 0)


class CubinLibrary:
    """The kernels of a file of cubins.

    Args:
        path: of the file.
        driver: that loads and launches.

    Raises:
        RuntimeError: the file does not load, or lacks a kernel.
    """

    def __init__(self, path: Path, driver: Driver) -> None:
        self.name, self._driver = f"{path.name} by {driver.name}", driver
        kernels = ("push", "push_tma", "wait", "publish", "reduce")
        try:
            module = driver.load(path)
            self._kernels = {name: driver.function(module, f"rs_{name}_kernel") for name in kernels}
        except Exception as error:  # CuPy's errors of the driver derive from Exception alone
            raise RuntimeError(f"{self.name} does not load ({error}): {REMEDY}") from error
        self._may_use_ring = False

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        stream: int,
        fault: int,
        *arguments: ctypes._SimpleCData[Any],
    ) -> None:
        """The fault is the last argument, by value; all are read before this returns."""
        addresses = [ctypes.addressof(one) for one in arguments] + [fault]
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        blocks, threads, shared = grid
        self._driver.launch(
            self._kernels[kernel], blocks, threads, shared, stream, ctypes.addressof(table)
        )

    def push(self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int) -> None:
        """See `CudaLibrary`."""
        head = (ctypes.c_void_p(items), ctypes.c_int(n))
        self._launch("push", (blocks, threads, 0), stream, fault, *head)

    def push_tma(self, items: int, n: int, fault: int, blocks: int, stream: int) -> None:
        """See `CudaLibrary`."""
        if torch.cuda.get_device_capability()[0] < 9:  # the kernel of older GPUs is empty
            raise CudaCallError("rs_push_tma", NOT_SUPPORTED)
        if not self._may_use_ring:
            self._driver.allow_shared(self._kernels["push_tma"], RING_BYTES)
            self._may_use_ring = True
        head = (ctypes.c_void_p(items), ctypes.c_int(n))
        self._launch("push_tma", (blocks, 32, RING_BYTES), stream, fault, *head)

    def push_copy_engine(self, items: int, n: int, fault: int, stream: int) -> None:
        """Not to be had from kernels."""
        raise CudaCallError("rs_push_copy_engine", NOT_SUPPORTED)

    def wait(
        self, items: int, n: int, use: int, op: int, timeout_ns: int, fault: int, stream: int
    ) -> None:
        """See `CudaLibrary`."""
        head = (ctypes.c_void_p(items), ctypes.c_int(n), ctypes.c_uint64(use), ctypes.c_int(op))
        grid = (1, WAIT_THREADS, 0)
        self._launch("wait", grid, stream, fault, *head, ctypes.c_uint64(timeout_ns))

    def wait_values(self, items: int, n: int, stream: int) -> None:
        """Not to be had from kernels."""
        raise CudaCallError("rs_wait_values", NOT_SUPPORTED)

    def publish(self, items: int, n: int, fault: int, stream: int) -> None:
        """See `CudaLibrary`."""
        head = (ctypes.c_void_p(items), ctypes.c_int(n))
        self._launch("publish", (1, WAIT_THREADS, 0), stream, fault, *head)

    def reduce(
        self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int
    ) -> None:
        """See `CudaLibrary`."""
        head = (ctypes.c_void_p(items), ctypes.c_int(n))
        self._launch("reduce", (blocks, threads, 0), stream, fault, *head)
