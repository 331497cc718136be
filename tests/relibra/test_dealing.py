"""Dealing sequences to micro-batches and ranks."""

import importlib.util

import numpy as np
import pytest

from relibra.dealing import deal_loads, deal_rows
from relibra.formats.trace_file import open_trace
from relibra.trace import RoutingTrace
from relibra_kernels.errors import PlanError, TraceError


def make_trace(lengths, valid=None):
    rows = int(sum(lengths))
    ids = np.arange(rows)[:, None, None] % 8 + np.zeros((1, 2, 1), int)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=int)])
    return RoutingTrace(ids, valid, starts, moe_layers=(0, 1), num_experts=8)


def sizes(dealt):
    return [[rows.num_rows for rows in ranks] for ranks in dealt]


@pytest.fixture(scope="module")
def trace_loads(shared_dir):
    path = shared_dir / "tools" / "trace_loads.py"
    spec = importlib.util.spec_from_file_location("trace_loads", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ep", "sequences"), [(1, 8), (4, 8), (8, 8), (16, 8), (32, 8), (16, 16), (32, 32), (3, 1)]
)
def test_full_micro_batches_are_dealt_as_by_the_shared_tool(shared_dir, trace_loads, ep, sequences):
    path = shared_dir / "data/routing/gptoss20b_routing.npz"
    loads = deal_loads(open_trace(path, 32), ep, sequences)
    expected = trace_loads.cut(
        trace_loads.load_trace(path), ep=ep, sequences_per_micro_batch=sequences
    )
    full = len(expected.rows)
    assert np.array_equal(loads.rows_MLGE[:full], expected.rows)
    # 88 sequences: the tool drops a short last micro-batch, we keep it
    assert loads.num_micro_batches == -(-88 // sequences)
    assert loads.totals_MLE.sum() == 44961 * 24 * 4


def test_more_ranks_than_sequences_cut_sequences():
    dealt = deal_rows(make_trace([5, 4, 3]), 4, sequences_per_micro_batch=2)
    assert sizes(dealt) == [[3, 2, 2, 2], [2, 1, 0, 0]]
    assert dealt[0][2].source_row.tolist() == [5, 6]
    assert dealt[1][1].layer_ids(1).ravel().tolist() == [11 % 8]


def test_fewer_ranks_than_sequences_join_sequences():
    dealt = deal_rows(make_trace([5, 4, 3, 2, 1]), 2, sequences_per_micro_batch=4)
    assert sizes(dealt) == [[9, 5], [1, 0]]


def test_ids_are_views():
    trace = make_trace([5, 4])
    dealt = deal_rows(trace, 2, 2)
    assert all(np.shares_memory(rows.ids, trace.ids) for rows in dealt[0])


def test_unknown_rows_are_counted_apart():
    loads = deal_loads(make_trace([4, 4], np.arange(8) % 4 != 0), 2, 2)
    assert loads.totals_MLE.sum(-1).tolist() == [[6, 6]]
    assert loads.num_unknown_ML.tolist() == [[2, 2]]


def test_samples_without_rows():
    loads = deal_loads(make_trace([0, 3, 0, 0]), 2, 2)
    assert loads.rows_MLGE.sum(-1).tolist() == [[[0, 3]] * 2, [[0, 0]] * 2]


def test_counts_of_all_ranks_have_a_limit():
    ids = np.zeros((2, 4096, 1), np.uint8)
    trace = RoutingTrace(ids, cu_seqlens=[0, 2], moe_layers=range(4096), num_experts=1 << 16)
    with pytest.raises(PlanError, match=r"counts: need at most .* \[1, 4096, 32, 65536\]"):
        deal_loads(trace, 32, 1)


def test_bad_numbers():
    with pytest.raises(ValueError, match="need a multiple or a divisor of 6 ranks, got 4"):
        deal_rows(make_trace([3]), 6, 4)
    with pytest.raises(ValueError, match="num_ranks: need 1 to 1024, got 0"):
        deal_rows(make_trace([3]), 0, 4)
    with pytest.raises(ValueError, match="num_ranks: need 1 to 1024, got 1000000000000"):
        deal_rows(make_trace([3]), 10**12, 10**12)
    with pytest.raises(ValueError, match="sequences_per_micro_batch: need 1 to 2147483648, got"):
        deal_rows(make_trace([3]), 2, 10**30)
    with pytest.raises(TraceError, match="need at least one sequence"):
        deal_rows(make_trace([]), 2, 2)
