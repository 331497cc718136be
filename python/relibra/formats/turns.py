"""Joining the parts of one sample: turns of an agent, resumed generations, growing prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.formats.readings import Rows, read_rows
from relibra.limits import MAX_HOLE_BYTES
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra.formats.carrier import LoadRules, Part, TraceModel


@dataclass(frozen=True)
class Sample:
    """Rows of one sample, not yet checked.

    Args:
        rows: the rows; None before the first part.
        known: bool `[rows]`, False where a null turn left a hole.
        notes: what joining decided.
    """

    rows: Rows | None
    known: npt.NDArray[np.bool_]
    notes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows held so far."""
        return len(self.known)


def join_parts(
    parts: Sequence[Part],
    model: TraceModel,
    rules: LoadRules,
    *,
    start: int = 0,
    num_tokens: int | None = None,
    existing: Sample | None = None,
) -> Sample:
    """Joins parts in order; where two have the same row, the later one wins.

    A part with a start continues there. A part without one must be the whole sample so far, told
    by its number of rows, and replaces what it repeats. A null part leaves its rows unknown.

    Args:
        parts: at least one.
        model: the model.
        rules: decides whether a row of the last token is kept.
        start: start of the first part, where the part does not say.
        num_tokens: tokens of the whole sample, where the caller knows.
        existing: rows that earlier calls loaded.

    Returns:
        The rows of the sample.

    Raises:
        TraceError: code `turn_gap`, `short_rows`, `surplus_rows`, `element_count` or
            `sample_count`.
    """
    held = existing or Sample(None, np.zeros(0, bool))
    keep = rules.last_row == "keep"
    parts = _name_lengths(parts, num_tokens)
    if start:
        parts[0] = _with_start(parts[0], start)
    hole_allowed = False
    for number, part in enumerate(parts):
        if part.rows is not None:
            begin = _begin_of(part, held.num_rows, hole_allowed)
            need = None if part.num_tokens is None else part.num_tokens - begin - (not keep)
            new = read_rows(part, model, need, may_trim=not keep)
            held = _extend(held, begin, new, number)
        hole_allowed = part.rows is None
    last = parts[-1]
    if held.rows is None:
        raise TraceError(
            f"field_missing: need routing in at least one of {len(parts)} turns, got null in all",
            code="field_missing",
        )
    if last.rows is None and last.num_tokens is not None:
        held = _grow(held, last.num_tokens - (not keep))
    return held


def _begin_of(part: Part, num_held: int, hole_allowed: bool) -> int:
    """Row of the sample at which a part begins."""
    begin = 0 if part.start is None else part.start
    if part.start is None and num_held and part.num_tokens is None:
        raise TraceError(
            f"turn_gap: {part.label}: need a start (routed_experts_start_len) or a token count to "
            f"place it after {num_held} rows, got neither",
            code="turn_gap",
        )
    if begin > num_held and not hole_allowed:
        raise TraceError(
            f"turn_gap: {part.label}: need a start of at most {num_held}, the rows held so far, "
            f"got {begin}; no null turn explains rows {num_held}-{begin - 1}",
            code="turn_gap",
            row=num_held,
        )
    if part.num_tokens is not None and begin >= part.num_tokens:
        raise TraceError(
            f"turn_gap: {part.label}: need a start below {part.num_tokens} tokens, got {begin}",
            code="turn_gap",
        )
    return begin


def _name_lengths(parts: Sequence[Part], num_tokens: int | None) -> list[Part]:
    """The parts, the last of them with the caller's token count."""
    if not parts:
        raise TraceError("sample_count: need at least one turn, got none", code="sample_count")
    last = parts[-1]
    if num_tokens is None:
        return list(parts)
    if last.num_tokens is not None and last.num_tokens != num_tokens:
        raise TraceError(
            f"element_count: {last.label}: need num_tokens = {num_tokens}, got a payload of "
            f"{last.num_tokens} prompt and completion tokens",
            code="element_count",
        )
    return [*parts[:-1], replace(last, num_tokens=num_tokens)]


def _with_start(part: Part, start: int) -> Part:
    if part.start is not None and part.start != start:
        raise TraceError(
            f"turn_gap: {part.label}: need start = {start}, got {part.start} in the payload",
            code="turn_gap",
        )
    return replace(part, start=start)


def _extend(held: Sample, begin: int, new: Rows, number: int) -> Sample:
    """`held[:begin] + new`, with unknown rows between where there is a hole."""
    if held.rows is None and begin == 0:
        return Sample(new, np.ones(len(new.ids), bool), held.notes)
    if held.rows is None:
        held = Sample(new[slice(0, 0)], held.known, held.notes)
    if begin > held.num_rows:
        held = _grow(held, begin)
    assert held.rows is not None
    old, both = held.rows, min(held.num_rows - begin, len(new.ids))
    differ = (old.ids[begin : begin + both] != new.ids[:both]).any(axis=(1, 2))
    differ &= held.known[begin : begin + both]
    notes = held.notes
    if differ.any():
        notes += (
            f"turn {number}: {int(differ.sum())} of {both} repeated rows differ from the earlier "
            "ones; the later turn was taken",
        )
    ids = np.concatenate([old.ids[:begin], new.ids])
    dense = None
    if old.dense is not None and new.dense is not None:
        dense = np.concatenate([old.dense[:begin], new.dense])
    known = np.concatenate([held.known[:begin], np.ones(len(new.ids), bool)])
    return Sample(Rows(ids, dense), known, notes)


def _grow(held: Sample, num_rows: int) -> Sample:
    """Adds unknown rows up to a number of rows."""
    assert held.rows is not None
    missing = max(0, num_rows - held.num_rows)
    unknown = missing + int((~held.known).sum())
    hole_bytes = unknown * held.rows.ids[:0].itemsize * math.prod(held.rows.ids.shape[1:])
    if hole_bytes > MAX_HOLE_BYTES:
        raise TraceError(
            f"turn_gap: need at most {MAX_HOLE_BYTES} bytes of rows that no turn brings, got "
            f"{unknown} unknown rows of {hole_bytes} bytes",
            code="turn_gap",
            row=held.num_rows,
        )
    shape = (missing, *held.rows.ids.shape[1:])
    rows = Rows(np.concatenate([held.rows.ids, np.zeros(shape, held.rows.ids.dtype)]), None)
    return Sample(rows, np.concatenate([held.known, np.zeros(missing, bool)]), held.notes)
