"""Largest sizes accepted from outside, checked before memory of such a size is taken.

They lie far above every model and cluster, and low enough that a damaged or hostile number ends in
an error that names it, not in a machine without memory.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from relibra_kernels.checks import check_int, describe
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_EXPERTS = 1 << 16  # E of a layer, so that every id fits uint16
MAX_LAYERS = 1 << 12  # decoder layers of a model
MAX_RANKS = 1 << 20  # of a job, and of a topology
MAX_EP_RANKS = 1 << 10  # G of a group that is planned: exact relabelling takes G^3 steps
MAX_TOKENS = 1 << 24  # tokens of a sample
MAX_HOLE_BYTES = 1 << 30  # ids that stand for rows of a sample that were never sent
MAX_WIDTH = 1 << 20  # D, F and other sizes of a model's matrices
MAX_ARRAY_BYTES = 1 << 33  # all arrays that are read from one file
MAX_COUNT_BYTES = 1 << 34  # int32 counts of a batch, over all ranks

# Largest constants of the cost model.
LARGEST = {
    "block_rows": 1 << 20,
    "sequence_tokens": MAX_TOKENS,
    "in_flight": MAX_LAYERS,
    "data_parallel": MAX_RANKS,
}
# Modelled seconds far beyond every machine, so that sums of picoseconds stay inside int64.
LONGEST_S = {
    "row_s": (1e-3, "the GEMM of a row"),
    "expert_read_s": (10.0, "reading an expert"),
    "push_expert_s": (1e3, "sending an expert"),
    "return_expert_s": (1e3, "sending the gradient of an expert"),
}


def layer_tuple(name: str, layers: Iterable[int]) -> tuple[int, ...]:
    """Layer numbers 0..MAX_LAYERS - 1 of an iterable, which is not read further than needed.

    Args:
        name: argument name for messages.
        layers: the numbers.

    Raises:
        TypeError: not iterable, or no integers.
        ValueError: too many numbers, or one out of range.

    Example:
        >>> layer_tuple("moe_layers", range(1, 4))
        (1, 2, 3)
    """
    try:
        found = tuple(islice(layers, MAX_LAYERS + 1))
    except TypeError:
        raise TypeError(f"{name}: need layer numbers, got {describe(layers)}") from None
    if len(found) > MAX_LAYERS:
        raise ValueError(f"{name}: need at most {MAX_LAYERS} layers, got more")
    return tuple(check_int(name, one, minimum=0, maximum=MAX_LAYERS - 1) for one in found)


def check_count_bytes(micro_batches: int, layers: int, ranks: int, experts: int) -> None:
    """Refuses counts `[M, L, G, E]` that need more than `MAX_COUNT_BYTES` as int32.

    Args:
        micro_batches: M.
        layers: L.
        ranks: G.
        experts: E.

    Raises:
        PlanError: too many.

    Example:
        >>> check_count_bytes(64, 94, 256, 128)
    """
    if 4 * micro_batches * layers * ranks * experts > MAX_COUNT_BYTES:
        sizes = [micro_batches, layers, ranks, experts]
        raise PlanError(f"counts: need at most {MAX_COUNT_BYTES} bytes, got [M, L, G, E] = {sizes}")
