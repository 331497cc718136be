"""Which rows a rank of a context- and sequence-parallel cell holds, and how its padding is filled.

Order of steps: add the row of each sample's last token, pad every sample, cut for context
parallelism, join, pad the total, cut for sequence parallelism; only then padding is filled, because
only then it is known how many padding rows each rank has. Rows are numbers into the trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from relibra.layout import ExpertLayout
from relibra_kernels.checks import check_choice, check_int
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

Int64Array: TypeAlias = npt.NDArray[np.int64]
Layout: TypeAlias = Literal["zigzag", "contiguous"]

PADDING = -1
LAST_TOKEN = -2


@dataclass(frozen=True)
class SliceSpec:
    """How a host lays the tokens of a micro-batch over the ranks that share its samples.

    Args:
        layout: `"zigzag"`: each sample is cut in 2 * cp chunks and rank r takes chunks r and
            2 * cp - 1 - r; `"contiguous"`: samples are joined, padded and cut in cp pieces.
        cp: (rank, size) of context parallelism.
        tp: (rank, size) of sequence parallelism; (0, 1) where every tensor-parallel rank
            dispatches all rows.
        sequence_multiple: each sample is padded to a multiple of this many tokens.
        total_multiple: the joined rows are padded to a multiple of this: those of one
            context-parallel rank with zigzag, those of all with contiguous.

    Raises:
        TypeError: a number that is no integer.
        ValueError: an unknown layout, or numbers out of range.

    Example:
        >>> SliceSpec(cp=(1, 2)).cp
        (1, 2)
    """

    layout: Layout = "zigzag"
    cp: tuple[int, int] = (0, 1)
    tp: tuple[int, int] = (0, 1)
    sequence_multiple: int = 1
    total_multiple: int = 1

    def __post_init__(self) -> None:
        """Checks every field."""
        check_choice("layout", self.layout, ("zigzag", "contiguous"))
        check_rank_of("cp", self.cp)
        check_rank_of("tp", self.tp)
        check_int("sequence_multiple", self.sequence_multiple, minimum=1)
        check_int("total_multiple", self.total_multiple, minimum=1)


def check_rank_of(name: str, value: object) -> tuple[int, int]:
    """Checks a (rank, size) pair.

    Args:
        name: argument name for the message.
        value: the pair.

    Returns:
        The pair as Python ints.

    Raises:
        TypeError: no pair of integers.
        ValueError: a size below 1 or a rank outside 0..size - 1.

    Example:
        >>> check_rank_of("cp", (2, 2))
        Traceback (most recent call last):
        ValueError: cp: need a rank in 0..1 of size 2, got 2
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name}: need a pair (rank, size), got {value!r}")
    size = check_int(f"{name} size", value[1], minimum=1)
    rank = check_int(f"{name} rank", value[0])
    if not 0 <= rank < size:
        raise ValueError(f"{name}: need a rank in 0..{size - 1} of size {size}, got {rank}")
    return rank, size


def packed_rows(cu_seqlens: Int64Array, *, has_last_row: bool, spec: SliceSpec) -> Int64Array:
    """Rows of the trace that one rank holds, in its order.

    Args:
        cu_seqlens: int64 `[samples + 1]`, first row of each sample in the trace.
        has_last_row: whether the trace has a row for each sample's last token; else one is added.
        spec: layout, ranks and multiples.

    Returns:
        int64 `[rows]`: row of the trace, `LAST_TOKEN` for a last token without one, `PADDING`.

    Raises:
        TraceError: code `layout`, a length that the cuts do not divide.

    Example:
        >>> spec = SliceSpec(cp=(0, 2), sequence_multiple=4)
        >>> packed_rows(np.array([0, 5]), has_last_row=False, spec=spec).tolist()
        [0, 1, -1, -1]
    """
    starts = cu_seqlens.tolist()
    samples = [
        _padded_sample(begin, end, has_last_row, spec.sequence_multiple)
        for begin, end in zip(starts[:-1], starts[1:], strict=True)
    ]
    cp_rank, cp_size = spec.cp
    if spec.layout == "zigzag":
        samples = [
            _zigzag(sample, number, cp_rank, cp_size) for number, sample in enumerate(samples)
        ]
        joined = _pad(_join(samples), spec.total_multiple)
    else:
        joined = _pad(_join(samples), spec.total_multiple)
        joined = _piece(joined, "cp", cp_rank, cp_size)
    return _piece(joined, "tp", *spec.tp)


def rank_first_ids(
    num_rows: int, num_layers: int, top_k: int, num_experts: int, ep: tuple[int, int]
) -> npt.NDArray[np.int64]:
    """Expert ids of padding rows that load all ranks alike and start at different ranks.

    Row p, layer index l, column c of rank p0 gets choice `a = (p0 + p) * K + c + l * G * K`, and
    with H experts a rank expert `(a % G) * H + (a // G) % H`: rank after rank, so any prefix loads
    the ranks within one of each other and a row has no id twice. Where G does not divide E the
    places of the missing experts are skipped.

    Args:
        num_rows: padding rows of the whole micro-batch on this rank.
        num_layers: L.
        top_k: K, at most E.
        num_experts: E.
        ep: (p0, G), this rank's place in the EP group and the group's size.

    Returns:
        int64 `[rows, L, K]`.

    Example:
        >>> rank_first_ids(2, 1, 2, num_experts=8, ep=(0, 4)).tolist()
        [[[0, 2]], [[4, 6]]]
    """
    p0, num_ranks = ep
    in_turn = ExpertLayout.identity(num_experts, num_ranks).home_slot_expert_GH.T.ravel()
    in_turn = in_turn[in_turn >= 0].astype(np.int64)
    row = (p0 + np.arange(num_rows, dtype=np.int64))[:, None, None] * top_k
    layer = np.arange(num_layers, dtype=np.int64)[:, None] * (num_ranks * top_k)
    choice = row + layer + np.arange(top_k)
    ids: npt.NDArray[np.int64] = in_turn[choice % num_experts]
    return ids


def _padded_sample(begin: int, end: int, has_last_row: bool, multiple: int) -> Int64Array:
    """Rows of one sample with its last token, padded."""
    rows = np.arange(begin, end, dtype=np.int64)
    if not has_last_row:
        rows = np.append(rows, LAST_TOKEN)
    return _pad(rows, multiple)


def _pad(rows: Int64Array, multiple: int) -> Int64Array:
    return np.pad(rows, (0, -len(rows) % multiple), constant_values=PADDING)


def _join(parts: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _zigzag(rows: Int64Array, sample: int, cp_rank: int, cp_size: int) -> Int64Array:
    """Chunks `cp_rank` and `2 * cp_size - 1 - cp_rank` of one sample."""
    if cp_size == 1:
        return rows
    if len(rows) % (2 * cp_size):
        raise TraceError(
            f"layout: sample {sample}: need a length divisible by 2 * cp = {2 * cp_size} for "
            f"zigzag, got {len(rows)} tokens; set sequence_multiple to what the host pads to",
            code="layout",
            sample=sample,
        )
    chunks = rows.reshape(2 * cp_size, -1)
    return np.concatenate([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _piece(rows: Int64Array, name: str, rank: int, size: int) -> Int64Array:
    """Piece `rank` of `size` equal ones."""
    if len(rows) % size:
        raise TraceError(
            f"layout: need a number of rows divisible by {name} = {size}, got {len(rows)}; "
            "set total_multiple to what the host pads to",
            code="layout",
        )
    piece: Int64Array = rows.reshape(size, -1)[rank]
    return piece
