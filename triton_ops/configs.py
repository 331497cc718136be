"""Block sizes of the GEMM kernels: a static table, so that results do not depend on the plan.

A row is found by kernel, architecture, dtype and size class of the expert: never by how many rows
a step or a slot has. Nothing is tuned at run time; `perf/tune_grouped_gemm.py` measures
candidates on a GPU and prints rows for this table.

Letters: D model dim, F expert dim.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
import triton
import triton.runtime.driver

from relibra_kernels.checks import check_int

KERNELS = ("expert_up", "grouped_gemm", "expert_down_backward", "grouped_gemm_wgrad")
ARCHS = ("sm_80", "sm_90", "sm_100", "interpreter")
SIZE_CLASSES = ("narrow", "wide")
DTYPES = {torch.bfloat16: "16 bit", torch.float16: "16 bit", torch.float32: "fp32"}

# Rows of a tile by architecture: every table of a rank is built with it, so all kernels share it.
_BLOCK_ROWS = {"sm_80": 64, "sm_90": 128, "sm_100": 128, "interpreter": 16}
_COMPILED = (
    "every option passes perf/aot_gate.py, see perf/results/aot.json for versions of Triton; "
    "compiled, not run"
)
_INTERPRETED = "small enough for Triton's interpreter"


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One way to run a GEMM kernel.

    Attributes:
        block_m: rows of a tile, the ``block_rows`` of the tables; of wgrad, a block of F.
        block_n: output columns of a tile.
        block_k: depth of one step of the k loop; of wgrad, rows that divide ``block_rows``.
        num_warps: warps a program.
        num_stages: pipeline depth.
        tma: copy blocks through tensor descriptors (sm_90 on), else masked pointers.

    Raises:
        ValueError: a block or a number of warps that is no power of two, or no stage.

    Example:
        >>> GemmConfig(16, 32, 32).num_warps
        4
        >>> GemmConfig(16, 48, 32)
        Traceback (most recent call last):
        ValueError: block_n: need a power of two, got 48
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 1
    tma: bool = False

    def __post_init__(self) -> None:
        """Checks what Triton would refuse with less clear words."""
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = check_int(name, getattr(self, name), minimum=1)
            if value & (value - 1):
                raise ValueError(f"{name}: need a power of two, got {value}")
        check_int("num_stages", self.num_stages, minimum=1)


@dataclasses.dataclass(frozen=True)
class ConfigRow:
    """A row of the table.

    Attributes:
        config: block sizes.
        provenance: where the row comes from, and whether it ever ran on a GPU.
    """

    config: GemmConfig
    provenance: str


_CPU = ("interpreter",)
_UP, _GEMM, _DOWN, _WGRAD = ((kernel,) for kernel in KERNELS)
_ROWS = (  # kernels, architectures, dtype, size classes, config, provenance
    (_UP, ("sm_80",), "16 bit", SIZE_CLASSES, (64, 128, 32, 8, 4, False), _COMPILED),
    (_UP, ("sm_90",), "16 bit", SIZE_CLASSES, (128, 128, 64, 8, 3, True), _COMPILED),
    (_UP, ("sm_100",), "16 bit", SIZE_CLASSES, (128, 64, 64, 8, 4, True), _COMPILED),
    (_GEMM, ("sm_80",), "16 bit", SIZE_CLASSES, (64, 128, 64, 8, 4, False), _COMPILED),
    (_GEMM, ("sm_90", "sm_100"), "16 bit", SIZE_CLASSES, (128, 256, 64, 8, 4, True), _COMPILED),
    (_DOWN, ("sm_80",), "16 bit", SIZE_CLASSES, (64, 64, 64, 8, 3, False), _COMPILED),
    (_DOWN, ("sm_90",), "16 bit", SIZE_CLASSES, (128, 128, 64, 8, 3, True), _COMPILED),
    (_DOWN, ("sm_100",), "16 bit", SIZE_CLASSES, (128, 64, 64, 8, 3, True), _COMPILED),
    # Of wgrad block_m is a block of F, and block_k one of rows.
    (_WGRAD, ("sm_80",), "16 bit", SIZE_CLASSES, (128, 128, 32, 8, 3, False), _COMPILED),
    (_WGRAD, ("sm_90",), "16 bit", SIZE_CLASSES, (128, 256, 64, 8, 4, True), _COMPILED),
    (_WGRAD, ("sm_100",), "16 bit", SIZE_CLASSES, (128, 128, 64, 8, 4, True), _COMPILED),
    (KERNELS, ("sm_80",), "fp32", SIZE_CLASSES, (64, 32, 32, 8, 2, False), _COMPILED),
    (KERNELS, ("sm_90",), "fp32", SIZE_CLASSES, (128, 32, 32, 8, 2, False), _COMPILED),
    (KERNELS[:3], ("sm_100",), "fp32", SIZE_CLASSES, (128, 32, 32, 8, 2, False), _COMPILED),
    # 128 x 32 spills 8 bytes with Triton 3.8.0.
    (_WGRAD, ("sm_100",), "fp32", SIZE_CLASSES, (64, 64, 32, 8, 2, False), _COMPILED),
    (KERNELS[:3], _CPU, "16 bit", SIZE_CLASSES, (16, 64, 64, 4, 1, False), _INTERPRETED),
    (KERNELS[:3], _CPU, "fp32", SIZE_CLASSES, (16, 64, 64, 4, 1, False), _INTERPRETED),
    (_WGRAD, _CPU, "16 bit", SIZE_CLASSES, (64, 64, 16, 4, 1, False), _INTERPRETED),
    (_WGRAD, _CPU, "fp32", SIZE_CLASSES, (64, 64, 16, 4, 1, False), _INTERPRETED),
)
TABLE = {
    key: ConfigRow(GemmConfig(*config), provenance)
    for kernels, archs, dtype, sizes, config, provenance in _ROWS
    for key in itertools.product(kernels, archs, (dtype,), sizes)
}


def size_class(hidden_size: int, expert_size: int) -> str:
    """Class of an expert's sizes: "narrow" experts have a short k loop in their second GEMM.

    Args:
        hidden_size: D.
        expert_size: F.

    Example:
        >>> size_class(2048, 768), size_class(7168, 2048)
        ('narrow', 'wide')
    """
    return "narrow" if min(hidden_size, expert_size) < 1024 else "wide"


@functools.cache
def lookup(
    kernel: str, arch: str, dtype: torch.dtype, hidden_size: int, expert_size: int
) -> GemmConfig:
    """Block sizes of a kernel.

    Args:
        kernel: name of the op in `triton_ops`.
        arch: see :func:`arch_of`.
        dtype: of rows and weights; fp16 and bf16 share their rows.
        hidden_size: D.
        expert_size: F.

    Raises:
        ValueError: the table has no such row; names the key and the remedy.

    Example:
        >>> lookup("expert_up", "sm_90", torch.bfloat16, 2048, 768).block_m
        128
        >>> lookup("expert_up", "sm_75", torch.float16, 2048, 768)
        Traceback (most recent call last):
        ValueError: arch: need one of sm_80, sm_90, sm_100, interpreter, got sm_75; ...
    """
    remedy = "use backend='reference', or measure a row with perf/tune_grouped_gemm.py and add it"
    for name, value, known in (("kernel", kernel, KERNELS), ("arch", arch, ARCHS)):
        if value not in known:
            raise ValueError(f"{name}: need one of {', '.join(known)}, got {value}; {remedy}")
    if dtype not in DTYPES:
        known_dtypes = ", ".join(str(one) for one in DTYPES)
        raise ValueError(f"dtype: need one of {known_dtypes}, got {dtype}; {remedy}")
    key = (kernel, arch, DTYPES[dtype], size_class(hidden_size, expert_size))
    if key not in TABLE:
        raise ValueError(f"config: need a row in triton_ops/configs.py, got key {key}; {remedy}")
    return TABLE[key].config


def variants(
    arch: str, dtype: torch.dtype, hidden_size: int, expert_size: int
) -> list[tuple[str, GemmConfig]]:
    """What a layer launches, for a warm-up that compiles everything before the first step.

    Args:
        arch: see :func:`arch_of`.
        dtype: of rows and weights.
        hidden_size: D.
        expert_size: F.

    Returns:
        (kernel, block sizes), one entry a GEMM kernel.

    Raises:
        ValueError: like :func:`lookup`.

    Example:
        >>> [kernel for kernel, _ in variants("sm_90", torch.bfloat16, 2048, 768)]
        ['expert_up', 'grouped_gemm', 'expert_down_backward', 'grouped_gemm_wgrad']
    """
    return [(name, lookup(name, arch, dtype, hidden_size, expert_size)) for name in KERNELS]


def block_rows(arch: str) -> int:
    """Rows of a tile, to build tables with.

    Args:
        arch: see :func:`arch_of`.

    Raises:
        ValueError: an unknown architecture.

    Example:
        >>> block_rows("sm_90"), block_rows("interpreter")
        (128, 16)
    """
    if arch not in _BLOCK_ROWS:
        raise ValueError(f"arch: need one of {', '.join(ARCHS)}, got {arch}")
    return _BLOCK_ROWS[arch]


@functools.cache
def arch_of(device: torch.device) -> str:
    """Architecture that kernels on a device's tensors are compiled for.

    Args:
        device: of the tensors.

    Returns:
        ``"sm_<capability>"``, or ``"interpreter"`` for CPU tensors under TRITON_INTERPRET=1.

    Raises:
        ValueError: CPU tensors without the interpreter; names the remedy.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    if triton.knobs.runtime.interpret:
        return "interpreter"
    try:
        return f"sm_{triton.runtime.driver.active.get_current_target().arch}"
    except RuntimeError as error:  # no driver
        raise ValueError(
            f"device: need a CUDA device to run Triton kernels, got {device}; set "
            "TRITON_INTERPRET=1 before Python starts, or use backend='reference'"
        ) from error
