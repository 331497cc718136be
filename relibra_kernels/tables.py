"""Host-side tables that the kernels read: slot quotas, slot bases, GEMM tiles, and their checks.

Built once a (micro-batch, layer) from a plan's quotas; int32, -1 means none. Everything here looks
at CPU tensors through NumPy views.

Letters: T tokens here, V tokens sent, U tokens received, R rows computed here (every slot's rows
padded to a multiple of ``block_rows``), K choices a token, E experts, G ranks, B tiles, n slots a
rank. Slot id = ``rank * n + j``; j runs over home, static, then replica slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from relibra_kernels.checks import check_int, check_int_array, check_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

Ints: TypeAlias = "torch.Tensor | npt.NDArray[np.integer] | Sequence[int]"

# Families of slots; the high byte of a tile's first word.
HOME, STATIC, REPLICA = 0, 1, 2
FAMILY_SHIFT = 24
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SlotQuota:
    """The slots that one source rank may fill, by expert (compressed rows), with their quotas.

    Source: quotas of the plan. A source's rows of one expert, in (token, choice) order, fill the
    expert's slots in ascending slot id.

    Attributes:
        expert_first: int32 ``[E+1]``, first entry of each expert in the three lists below.
        slot_id: int32 ``[nnz]``, ascending inside an expert.
        slot_quota: int32 ``[nnz]``, rows of this source for the slot.
        slot_first_row: int32 ``[nnz]``, row at the destination of this source's first row in the
            slot: the slot's base plus the rows of earlier sources.

    Raises:
        TypeError: a field is not an int32 tensor.
        ValueError: the lists do not fit each other, ids do not ascend, or a number is negative.

    Example:
        Expert 0 lives in slot 0 and has a copy in slot 3; expert 1 lives in slot 2.

        >>> quota = SlotQuota(
        ...     expert_first=torch.tensor([0, 2, 3], dtype=torch.int32),
        ...     slot_id=torch.tensor([0, 3, 2], dtype=torch.int32),
        ...     slot_quota=torch.tensor([1, 3, 4], dtype=torch.int32),
        ...     slot_first_row=torch.tensor([2, 8, 1], dtype=torch.int32))
        >>> quota.num_experts, quota.rows_E.tolist()
        (2, [4, 4])
    """

    expert_first: torch.Tensor
    slot_id: torch.Tensor
    slot_quota: torch.Tensor
    slot_first_row: torch.Tensor

    def __post_init__(self) -> None:
        """Checks the four lists against each other; values only where they are on the CPU."""
        check_tensor("expert_first", self.expert_first, dtype=torch.int32, ndim=1)
        size = check_tensor("slot_id", self.slot_id, dtype=torch.int32, ndim=1).numel()
        for name in ("slot_quota", "slot_first_row"):
            check_tensor(name, getattr(self, name), dtype=torch.int32, shape=(size,))
        if self.expert_first.is_cpu:
            check_quota_values(self)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.expert_first.numel() - 1

    @property
    def rows_E(self) -> npt.NDArray[np.int64]:
        """Rows of this source for each expert, int64 ``[E]``."""
        before = np.concatenate([[0], np.cumsum(self.slot_quota.numpy(), dtype=np.int64)])
        rows: npt.NDArray[np.int64] = np.diff(before[self.expert_first.numpy()])
        return rows

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The four lists in the order in which ``build_route`` takes them."""
        return self.expert_first, self.slot_id, self.slot_quota, self.slot_first_row


def check_offsets(expert_first: torch.Tensor, size: int) -> npt.NDArray[np.int32]:
    """Refuses offsets that do not cut a list of ``size`` entries.

    Args:
        expert_first: int32 ``[E+1]`` on the CPU.
        size: nnz.

    Returns:
        The offsets.

    Raises:
        ValueError: they do not ascend from 0 to ``size``.
    """
    first: npt.NDArray[np.int32] = expert_first.numpy()
    if first.size == 0 or first[0] != 0 or first[-1] != size or (np.diff(first) < 0).any():
        raise ValueError(
            f"expert_first: need ascending offsets from 0 to {size}, got {first.tolist()}"
        )
    return first


def check_quota_values(quota: SlotQuota) -> None:
    """Refuses a slot quota whose numbers contradict each other.

    Args:
        quota: lists on the CPU.

    Raises:
        ValueError: names the list, the need and the first place that breaks it.
    """
    slots = quota.slot_id.numpy()
    first = check_offsets(quota.expert_first, slots.size)
    inside = np.ones(max(slots.size - 1, 0), bool)
    inside[first[(first > 0) & (first < slots.size)] - 1] = False
    wrong = np.flatnonzero(inside & (np.diff(slots) <= 0)) + 1
    if wrong.size:
        raise ValueError(
            f"slot_id: need ascending ids inside an expert, got {int(slots[wrong[0]])} "
            f"after {int(slots[wrong[0] - 1])} at [{int(wrong[0])}]"
        )
    for name in ("slot_id", "slot_quota", "slot_first_row"):
        check_int_array(name, getattr(quota, name), minimum=0)


def slot_bases(slot_rows_n: Ints, block_rows: int) -> torch.Tensor:
    """First row of each slot when every slot's rows are padded to whole tiles.

    Derived: ``base[j+1] = base[j] + ceil(rows[j] / block_rows) * block_rows``.

    Args:
        slot_rows_n: integers ``[n]``, rows of each slot of this rank.
        block_rows: rows of a GEMM tile.

    Returns:
        int32 ``[n+1]`` on the CPU; the last entry is R.

    Raises:
        ValueError: a negative count, ``block_rows`` below 1, or R does not fit 32 bits.

    Example:
        >>> slot_bases([5, 0, 4, 1], 4).tolist()
        [0, 8, 8, 12, 16]
    """
    return torch.from_numpy(_bases(slot_rows_n, block_rows))


def count_padded_rows(slot_rows_n: Ints, block_rows: int) -> int:
    """R, the last entry of :func:`slot_bases`, as a host integer; arguments and errors as there.

    Example:
        >>> count_padded_rows([5, 0, 4, 1], 4)
        16
    """
    return int(_bases(slot_rows_n, block_rows)[-1])


def _bases(slot_rows_n: Ints, block_rows: int) -> npt.NDArray[np.int32]:
    rows = check_int_array(  # no sum of so many can overflow int64
        "slot_rows_n", slot_rows_n, ndim=1, minimum=0, maximum=INT32_MAX, dtype=np.int64
    )
    check_int("block_rows", block_rows, minimum=1, maximum=INT32_MAX)
    return _bases_of(-(-rows // block_rows), block_rows)


def _bases_of(tiles_n: npt.NDArray[np.int64], block_rows: int) -> npt.NDArray[np.int32]:
    """First row of each slot, and R, from the tiles of each slot."""
    base = np.zeros(tiles_n.size + 1, np.int64)
    np.cumsum(tiles_n * block_rows, out=base[1:])
    if base[-1] > INT32_MAX:
        raise ValueError(f"slot_rows_n: need at most {INT32_MAX} padded rows, got {base[-1]}")
    return base.astype(np.int32)


def _checked_slots(
    slot_rows_n: Ints, num_home: int, num_static: int, block_rows: int
) -> npt.NDArray[np.int64]:
    """The rows of each slot as int64, when all numbers are in range."""
    rows = check_int_array(
        "slot_rows_n", slot_rows_n, ndim=1, minimum=0, maximum=INT32_MAX, dtype=np.int64
    )
    check_int("num_home", num_home, minimum=0, maximum=rows.size)
    check_int("num_static", num_static, minimum=0, maximum=rows.size - num_home)
    check_int("block_rows", block_rows, minimum=1, maximum=INT32_MAX)
    return rows


@functools.cache
def _slot_words(num_slots: int, num_home: int, num_static: int) -> npt.NDArray[np.int64]:
    """First word of the tiles of every slot: weight index inside the family | family << 24."""
    slot, num_own = np.arange(num_slots), num_home + num_static
    family = np.where(slot < num_home, HOME, np.where(slot < num_own, STATIC, REPLICA))
    words: npt.NDArray[np.int64]
    words = slot - np.array([0, num_home, num_own])[family] | family << FAMILY_SHIFT
    words.setflags(write=False)
    return words


def m_tiles(slot_rows_n: Ints, num_home: int, block_rows: int, num_static: int = 0) -> torch.Tensor:
    """Tiles of a row-wise grouped GEMM: which rows meet which weight.

    Args:
        slot_rows_n: integers ``[n]``, rows of each slot; home slots first, then static, replica.
        num_home: H, home slots.
        block_rows: rows of a tile.
        num_static: X, static slots.

    Returns:
        int32 ``[B, 4]`` on the CPU: (weight index inside the family | family << 24, first row,
        rows 1..block_rows, flags = 0). Slots ascend, so home tiles come first.

    Raises:
        ValueError: a negative count, or more home and static slots than slots.

    Example:
        Two home slots and one replica slot, tiles of 4 rows:

        >>> m_tiles([5, 0, 3], num_home=2, block_rows=4).tolist()
        [[0, 0, 4, 0], [0, 4, 1, 0], [33554432, 8, 3, 0]]
    """
    rows = _checked_slots(slot_rows_n, num_home, num_static, block_rows)
    tiles_n = -(-rows // block_rows)
    base = _bases_of(tiles_n, block_rows)
    owner = np.arange(rows.size).repeat(tiles_n)
    first = np.arange(owner.size) * block_rows  # slots lie one after the other in whole tiles
    tiles = np.zeros((owner.size, 4), np.int32)
    tiles[:, 0] = _slot_words(rows.size, num_home, num_static)[owner]
    tiles[:, 1] = first
    tiles[:, 2] = np.minimum((base[:-1] + rows)[owner] - first, block_rows)
    return torch.from_numpy(tiles)


def tile_weights(mtile_B4: torch.Tensor) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Family and weight index of every tile.

    Args:
        mtile_B4: int32 ``[B, 4]`` on the CPU, see :func:`m_tiles`.

    Returns:
        Two int32 arrays ``[B]``.

    Example:
        >>> family, weight = tile_weights(m_tiles([5, 0, 3], num_home=2, block_rows=4))
        >>> family.tolist(), weight.tolist()
        ([0, 0, 2], [0, 0, 0])
    """
    word = mtile_B4.numpy()[:, 0]
    return word >> FAMILY_SHIFT, word & ((1 << FAMILY_SHIFT) - 1)


# Flags in the last word of a weight-gradient tile, above its 22 bits of output tile.
MATRIX_SHIFT = 22  # 0: the gradient of w13, 1: of w2
STORE = 1 << 24  # overwrite the output tile; otherwise add to it
SIGNAL = 1 << 25  # the last tile of a replica slot


def w_tiles(
    slot_rows_n: Ints,
    num_home: int,
    num_static: int,
    block_rows: int,
    tiles13: int,
    tiles2: int,
    accumulate_home: bool,
) -> torch.Tensor:
    """Output tiles of the weight gradients of a rank's slots, in the order in which they are taken.

    Replica slots come first, by slot, then static and home slots, longest first: programs that take
    the next tile when they are free then finish within one tile of each other. Copies always
    overwrite; home slots add with ``accumulate_home`` (none for an empty slot), else overwrite
    (with zeros for an empty slot).

    Args:
        slot_rows_n: integers ``[n]``, rows of each slot; home slots first, then static, replica.
        num_home: H, home slots.
        num_static: X, static slots.
        block_rows: rows to which every slot is padded.
        tiles13: output tiles of one gradient of w13; 0 leaves it out.
        tiles2: output tiles of one gradient of w2; 0 leaves it out.
        accumulate_home: add to what the home gradients hold.

    Returns:
        int32 ``[B, 4]`` on the CPU: (weight index inside the family | family << 24, first row, end
        row, output tile | matrix << 22 | STORE << 24 | SIGNAL << 25). The end counts real rows.

    Raises:
        ValueError: a negative count, more home and static slots than slots, or 2^22 output tiles.

    Example:
        Two home slots, one of them empty, and an empty replica slot; one tile a matrix:

        >>> tile = w_tiles([0, 3, 0], 2, 0, 4, tiles13=1, tiles2=1, accumulate_home=True)
        >>> [[hex(word) for word in row] for row in tile.tolist()]  # doctest: +NORMALIZE_WHITESPACE
        [['0x2000000', '0x4', '0x4', '0x1000000'], ['0x2000000', '0x4', '0x4', '0x3400000'],
         ['0x1', '0x0', '0x3', '0x0'], ['0x1', '0x0', '0x3', '0x400000']]
    """
    rows = _checked_slots(slot_rows_n, num_home, num_static, block_rows)
    for name, count in (("tiles13", tiles13), ("tiles2", tiles2)):
        check_int(name, count, minimum=0, maximum=(1 << MATRIX_SHIFT) - 1)
    base = _bases_of(-(-rows // block_rows), block_rows)
    num_own = num_home + num_static
    own_rows = rows[:num_own]
    own = np.argsort(-own_rows, kind="stable")
    if accumulate_home:
        own = own[(own >= num_home) | (own_rows[own] > 0)]
    num_replica = rows.size - num_own
    slot = np.concatenate([np.arange(num_own, rows.size), own])
    outputs = _output_words(tiles13, tiles2)
    tiles = np.empty((slot.size, outputs.size, 4), np.int32)
    first = base[:-1][slot]
    tiles[..., 0] = _slot_words(rows.size, num_home, num_static)[slot, None]
    tiles[..., 1] = first[:, None]
    tiles[..., 2] = (first + rows[slot])[:, None]
    stores = (slot >= num_home) | (not accumulate_home)
    tiles[..., 3] = outputs | np.where(stores, STORE, 0)[:, None]
    if outputs.size:
        tiles[:num_replica, -1, 3] |= SIGNAL
    return torch.from_numpy(tiles.reshape(-1, 4))


@functools.cache
def _output_words(tiles13: int, tiles2: int) -> npt.NDArray[np.int64]:
    """Output tile | matrix << 22 of all output tiles of one slot."""
    words = np.concatenate([np.arange(tiles13), np.arange(tiles2) | 1 << MATRIX_SHIFT])
    words.setflags(write=False)
    return words
