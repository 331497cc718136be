"""How large the receive buffers of peer dispatch must be in a step, from what every rank knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra_kernels.reference.combine import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from relibra.step import TrainingStep


def row_needs(
    step: TrainingStep, counts: Iterable[tuple[tuple[str, int, int], npt.NDArray[np.integer]]]
) -> dict[str, int]:
    """Bytes of one buffer of each channel that hold every message of a step on every rank.

    Uses that follow the live router send their rows flat, and need none.

    Args:
        step: whose routes and splits are known.
        counts: (pass, micro-batch, place of the layer) and ``[G, G]``, distinct tokens that each
            source sends to each rank, equal on all ranks.

    Returns:
        Channel -> bytes, equal on all ranks.
    """
    needs: dict[str, int] = {}
    attachment, is_exact = step.attachment, step.runtime.combine == "exact"
    for (pass_, micro_batch, index), pairs_GG in counts:
        if step.mode_of(pass_, micro_batch) != "exact":
            continue
        moe = attachment.layers[attachment.moe_layers[index]]
        hidden, size = moe.w2.shape[2 if moe.options.transposed else 1], moe.w2.element_size()
        top_k = step.routes[pass_][micro_batch].top_k
        scores = top_k * accumulation_dtype(moe.w2.dtype).itemsize
        received, returned = int(pairs_GG.sum(0).max()), int(pairs_GG.sum(1).max())
        rows = step.source_of(pass_, micro_batch, index).most_rows if is_exact else returned
        for channel, nbytes in (
            ("x", received * hidden * size),
            ("scores", received * scores),
            ("y", rows * hidden * size),
            ("dy", received * hidden * size),
            ("dx", returned * hidden * size),
            ("dscores", returned * scores),
        ):
            needs[channel] = max(needs.get(channel, 0), nbytes)
    return needs
