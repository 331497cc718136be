"""Products of rows with a `WeightSet`, one a slot (or one a tile), whatever the storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from relibra_kernels.reference.grouped_gemm import multiply, slot_segments

if TYPE_CHECKING:
    from relibra_kernels.reference.grouped_gemm import Families
    from relibra_kernels.weights import WeightSet


def multiply_forward(
    rows: torch.Tensor, field: WeightSet, mtile_B4: torch.Tensor, block_rows: int, exact: bool
) -> torch.Tensor:
    """``out[r] = w[slot of r] @ rows[r]`` for the rows of the tiles, zeros elsewhere.

    Args:
        rows: ``[R, K]``.
        field: ``[slots, halves * N, K]``.
        mtile_B4: int32 ``[B, 4]`` on the CPU, see `relibra_kernels.tables.m_tiles`.
        block_rows: rows of a tile.
        exact: see `relibra_kernels.reference.grouped_gemm.grouped_gemm`.

    Returns:
        ``[R, halves * N]``, gate | up whatever the storage.

    Example:
        >>> import torch
        >>> from relibra_kernels.tables import m_tiles
        >>> from relibra_kernels.weights import WeightSet
        >>> pairs = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])  # gate 1, 3 and up 2, 4
        >>> field = WeightSet(pairs, halves=2, interleaved=True)
        >>> multiply_forward(torch.ones(1, 1), field, m_tiles([1], 1, 1), 1, False)
        tensor([[1., 3., 2., 4.]])
    """
    weights = [_transposed(family) for family in stored_matrices(field)]
    out = multiply(rows, weights, mtile_B4, block_rows, exact)
    return _apart(out) if field.interleaved else out


def multiply_backward(
    rows: torch.Tensor, field: WeightSet, mtile_B4: torch.Tensor, block_rows: int, exact: bool
) -> torch.Tensor:
    """``out[r] = w[slot of r].T @ rows[r]`` for the rows of the tiles, zeros elsewhere.

    Args:
        rows: ``[R, halves * N]``, gate | up whatever the storage.
        field: ``[slots, halves * N, K]``.
        mtile_B4: int32 ``[B, 4]`` on the CPU.
        block_rows: rows of a tile.
        exact: as for :func:`multiply_forward`.

    Returns:
        ``[R, K]``.
    """
    rows = paired(rows) if field.interleaved else rows
    return multiply(rows, stored_matrices(field), mtile_B4, block_rows, exact)


def add_bias(
    rows: torch.Tensor, bias: WeightSet, mtile_B4: torch.Tensor, block_rows: int
) -> torch.Tensor:
    """Adds to the rows of the tiles, in place, the bias of their slot.

    Args:
        rows: ``[R, halves * N]``, gate | up whatever the storage.
        bias: ``[slots, halves * N, 1]``.
        mtile_B4: int32 ``[B, 4]`` on the CPU.
        block_rows: rows of a tile.

    Returns:
        ``rows``.
    """
    for segment in slot_segments(mtile_B4, block_rows):
        one = slot_view(bias, (segment.family, segment.weight)).reshape(-1)
        rows[segment.first : segment.first + segment.rows] += one
    return rows


def stored_matrices(field: WeightSet) -> Families:
    """Matrices ``[halves * N, K]`` of every family, rows in the order of the storage.

    No copy, but one slot at a time where gate and up weights are two tensors.

    Args:
        field: weights.
    """
    families = (field.home, field.static, field.replica)
    matrices: list[torch.Tensor | Sequence[torch.Tensor]] = [
        () if family is None else family for family in families
    ]
    if field.transposed:
        matrices = [_transposed(family) for family in matrices]
    if field.halves_apart:
        gate, up = (x.transpose(1, 2) if field.transposed else x for x in field.home)
        matrices[0] = JoinedHalves(gate, up)
    return matrices


def slot_view(field: WeightSet, slot: tuple[int, int]) -> torch.Tensor:
    """Logical ``[halves, rows, columns]`` of one slot.

    Args:
        field: weights or gradients.
        slot: family and slot inside it.
    """
    family = (field.home, field.static, field.replica)[slot[0]]
    assert family is not None
    return field.view(family[slot[1]])[0]


def paired(rows: torch.Tensor) -> torch.Tensor:
    """Columns gate | up -> in pairs.

    Args:
        rows: ``[R, 2F]``.
    """
    return rows.reshape(len(rows), 2, rows.shape[1] // 2).transpose(1, 2).flatten(1)


class JoinedHalves(Sequence["torch.Tensor"]):
    """Slots of two tensors ``[H, F, D]`` as matrices ``[2F, D]``, joined when asked for.

    Args:
        gate: ``[H, F, D]``.
        up: likewise.
        transposed: matrices ``[D, 2F]`` instead.
    """

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, transposed: bool = False) -> None:
        self.halves = gate, up
        self.transposed = transposed
        self._last: tuple[int, torch.Tensor] | None = None  # neighbouring tiles share their slot

    def __len__(self) -> int:
        """H."""
        return len(self.halves[0])

    def __getitem__(self, slot: Any) -> Any:
        """Matrix of one slot."""
        if self._last is None or self._last[0] != slot:
            self._last = slot, torch.cat([half[slot] for half in self.halves])
        return self._last[1].t() if self.transposed else self._last[1]

    def t(self) -> JoinedHalves:
        """The same matrices, transposed."""
        return JoinedHalves(*self.halves, transposed=not self.transposed)


def _transposed(
    family: torch.Tensor | Sequence[torch.Tensor],
) -> torch.Tensor | Sequence[torch.Tensor]:
    if isinstance(family, JoinedHalves):
        return family.t()
    if isinstance(family, tuple | list):
        return [one.t() for one in family]
    return family.transpose(1, 2)  # type: ignore[union-attr]


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """Columns in pairs -> gate | up."""
    return rows.reshape(len(rows), rows.shape[1] // 2, 2).transpose(1, 2).flatten(1)
