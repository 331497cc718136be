"""Every tile of rows times the weight of its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from relibra_kernels.tables import tile_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below 4 rows torch takes a matrix-vector path whose bits depend on where a weight lies in memory.
MIN_TILE_ROWS = 4
ALIGN_BYTES = 64

# Weights [A, C] by family and slot, in the order of the families' numbers: home, static, replica.
Families: TypeAlias = "Sequence[torch.Tensor | Sequence[torch.Tensor]]"


def grouped_gemm(
    rows_RD: torch.Tensor,
    home_w_HND: torch.Tensor,
    replica_w_SND: torch.Tensor,
    mtile_B4: torch.Tensor,
    block_rows: int,
    exact: bool,
) -> torch.Tensor:
    """``out[r] = w[slot of r] @ rows[r]`` for the rows of every tile, exact zeros elsewhere.

    Args:
        rows_RD: ``[R, D]``, any float dtype; what rows outside the tiles hold (NaN, say) is never
            read.
        home_w_HND: ``[H, N, D]``, dtype of ``rows``, any strides; never copied.
        replica_w_SND: ``[S, N, D]``, likewise; S may be 0.
        mtile_B4: int32 ``[B, 4]``, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: multiply fixed tiles of ``block_rows`` rows, so that a row's bits do not depend on
            which other rows share its slot; otherwise whole slots at once.

    Returns:
        ``[R, N]`` in the dtype of ``rows``; fp32 accumulation. Differentiable in rows and weights
        where the tiles are those of `m_tiles` (gradients assume its layout of slots).

    Raises:
        TypeError, ValueError: an argument breaks the contract above, or a tile leaves its buffer.

    Example:
        >>> import relibra_kernels
        >>> from relibra_kernels.tables import m_tiles
        >>> torch.ops.relibra.grouped_gemm(
        ...     torch.tensor([[1.0], [2.0], [3.0], [float("nan")]]),
        ...     torch.tensor([[[10.0], [0.5]]]), torch.tensor([[[100.0], [7.0]]]),
        ...     m_tiles([2, 1], num_home=1, block_rows=2), 2, True).tolist()
        [[10.0, 0.5], [20.0, 1.0], [300.0, 21.0], [0.0, 0.0]]
    """
    weights = (home_w_HND.transpose(1, 2), (), replica_w_SND.transpose(1, 2))
    return multiply(rows_RD, weights, mtile_B4, block_rows, exact)


class Segment(NamedTuple):
    """Consecutive rows that meet one weight."""

    family: int
    weight: int
    first: int
    rows: int


def multiply(
    rows: torch.Tensor,
    weights: Families,
    mtile_B4: torch.Tensor,
    block_rows: int,
    exact: bool,
) -> torch.Tensor:
    """``out[r] = rows[r] @ weights[family][weight]`` for the rows of the tiles, zeros elsewhere.

    Args:
        rows: ``[R, A]``.
        weights: home ``[H, A, C]``, static and replica ``[S, A, C]``: a tensor, or a matrix a slot.
        mtile_B4: int32 ``[B, 4]``.
        block_rows: rows of a tile.
        exact: see `grouped_gemm`.

    Returns:
        ``[R, C]``.
    """
    body = multiply_tiles if exact else multiply_slots
    return body(rows, weights, mtile_B4, block_rows)


def multiply_slots(
    rows: torch.Tensor,
    weights: Families,
    mtile_B4: torch.Tensor,
    block_rows: int,
) -> torch.Tensor:
    """`multiply`, one product a slot.

    Torch's `grouped_mm` is such a loop too on CPUs. This one multiplies no padding, writes the rows
    of both families in place and takes fp64 and any strides; ``perf/bench_grouped_gemm.py`` times
    them side by side.
    """
    out = rows.new_empty(rows.shape[0], product_width(weights))
    done = 0
    for segment in sorted(slot_segments(mtile_B4, block_rows), key=lambda one: one.first):
        first, end = segment.first, segment.first + segment.rows
        out[done:first].zero_()
        weight = weights[segment.family][segment.weight]
        torch.mm(rows[first:end], weight, out=out[first:end])
        done = end
    out[done:].zero_()
    return out


def multiply_tiles(
    rows: torch.Tensor,
    weights: Families,
    mtile_B4: torch.Tensor,
    block_rows: int,
) -> torch.Tensor:
    """`multiply`, one product a tile, all of one shape.

    A row's bits depend on nothing but the row and its weight: every product has the same sizes
    and strides, its rows are copied to aligned memory (row starts at multiples of 64 bytes, or
    else odd widths would take other code for other rows) and missing rows are zeros.
    """
    family, weight = tile_weights(mtile_B4)
    tile = mtile_B4.numpy()
    height = max(block_rows, MIN_TILE_ROWS)
    owner = np.repeat(np.arange(len(tile)), tile[:, 2])
    inside = np.arange(owner.size) - np.repeat(np.cumsum(tile[:, 2]) - tile[:, 2], tile[:, 2])
    source = torch.from_numpy(tile[owner, 1] + inside)
    place = torch.from_numpy(owner * height + inside)

    packed = aligned_zeros(rows, len(tile) * height, rows.shape[1])
    packed.index_copy_(0, place, rows.index_select(0, source))
    width = product_width(weights)
    products = aligned_zeros(rows, len(tile) * height, width)
    for b, (which, index) in enumerate(zip(family.tolist(), weight.tolist(), strict=True)):
        here = slice(b * height, (b + 1) * height)
        torch.mm(packed[here], weights[which][index], out=products[here])
    out = rows.new_zeros(rows.shape[0], width)
    return out.index_copy_(0, source, products.index_select(0, place))


def product_width(weights: Families) -> int:
    """C."""
    home = weights[0]
    return home.shape[2] if isinstance(home, torch.Tensor) else home[0].shape[1]


def aligned_zeros(like: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Zeros ``[num_rows, width]`` whose rows start at multiples of 64 bytes."""
    step = ALIGN_BYTES // like.element_size()
    return like.new_zeros(num_rows, -(-width // step) * step)[:, :width]


def slot_segments(mtile_B4: torch.Tensor, block_rows: int) -> Sequence[Segment]:
    """Joins neighbouring tiles of one weight, in the order of the table.

    Args:
        mtile_B4: int32 ``[B, 4]``.
        block_rows: rows of a full tile.

    Returns:
        Segments; together they hold each row of each tile once.

    Example:
        >>> from relibra_kernels.tables import m_tiles
        >>> [tuple(one) for one in slot_segments(m_tiles([5, 0, 3], 2, 4), 4)]
        [(0, 0, 0, 5), (2, 0, 8, 3)]
    """
    tile = mtile_B4.numpy()
    if not len(tile):
        return []
    joined = (
        (tile[1:, 0] == tile[:-1, 0])
        & (tile[:-1, 2] == block_rows)
        & (tile[1:, 1] == tile[:-1, 1] + block_rows)
    )
    starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    family, weight = tile_weights(mtile_B4)
    lists = (family[starts], weight[starts], tile[starts, 1], np.add.reduceat(tile[:, 2], starts))
    return [Segment(*one) for one in zip(*(values.tolist() for values in lists), strict=True)]
