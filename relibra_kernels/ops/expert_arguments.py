"""Arguments that the ops of the experts share: weights and biases by family, the activation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from relibra_kernels.checks import check_int, check_tensor, describe
from relibra_kernels.ops.gemm_launch import weight_set
from relibra_kernels.reference.activation import CLAMPED_SWIGLU, SQUARED_RELU, SWIGLU
from relibra_kernels.weights import WeightSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

FAMILIES = ("home", "static", "replica")
SCORE_AT = ("output", "activation")


class Activation(NamedTuple):
    """Number of an activation and its parameters, see `relibra_kernels.reference.activation`."""

    kind: int
    alpha: float
    limit: float

    @property
    def halves(self) -> int:
        """2 with a gate, else 1."""
        return 2 if self.kind <= CLAMPED_SWIGLU else 1

    def check(self) -> None:
        """Refuses an unknown number, and parameters that make no clamped SwiGLU."""
        check_int("activation", self.kind, minimum=SWIGLU, maximum=SQUARED_RELU)
        if self.kind != CLAMPED_SWIGLU:
            return
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha: need a finite number, got {self.alpha}")
        if not 0 < self.limit < math.inf:
            raise ValueError(f"limit: need a positive finite number, got {self.limit}")

    def keywords(self) -> dict[str, float]:
        """As the bodies take it."""
        return {"activation": self.kind, "alpha": self.alpha, "limit": self.limit}


class Weights(NamedTuple):
    """One weight field as the ops take it: home as a list, the copies or None.

    With `apart` the list is the pair (gate, up) of tensors ``[H, F, D]``.
    """

    home: Sequence[Tensor]
    static: Tensor | None
    replica: Tensor | None
    apart: bool = False

    def check(self, name: str, rows: Tensor) -> None:
        """Families of the dtype of some rows and of one shape; the numbers of slots are free."""
        if not isinstance(self.home, list | tuple):
            raise TypeError(f"home_{name}: need a list of tensors, got {describe(self.home)}")
        if not self.home:
            raise ValueError(f"home_{name}: need at least one tensor, got none")
        ndim = 3 if self.is_whole or self.apart else 2
        first = check_tensor(f"home_{name}[0]", self.home[0], dtype=rows.dtype, ndim=ndim)
        if self.apart:
            return  # `WeightSet` checks the pair and its copies
        shape = tuple(first.shape[-2:])
        for i, expert in enumerate(self.home[1:], 1):
            check_tensor(f"home_{name}[{i}]", expert, dtype=rows.dtype, shape=shape)
        for family, tensor in (("static", self.static), ("replica", self.replica)):
            if tensor is not None:
                check_tensor(f"{family}_{name}", tensor, dtype=rows.dtype, shape=(None, *shape))

    @property
    def is_whole(self) -> bool:
        """Whether home experts are one tensor."""
        return (len(self.home) == 1 or self.apart) and self.home[0].dim() == 3

    def counts(self) -> tuple[int, int, int]:
        """H, X, S."""
        num_home = self.home[0].shape[0] if self.is_whole else len(self.home)
        num_static = 0 if self.static is None else self.static.shape[0]
        return num_home, num_static, 0 if self.replica is None else self.replica.shape[0]

    def tile_limits(self) -> tuple[int, int, int]:
        """H, S, X: in the order of ``check_tiles``."""
        num_home, num_static, num_replica = self.counts()
        return num_home, num_replica, num_static

    def field(
        self, halves: int, interleaved: bool, transposed: bool, tiles: Tensor | None
    ) -> WeightSet:
        """The same, as the bodies take it; the launch data of the tiles may remember it."""
        return weight_set(
            *(self.home, self.static, self.replica),
            *(halves, interleaved, transposed),
            tiles=tiles,
            halves_apart=self.apart,
        )


def check_same_slots(
    counts13: tuple[int, int, int] | None, counts2: tuple[int, int, int] | None
) -> None:
    """The gradients of both products have one number of slots a family, since tiles name slots.

    Args:
        counts13: H, X, S; None where not wanted.
        counts2: likewise.

    Raises:
        ValueError: other numbers.
    """
    if counts13 is not None and counts2 is not None and counts13 != counts2:
        raise ValueError(
            f"home_grad2: need home, static and replica slots {counts13} as in home_grad13, "
            f"static_grad13 and replica_grad13, got {counts2}"
        )


def check_width(name: str, rows: Tensor, field: WeightSet, *, backward: bool = False) -> None:
    """Rows as wide as the products need.

    Args:
        name: of the rows.
        rows: ``[R, ...]``.
        field: the weights.
        backward: rows meet the weights' rows (of all halves) instead of their columns.

    Raises:
        ValueError: another width.
    """
    need = field.halves * field.num_rows if backward else field.num_columns
    if rows.shape[1] != need:
        raise ValueError(
            f"{name}: need {need} columns to fit weights of {field.halves} x {field.num_rows} rows "
            f"and {field.num_columns} columns, got {rows.shape[1]}"
        )


def bias_field(
    name: str,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    weights: WeightSet,
    dtype: torch.dtype,
) -> WeightSet | None:
    """Biases of every family of some weights, or None without.

    Args:
        name: of the field, such as ``"b13"``.
        biases: ``[slots, halves * N]`` of home, static, replica; None for all, or where there are
            no slots.
        weights: the field to whose products they are added.
        dtype: that they need.

    Raises:
        TypeError: another dtype.
        ValueError: other shapes, rows that are not contiguous, or a family without its bias.
    """
    if biases[0] is None and biases[1] is None and biases[2] is None:
        return None
    width = weights.halves * weights.num_rows
    copies = (0 if x is None else len(x) for x in (weights.static, weights.replica))
    slots = (weights.num_home, *copies)
    checked: list[Tensor | None] = []
    for family, bias, count in zip(FAMILIES, biases, slots, strict=True):
        if bias is None and count:
            raise ValueError(f"{family}_{name}: need [{count}, {width}] like the weights, got None")
        if bias is not None:
            check_tensor(f"{family}_{name}", bias, dtype=dtype, shape=(count, width))
            if count and bias.stride(1) != 1:
                raise ValueError(
                    f"{family}_{name}: need contiguous rows, got strides {bias.stride()}"
                )
        checked.append(bias[:, :, None] if bias is not None and count else None)
    home, static, replica = checked
    assert home is not None
    return WeightSet(home, static, replica, halves=weights.halves, interleaved=weights.interleaved)
