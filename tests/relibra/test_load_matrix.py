"""Counting rows, joining the counts of ranks, and balance metrics."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra import load_matrix
from relibra.load_matrix import LoadMatrix, balance_metrics
from relibra.trace import DispatchRows, RoutingTrace
from relibra_kernels.errors import PlanError


def random_rows(rng, num_rows, num_layers, top_k, num_experts, dtype=np.int16):
    ids = rng.random((num_rows, num_layers, num_experts)).argsort(axis=-1)[..., :top_k]
    return DispatchRows(ids.astype(dtype), rng.integers(0, 3, num_rows), num_experts=num_experts)


def naive_counts(rows, kinds):
    counts = np.zeros((rows.num_layers, rows.num_experts), int)
    for row in range(rows.num_rows):
        if rows.kind[row] in kinds:
            for layer in range(rows.num_layers):
                for expert in rows.ids[row, layer]:
                    counts[layer, expert] += 1
    return counts


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=3))
def test_from_rows_equals_a_loop(chunk, seed, sizes):
    rng = np.random.default_rng(seed)
    num_layers, num_experts = rng.integers(1, 4), rng.integers(1, 9)
    top_k = rng.integers(1, num_experts + 1)
    rows = [random_rows(rng, size, num_layers, top_k, num_experts) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_matrix, "_CHUNK_ELEMENTS", chunk)
        loads = LoadMatrix.from_rows(rows)
    assert loads.rows_MLGE.shape == (len(sizes), num_layers, 1, num_experts)
    assert not loads.is_gathered
    for m, each in enumerate(rows):
        padding = naive_counts(each, ())
        if loads.padding_MLGE is not None:
            padding = loads.padding_MLGE[m, :, 0]
        assert np.array_equal(loads.rows_MLGE[m, :, 0], naive_counts(each, (0, 2)))
        assert np.array_equal(
            padding + np.zeros_like(naive_counts(each, ())), naive_counts(each, (2,))
        )
        assert loads.num_unknown_ML[m].tolist() == [(each.kind == 1).sum()] * num_layers
    assert np.array_equal(loads.routed_totals_MLE, [naive_counts(each, (0,)) for each in rows])


def test_replay_14_unknown_rows_are_slack_and_not_rows():
    """Seven rows of a cached prefix and the last token follow the live router."""
    ids = np.arange(11 * 5 * 4).reshape(11, 5, 4) % 16
    valid = np.arange(11) >= 7
    trace = RoutingTrace(ids.astype(np.int8), valid, moe_layers=range(1, 6), num_experts=16)
    filled = LoadMatrix.from_rows([trace.slice()])
    live = LoadMatrix.from_rows([trace.slice(last_row="live")])
    assert filled.routed_totals_MLE.sum(-1).tolist() == [[16] * 5]
    assert filled.num_unknown_ML.tolist() == [[7] * 5]
    assert live.totals_MLE.sum(-1).tolist() == [[16] * 5]
    assert live.num_unknown_ML.tolist() == [[8] * 5]
    assert filled.slack_ML(4).tolist() == [[28] * 5]
    assert np.array_equal(trace.counts(3), live.totals_MLE[0, 2])


def test_replay_21_metrics_with_and_without_padding_have_two_names():
    routed = np.arange(16).reshape(8, 1, 2) % 8  # every expert twice
    padding = np.broadcast_to([0, 1], (8, 1, 2))
    rows = DispatchRows(np.concatenate([routed, padding]), kind=[0] * 8 + [2] * 8, num_experts=8)
    loads = LoadMatrix.from_rows([rows])
    assert loads.totals_MLE.ravel().tolist() == [10, 10, 2, 2, 2, 2, 2, 2]
    metrics = balance_metrics(loads.rows_MLGE[0, 0, 0], loads.padding_MLGE[0, 0, 0])
    assert metrics["max_vio"] == 1.5
    assert metrics["max_vio_routed"] == 0.0
    assert set(metrics) == {
        f"{name}{end}"
        for name in ("imbalance", "max_vio", "min_vio", "balancedness")
        for end in ("", "_routed")
    }


def test_comm_09_the_four_metrics():
    assert balance_metrics([10, 20, 30, 40]) == {
        "imbalance": 1.6,
        "max_vio": 0.6,
        "min_vio": -0.6,
        "balancedness": 0.625,
    }


def test_metrics_without_rows():
    assert balance_metrics([0, 0])["imbalance"] == 1.0


@pytest.mark.parametrize(
    ("rows", "padding", "message"),
    [
        ([], None, "rows_G: need at least one place"),
        ([1.0], None, "rows_G: need integers"),
        ([1, -1], None, "rows_G: need values in 0"),
        ([1, 2], [1], r"padding_G: need shape \[2\]"),
        ([1, 2], [1, 3], "padding_G: need at most rows_G"),
    ],
)
def test_metrics_of_no_rows_are_refused(rows, padding, message):
    with pytest.raises(PlanError, match=message):
        balance_metrics(rows, padding)


def counted(rank, num_micro_batches=1, num_layers=1, num_experts=16, **fields):
    """plan-04: rank r sends 100 (r + 1) rows to each of experts 4r .. 4r + 3."""
    rows = np.zeros((num_micro_batches, num_layers, 1, num_experts), int)
    rows[..., 4 * rank : 4 * rank + 4] = 100 * (rank + 1)
    return LoadMatrix(rows, is_gathered=False, **fields)


def test_plan_04_gathered_counts():
    loads = LoadMatrix.stack([counted(rank, source_rank=rank) for rank in range(4)])
    assert loads.is_gathered
    assert loads.rows_MLGE.shape == (1, 1, 4, 16)
    by_rank = loads.totals_MLE.reshape(4, 4).sum(-1)
    assert by_rank.tolist() == [400, 800, 1200, 1600]
    assert balance_metrics(by_rank)["imbalance"] == 1.6
    assert np.array_equal(loads.rows_MLGE[0, 0].sum(1), by_rank)


def test_stack_adds_unknown_rows_and_fills_in_padding():
    padding = np.zeros((1, 1, 1, 16), int)
    padding[..., 4] = 7
    second = counted(1, padding_MLGE=padding, num_unknown_ML=[[3]])
    loads = LoadMatrix.stack([counted(0), second])
    assert loads.num_unknown_ML.tolist() == [[3]]
    assert loads.padding_MLGE.sum(axis=(0, 1, 3)).tolist() == [0, 7]
    assert loads.routed_totals_MLE[0, 0, 4] == 193


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (counted(2, num_micro_batches=2), "rank 2: need 1 micro-batches like rank 0, got 2"),
        (counted(2, num_layers=3), "rank 2: need 1 MoE layers like rank 0, got 3"),
        (counted(2, num_experts=32), "rank 2: need 16 experts like rank 0, got 32"),
        (
            counted(2, optimizer_step_M=[1]),
            r"rank 2: need \[0\] optimizer steps like rank 0, got \[1\]",
        ),
        (
            counted(2, source_rank=3),
            r"matrices\[2\]: need the counts of rank 2, got those of rank 3",
        ),
        (LoadMatrix(np.zeros((1, 1, 4, 16), int)), r"matrices\[2\]: need .* 4 ranks"),
    ],
)
def test_stack_names_the_rank_that_differs(third, message):
    with pytest.raises(PlanError, match=message):
        LoadMatrix.stack([counted(0), counted(1), third])


ONE = [[[[1, 2]]]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows_MLGE": [[[[1.0, 2.0]]]]}, "rows_MLGE: need integers, got float64 array"),
        (
            {"rows_MLGE": [[[[1, float("nan")]]]]},
            "rows_MLGE: need integers, got float64 array [1, 1, 1, 2] with nan at [0, 0, 0, 1]",
        ),
        (
            {"rows_MLGE": [[[[1, -2]]]]},
            "rows_MLGE: need values in 0..2147483647, got -2",
        ),
        (
            {"rows_MLGE": [[[[1, 2**31]]]]},
            "rows_MLGE: need values in 0..2147483647, got 2147483648",
        ),
        ({"rows_MLGE": [[[True, False]]]}, "rows_MLGE: need integers, got bool array"),
        ({"rows_MLGE": [[[1, 2]]]}, "rows_MLGE: need shape [any, any, any, any]"),
        ({"rows_MLGE": np.zeros((1, 0, 1, 2), int)}, "rows_MLGE: need at least one layer"),
        ({"rows_MLGE": np.zeros((0, 1, 1, 2), int)}, "rows_MLGE: need at least one micro-batch"),
        ({"rows_MLGE": np.zeros((1, 4097, 1, 1), int)}, "rows_MLGE: need at most 4096 layers"),
        ({"rows_MLGE": np.zeros((1, 1, 1, 65537), int)}, "rows_MLGE: need at most 65536 experts"),
        ({"optimizer_step_M": [0, 1]}, "optimizer_step_M: need shape [1]"),
        ({"optimizer_step_M": [0.5]}, "optimizer_step_M: need integers"),
        (
            {"padding_MLGE": [[[[0, 3]]]]},
            "padding_MLGE: need at most rows_MLGE, got 3 of 2",
        ),
        ({"padding_MLGE": [[[[0]]]]}, "padding_MLGE: need shape [1, 1, 1, 2]"),
        ({"num_unknown_ML": [[-1]]}, "num_unknown_ML: need values in 0"),
        ({"source_rank": -1}, "source_rank: need at least 0"),
        (
            {"rows_MLGE": [[[[1], [2]]]], "is_gathered": False},
            "is_gathered: need True for counts of 2 source ranks",
        ),
    ],
)
def test_bad_loads_are_refused_by_name(fields, message):
    with pytest.raises(PlanError) as raised:
        LoadMatrix(**{"rows_MLGE": ONE, **fields})
    assert str(raised.value).startswith(message)


def test_optimizer_steps_do_not_decrease():
    rows = np.zeros((3, 1, 1, 2), int)
    with pytest.raises(PlanError, match="optimizer_step_M: .* got 1 then 0 at micro-batch 2"):
        LoadMatrix(rows, [0, 1, 0])
    assert LoadMatrix(rows, [0, 1, 1]).optimizer_step_M.tolist() == [0, 1, 1]


def test_sums_are_wide():
    most = 2**31 - 1
    loads = LoadMatrix(np.full((1, 1, 3, 2), most, np.uint32))
    assert loads.rows_MLGE.dtype == np.int32
    assert loads.totals_MLE.tolist() == [[[3 * most, 3 * most]]]
    assert balance_metrics(loads.totals_MLE[0, 0])["imbalance"] == 1.0


def test_loads_are_read_only_and_equal_by_value():
    rows = np.array(ONE, np.int32)
    loads = LoadMatrix(rows)
    assert np.shares_memory(loads.rows_MLGE, rows)
    with pytest.raises(ValueError, match="read-only"):
        loads.rows_MLGE[:] = 0
    assert loads == LoadMatrix(torch.tensor(ONE), source_rank=3)
    assert loads != LoadMatrix([[[[1, 3]]]])
    assert loads != LoadMatrix(ONE, padding_MLGE=[[[[0, 1]]]])
    assert loads != LoadMatrix(ONE, num_unknown_ML=[[1]])


def test_counts_that_would_not_fit_are_refused_before_they_are_taken():
    row = DispatchRows(np.zeros((1, 4096, 1), np.uint8), num_experts=1 << 16)
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"counts: need at most 17179869184 bytes, got \[M, L, G"):
        LoadMatrix.from_rows([row] * 17)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_micro_batches_must_fit_together():
    rng = np.random.default_rng(0)
    rows = [random_rows(rng, 2, 1, 2, 8), random_rows(rng, 2, 1, 3, 8)]
    with pytest.raises(PlanError, match=r"rows\[1\]: need .* \(1, 2, 8\) like rows\[0\], got"):
        LoadMatrix.from_rows(rows)
    with pytest.raises(PlanError, match="rows: need at least one micro-batch"):
        LoadMatrix.from_rows([])


def test_an_empty_micro_batch_counts_nothing():
    empty = DispatchRows(np.zeros((0, 2, 3), np.uint8), num_experts=4)
    assert LoadMatrix.from_rows([empty]).totals_MLE.tolist() == [[[0] * 4] * 2]
