"""Routing recorded by a rollout, and the rows of it that one rank dispatches.

Letters: L MoE layers, K choices a token, E experts. Layers in arguments and messages are decoder
layer numbers; `l` or "layer index" is a place on the L axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from relibra.dispatch_rows import DispatchRows
from relibra.id_arrays import IdArray, as_ids, check_id_range, check_starts, read_only, take_layers
from relibra.limits import MAX_EXPERTS, layer_tuple
from relibra.slicing import (
    LAST_TOKEN,
    Layout,
    SliceSpec,
    check_rank_of,
    packed_rows,
    rank_first_ids,
)
from relibra_kernels.checks import check_choice, check_int, describe
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Int64Array: TypeAlias = npt.NDArray[np.int64]
PadFill: TypeAlias = Literal["rank_first", "arange", "keep"]

__all__ = ["DispatchRows", "RoutingTrace"]

# Default of fields that are never None after construction.
_FILLED_IN: Any = None


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Experts that a rollout chose, for some samples, in logical ids.

    Source: ReLibra, section 2 (routing replay). The ids keep the dtype and the memory in which they
    came: a narrow array, a read-only buffer or a memory-mapped file. What is derived is int32.

    Args:
        ids: integer `[rows, L, K]`, expert of each choice in the order in which the combine sums.
        valid: bool `[rows]`, False where a row is unknown and follows the live router, whatever its
            ids hold; None is all valid.
        cu_seqlens: int64 `[samples + 1]`, first row of each sample; None is one sample.
        moe_layers: decoder layer number of each place on the L axis, 0..4095.
        num_experts: E, at most 65,536.
        has_last_row: False where a sample of n tokens has n - 1 rows, as rollouts deliver; True
            where the last token has its row too.
        notes: what the loader decided and a reader should know, one sentence each.

    Raises:
        TypeError: ids that are no integers.
        ValueError: a layer number or E out of range.
        TraceError: shapes that do not fit, or a valid row with an id outside 0..E-1.

    Example:
        >>> ids = np.array([[[0, 1]], [[0, 3]], [[2, 1]]], np.uint8)  # 3 rows, 1 layer, K 2
        >>> trace = RoutingTrace(ids, cu_seqlens=[0, 1, 3], moe_layers=(5,), num_experts=4)
        >>> trace.num_samples, trace.counts(5).tolist()
        (2, [2, 2, 1, 1])
        >>> trace.select([1]).layer(5).tolist()
        [[0, 3], [2, 1]]
    """

    ids: IdArray
    valid: BoolArray = _FILLED_IN
    cu_seqlens: Int64Array = _FILLED_IN
    moe_layers: tuple[int, ...] = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    has_last_row: bool = field(default=False, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Checks shapes and ids; converts what is small, never the ids."""
        ids = as_ids("ids", self.ids)
        layers = layer_tuple("moe_layers", self.moe_layers)
        if ids.shape[1] != len(layers) or list(layers) != sorted(set(layers)):
            raise TraceError(
                f"moe_layers: need {ids.shape[1]} rising layer numbers like the ids' layer axis, "
                f"got {list(layers)}",
                code="layer_axis",
            )
        valid: object = self.valid
        valid = np.ones(len(ids), bool) if valid is None else np.asarray(valid)
        if valid.dtype != np.bool_ or valid.shape != (len(ids),):
            raise TraceError(
                f"valid: need a bool array [{len(ids)}], got {describe(valid)}", code="dtype"
            )
        starts: object = self.cu_seqlens
        cu_seqlens = check_starts([0, len(ids)] if starts is None else starts, len(ids))
        num_experts = check_int("num_experts", self.num_experts, minimum=1, maximum=MAX_EXPERTS)
        check_id_range("ids", ids, valid, layers, num_experts, cu_seqlens)
        self._set(
            ids=ids,
            valid=valid,
            cu_seqlens=cu_seqlens,
            moe_layers=layers,
            num_experts=num_experts,
            has_last_row=bool(self.has_last_row),
            notes=tuple(self.notes),
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            value = read_only(value) if isinstance(value, np.ndarray) else value
            object.__setattr__(self, name, value)

    def _derived(self, **changes: object) -> RoutingTrace:
        """A trace of rows that were checked before: they are not read again."""
        new = object.__new__(RoutingTrace)
        new._set(**(vars(self) | changes))
        return new

    @property
    def num_rows(self) -> int:
        """Rows of all samples, unknown ones too."""
        return len(self.ids)

    @property
    def num_samples(self) -> int:
        """Samples."""
        return len(self.cu_seqlens) - 1

    @property
    def num_layers(self) -> int:
        """L, MoE layers only."""
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.ids.shape[2])

    def layer_index(self, layer: int) -> int:
        """Place of a decoder layer on the L axis.

        Args:
            layer: decoder layer number, from 0.

        Raises:
            TraceError: code `layer_axis`, a layer that the trace does not hold.
        """
        if layer not in self.moe_layers:
            raise TraceError(
                f"layer: need one of {list(self.moe_layers)}, got {layer}",
                code="layer_axis",
                layer=layer,
            )
        return self.moe_layers.index(layer)

    def layer(self, layer: int) -> npt.NDArray[np.int32]:
        """Choices of one decoder layer.

        Args:
            layer: decoder layer number, from 0.

        Returns:
            int32 `[rows, K]`, -1 in unknown rows.

        Raises:
            TraceError: code `layer_axis`, a layer that the trace does not hold.
        """
        ids = self.ids[:, self.layer_index(layer)].astype(np.int32)
        ids[~self.valid] = -1
        return ids

    def counts(self, layer: int) -> Int64Array:
        """Choices of each expert in one decoder layer, known rows only.

        Args:
            layer: decoder layer number, from 0.

        Returns:
            int64 `[E]`.

        Raises:
            TraceError: code `layer_axis`, a layer that the trace does not hold.
        """
        ids = self.ids[:, self.layer_index(layer)]
        if not self.valid.all():
            ids = ids[self.valid]
        return np.bincount(ids.ravel(), minlength=self.num_experts).astype(np.int64)

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Joins the samples of several traces, in order.

        Args:
            traces: at least one, all with the same layers, K, E and kind of last row.

        Raises:
            TraceError: no trace, or traces of different models.

        Example:
            >>> one = RoutingTrace(np.zeros((2, 1, 1), int), moe_layers=[0], num_experts=1)
            >>> RoutingTrace.concat([one, one]).cu_seqlens.tolist()
            [0, 2, 4]
        """
        if not traces:
            raise TraceError("traces: need at least one, got none", code="sample_count")
        first = traces[0]
        for number, each in enumerate(traces):
            for what, code, got, need in (
                ("moe_layers", "layer_axis", each.moe_layers, first.moe_layers),
                ("top_k", "top_k", each.top_k, first.top_k),
                ("num_experts", "id_range", each.num_experts, first.num_experts),
                ("has_last_row", "short_rows", each.has_last_row, first.has_last_row),
            ):
                if got != need:
                    message = f"traces[{number}]: need {what} {need} like traces[0], got {got}"
                    raise TraceError(message, code=code)
        lengths = np.concatenate([np.diff(each.cu_seqlens) for each in traces])
        return first._derived(
            ids=np.concatenate([each.ids for each in traces]),
            valid=np.concatenate([each.valid for each in traces]),
            cu_seqlens=_starts(lengths),
            notes=tuple(note for each in traces for note in each.notes),
        )

    def select(
        self, samples: Iterable[int] | None = None, *, layers: Iterable[int] | None = None
    ) -> RoutingTrace:
        """Some samples with their rows, in the order asked for, and some layers.

        A run of samples in order, or of layers in equal steps, is a view and copies nothing.

        Args:
            samples: sample numbers; None is all.
            layers: decoder layer numbers, rising, such as those of one pipeline stage; None is all.

        Raises:
            TraceError: code `sample_count` or `layer_axis`, a number that the trace does not hold.
        """
        rows, lengths = self._rows_of(samples)
        ids, moe_layers = self.ids, self.moe_layers
        if layers is not None:
            moe_layers = tuple(layers)
            if not moe_layers or list(moe_layers) != sorted(set(moe_layers)):
                message = f"layers: need rising layer numbers, got {list(moe_layers)}"
                raise TraceError(message, code="layer_axis")
            ids = take_layers(ids, [self.layer_index(one) for one in moe_layers])
        return self._derived(
            ids=ids[rows],
            valid=self.valid[rows],
            cu_seqlens=_starts(lengths),
            moe_layers=moe_layers,
        )

    def _rows_of(self, samples: Iterable[int] | None) -> tuple[slice | Int64Array, Int64Array]:
        """Rows of samples (a slice where they are one run) and the samples' lengths."""
        lengths = np.diff(self.cu_seqlens)
        if samples is None:
            return slice(None), lengths
        chosen = [check_int("samples", one) for one in samples]
        for one in chosen:
            if not 0 <= one < self.num_samples:
                raise TraceError(
                    f"samples: need numbers in 0..{self.num_samples - 1}, got {one}",
                    code="sample_count",
                    sample=one,
                )
        if chosen and chosen == list(range(chosen[0], chosen[0] + len(chosen))):
            begin, end = self.cu_seqlens[chosen[0]], self.cu_seqlens[chosen[-1] + 1]
            return slice(int(begin), int(end)), lengths[chosen]
        parts = [np.arange(self.cu_seqlens[s], self.cu_seqlens[s + 1]) for s in chosen]
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return rows, lengths[np.array(chosen, np.int64)]

    def slice(
        self,
        layout: Layout = "zigzag",
        cp: tuple[int, int] = (0, 1),
        tp: tuple[int, int] = (0, 1),
        sequence_multiple: int = 1,
        total_multiple: int = 1,
        last_row: Literal["fill", "live"] = "fill",
        pad_fill: PadFill = "rank_first",
        ep: tuple[int, int] = (0, 1),
    ) -> DispatchRows:
        """The rows that one rank dispatches when these samples are one micro-batch.

        Args:
            layout: see `SliceSpec`, as the next four.
            cp: (rank, size) of context parallelism.
            tp: (rank, size) of sequence parallelism.
            sequence_multiple: tokens that each sample is padded to a multiple of.
            total_multiple: tokens that the joined rows are padded to a multiple of.
            last_row: what a last token without a row does: `"fill"` makes it a padding row (it
                predicts nothing in the loss, so any forced choice is right), `"live"` an unknown
                one.
            pad_fill: experts of padding rows: `"rank_first"` loads all ranks alike, `"arange"` is
                0..K-1 in every row as some hosts do, `"keep"` trusts the payload and refuses rows
                that the payload does not have.
            ep: (rank, size) of the EP group, for `"rank_first"`.

        Raises:
            TypeError: no integers.
            ValueError: an unknown option, or a rank outside its size.
            TraceError: code `layout`, lengths that the cuts do not divide, or rows that `"keep"`
                cannot fill.

        Example:
            >>> trace = RoutingTrace(np.zeros((3, 1, 1), int), moe_layers=[0], num_experts=4)
            >>> rows = trace.slice(sequence_multiple=8, ep=(0, 4))
            >>> rows.kind.tolist(), rows.ids.ravel().tolist()
            ([0, 0, 0, 2, 2, 2, 2, 2], [0, 0, 0, 0, 1, 2, 3, 0])
        """
        check_choice("last_row", last_row, ("fill", "live"))
        check_choice("pad_fill", pad_fill, ("rank_first", "arange", "keep"))
        spec = SliceSpec(layout, cp, tp, sequence_multiple, total_multiple)
        rows = packed_rows(self.cu_seqlens, has_last_row=self.has_last_row, spec=spec)
        unknown_last = (rows == LAST_TOKEN) & (last_row == "live")
        to_fill = (rows < 0) & ~unknown_last
        source_row = np.maximum(rows, -1)
        kind = np.full(len(rows), DispatchRows.KIND_ROUTED, np.uint8)
        kind[(source_row >= 0) & ~self.valid[source_row] if self.num_rows else rows >= 0] = (
            DispatchRows.KIND_UNKNOWN
        )
        kind[unknown_last] = DispatchRows.KIND_UNKNOWN
        kind[to_fill] = DispatchRows.KIND_PADDING
        dtype = self.ids.dtype
        if np.iinfo(dtype).max < self.num_experts - 1:  # padding may have any id
            dtype = np.promote_types(dtype, np.min_scalar_type(self.num_experts - 1))
        ids = np.zeros((len(rows), self.num_layers, self.top_k), dtype)
        ids[source_row >= 0] = self.ids[source_row[source_row >= 0]]
        ids[to_fill] = self._padding_ids(int(to_fill.sum()), pad_fill, ep)
        return DispatchRows(
            ids, kind, source_row, num_experts=self.num_experts, moe_layers=self.moe_layers
        )

    def _padding_ids(self, num_rows: int, pad_fill: PadFill, ep: tuple[int, int]) -> IdArray:
        """Ids of the padding rows of one rank, broadcastable to `[rows, L, K]`."""
        if pad_fill == "rank_first":
            rank_of = check_rank_of("ep", ep)
            return rank_first_ids(num_rows, self.num_layers, self.top_k, self.num_experts, rank_of)
        if pad_fill == "keep" and num_rows:
            raise TraceError(
                f"pad_fill: need 'rank_first' or 'arange' for {num_rows} rows that the payload "
                "does not have (padding, last tokens), got 'keep'",
                code="layout",
            )
        return np.arange(self.top_k, dtype=np.int64)[None, None]

    def save(self, path: str | Path) -> None:
        """Writes the trace as a safetensors file that `load` maps.

        Args:
            path: file to write; an existing one is replaced.
        """
        from relibra.formats.relibra_file import save_trace

        save_trace(self, path)

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Maps a file written by `save`; the ids stay on disk until they are used.

        Args:
            path: a `.safetensors` file.

        Raises:
            OSError: no such file.
            TraceError: no trace file, or a damaged one.
        """
        from relibra.formats.relibra_file import load_trace

        return load_trace(path)


def _starts(lengths: Int64Array) -> Int64Array:
    """First row of each sample, and the end."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
