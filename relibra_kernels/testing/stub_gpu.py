"""A stand-in GPU for Triton: launches from CPU tensors compile for it and are noted, not run.

The real launch code runs: grids, block sizes, specialisation, limits of shared memory. Use it in a
process of its own that never sets TRITON_INTERPRET: Triton has no way back to another driver.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes of shared memory a block may use, and streaming multiprocessors.
# Source: CUDA C++ programming guide, table of compute capabilities; A100, H200 and B200.
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch that would have reached the GPU. Registers stay unknown: the driver counts them.

    Attributes:
        kernel: name of the Triton function.
        grid: programs along x, y and z.
        num_warps: warps a program.
        shared_bytes: shared memory a program.
        variant: number of the compiled variant; its launches share it.
        cubin: its binary, to be disassembled.
    """

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    variant: int
    cubin: bytes = dataclasses.field(repr=False)


def use_stub_gpu(arch: str) -> list[Launch]:
    """Makes a stand-in the current GPU of this process.

    Args:
        arch: ``"sm_80"``, ``"sm_90"`` or ``"sm_100"``.

    Returns:
        The list that every later launch is appended to; a launch that needs more shared memory
        than the GPU has raises Triton's OutOfResources instead.

    Raises:
        ValueError: another architecture.
        RuntimeError: this process interprets kernels.
    """
    check_choice("arch", arch, tuple(SHARED_BYTES))
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: need it unset in a process with a stand-in GPU")
    launches: list[Launch] = []
    driver.set_active(_StubDriver(arch, launches))
    return launches


class _StubUtils:
    """What Triton asks of the driver about a device and its binaries."""

    def __init__(self, arch: str) -> None:
        self.properties = {
            "max_shared_mem": SHARED_BYTES[arch],
            "multiprocessor_count": MULTIPROCESSORS[arch],
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }
        self.cubins: list[bytes] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self.properties

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        self.cubins.append(cubin)
        # module, function, registers, spills, most threads a block
        return 1, len(self.cubins) - 1, 0, 0, 1024

    def unload_module(self, *module: object) -> None:
        pass


class _StubDriver:
    """The part of Triton's driver interface that a launch uses."""

    def __init__(self, arch: str, launches: list[Launch]) -> None:
        self.capability = int(arch.removeprefix("sm_"))
        self.utils = _StubUtils(arch)
        self.launches = launches

    def launcher_cls(self, source: object, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: object) -> None:
            self.launches.append(
                Launch(
                    metadata.name,
                    (x, y, z),
                    metadata.num_warps,
                    metadata.shared,
                    function,
                    self.utils.cubins[function],
                )
            )

        return launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton's caches go by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
