"""Checks of recorded ids: range, duplicates, and rows that look as if nothing was captured.

One pass over the bytes, in chunks; places are looked up only when something is wrong.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.id_arrays import check_id_range, chunks, place_of
from relibra_kernels.errors import TraceError, TraceWarning

if TYPE_CHECKING:
    from relibra.formats.carrier import LoadRules, TraceModel
    from relibra.id_arrays import IdArray

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

# Shortest suspicious runs. Real text: the longest run of equal rows in 44,961 GPT-OSS rows is 1.
_MIN_REPEATS = 4
_MIN_CHOICES_TO_REPEAT = 8
_MIN_ZERO_RUN_TOP_1 = 32


@dataclass(frozen=True)
class RowScan:
    """What one pass saw: bool `[rows]` each, and bool `[L]` for layers.

    Args:
        some_unset: a choice of the row is -1.
        all_unset: all choices of the row are -1.
        zero: all choices of the row are 0.
        duplicate: a layer of the row has an id twice.
        repeated: the row equals the one before it.
        layer_used: the layer has an id above 0 in some row.
    """

    some_unset: BoolArray
    all_unset: BoolArray
    zero: BoolArray
    duplicate: BoolArray
    repeated: BoolArray
    layer_used: BoolArray


def scan_rows(ids: IdArray) -> RowScan:
    """Looks at every id once.

    Args:
        ids: integer `[rows, L, K]`.

    Example:
        >>> scan = scan_rows(np.array([[[1, 2]], [[1, 2]], [[0, 0]], [[-1, -1]]]))
        >>> scan.repeated.tolist(), scan.zero.tolist()
        ([False, True, False, False], [False, False, True, False])
    """
    num_rows, num_layers, top_k = ids.shape
    some, every, zero, duplicate, repeated = np.zeros((5, num_rows), bool)
    layer_used = np.zeros(num_layers, bool)
    for rows in chunks(ids):
        part = np.ascontiguousarray(ids[rows])
        flat = part.reshape(len(part), -1)
        if part.dtype.kind == "i" and part.min() < 0:
            some[rows] = (flat == -1).any(axis=1)
            every[rows] = (flat == -1).all(axis=1)
        zero[rows] = ~flat.any(axis=1)
        layer_used |= (part > 0).any(axis=(0, 2))
        if top_k > 1:
            ordered = np.sort(part, axis=-1)
            duplicate[rows] = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
        repeated[rows.start + 1 : rows.stop] = (flat[1:] == flat[:-1]).all(axis=1)
        if rows.start:
            repeated[rows.start] = np.array_equal(ids[rows.start], ids[rows.start - 1])
    return RowScan(some, every, zero, duplicate, repeated, layer_used)


def check_rows(
    ids: IdArray,
    known: BoolArray,
    cu_seqlens: Int64Array,
    model: TraceModel,
    rules: LoadRules,
) -> BoolArray:
    """Refuses, marks unknown or warns about rows, as `rules` say.

    Args:
        ids: integer `[rows, L, K]`, MoE layers only.
        known: bool `[rows]`, False where a row is already known to be missing.
        cu_seqlens: int64 `[samples + 1]`.
        model: the model.
        rules: what to do with rows that are missing or look wrong.

    Returns:
        bool `[rows]`: the rows that may be replayed.

    Raises:
        TraceError: code `id_range`, `partly_negative`, `unset_rows`, `zero_layer`, `duplicate_id`
            or `repeated_rows`.
    """
    scan = scan_rows(ids)
    check = _RowChecks(ids, cu_seqlens, model, rules)
    partly = scan.some_unset & ~scan.all_unset & known
    if partly.any():
        check.partly_negative(int(np.argmax(partly)))
    check.missing_rows(scan.all_unset | ~known)
    valid = known & ~scan.all_unset
    layers = model.moe_layers
    check_id_range("id_range", ids, valid, layers, model.num_experts, cu_seqlens)
    unset = valid & scan.zero
    if model.top_k == 1:
        after_unset = unset & np.roll(unset, 1)
        unset &= _run_lengths(after_unset, cu_seqlens) >= _MIN_ZERO_RUN_TOP_1
    if model.top_k > 1 and scan.layer_used.any() and not scan.layer_used.all():
        check.zero_layer(layers[int(np.argmin(scan.layer_used))])
    valid &= ~check.suspect_rows("unset_rows", unset)
    duplicate = valid & scan.duplicate & ~unset
    if duplicate.any() and not rules.allow_duplicates:
        check.duplicate_id(int(np.argmax(duplicate)))
    if len(layers) * model.top_k >= _MIN_CHOICES_TO_REPEAT:
        again = scan.repeated & valid & ~unset
        runs = _run_lengths(again, cu_seqlens) >= _MIN_REPEATS
        valid &= ~check.suspect_rows("repeated_rows", runs)
    return valid


def warn_dense_layers(dense: IdArray | None, model: TraceModel) -> None:
    """Warns when a layer that is said to be dense has ids.

    Args:
        dense: integer `[rows, dense layers, K]`, or None.
        model: the model.
    """
    if dense is None:
        return
    used = np.zeros(dense.shape[1], bool)
    for rows in chunks(dense):
        used |= (dense[rows] > 0).any(axis=(0, 2))
    for layer in np.array(model.dense_layers)[used].tolist():
        warn(
            "dense_layer_used",
            f"layer {layer}: need zeros in a layer that is not in moe_layers, got expert ids; "
            "is moe_layers right?",
            layer=layer,
        )


def warn(code: str, message: str, **place: int | None) -> None:
    """Emits a TraceWarning at the caller of the loader.

    Args:
        code: code of the check.
        message: text after the code.
        **place: `sample`, `layer`, `row`.
    """
    warnings.warn(TraceWarning(f"{code}: {message}", code=code, **place), stacklevel=5)


class _RowChecks:
    """Messages with places, for one trace."""

    def __init__(
        self, ids: IdArray, cu_seqlens: Int64Array, model: TraceModel, rules: LoadRules
    ) -> None:
        self.ids, self.cu_seqlens, self.model, self.rules = ids, cu_seqlens, model, rules

    def partly_negative(self, row: int) -> None:
        place = np.argwhere(self.ids[row] < 0)[0]
        layer = self.model.moe_layers[int(place[0])]
        sample, number, where = self._place(row)
        raise TraceError(
            f"partly_negative: {where}layer {layer}: need -1 in all choices of a missing row or in "
            f"none, got {self.ids[row, place[0]].tolist()}; the row is damaged",
            code="partly_negative",
            sample=sample,
            layer=layer,
            row=number,
        )

    def zero_layer(self, layer: int) -> None:
        raise TraceError(
            f"zero_layer: layer {layer}: need expert ids in every MoE layer, got zero in every row "
            "while other layers have ids; pipeline stages not merged, or a dense layer listed in "
            "moe_layers",
            code="zero_layer",
            layer=layer,
        )

    def duplicate_id(self, row: int) -> None:
        ordered = np.sort(self.ids[row], axis=-1)
        place = np.argwhere(ordered[:, 1:] == ordered[:, :-1])[0]
        layer = self.model.moe_layers[int(place[0])]
        sample, number, where = self._place(row)
        raise TraceError(
            f"duplicate_id: {where}layer {layer}: need {self.model.top_k} different ids, got "
            f"{int(ordered[tuple(place)])} twice in {self.ids[row, place[0]].tolist()}; pass "
            "allow_duplicates=True if both are meant to count",
            code="duplicate_id",
            sample=sample,
            layer=layer,
            row=number,
        )

    def missing_rows(self, missing: BoolArray) -> None:
        """Rows that the carrier admits not to have."""
        if missing.any() and self.rules.missing == "error":
            self._raise_rows("unset_rows", missing, "the carrier marks them as not captured")

    def suspect_rows(self, code: str, rows: BoolArray) -> BoolArray:
        """Refuses or reports suspicious rows; returns those to be marked unknown."""
        if not rows.any():
            return rows
        cause = {
            "unset_rows": "zero in all MoE layers: capture buffer too small, or a cached prefix",
            "repeated_rows": "equal in all MoE layers: a stale buffer or profiling rows",
        }[code]
        refuse = self.rules.suspect == "error"
        if refuse or (self.rules.suspect == "report" and code == "unset_rows"):
            self._raise_rows(code, rows, cause)
        live = self.rules.suspect == "live"
        text, sample, row = self._range(rows)
        kept = "they follow the live router" if live else "they are kept"
        warn(code, f"{text} are {cause}; {kept}", sample=sample, row=row)
        return rows if live else np.zeros_like(rows)

    def _raise_rows(self, code: str, rows: BoolArray, cause: str) -> None:
        text, sample, row = self._range(rows)
        raise TraceError(
            f"{code}: need routing in every row, got none that can be trusted in {text}: {cause}",
            code=code,
            sample=sample,
            row=row,
        )

    def _range(self, rows: BoolArray) -> tuple[str, int | None, int]:
        """The first run of rows in words, with its sample and first row."""
        first = int(np.argmax(rows))
        sample, row, where = self._place(first)
        end = int(self.cu_seqlens[np.searchsorted(self.cu_seqlens, first, side="right")])
        inside = rows[first:end]
        length = len(inside) if inside.all() else int(np.argmin(inside))
        text = f"{where}rows {row}-{row + length - 1} ({length} rows)"
        total = int(rows.sum())
        if total > length:
            text += f" and {total - length} rows elsewhere"
        return text, sample, row

    def _place(self, row: int) -> tuple[int | None, int, str]:
        """Sample, row of the sample, and the words for them."""
        sample, number = place_of(row, self.cu_seqlens)
        return sample, number, "" if sample is None else f"sample {sample}, "


def _run_lengths(continues: BoolArray, cu_seqlens: Int64Array) -> Int64Array:
    """Length of the run that each row is in; runs end with their sample.

    `continues` says of each row whether it continues the run of the row before it.
    """
    continues = continues.copy()
    continues[cu_seqlens[:-1][np.diff(cu_seqlens) > 0]] = False
    run = np.cumsum(~continues)
    lengths: Int64Array = np.bincount(run)[run]
    return lengths
