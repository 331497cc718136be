"""Arrays of expert ids `[rows, L, K]`: accepting them, checking their range, views of them.

Nothing here copies or widens a whole array: carriers are narrow, large and often mapped files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from relibra.limits import MAX_LAYERS
from relibra_kernels.checks import check_int_array, describe
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IdArray: TypeAlias = npt.NDArray[Any]

# Bytes looked at together: small enough to stay in cache, large enough to hide Python.
_CHUNK_BYTES = 1 << 20
# From so many ids out of range on, more than 5 % of all, they look like slot ids.
_MANY = 4


def as_ids(name: str, value: object) -> IdArray:
    """Accepts an array, CPU or GPU tensor or nested list of ids, without a copy where possible.

    Args:
        name: argument name for the message.
        value: integers `[rows, L, K]` of any width.

    Returns:
        The array.

    Raises:
        TypeError: the elements are no integers.
        TraceError: code `layer_axis`, another number of dimensions, or L is not 1..4,096 or
            K 0.

    Example:
        >>> as_ids("ids", [[[0, 1]]]).shape
        (1, 1, 2)
        >>> as_ids("ids", np.zeros((2, 1, 2)))
        Traceback (most recent call last):
        TypeError: ids: need integers, got float64 array [2, 1, 2]
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():  # also what NumPy has no type for
            raise TypeError(f"{name}: need integers, got {describe(value)}")
        value = value.detach().cpu().numpy()
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: need integers, got {describe(array)}")
    if array.ndim != 3 or 0 in array.shape[1:]:
        raise TraceError(f"{name}: need [rows, L, K], got {describe(array)}", code="layer_axis")
    if array.shape[1] > MAX_LAYERS:
        raise TraceError(
            f"{name}: need at most {MAX_LAYERS} layers, got {describe(array)}", code="layer_axis"
        )
    return array


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view of the same memory that cannot be written to.

    Args:
        array: any array.

    Example:
        >>> read_only(np.zeros(1)).flags.writeable
        False
    """
    view = array.view()
    view.flags.writeable = False
    return view


def check_starts(value: object, num_rows: int) -> npt.NDArray[np.int64]:
    """Checks the first rows of samples.

    Args:
        value: integers `[samples + 1]` that begin at 0, do not decrease and end at `num_rows`.
        num_rows: rows of all samples.

    Returns:
        int64 array.

    Raises:
        TypeError: no integers.
        TraceError: code `sample_count`, numbers that do not cover the rows.

    Example:
        >>> check_starts([0, 2, 2], 3)
        Traceback (most recent call last):
        relibra_kernels.errors.TraceError: cu_seqlens: need numbers from 0 up to 3 rows, got 0 .. 2
    """
    try:
        starts = check_int_array("cu_seqlens", value, ndim=1, dtype=np.int64)
    except ValueError as error:
        raise TraceError(str(error), code="sample_count") from None
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != num_rows:
        ends = f"{starts[0]} .. {starts[-1]}" if len(starts) else "none"
        raise TraceError(
            f"cu_seqlens: need numbers from 0 up to {num_rows} rows, got {ends}",
            code="sample_count",
        )
    if (np.diff(starts) < 0).any():
        place = int(np.argmax(np.diff(starts) < 0))
        raise TraceError(
            f"cu_seqlens: need numbers that do not decrease, got {starts[place]} then "
            f"{starts[place + 1]} at sample {place}",
            code="sample_count",
            sample=place,
        )
    return starts


def take_layers(ids: IdArray, places: Sequence[int]) -> IdArray:
    """Some places of the L axis: a view where they are in equal steps, else a copy.

    Args:
        ids: `[rows, L, K]`.
        places: rising places of the L axis, at least one.

    Example:
        >>> ids = np.arange(6).reshape(1, 6, 1)
        >>> view = take_layers(ids, [1, 3, 5])
        >>> view.ravel().tolist(), np.shares_memory(view, ids)
        ([1, 3, 5], True)
    """
    step = places[1] - places[0] if len(places) > 1 else 1
    if list(places) == list(range(places[0], places[-1] + 1, step)):
        return ids[:, places[0] : places[-1] + 1 : step]
    return ids[:, list(places)]


def chunks(ids: IdArray) -> Iterator[slice]:
    """Runs of rows to look at together, so that temporaries stay small.

    Args:
        ids: `[rows, ...]`.

    Example:
        >>> list(chunks(np.zeros((3, 1, 1), np.int32)))
        [slice(0, 3, None)]
    """
    row_bytes = max(1, ids[:1].nbytes)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, len(ids), step):
        yield slice(begin, min(begin + step, len(ids)))


def check_id_range(
    name: str,
    ids: IdArray,
    counted: npt.NDArray[np.bool_],
    layers: Sequence[int],
    num_experts: int,
    cu_seqlens: npt.NDArray[np.int64] | None = None,
) -> None:
    """Refuses ids outside 0..E-1 in the rows that are counted.

    Args:
        name: argument name for the message.
        ids: `[rows, L, K]`.
        counted: bool `[rows]`, the rows looked at.
        layers: number of each place on the L axis, for the message.
        num_experts: E.
        cu_seqlens: int64 `[samples + 1]`, to name sample and row of the sample; None is one sample.

    Raises:
        TraceError: code `id_range`; names the first place, its id and the number of such ids.

    Example:
        >>> check_id_range("ids", np.array([[[0, 9]]]), np.array([True]), [3], 8)
        Traceback (most recent call last):
        relibra_kernels.errors.TraceError: ids: need ids in 0..7, got 9 at layer 3, row 0, column 1
    """
    for rows in chunks(ids):
        part = ids[rows]
        if not counted[rows].all():
            part = part[counted[rows]]
        if part.size and (part.min() < 0 or part.max() >= num_experts):
            _raise_id_range(name, ids, counted, layers, num_experts, cu_seqlens)


def place_of(row: int, cu_seqlens: npt.NDArray[np.int64] | None) -> tuple[int | None, int]:
    """Sample and row inside it of a row of the trace; no sample where there is only one.

    Args:
        row: row of the trace.
        cu_seqlens: int64 `[samples + 1]`, or None.

    Example:
        >>> place_of(7, np.array([0, 5, 9]))
        (1, 2)
    """
    if cu_seqlens is None or len(cu_seqlens) <= 2:
        return None, row
    sample = int(np.searchsorted(cu_seqlens, row, side="right")) - 1
    return sample, row - int(cu_seqlens[sample])


def _raise_id_range(
    name: str,
    ids: IdArray,
    counted: npt.NDArray[np.bool_],
    layers: Sequence[int],
    num_experts: int,
    cu_seqlens: npt.NDArray[np.int64] | None,
) -> None:
    """Counts the wrong ids and names the first."""
    num_wrong, num_seen = 0, 0
    first: tuple[int, int, int] | None = None
    for rows in chunks(ids):
        part = ids[rows]
        wrong = ((part < 0) | (part >= num_experts)) & counted[rows][:, None, None]
        num_seen += part.size
        num_wrong += int(wrong.sum())
        if first is None and wrong.any():
            place = np.argwhere(wrong)[0]
            first = (rows.start + int(place[0]), int(place[1]), int(place[2]))
    assert first is not None
    sample, row = place_of(first[0], cu_seqlens)
    where = "" if sample is None else f"sample {sample}, "
    cause = f"; {num_wrong} such ids" if num_wrong > 1 else ""
    if num_wrong >= _MANY and num_wrong * 20 > num_seen:
        cause += ", so these may be slot ids of a balancer; logical ids are needed"
    raise TraceError(
        f"{name}: need ids in 0..{num_experts - 1}, got {int(ids[first])} at {where}"
        f"layer {layers[first[1]]}, row {row}, column {first[2]}{cause}",
        code="id_range",
        sample=sample,
        layer=layers[first[1]],
        row=row,
    )
