"""From what a carrier delivered to rows `[rows, MoE layers, K]` of the right number.

A flat buffer can be read with all decoder layers or with MoE layers only; nothing in it says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relibra.id_arrays import take_layers
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from relibra.formats.carrier import Part, TraceModel
    from relibra.id_arrays import IdArray

# What a rollout engine may have meant by bytes whose dtype it did not name.
_OTHER_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")


@dataclass(frozen=True)
class Rows:
    """Rows of MoE layers and, where the carrier has them, of the dense layers beside them.

    Args:
        ids: integer `[rows, L, K]`.
        dense: integer `[rows, dense layers, K]`; None where the carrier has MoE layers only.
    """

    ids: IdArray
    dense: IdArray | None

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.ids[rows], None if self.dense is None else self.dense[rows])


def split_layers(rows: IdArray, model: TraceModel, label: str) -> Rows:
    """Separates MoE layers from dense ones.

    Args:
        rows: integer `[rows, layers, K]` with all decoder layers or MoE layers only.
        model: what is needed.
        label: where the rows stood, for messages.

    Raises:
        TraceError: code `dtype_too_narrow`, `top_k` or `layer_axis`.
    """
    limit = np.iinfo(rows.dtype).max
    if limit < model.num_experts - 1:
        raise TraceError(
            f"dtype_too_narrow: {label}: need a dtype that holds id {model.num_experts - 1}, got "
            f"{rows.dtype}, which ends at {limit}; ids may have wrapped, so nothing is replayed",
            code="dtype_too_narrow",
        )
    _, axis, top_k = rows.shape
    if top_k != model.top_k:
        hint = "; is a fused shared-expert column in it?" if top_k == model.top_k + 1 else ""
        raise TraceError(
            f"top_k: {label}: need {model.top_k} choices a token, got {top_k}{hint}", code="top_k"
        )
    num_moe = len(model.moe_layers)
    if axis == num_moe:
        return Rows(rows, None)
    if axis != model.num_layers:
        surplus = axis - model.num_layers if axis > model.num_layers else axis - num_moe
        hint = "; does it contain MTP layers?" if 0 < surplus <= 2 else ""
        raise TraceError(
            f"layer_axis: {label}: need {model.num_layers} decoder layers or {num_moe} MoE layers, "
            f"got {axis}{hint}",
            code="layer_axis",
        )
    dense = take_layers(rows, model.dense_layers)
    return Rows(take_layers(rows, model.moe_layers), dense)


def read_rows(part: Part, model: TraceModel, need: int | None, *, may_trim: bool) -> Rows:
    """Rows of one part, exactly `need` of them.

    Args:
        part: what was delivered; `rows` is not None.
        model: the model.
        need: rows needed; None accepts any number.
        may_trim: whether one row more, that of the last token, is dropped.

    Raises:
        TraceError: code `element_count`, `surplus_rows`, `short_rows`, or as `split_layers`.
    """
    assert part.rows is not None
    if part.rows.ndim == 3:
        return _fit(split_layers(part.rows, model, part.label), part, need, may_trim)
    if part.rows.ndim != 1:
        shape = list(part.rows.shape)
        message = f"layer_axis: {part.label}: need [rows, layers, K] or flat elements, got {shape}"
        raise TraceError(message, code="layer_axis")
    return _fit(_choose_reading(part, part.rows, model, need, may_trim), part, need, may_trim)


def _choose_reading(
    part: Part, flat: IdArray, model: TraceModel, need: int | None, may_trim: bool
) -> Rows:
    """Reads a flat buffer with all decoder layers first, then with MoE layers only."""
    axes = list(dict.fromkeys((model.num_layers, len(model.moe_layers))))
    whole = {
        axis: flat.size // (axis * model.top_k)
        for axis in axes
        if flat.size % (axis * model.top_k) == 0
    }
    wanted = range(need, need + 1 + may_trim) if need is not None else None
    fitting = [axis for axis in whole if wanted is None or whole[axis] in wanted]
    if not fitting and (need is None or not whole or _other_meaning(part, flat, model, need)):
        raise _element_count(part, flat, model, axes, need)
    readings = {
        axis: split_layers(flat.reshape(-1, axis, model.top_k), model, part.label)
        for axis in fitting or whole
    }
    if len(readings) > 1 and fitting:
        likely = [axis for axis, rows in readings.items() if _looks_right(rows)]
        if len(likely) > 1:
            both = " and ".join(f"{whole[axis]} rows x {axis} layers" for axis in likely)
            raise TraceError(
                f"element_count: {part.label}: need one reading of {flat.size} elements, got "
                f"{both}; pass num_tokens or format",
                code="element_count",
            )
        return readings[likely[0] if likely else axes[0]]
    return next(iter(readings.values()))


def _looks_right(rows: Rows) -> bool:
    """Whether dense layers are zero and no row has an id twice."""
    if rows.dense is not None and rows.dense.any():
        return False
    ids = np.sort(rows.ids, axis=-1)
    twice = (ids[..., 1:] == ids[..., :-1]).any(axis=(1, 2))
    unset = ~rows.ids.any(axis=(1, 2)) | (rows.ids < 0).all(axis=(1, 2))
    return not (twice & ~unset).any()


def _fit(rows: Rows, part: Part, need: int | None, may_trim: bool) -> Rows:
    """Drops the one row that may be too many, or says what is wrong with the number."""
    got = len(rows.ids)
    if need is None or got == need:
        return rows
    if may_trim and got == need + 1:
        return rows[slice(0, need)]
    if got < need:
        raise TraceError(
            f"short_rows: {part.label}: need {need} rows, got {got}, and nothing marks where the "
            "hole is",
            code="short_rows",
        )
    repeats = (rows.ids[1:] == rows.ids[:1]).all(axis=(1, 2))
    hint = ""
    if repeats.any():
        hint = f"; row {int(np.argmax(repeats)) + 1} repeats row 0: were resumed parts joined?"
    raise TraceError(
        f"surplus_rows: {part.label}: need {need} rows, got {got}{hint}", code="surplus_rows"
    )


def _other_meaning(part: Part, flat: IdArray, model: TraceModel, need: int) -> str:
    """A dtype under which the bytes would fit, when the carrier named none."""
    if not part.raw_dtype:
        return ""
    for dtype in _OTHER_DTYPES:
        for axis in (model.num_layers, len(model.moe_layers)):
            fits = need * axis * model.top_k * np.dtype(dtype).itemsize == flat.nbytes
            if fits and np.dtype(dtype) != flat.dtype:
                return f"; as {dtype} it would be {need} x {axis} x {model.top_k}"
    return ""


def _element_count(
    part: Part, flat: IdArray, model: TraceModel, axes: list[int], need: int | None
) -> TraceError:
    """The error for a buffer that is not made of whole rows."""
    if need is None:
        wanted = " or ".join(f"a multiple of {axis} x {model.top_k}" for axis in axes)
        hint = ""
    else:
        wanted = " or ".join(
            f"{need * axis * model.top_k} = {need} x {axis} x {model.top_k}" for axis in axes
        )
        hint = _other_meaning(part, flat, model, need)
        rows, rest = divmod(flat.size, max(1, need * model.top_k))
        if not hint and rest == 0:
            hint = f"; with {rows} layers it would fit"
    return TraceError(
        f"element_count: {part.label}: need {wanted} elements (rows x layers x K), got "
        f"{flat.size} of {flat.dtype}{hint}",
        code="element_count",
    )
