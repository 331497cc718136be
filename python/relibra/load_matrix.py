"""Rows that each source rank sends to each expert: all that the planner needs to know of routing.

Letters: M micro-batches, L MoE layers, G ranks of the EP group, E experts, K choices a token.
Every rank counts its own `DispatchRows`; one small gather (M * L * E int32 a rank) joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from relibra.limits import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS, check_count_bytes
from relibra_kernels.checks import check_int, check_int_array
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra.trace import DispatchRows

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]

# Elements counted at a time: bounds the int64 copy that bincount needs.
_CHUNK_ELEMENTS = 1 << 20
_MOST = {"micro-batch": 1 << 31, "layer": MAX_LAYERS, "rank": MAX_RANKS, "expert": MAX_EXPERTS}
# Default of fields that are never None after construction.
_FILLED_IN: Any = None


@dataclass(frozen=True, eq=False)
class LoadMatrix:
    """Rows by micro-batch, MoE layer, source rank and expert, counted as they are dispatched.

    Source: ReLibra, section 4 (loads known from routing replay). A row is one (token, choice) pair;
    padding rows count, since they are dispatched too; rows that follow the live router are unknown
    and counted apart. The arrays are read-only views of what was passed in.

    Args:
        rows_MLGE: `[M, L, G, E]`, rows that source rank g sends to expert e; integers 0..2^31 - 1.
            No axis is empty; at most 4,096 layers, 2^20 ranks and 65,536 experts.
        optimizer_step_M: `[M]`, optimizer step of each micro-batch, not decreasing; None is 0.
        padding_MLGE: `[M, L, G, E]`, the part of `rows_MLGE` that is padding; None is no padding.
        num_unknown_ML: `[M, L]`, tokens of all source ranks whose K choices follow the live router;
            None is 0.
        is_gathered: whether all source ranks are in. One rank's own counts (G axis of length 1) are
            not, and `plan_step` refuses them.
        source_rank: the rank that counted, for messages; None where gathered or not known.

    Raises:
        PlanError: floats (NaN too), booleans, negative numbers, shapes that do not fit; names the
            argument.

    Example:
        >>> loads = LoadMatrix([[[[3, 1], [0, 4]]]])  # M 1, L 1, G 2, E 2
        >>> loads.totals_MLE.tolist(), loads.num_ranks
        ([[[3, 5]]], 2)
    """

    rows_MLGE: Int32Array
    optimizer_step_M: Int32Array = _FILLED_IN
    padding_MLGE: Int32Array | None = None
    num_unknown_ML: Int32Array = _FILLED_IN
    is_gathered: bool = True
    source_rank: int | None = None

    def __post_init__(self) -> None:
        """Converts to int32 where no value changes, and checks everything."""
        rows = _counts("rows_MLGE", self.rows_MLGE, (None, None, None, None))
        num_micro_batches, num_layers, num_ranks, _ = rows.shape
        for (what, most), size in zip(_MOST.items(), rows.shape, strict=True):
            if not 1 <= size <= most:
                need = f"at most {most} {what}s" if size else f"at least one {what}"
                raise PlanError(f"rows_MLGE: need {need}, got shape {list(rows.shape)}")
        steps: object = self.optimizer_step_M
        if steps is None:
            steps = np.zeros(num_micro_batches, np.int32)
        steps = _counts("optimizer_step_M", steps, (num_micro_batches,))
        if (np.diff(steps) < 0).any():
            place = int(np.argmax(np.diff(steps) < 0)) + 1
            raise PlanError(
                "optimizer_step_M: need numbers that do not decrease, "
                f"got {steps[place - 1]} then {steps[place]} at micro-batch {place}"
            )
        unknown: object = self.num_unknown_ML
        if unknown is None:
            unknown = np.zeros((num_micro_batches, num_layers), np.int32)
        unknown = _counts("num_unknown_ML", unknown, (num_micro_batches, num_layers))
        padding = None if self.padding_MLGE is None else _part_of(self.padding_MLGE, rows)
        if not self.is_gathered and num_ranks != 1:
            raise PlanError(
                f"is_gathered: need True for counts of {num_ranks} source ranks, got False"
            )
        for name, value in (
            ("rows_MLGE", rows),
            ("optimizer_step_M", steps),
            ("padding_MLGE", padding),
            ("num_unknown_ML", unknown),
            ("is_gathered", bool(self.is_gathered)),
        ):
            object.__setattr__(self, name, value)
        if self.source_rank is not None:
            rank = _plan_int("source_rank", self.source_rank)
            object.__setattr__(self, "source_rank", rank)

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return int(self.rows_MLGE.shape[0])

    @property
    def num_layers(self) -> int:
        """L, MoE layers only."""
        return int(self.rows_MLGE.shape[1])

    @property
    def num_ranks(self) -> int:
        """G; 1 where not gathered."""
        return int(self.rows_MLGE.shape[2])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.rows_MLGE.shape[3])

    @cached_property
    def totals_MLE(self) -> Int64Array:
        """Rows of each expert over all source ranks, int64 `[M, L, E]`."""
        totals: Int64Array = self.rows_MLGE.sum(axis=2, dtype=np.int64)
        return totals

    @cached_property
    def routed_totals_MLE(self) -> Int64Array:
        """`totals_MLE` without padding rows, int64 `[M, L, E]`."""
        if self.padding_MLGE is None:
            return self.totals_MLE
        padding: Int64Array = self.padding_MLGE.sum(axis=2, dtype=np.int64)
        return self.totals_MLE - padding

    def only_layers(self, first: int, last: int) -> LoadMatrix:
        """The counts of some MoE layers, a view.

        Args:
            first: index of the first layer.
            last: index behind the last layer.

        Returns:
            `[M, last - first, G, E]`.

        Raises:
            PlanError: no layer is left.
        """
        padding = None if self.padding_MLGE is None else self.padding_MLGE[:, first:last]
        return replace(
            self,
            rows_MLGE=self.rows_MLGE[:, first:last],
            padding_MLGE=padding,
            num_unknown_ML=self.num_unknown_ML[:, first:last],
        )

    def slack_ML(self, top_k: int) -> Int64Array:
        """Rows that the live router may add, on any expert.

        Args:
            top_k: K, choices a token.

        Returns:
            int64 `[M, L]`, K rows for each unknown token.
        """
        return self.num_unknown_ML.astype(np.int64) * _plan_int("top_k", top_k, minimum=1)

    def __eq__(self, other: object) -> bool:
        """By value, the source rank aside."""
        if not isinstance(other, LoadMatrix):
            return NotImplemented
        mine, theirs = (
            [getattr(each, field.name) for field in fields(LoadMatrix)[:-1]]
            for each in (self, other)
        )
        return all(
            (a is None) == (b is None) and (a is None or np.array_equal(a, b))
            for a, b in zip(mine, theirs, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[DispatchRows],
        optimizer_step_M: npt.ArrayLike | None = None,
        *,
        source_rank: int | None = None,
    ) -> LoadMatrix:
        """Counts this rank's rows as it will dispatch them.

        Args:
            rows: one `DispatchRows` a micro-batch, all with the same layers, K and E.
            optimizer_step_M: `[M]`, see the class.
            source_rank: this rank, for messages.

        Returns:
            Counts of one source rank, not gathered: `[M, L, 1, E]`. Routed and padding rows are
            exact; unknown rows only count in `num_unknown_ML`.

        Raises:
            PlanError: no micro-batch, different layers, K or E, or counts above 16 GiB.

        Example:
            >>> from relibra.trace import DispatchRows
            >>> ids = np.array([[[0, 1]], [[0, 2]]])  # 2 tokens, 1 layer, K 2
            >>> loads = LoadMatrix.from_rows([DispatchRows(ids, num_experts=4)])
            >>> loads.rows_MLGE.tolist(), loads.is_gathered
            ([[[[2, 1, 1, 0]]]], False)
        """
        rows = list(rows)
        if not rows:
            raise PlanError("rows: need at least one micro-batch, got none")
        first = rows[0]
        sizes = (first.num_layers, first.top_k, first.num_experts)
        for micro_batch, each in enumerate(rows):
            got = (each.num_layers, each.top_k, each.num_experts)
            if got != sizes:
                raise PlanError(
                    f"rows[{micro_batch}]: need (layers, K, experts) = {sizes} like rows[0], "
                    f"got {got}"
                )
        check_count_bytes(len(rows), first.num_layers, 1, first.num_experts)
        routed = np.stack([_count_ids(each, each.KIND_ROUTED) for each in rows])
        padding = np.stack([_count_ids(each, each.KIND_PADDING) for each in rows])
        unknown = [int((each.kind == each.KIND_UNKNOWN).sum()) for each in rows]
        return cls(
            cast("Int32Array", (routed + padding)[:, :, None]),
            cast("Int32Array", optimizer_step_M),
            cast("Int32Array", padding[:, :, None]) if padding.any() else None,
            np.repeat(np.array(unknown, np.int32)[:, None], first.num_layers, axis=1),
            is_gathered=False,
            source_rank=source_rank,
        )

    @classmethod
    def stack(cls, matrices: Sequence[LoadMatrix]) -> LoadMatrix:
        """Joins the counts of all source ranks.

        Args:
            matrices: one matrix a rank that is not gathered, in rank order.

        Returns:
            The gathered `[M, L, G, E]`.

        Raises:
            PlanError: no matrix, one that is gathered already, or ranks that differ in M, L, E or
                in optimizer steps; names the first rank that differs from rank 0.

        Example:
            >>> one = LoadMatrix([[[[1, 2]]]], is_gathered=False)
            >>> LoadMatrix.stack([one, one]).rows_MLGE.tolist()
            [[[[1, 2], [1, 2]]]]
        """
        matrices = list(matrices)
        if not matrices:
            raise PlanError("matrices: need one LoadMatrix a rank, got none")
        first = matrices[0]
        for rank, each in enumerate(matrices):
            _check_stackable(rank, each, first)
        padding = None
        if any(each.padding_MLGE is not None for each in matrices):
            parts = [
                np.zeros_like(each.rows_MLGE) if each.padding_MLGE is None else each.padding_MLGE
                for each in matrices
            ]
            padding = np.concatenate(parts, axis=2)
        unknown = np.stack([each.num_unknown_ML for each in matrices]).sum(axis=0, dtype=np.int64)
        return cls(
            np.concatenate([each.rows_MLGE for each in matrices], axis=2),
            first.optimizer_step_M,
            padding,
            cast("Int32Array", unknown),
            is_gathered=True,
        )


def balance_metrics(
    rows_G: npt.ArrayLike, padding_G: npt.ArrayLike | None = None
) -> dict[str, float]:
    """Balance of some places (ranks, nodes or experts) in the four ways in which people log it.

    Source: max_vio as in auxiliary-loss-free balancing, `max / mean - 1`.

    Args:
        rows_G: dispatched rows of each place, padding included.
        padding_G: the part of `rows_G` that is padding; adds the same four without padding, under
            names that end in `_routed`.

    Returns:
        `imbalance` (max / mean), `max_vio` (max / mean - 1), `min_vio` (min / mean - 1),
        `balancedness` (mean / max); places without any row are balanced (1, 0, 0, 1).

    Raises:
        PlanError: no integers, a negative number, no place, or padding that is no part of the rows.

    Example:
        >>> balance_metrics([10, 20, 30, 40])
        {'imbalance': 1.6, 'max_vio': 0.6, 'min_vio': -0.6, 'balancedness': 0.625}
    """
    rows = _counts("rows_G", rows_G, (None,), np.int64)
    if rows.size == 0:
        raise PlanError("rows_G: need at least one place, got none")
    metrics = _metrics(rows)
    if padding_G is not None:
        routed = rows - _counts("padding_G", padding_G, rows.shape, np.int64)
        if (routed < 0).any():
            raise PlanError(f"padding_G: need at most rows_G, got {padding_G!r} of {rows_G!r}")
        metrics |= {f"{name}_routed": value for name, value in _metrics(routed).items()}
    return metrics


def _metrics(rows: npt.NDArray[np.int64]) -> dict[str, float]:
    """The four numbers of `balance_metrics`; one division each, so that 1.6 prints as 1.6."""
    total, most, least = int(rows.sum()), int(rows.max()), int(rows.min())
    if total == 0:
        return {"imbalance": 1.0, "max_vio": 0.0, "min_vio": 0.0, "balancedness": 1.0}
    return {
        "imbalance": most * rows.size / total,
        "max_vio": (most * rows.size - total) / total,
        "min_vio": (least * rows.size - total) / total,
        "balancedness": total / (most * rows.size),
    }


def _counts(
    name: str, value: object, shape: tuple[int | None, ...], dtype: npt.DTypeLike = np.int32
) -> npt.NDArray[Any]:
    """`check_int_array` for counts, with PlanError and a read-only result."""
    try:
        array = check_int_array(name, value, shape=shape, minimum=0, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from None
    view = array.view()
    view.flags.writeable = False
    return view


def _part_of(padding_MLGE: object, rows: Int32Array) -> Int32Array:
    """The padding counts, known to be at most the rows."""
    padding = _counts("padding_MLGE", padding_MLGE, rows.shape)
    if (padding > rows).any():
        place = tuple(int(i) for i in np.argwhere(padding > rows)[0])
        raise PlanError(
            "padding_MLGE: need at most rows_MLGE, "
            f"got {padding[place]} of {rows[place]} rows at {list(place)}"
        )
    return padding


def _plan_int(name: str, value: object, minimum: int = 0) -> int:
    """`check_int` with PlanError."""
    try:
        return check_int(name, value, minimum=minimum)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from None


def _count_ids(rows: DispatchRows, kind: int) -> Int64Array:
    """Rows of one kind by layer and expert, int64 `[L, E]`."""
    num_layers, num_experts = rows.num_layers, rows.num_experts
    counts = np.zeros(num_layers * num_experts, np.int64)
    places = np.flatnonzero(rows.kind == kind)
    first_cell_L = num_experts * np.arange(num_layers)[:, None]
    step = max(1, _CHUNK_ELEMENTS // max(1, num_layers * rows.top_k))
    for begin in range(0, len(places), step):
        cells = rows.ids[places[begin : begin + step]] + first_cell_L
        counts += np.bincount(cells.ravel(), minlength=len(counts))
    return counts.reshape(num_layers, num_experts)


def _check_stackable(rank: int, each: LoadMatrix, first: LoadMatrix) -> None:
    """Refuses what cannot be joined with rank 0's counts."""
    if each.is_gathered:
        raise PlanError(
            f"matrices[{rank}]: need the counts of one rank, got a matrix of {each.num_ranks} "
            "ranks that is gathered already"
        )
    if each.source_rank is not None and each.source_rank != rank:
        raise PlanError(
            f"matrices[{rank}]: need the counts of rank {rank}, got those of rank "
            f"{each.source_rank}"
        )
    for what, got, need in (
        ("micro-batches", each.num_micro_batches, first.num_micro_batches),
        ("MoE layers", each.num_layers, first.num_layers),
        ("experts", each.num_experts, first.num_experts),
        ("optimizer steps", each.optimizer_step_M.tolist(), first.optimizer_step_M.tolist()),
    ):
        if got != need:
            raise PlanError(f"rank {rank}: need {need} {what} like rank 0, got {got}")
