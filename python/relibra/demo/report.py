"""What a run leaves in its folder: the recorded trace, a JSON report, a picture.

Letters: G ranks, M micro-batches, s samples of a rank in a micro-batch, r rows of a sample, L MoE
layers, K choices a token.
"""

from __future__ import annotations

import json
import math
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relibra.trace import RoutingTrace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from relibra.demo.settings import DemoSettings

TRACE_FILE, REPORT_FILE, PICTURE_FILE = "routing.safetensors", "report.json", "demo.png"


def build_trace(
    ids_by_rank: Sequence[Sequence[npt.NDArray[np.uint8]]], settings: DemoSettings
) -> RoutingTrace:
    """Join what all ranks recorded, in the order step, micro-batch, rank, sample.

    ``relibra plan`` cuts this order into the micro-batches of the run again, with
    ``--micro-batch-sequences`` = samples of all ranks in a micro-batch.

    Args:
        ids_by_rank: ``[rank][step]`` -> uint8 ``[B, r, L, K]``.
        settings: Sizes.

    Returns:
        A trace of all samples of all steps.
    """
    steps_SGBrLK = np.stack([np.stack(steps) for steps in ids_by_rank], axis=1)
    num_steps, num_ranks, _, num_rows, num_layers, top_k = steps_SGBrLK.shape
    cut = steps_SGBrLK.reshape(
        num_steps, num_ranks, settings.num_micro_batches, -1, num_rows, num_layers, top_k
    )
    ids = np.ascontiguousarray(cut.swapaxes(1, 2)).reshape(-1, num_layers, top_k)
    return RoutingTrace(
        ids,
        cu_seqlens=np.arange(0, len(ids) + 1, num_rows),
        moe_layers=tuple(range(num_layers)),
        num_experts=settings.num_experts,
    )


def environment() -> dict[str, Any]:
    """Versions that the numbers were made with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def to_json(report: Mapping[str, Any]) -> str:
    """Text of a report; numbers that are not finite become null, which JSON can hold.

    Example:
        >>> to_json({"value": float("nan"), "steps": (1, 2)}).split()
        ['{', '"value":', 'null,', '"steps":', '[', '1,', '2', ']', '}']
    """
    return json.dumps(_plain(report), indent=1, allow_nan=False)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write the JSON report."""
    (folder / REPORT_FILE).write_text(to_json(report) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    return value
