"""What the ops need to launch a GEMM kernel: block sizes, tile counts, weights by family."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from relibra_kernels.checks import check_int
from relibra_kernels.ops.launch_data import launch_data
from relibra_kernels.weights import WeightSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from relibra_kernels.triton_ops.configs import GemmConfig

SIZE_MULTIPLE = 64
CPU_BLOCK_ROWS = 16
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_gemm_sizes(rows: Tensor, **sizes: int) -> None:
    """What the GEMM kernels need of dtype and sizes.

    Args:
        rows: any of the op's matrices.
        sizes: by name, such as ``hidden_size=2048``.

    Raises:
        TypeError: a dtype that no kernel has.
        ValueError: a size that is no multiple of 64.

    Example:
        >>> check_gemm_sizes(torch.zeros(1, 64), hidden_size=136)
        Traceback (most recent call last):
        ValueError: hidden_size: need a multiple of 64, got 136; pad it, or use backend='reference'
    """
    if rows.dtype not in KERNEL_DTYPES:
        known = ", ".join(str(dtype) for dtype in KERNEL_DTYPES)
        raise TypeError(f"dtype: need one of {known}, got {rows.dtype}; use backend='reference'")
    for name, size in sizes.items():
        if size % SIZE_MULTIPLE:
            raise ValueError(
                f"{name}: need a multiple of {SIZE_MULTIPLE}, got {size}; pad it, or use "
                "backend='reference'"
            )


def gemm_config(
    kernel: str, rows: Tensor, hidden_size: int, expert_size: int, block_rows: int | None = None
) -> GemmConfig:
    """Block sizes for a launch on the device of some rows.

    Args:
        kernel: name in `triton_ops.configs`.
        rows: any of the op's matrices.
        hidden_size: D.
        expert_size: F.
        block_rows: rows of the tables' tiles, which the kernel's must equal; None where the kernel
            does not walk over tiles of rows. The interpreter takes any.

    Raises:
        ValueError: no row in the table for this key, or tables with other tiles.
    """
    from relibra_kernels.triton_ops import configs

    arch = configs.arch_of(rows.device)
    config = configs.lookup(kernel, arch, rows.dtype, hidden_size, expert_size)
    if block_rows is None or config.block_m == block_rows:
        return config
    check_int("block_rows", block_rows, minimum=1)
    if arch != "interpreter":
        raise ValueError(
            f"block_rows: need {config.block_m}, the tiles of {kernel} on {arch}, got {block_rows}"
        )
    return dataclasses.replace(config, block_m=block_rows)


def tile_count(tiles_B4: Tensor, device: torch.device) -> Tensor:
    """B as the kernels read it, int32 ``[1]`` on their device; made ahead where tables carry it."""
    data = launch_data(tiles_B4)
    if data is not None and data.num_tiles.device == device:
        return data.num_tiles
    return torch.full((1,), len(tiles_B4), dtype=torch.int32, device=device)


def clear_other_rows(mtile_B4: Tensor, block_rows: int, *outputs: Tensor) -> None:
    """Zeros in the rows that no tile holds, which kernels leave as they were; seldom any.

    Args:
        mtile_B4: int32 ``[B, 4]``.
        block_rows: rows of a tile.
        outputs: ``[R, ...]`` each.

    Example:
        >>> out = torch.full((6, 1), 7.0)
        >>> clear_other_rows(torch.tensor([[0, 2, 1, 0]]), 2, out)
        >>> out.flatten().tolist()
        [0.0, 0.0, 7.0, 7.0, 0.0, 0.0]
    """
    num_rows = outputs[0].shape[0]
    if num_rows == mtile_B4.shape[0] * block_rows:
        return
    in_tile = torch.arange(block_rows, device=mtile_B4.device)
    rows = (mtile_B4[:, 1, None] + in_tile).reshape(-1).long()
    others = torch.ones(num_rows, dtype=torch.bool, device=mtile_B4.device)
    others[rows] = False
    for out in outputs:
        out.masked_fill_(others.reshape(-1, *[1] * (out.dim() - 1)), 0)


def weight_set(
    home: Sequence[Tensor],
    static: Tensor | None,
    replica: Tensor | None,
    halves: int,
    interleaved: bool = False,
    transposed: bool = False,
    tiles: Tensor | None = None,
    halves_apart: bool = False,
) -> WeightSet:
    """The families of one field from an op's arguments; a family without slots is left out.

    Args:
        home: one tensor ``[H, N, K]``, H tensors ``[N, K]``, or a pair, see `WeightSet`.
        static: ``[X, N, K]`` or None.
        replica: ``[S, N, K]`` or None.
        halves: 2 for gate and up rows.
        interleaved: gate and up rows alternate.
        transposed: stored ``[slots, K, N]``.
        tiles: the launch's table; its launch data may remember the field.
        halves_apart: gate and up weights of the home slots are two tensors.

    Raises:
        TypeError, ValueError: tensors that do not fit each other, see `WeightSet`.
    """
    static = static if static is not None and static.shape[0] else None
    replica = replica if replica is not None and replica.shape[0] else None

    def make() -> WeightSet:
        whole = len(home) == 1 and home[0].dim() == 3
        return WeightSet(
            home[0] if whole else tuple(home),
            static,
            replica,
            halves=halves,
            interleaved=interleaved,
            transposed=transposed,
            halves_apart=halves_apart,
        )

    data = None if tiles is None else launch_data(tiles)
    if data is None or data.weights is None:
        return make()
    options = (halves, interleaved, transposed, halves_apart)
    return data.weights.get((*home, static, replica), options, make)


def default_block_rows(device: torch.device, backend: str = "auto") -> int:
    """Rows of a tile that tables for a device should have.

    Args:
        device: where the experts' rows will be.
        backend: see `relibra_kernels.ops`.

    Raises:
        ValueError: an architecture that no kernel is made for.

    Example:
        >>> default_block_rows(torch.device("cpu"))
        16
    """
    if device.type != "cuda" or backend == "reference":
        return CPU_BLOCK_ROWS
    from relibra_kernels.triton_ops import configs

    return configs.block_rows(configs.arch_of(device))
