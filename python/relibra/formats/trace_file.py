"""Trace files that bring their own model, for tools that are given nothing but a path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.formats import relibra_file
from relibra.formats.carrier import Batch, LoadRules, TraceModel
from relibra.formats.loading import trace_from_batch
from relibra.limits import MAX_EXPERTS, MAX_LAYERS
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from relibra.trace import RoutingTrace


def open_trace(path: str | Path, num_experts: int | None = None) -> RoutingTrace:
    """Reads and checks a trace file; what an `.npz` file does not say is taken from its arrays.

    Args:
        path: a `.safetensors` trace file, or an `.npz` file with `routed_experts [rows, L, K]` and
            `cu_seqlens`, whose layers are taken as MoE layers 0..L-1.
        num_experts: E; None is what the file says, or the largest id + 1 (then a note says so).

    Returns:
        The trace.

    Raises:
        OSError: no such file.
        TraceError: a damaged or foreign file, or ids that the checks refuse.
    """
    path = Path(path)
    batch = relibra_file.read(path) if path.suffix in (".safetensors", ".npz") else None
    if not isinstance(batch, Batch):
        raise TraceError(
            f"field_missing: {path.name}: need a .safetensors or .npz trace file, got "
            f"'{path.suffix}'",
            code="field_missing",
        )
    rows, moe_layers = batch.rows, batch.moe_layers
    if rows.ndim != 3 or 0 in rows.shape or rows.shape[1] > MAX_LAYERS:
        raise TraceError(
            f"layer_axis: {path.name}: need routed_experts [rows, L, K], got {list(rows.shape)}",
            code="layer_axis",
        )
    if moe_layers is None:
        moe_layers = tuple(range(rows.shape[1]))
    if num_experts is None and batch.num_experts is None:
        num_experts = max(int(rows.max()) + 1, rows.shape[2])
        if num_experts > MAX_EXPERTS:
            raise TraceError(
                f"id_range: {path.name}: need ids and K that fit {MAX_EXPERTS} experts, got id "
                f"{int(rows.max())} and K {rows.shape[2]}",
                code="id_range",
            )
        note = f"num_experts = {num_experts} is the largest id + 1 of {path.name}"
        batch = replace(batch, notes=(*batch.notes, note))
    elif num_experts is None:
        num_experts = batch.num_experts
    assert num_experts is not None
    model = TraceModel(moe_layers[-1] + 1, moe_layers, rows.shape[2], num_experts)
    return trace_from_batch(batch, model, LoadRules())
