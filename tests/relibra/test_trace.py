"""RoutingTrace and DispatchRows: samples, layers, memory and refusals."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from relibra.trace import DispatchRows, RoutingTrace
from relibra_kernels.errors import TraceError


def make_trace(lengths, num_layers=2, top_k=3, num_experts=16, dtype=np.uint8, **fields):
    """Ids `(2s + l + k) % E` for sample s, layer index l, column k."""
    ids = [
        np.broadcast_to(
            2 * s + np.arange(num_layers)[:, None] + np.arange(top_k), (n, num_layers, top_k)
        )
        for s, n in enumerate(lengths)
    ]
    ids = (np.concatenate(ids) % num_experts).astype(dtype)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    fields = {"moe_layers": range(1, num_layers + 1), "num_experts": num_experts, **fields}
    return RoutingTrace(ids, cu_seqlens=starts, **fields)


def test_replay_08_rows_travel_with_their_samples():
    trace = make_trace([tokens - 1 for tokens in (5, 9, 4, 7, 6, 8)])
    first, second = trace.select([3, 0, 5]), trace.select([1, 4, 2])
    assert first.cu_seqlens.tolist() == [0, 6, 10, 17]
    assert second.cu_seqlens.tolist() == [0, 8, 13, 16]
    assert first.layer(1)[first.cu_seqlens[:-1], 0].tolist() == [6, 0, 10]
    assert second.layer(1)[second.cu_seqlens[:-1], 0].tolist() == [2, 8, 4]


def test_replay_13_read_only_memory_is_used_as_it_is():
    ids = (np.arange(11 * 5 * 4).reshape(11, 5, 4) % 16).astype(np.uint8)
    ids.flags.writeable = False
    before = ids.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = RoutingTrace(ids, moe_layers=range(5), num_experts=16)
        rows = trace.slice(sequence_multiple=8, ep=(0, 4))
        trace.counts(3)
        rows.layer_ids(0)[:] = 0
        trace.layer(0)[:] = 0
    assert np.shares_memory(trace.ids, ids)
    assert np.array_equal(ids, before)
    assert np.array_equal(rows.ids[:11], before)


def test_ids_cannot_be_written_through_a_trace():
    trace = make_trace([3])
    with pytest.raises(ValueError, match="read-only"):
        trace.ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.num_experts = 4


@pytest.mark.parametrize(
    ("samples", "layers"), [([1, 2], None), (None, [1, 2]), ([0], [2]), (None, [1, 3]), ([], None)]
)
def test_select_of_runs_is_a_view(samples, layers):
    trace = make_trace([5, 9, 4], num_layers=3)
    part = trace.select(samples, layers=layers)
    chosen = range(3) if samples is None else samples
    rows = [trace.ids[trace.cu_seqlens[s] : trace.cu_seqlens[s + 1]] for s in chosen]
    expected = np.concatenate(rows) if rows else trace.ids[:0]
    places = [trace.moe_layers.index(layer) for layer in layers or trace.moe_layers]
    assert np.array_equal(part.ids, expected[:, places])
    assert part.moe_layers == tuple(layers or trace.moe_layers)
    assert part.num_rows == 0 or np.shares_memory(part.ids, trace.ids)


def test_unknown_rows_are_not_counted_and_have_no_ids():
    trace = RoutingTrace(
        np.array([[[0, 1]], [[2, 3]]], np.uint8),
        np.array([True, False]),
        moe_layers=[4],
        num_experts=4,
    )
    assert trace.counts(4).tolist() == [1, 1, 0, 0]
    assert trace.layer(4).tolist() == [[0, 1], [-1, -1]]
    rows = trace.slice(last_row="live")
    assert rows.kind.tolist() == [0, 1, 1]
    assert rows.source_row.tolist() == [0, 1, -1]
    assert rows.layer_ids(0).tolist() == [[0, 1], [-1, -1], [-1, -1]]


def test_concat_keeps_samples_and_widens_to_a_common_dtype():
    first, second = make_trace([2, 1]), make_trace([3], dtype=np.int16)
    both = RoutingTrace.concat([first, second])
    assert both.ids.dtype == np.int16
    assert both.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert np.array_equal(both.select([2]).ids, second.ids)


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (make_trace([2], num_layers=3), "layer_axis"),
        (make_trace([2], top_k=2), "top_k"),
        (make_trace([2], num_experts=32), "id_range"),
        (make_trace([2], has_last_row=True), "short_rows"),
    ],
)
def test_concat_refuses_another_model(other, code):
    with pytest.raises(TraceError, match=r"traces\[1\]: need") as raised:
        RoutingTrace.concat([make_trace([2]), other])
    assert raised.value.code == code


IDS = np.zeros((3, 1, 1), np.uint8)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"ids": np.zeros((3, 1, 1))}, TypeError, "ids: need integers, got float64 array"),
        ({"ids": np.zeros((3, 1), int)}, TraceError, "ids: need [rows, L, K], got int64 array"),
        (
            {"ids": np.full((3, 1, 1), 4)},
            TraceError,
            "ids: need ids in 0..3, got 4 at layer 7",
        ),
        ({"ids": np.full((3, 1, 1), -1)}, TraceError, "ids: need ids in 0..3, got -1 at layer 7"),
        ({"moe_layers": [1, 2]}, TraceError, "moe_layers: need 1 rising layer numbers"),
        ({"valid": np.ones(2, bool)}, TraceError, "valid: need a bool array [3], got bool array"),
        ({"valid": np.ones(3)}, TraceError, "valid: need a bool array [3], got float64 array"),
        ({"cu_seqlens": [0, 2]}, TraceError, "cu_seqlens: need numbers from 0 up to 3 rows"),
        ({"cu_seqlens": [0, 2, 1, 3]}, TraceError, "cu_seqlens: need numbers that do not decrease"),
        ({"num_experts": 0}, ValueError, "num_experts: need 1 to 65536, got 0"),
        ({"num_experts": 2**34}, ValueError, "num_experts: need 1 to 65536, got 17179869184"),
        ({"moe_layers": [4096]}, ValueError, "moe_layers: need 0 to 4095, got 4096"),
        ({"moe_layers": 7}, TypeError, "moe_layers: need layer numbers, got int 7"),
        ({"ids": np.zeros((0, 2**40, 1), int)}, TraceError, "ids: need at most 4096 layers, got"),
    ],
)
def test_bad_traces_are_refused(fields, error, message):
    fields = {"ids": IDS, "moe_layers": [7], "num_experts": 4, **fields}
    with pytest.raises(error) as raised:
        RoutingTrace(fields.pop("ids"), **fields)
    assert str(raised.value).startswith(message)


def test_an_id_out_of_range_is_placed_in_its_sample():
    ids = np.zeros((9, 2, 1), np.int32)
    ids[7, 1, 0] = 8
    with pytest.raises(TraceError) as raised:
        RoutingTrace(ids, cu_seqlens=[0, 4, 9], moe_layers=[3, 5], num_experts=8)
    error = raised.value
    assert (error.code, error.sample, error.layer, error.row) == ("id_range", 1, 5, 3)


def test_many_ids_out_of_range_look_like_slot_ids():
    with pytest.raises(TraceError, match="slot ids of a balancer"):
        RoutingTrace(np.arange(20).reshape(20, 1, 1), moe_layers=[0], num_experts=16)


def test_a_layer_that_is_not_there():
    with pytest.raises(TraceError, match=r"layer: need one of \[1, 2\], got 0"):
        make_trace([1]).layer(0)
    with pytest.raises(TraceError, match=r"samples: need numbers in 0..0, got 1"):
        make_trace([1]).select([1])


def test_padding_ids_do_not_wrap_in_a_narrow_dtype():
    trace = RoutingTrace(np.zeros((1, 1, 1), np.int8), moe_layers=[0], num_experts=300)
    rows = trace.slice(sequence_multiple=8, ep=(0, 2))
    assert rows.ids.ravel().tolist() == [0, 0, 150, 1, 151, 2, 152, 3]
    assert make_trace([3]).slice().ids.dtype == np.uint8


def test_dispatch_rows_take_tensors_and_check_kinds():
    ids = torch.tensor([[[0, 1]], [[2, 3]]])
    rows = DispatchRows(ids, kind=[2, 0], num_experts=4)
    assert (rows.num_rows, rows.num_layers, rows.top_k, rows.has_unknown) == (2, 1, 2, False)
    assert rows.source_row.tolist() == [0, 1]
    assert rows.layer_ids(0).dtype == np.int32
    with pytest.raises(TraceError, match=r"kind: need values in 0..2, got 3 at \[1\]"):
        DispatchRows(ids, kind=[0, 3], num_experts=4)
    with pytest.raises(TraceError, match=r"kind: need shape \[2\]"):
        DispatchRows(ids, kind=[0], num_experts=4)
    with pytest.raises(TraceError, match="ids: need ids in 0..2, got 3 at layer 9, row 1, col"):
        DispatchRows(ids, num_experts=3, moe_layers=[9])


def test_dispatch_rows_have_limits():
    with pytest.raises(ValueError, match="num_experts: need 1 to 65536, got 65537"):
        DispatchRows([[[0]]], num_experts=65537)
    with pytest.raises(TraceError, match="ids: need at most 4096 layers"):
        DispatchRows(np.zeros((0, 2**40, 1), int), num_experts=4)
    with pytest.raises(TypeError, match="moe_layers: need layer numbers, got int 3"):
        DispatchRows([[[0]]], num_experts=4, moe_layers=3)


def test_ids_of_unknown_rows_do_not_matter():
    rows = DispatchRows([[[99]], [[0]]], kind=[1, 0], num_experts=4)
    assert rows.layer_ids(0).tolist() == [[-1], [0]]


def test_no_rows_at_all():
    rows = DispatchRows(np.zeros((0, 2, 3), np.int64), num_experts=4)
    assert rows.layer_ids(1).shape == (0, 3)
    trace = RoutingTrace(np.zeros((0, 2, 3), np.int8), moe_layers=[0, 1], num_experts=4)
    assert trace.counts(1).tolist() == [0, 0, 0, 0]
    assert trace.slice().kind.tolist() == [DispatchRows.KIND_PADDING]  # the last token alone
