"""Dealing the sequences of a recorded trace to micro-batches and source ranks, for simulations.

Letters: M micro-batches, G ranks. A rank is only the source of its rows: dealing does not change
how many rows an expert gets, only which sequences share a micro-batch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.dispatch_rows import DispatchRows
from relibra.limits import MAX_EP_RANKS, check_count_bytes
from relibra.load_matrix import LoadMatrix
from relibra_kernels.checks import check_int
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from relibra.trace import RoutingTrace

# Of a micro-batch: products with ranks stay far below 2^63.
_MOST_SEQUENCES = 1 << 31


def deal_rows(
    trace: RoutingTrace, num_ranks: int, sequences_per_micro_batch: int
) -> list[list[DispatchRows]]:
    """Deals whole sequences, or equal parts of them, to ranks in the order of the trace.

    Micro-batch m has the next `sequences_per_micro_batch` sequences; a short last micro-batch is
    kept, and its last ranks may have no rows. With more ranks than sequences each sequence is cut
    into G / B parts of neighbouring tokens, with fewer a rank has B / G sequences one after the
    other. No row is added for last tokens.

    Args:
        trace: the sequences.
        num_ranks: G.
        sequences_per_micro_batch: B, a multiple or a divisor of G.

    Returns:
        `[M][G]` rows; their ids are views of the trace.

    Raises:
        TypeError, ValueError: numbers that are no positive integers, or neither divides the other.
        TraceError: code `sample_count`, a trace without sequences.

    Example:
        >>> from relibra.trace import RoutingTrace
        >>> ids = np.arange(5).reshape(5, 1, 1)
        >>> trace = RoutingTrace(ids, cu_seqlens=[0, 3, 5], moe_layers=[0], num_experts=5)
        >>> dealt = deal_rows(trace, 2, sequences_per_micro_batch=1)
        >>> [[rows.ids.ravel().tolist() for rows in ranks] for ranks in dealt]
        [[[0, 1], [2]], [[3], [4]]]
    """
    check_int("num_ranks", num_ranks, minimum=1, maximum=MAX_EP_RANKS)
    per = check_int(
        "sequences_per_micro_batch", sequences_per_micro_batch, minimum=1, maximum=_MOST_SEQUENCES
    )
    if num_ranks % per and per % num_ranks:
        raise ValueError(
            f"sequences_per_micro_batch: need a multiple or a divisor of {num_ranks} ranks, "
            f"got {per}"
        )
    if trace.num_samples == 0:
        raise TraceError("sample_count: need at least one sequence, got none", code="sample_count")
    parts, share = max(1, num_ranks // per), max(1, per // num_ranks)
    kind = np.where(trace.valid, DispatchRows.KIND_ROUTED, DispatchRows.KIND_UNKNOWN)
    dealt = []
    for first in range(0, trace.num_samples, per):
        lengths = np.diff(trace.cu_seqlens[first : first + per + 1])[:, None]
        pieces = lengths // parts + (np.arange(parts) < lengths % parts)
        bounds = trace.cu_seqlens[first] + np.concatenate([[0], np.cumsum(pieces)])
        cuts = bounds[np.minimum(np.arange(num_ranks + 1) * share, len(bounds) - 1)].tolist()
        dealt.append(
            [
                DispatchRows(
                    trace.ids[begin:end],
                    kind[begin:end],
                    np.arange(begin, end),
                    num_experts=trace.num_experts,
                    moe_layers=trace.moe_layers,
                )
                for begin, end in zip(cuts[:-1], cuts[1:], strict=True)
            ]
        )
    return dealt


def deal_loads(trace: RoutingTrace, num_ranks: int, sequences_per_micro_batch: int) -> LoadMatrix:
    """Counts of `deal_rows` over all ranks.

    Args:
        trace: the sequences.
        num_ranks: G.
        sequences_per_micro_batch: B, a multiple or a divisor of G.

    Returns:
        The gathered loads `[M, L, G, E]`.

    Raises:
        TypeError, ValueError, TraceError: as `deal_rows`.
    """
    dealt = deal_rows(trace, num_ranks, sequences_per_micro_batch)
    check_count_bytes(len(dealt), trace.num_layers, num_ranks, trace.num_experts)
    by_rank = zip(*dealt, strict=True)
    return LoadMatrix.stack([LoadMatrix.from_rows(rows) for rows in by_rank])
