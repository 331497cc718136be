"""What follows from a composition: loads to plan with, and the rows that a rank dispatches.

Letters: J samples, M micro-batches of all optimizer steps, C cells, L MoE layers, E experts,
G ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relibra.dispatch_rows import DispatchRows
from relibra.limits import MAX_RANKS, check_count_bytes
from relibra.load_matrix import LoadMatrix
from relibra.trace import RoutingTrace
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relibra.composition import Composition, Int32Array, Samples
    from relibra.layout import ExpertLayout
    from relibra.topology import Topology


def composed_loads(
    composition: Composition, samples: Samples, *, ranks_per_cell: int = 1
) -> LoadMatrix:
    """Loads of a composition, to plan before anything is packed.

    Args:
        composition: made of these samples.
        samples: the samples.
        ranks_per_cell: TP x CP; the rows of a cell are spread evenly over its ranks
            `cell * ranks_per_cell ...`, the remainder over the first.

    Returns:
        Gathered loads `[M, L, G, E]` with G = C * ranks_per_cell.

    Raises:
        PlanError: a composition of other samples, too many ranks, or counts above int32.

    Example:
        >>> from relibra.composition import Composition, Samples
        >>> samples = Samples([[[3, 1]], [[0, 4]]], [2, 2])
        >>> composed_loads(Composition([0, 0], [0, 1], [0], 2), samples).rows_MLGE.tolist()
        [[[[3, 1], [0, 4]]]]
    """
    if composition.ids != samples.ids:
        raise PlanError("composition: need one of these samples")
    ranks = check_int("ranks_per_cell", ranks_per_cell, minimum=1, maximum=MAX_RANKS)
    _, num_layers, num_experts = samples.rows_JLE.shape
    check_count_bytes(
        composition.num_micro_batches, num_layers, composition.num_cells * ranks, num_experts
    )
    cells = np.zeros(
        (composition.num_micro_batches, composition.num_cells, num_layers, num_experts), np.int64
    )
    places = zip(composition.micro_batch_J.tolist(), composition.cell_J.tolist(), strict=True)
    for sample, place in enumerate(places):
        cells[place] += samples.rows_JLE[sample]
    parts = [cells // ranks + (cells % ranks > rank) for rank in range(ranks)]
    rows = np.stack(parts, axis=2).reshape(len(cells), -1, num_layers, num_experts)
    steps: Any = composition.optimizer_step_M
    counts: Any = np.ascontiguousarray(rows.transpose(0, 2, 1, 3))
    return LoadMatrix(counts, steps)  # which refuses what int32 does not hold


def expert_nodes(layouts: Sequence[ExpertLayout], topology: Topology) -> Int32Array:
    """Node of the home rank of each expert: the `projection` of a second composition.

    Compose, plan, compose again from there by nodes, and plan again from the first plan's layouts:
    the second composition looks only at what the layouts do not balance already.

    Args:
        layouts: one a layer, such as `plan.layouts`.
        topology: of the plan. With several pipeline stages, stack the results of all stages.

    Returns:
        int32 `[L, E]`.

    Example:
        >>> from relibra.layout import ExpertLayout
        >>> from relibra.topology import Topology
        >>> expert_nodes([ExpertLayout([[0], [2], [1], [3]])], Topology(2, 2)).tolist()
        [[0, 1, 0, 1]]
    """
    node_G = topology.rank_to_node_G
    return np.stack([node_G[layout.home_rank_E] for layout in layouts]).astype(np.int32)


def composed_rows(
    composition: Composition,
    cell: int,
    source: RoutingTrace | Sequence[DispatchRows],
    **slicing: Any,
) -> list[DispatchRows]:
    """The rows that a rank of a cell dispatches in each micro-batch.

    Args:
        composition: of the samples of `source`, in the same order.
        cell: cell of this rank.
        source: the trace whose samples were composed; or rows for each sample, already as this rank
            holds them, which are joined in order.
        slicing: for a trace, arguments of `RoutingTrace.slice` (context and sequence parallel
            place of this rank, multiples, padding).

    Returns:
        One `DispatchRows` a micro-batch, of all optimizer steps in order; `source_row` counts rows
        of the whole trace, or rows of each sample.

    Raises:
        PlanError: a cell out of range, or another number of samples.
        TraceError: as `RoutingTrace.slice`.

    Example:
        >>> from relibra.composition import Composition
        >>> trace = RoutingTrace([[[0]], [[1]], [[2]]], cu_seqlens=[0, 1, 3], moe_layers=[0],
        ...                      num_experts=4, has_last_row=True)
        >>> composition = Composition([1, 0], [0, 0], [0, 0], num_cells=1)
        >>> [rows.ids.ravel().tolist() for rows in composed_rows(composition, 0, trace)]
        [[1, 2], [0]]
    """
    if not 0 <= check_int("cell", cell) < composition.num_cells:
        raise PlanError(f"cell: need 0..{composition.num_cells - 1}, got {cell}")
    count = source.num_samples if isinstance(source, RoutingTrace) else len(source)
    if count != len(composition.ids):
        raise PlanError(f"source: need {len(composition.ids)} samples, got {count}")
    chosen = [composition.samples_of(m, cell) for m in range(composition.num_micro_batches)]
    if isinstance(source, RoutingTrace):
        return [_sliced(source, samples, slicing) for samples in chosen]
    if slicing:
        raise TypeError(f"slicing: need none for rows of samples, got {sorted(slicing)}")
    return [_joined(source, samples) for samples in chosen]


def _sliced(
    trace: RoutingTrace, samples: tuple[int, ...], slicing: Mapping[str, Any]
) -> DispatchRows:
    rows = trace.select(samples).slice(**slicing)
    starts = trace.cu_seqlens
    order = np.concatenate(
        [np.arange(starts[s], starts[s + 1]) for s in samples] + [np.full(1, -1)]
    )  # the last, -1, stands for rows that the trace does not have
    return DispatchRows(
        rows.ids,
        rows.kind,
        order[rows.source_row],
        num_experts=rows.num_experts,
        moe_layers=rows.moe_layers,
    )


def _joined(source: Sequence[DispatchRows], samples: tuple[int, ...]) -> DispatchRows:
    first = source[0]
    parts = [source[sample] for sample in samples]
    return DispatchRows(
        np.concatenate([first.ids[:0], *(part.ids for part in parts)]),
        np.concatenate([first.kind[:0], *(part.kind for part in parts)]),
        np.concatenate([first.source_row[:0], *(part.source_row for part in parts)]),
        num_experts=first.num_experts,
        moe_layers=first.moe_layers,
    )
