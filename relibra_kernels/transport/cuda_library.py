"""The CUDA library of replica synchronisation: what its calls are, and the shared library of them.

Built with nvcc, ``librelibra_cuda.so`` has the C ABI of `cuda/replica_sync/c_api.h`; see
`cuda_library_load` for who loads what. Nothing here needs a GPU before the first call.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

from relibra_kernels.transport.sync_types import ABI_VERSION

if TYPE_CHECKING:
    from pathlib import Path

REMEDY = (
    "build with nvcc on PATH (pip install -e . --no-build-isolation), or pip install cuda-bindings"
)
NOT_SUPPORTED = 801  # cudaErrorNotSupported
_MEANINGS = {
    1: "invalid value",
    2: "out of memory",
    35: "the driver is missing or too old",
    100: "arguments that cannot be, or no CUDA device",
    209: "no kernel of the library is for this GPU",
    700: "a kernel used an illegal address",
    NOT_SUPPORTED: "not supported here",
}


class CudaCallError(RuntimeError):
    """A call of the CUDA library returned a code.

    Args:
        call: name of the function.
        code: what it returned, of the CUDA runtime; of the driver from 10000 on.

    Example:
        >>> print(CudaCallError("rs_push", 209))
        rs_push returned 209: no kernel of the library is for this GPU
    """

    def __init__(self, call: str, code: int) -> None:
        meaning = _MEANINGS.get(code, "see cudaError_t; 10000 more than a CUresult")
        super().__init__(f"{call} returned {code}: {meaning}")
        self.call, self.code = call, code


class CudaLibrary(Protocol):
    """Calls that submit work to a stream; addresses, streams and faults are integers.

    Attributes:
        name: for messages.
    """

    name: str

    def push(self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int) -> None:
        """Copies by the SMs, then words."""
        ...

    def push_tma(self, items: int, n: int, fault: int, blocks: int, stream: int) -> None:
        """Copies in bulk by few SMs, then words; sm_90 and newer."""
        ...

    def push_copy_engine(self, items: int, n: int, fault: int, stream: int) -> None:
        """Copies by copy engines, then words; ``items`` are read before it returns."""
        ...

    def wait(
        self, items: int, n: int, use: int, op: int, timeout_ns: int, fault: int, stream: int
    ) -> None:
        """A block of one SM waits for words."""
        ...

    def wait_values(self, items: int, n: int, stream: int) -> None:
        """The stream waits without an SM, without an end of its own."""
        ...

    def publish(self, items: int, n: int, fault: int, stream: int) -> None:
        """Words."""
        ...

    def reduce(
        self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int
    ) -> None:
        """Sums."""
        ...


class SharedLibrary:
    """The C ABI of a shared library, of the GPU or of the CPU.

    Args:
        path: of the file.

    Raises:
        RuntimeError: it does not load, or has another version of the interface.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            library = ctypes.CDLL(str(path))
            found = int(library.rs_abi_version())
            if found != ABI_VERSION:
                raise RuntimeError(f"need interface version {ABI_VERSION}, got {found}")
            address, number, u64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
            arguments: dict[str, list[type[ctypes._SimpleCData[Any]]]] = {
                "rs_push": [address, number, number, address],
                "rs_push_tma": [address, number, address],
                "rs_push_copy_engine": [address, address],
                "rs_wait": [u64, number, u64, address, address],
                "rs_wait_values": [address],
                "rs_publish": [address, address],
                "rs_reduce": [address, number, number, address],
            }
            for name, rest in arguments.items():
                getattr(library, name).argtypes = [address, number, *rest]
        except (OSError, AttributeError, RuntimeError) as error:
            raise RuntimeError(f"{path.name} does not load ({error}): {REMEDY}") from error
        self._library = library

    def _call(self, name: str, *arguments: int) -> None:
        if code := int(getattr(self._library, name)(*arguments)):
            raise CudaCallError(name, code)

    def push(self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int) -> None:
        """See `CudaLibrary`."""
        self._call("rs_push", items, n, fault, blocks, threads, stream)

    def push_tma(self, items: int, n: int, fault: int, blocks: int, stream: int) -> None:
        """See `CudaLibrary`."""
        self._call("rs_push_tma", items, n, fault, blocks, stream)

    def push_copy_engine(self, items: int, n: int, fault: int, stream: int) -> None:
        """See `CudaLibrary`."""
        self._call("rs_push_copy_engine", items, n, fault, stream)

    def wait(
        self, items: int, n: int, use: int, op: int, timeout_ns: int, fault: int, stream: int
    ) -> None:
        """See `CudaLibrary`."""
        self._call("rs_wait", items, n, use, op, timeout_ns, fault, stream)

    def wait_values(self, items: int, n: int, stream: int) -> None:
        """See `CudaLibrary`."""
        self._call("rs_wait_values", items, n, stream)

    def publish(self, items: int, n: int, fault: int, stream: int) -> None:
        """See `CudaLibrary`."""
        self._call("rs_publish", items, n, fault, stream)

    def reduce(
        self, items: int, n: int, fault: int, blocks: int, threads: int, stream: int
    ) -> None:
        """See `CudaLibrary`."""
        self._call("rs_reduce", items, n, fault, blocks, threads, stream)
