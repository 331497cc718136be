"""One weight field of a rank's experts, in every family of slots, whatever its storage.

Models store expert weights in several ways; kernels see one logical view ``[slots, halves, rows,
columns]``, and only its strides differ.

Letters: D model dim, F expert dim, H home, X static and S replica slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from relibra_kernels.checks import check_int, check_tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class WeightSet:
    """Weights of one field by slot family.

    Source: ReLibra (arXiv 2605.08639), section 4: home experts and the replica slots that all
    layers share; the storage layouts are those of common model code.

    Attributes:
        home: ``[H, N, K]``, or a tuple of H tensors ``[N, K]``: one parameter an expert. With
            ``halves_apart`` the pair (gate, up), each ``[H, N / 2, K]``.
        static: ``[X, N, K]``, or None without static copies.
        replica: ``[S, N, K]``, or None without replica slots.
        halves: 2 where N counts gate and up rows (w13), else 1 (w2).
        interleaved: gate and up rows alternate; otherwise all gate rows come first.
        transposed: stored ``[slots, K, N]`` and ``[K, N]``.
        halves_apart: gate and up weights of the home slots are two tensors; copies are one.

    Raises:
        TypeError: no tensors, or different dtypes.
        ValueError: shapes that do not fit each other, an odd N with two halves, columns that are
            not contiguous, an interleaved field with one half, or halves apart that are no pair.

    Example:
        >>> w13 = torch.zeros(4, 6, 5)
        >>> WeightSet(w13, replica=torch.zeros(1, 6, 5), halves=2).view(w13).shape
        torch.Size([4, 2, 3, 5])
    """

    home: torch.Tensor | tuple[torch.Tensor, ...]
    static: torch.Tensor | None = None
    replica: torch.Tensor | None = None
    halves: int = 1
    interleaved: bool = False
    transposed: bool = False
    halves_apart: bool = False
    launches: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # launch arguments by block shape, kept by the kernels' wrappers

    def __post_init__(self) -> None:
        """Checks every family against the home weights."""
        check_int("halves", self.halves, minimum=1, maximum=2)
        if self.interleaved and self.halves != 2:
            raise ValueError("interleaved: need halves=2, got halves=1")
        if self.halves_apart and (self.halves != 2 or self.interleaved):
            raise ValueError(
                "halves_apart: need halves=2 and interleaved=False, got "
                f"halves={self.halves}, interleaved={self.interleaved}"
            )
        shape = self._check_pair() if self.halves_apart else self._check_home()
        for name in ("static", "replica"):
            family = getattr(self, name)
            if family is not None:
                check_tensor(name, family, dtype=self.dtype, shape=(None, *shape))
        rows = shape[1] if self.transposed else shape[0]
        if rows % self.halves:
            raise ValueError(f"home: need an even number of gate and up rows, got {rows}")
        for name, family in self.families():
            if family.stride(-1) != 1:
                raise ValueError(f"{name}: need contiguous columns, got strides {family.stride()}")

    def _check_home(self) -> tuple[int, ...]:
        if isinstance(self.home, torch.Tensor):
            return tuple(check_tensor("home", self.home, dtype=FLOATS, ndim=3).shape[1:])
        if type(self.home) is not tuple or len(self.home) == 0:
            raise TypeError(f"home: need a tensor or a tuple of tensors, got {self.home!r:.60}")
        first = check_tensor("home[0]", self.home[0], dtype=FLOATS, ndim=2)
        for i, expert in enumerate(self.home):
            check_tensor(f"home[{i}]", expert, dtype=first.dtype, shape=tuple(first.shape))
            if expert.stride() != first.stride():
                raise ValueError(
                    f"home[{i}]: need the strides of home[0], {first.stride()}, "
                    f"got {expert.stride()}"
                )
        return tuple(first.shape)

    def _check_pair(self) -> tuple[int, int]:
        """Stored shape of a slot with both halves."""
        if type(self.home) is not tuple or len(self.home) != 2:
            raise TypeError(f"home: need the pair (gate, up) of tensors, got {self.home!r:.60}")
        gate = check_tensor("home[0]", self.home[0], dtype=FLOATS, ndim=3)
        up = check_tensor("home[1]", self.home[1], dtype=gate.dtype, shape=tuple(gate.shape))
        if up.stride() != gate.stride():
            raise ValueError(
                f"home[1]: need the strides of home[0], {gate.stride()}, got {up.stride()}"
            )
        _, rows, columns = gate.shape
        return (rows, 2 * columns) if self.transposed else (2 * rows, columns)

    def families(self) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of every family that is there; the first home tensor stands for all."""
        home = self.home if isinstance(self.home, torch.Tensor) else self.home[0]
        rest = (("static", self.static), ("replica", self.replica))
        return [("home", home), *((name, x) for name, x in rest if x is not None)]

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of every family."""
        return self.families()[0][1].dtype

    @functools.cached_property
    def num_home(self) -> int:
        """H."""
        if isinstance(self.home, torch.Tensor):
            return self.home.shape[0]
        return len(self.home[0] if self.halves_apart else self.home)

    @functools.cached_property
    def is_table(self) -> bool:
        """Whether home experts are separate tensors, found through a table of addresses."""
        return not (isinstance(self.home, torch.Tensor) or self.halves_apart)

    @functools.cached_property
    def num_rows(self) -> int:
        """Logical rows of one half: F of w13, D of w2."""
        rows = self.families()[0][1].shape[-1 if self.transposed else -2]
        return rows if self.halves_apart else rows // self.halves

    @functools.cached_property
    def num_columns(self) -> int:
        """Logical columns, the length of the products' sum: D of w13, F of w2."""
        shape = self.families()[0][1].shape
        return shape[-2 if self.transposed else -1]

    def view(self, family: torch.Tensor) -> torch.Tensor:
        """Logical view ``[slots, halves, rows, columns]`` of one family, no copy.

        Args:
            family: a tensor of this set, ``[slots, N, K]``, or ``[N, K]`` for one expert. One half
                of a pair has ``[slots, 1, rows, columns]``.
        """
        x = family.unsqueeze(0) if family.dim() == 2 else family
        if self.transposed:
            x = x.transpose(1, 2)
        slots, rows, columns = x.shape
        width = self.num_rows
        if self.interleaved:
            return x.view(slots, width, 2, columns).transpose(1, 2)
        return x.view(slots, rows // width if width else self.halves, width, columns)
