"""Rows and loads of a composition."""

import numpy as np
import pytest

import relibra
from relibra import Composition, DispatchRows, PlanError, RoutingTrace, Samples, composed_rows
from relibra.composed import composed_loads


@pytest.fixture
def trace():
    rng = np.random.default_rng(0)
    lengths = [3, 1, 4, 2, 5]
    ids = np.argsort(rng.random((sum(lengths), 2, 8)), axis=-1)[..., :2]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return RoutingTrace(ids, None, starts, moe_layers=[1, 2], num_experts=8, has_last_row=True)


COMPOSITION = Composition([1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0], num_cells=2)


def test_every_row_is_dispatched_once(trace):
    seen = []
    for cell in range(2):
        for m, rows in enumerate(composed_rows(COMPOSITION, cell, trace)):
            seen += rows.source_row.tolist()
            assert np.array_equal(rows.ids, trace.ids[rows.source_row])
            samples = np.searchsorted(trace.cu_seqlens, rows.source_row, side="right") - 1
            assert set(samples.tolist()) == set(COMPOSITION.samples_of(m, cell))
    assert sorted(seen) == list(range(trace.num_rows))


def test_slicing_arguments_reach_the_trace(trace):
    """Two context-parallel ranks of a cell hold the rows of the cell, padded."""
    whole = composed_rows(COMPOSITION, 0, trace)
    halves = [
        composed_rows(COMPOSITION, 0, trace, cp=(r, 2), sequence_multiple=4, ep=(r, 4))
        for r in range(2)
    ]
    for m, rows in enumerate(whole):
        parts = np.concatenate([half[m].source_row for half in halves])
        assert sorted(parts[parts >= 0].tolist()) == sorted(rows.source_row.tolist())
        assert len(parts) % 4 == 0
        kinds = np.concatenate([half[m].kind for half in halves])
        assert ((parts < 0) == (kinds == DispatchRows.KIND_PADDING)).all()


def test_rows_of_samples_are_joined(trace):
    single = [trace.select([j]).slice() for j in range(trace.num_samples)]
    for cell in range(2):
        one = composed_rows(COMPOSITION, cell, trace)
        other = composed_rows(COMPOSITION, cell, single)
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a.ids, b.ids)
            assert np.array_equal(a.kind, b.kind)


def test_loads_equal_the_counted_rows(trace):
    samples = Samples.from_trace(trace)
    loads = relibra.composed_loads(COMPOSITION, samples)
    counted = relibra.LoadMatrix.stack(
        [relibra.LoadMatrix.from_rows(composed_rows(COMPOSITION, cell, trace)) for cell in (0, 1)]
    )
    assert np.array_equal(loads.rows_MLGE, counted.rows_MLGE)
    spread = relibra.composed_loads(COMPOSITION, samples, ranks_per_cell=3)
    assert spread.num_ranks == 6
    by_cell = spread.rows_MLGE.reshape(2, 2, 2, 3, 8)
    assert np.array_equal(by_cell.sum(3), loads.rows_MLGE)
    assert (by_cell.max(3) - by_cell.min(3)).max() <= 1


def test_nodes_of_experts():
    layouts = [relibra.ExpertLayout([[0, 3], [1, 2]]), relibra.ExpertLayout([[2, 1], [0, 3]])]
    nodes = relibra.expert_nodes(layouts, relibra.Topology(2, 1))
    assert nodes.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize("cell", [-1, 2])
def test_refuses_cells_out_of_range(trace, cell):
    with pytest.raises(PlanError, match=f"cell: need 0..1, got {cell}"):
        composed_rows(COMPOSITION, cell, trace)


def test_counts_and_steps_are_refused_where_int32_would_wrap():
    full = Samples([[[2**31 - 1]]] * 3, [1, 1, 1])
    with pytest.raises(ValueError, match="rows_MLGE: need values in 0..2147483647, got 6442450941"):
        composed_loads(Composition([0, 0, 0], [0, 0, 0], [0], 1), full)
    late = Samples([[[1]]], [1], optimizer_step_J=[1 << 40])
    with pytest.raises(ValueError, match="optimizer_step_M: need values in"):
        composed_loads(Composition([0], [0], [1 << 40], 1), late)


@pytest.mark.parametrize("ranks", [0, 10**9, 1 << 20])
def test_ranks_of_a_cell_that_no_memory_holds(ranks):
    samples = Samples(np.ones((1, 64, 512), np.int32), [1])
    with pytest.raises(ValueError, match="ranks_per_cell: need 1 to|counts: need at most"):
        composed_loads(Composition([0], [0], [0], 1), samples, ranks_per_cell=ranks)


def test_refuses_other_samples(trace):
    with pytest.raises(PlanError, match="source: need 5 samples, got 2"):
        composed_rows(COMPOSITION, 0, trace.select([0, 1]))
    with pytest.raises(PlanError, match="composition: need one of these samples"):
        relibra.composed_loads(COMPOSITION, Samples([[[1]]], [1]))
    with pytest.raises(TypeError, match="slicing"):
        composed_rows(COMPOSITION, 0, [trace.slice()] * 5, cp=(0, 1))
