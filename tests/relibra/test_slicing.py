"""Rows of one rank of a cell, and how padding is filled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.load_matrix import LoadMatrix
from relibra.slicing import LAST_TOKEN, PADDING, SliceSpec, packed_rows, rank_first_ids
from relibra.trace import DispatchRows, RoutingTrace
from relibra_kernels.errors import TraceError

ROUTED, UNKNOWN, PAD = 0, 1, 2


def positions(lengths, **spec):
    """Places in the packed tensor of whole samples, -1 for padding after them."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return packed_rows(starts, has_last_row=True, spec=SliceSpec(**spec)).tolist()


def routed(lengths, num_layers=2, top_k=2, num_experts=16, first_layer=0):
    """Trace of n - 1 rows a sample, id `(3t + l + k) % E`, t the token's number in its sample."""
    token = np.concatenate([np.arange(n - 1) for n in lengths])[:, None, None]
    ids = 3 * token + (first_layer + np.arange(num_layers))[:, None] + np.arange(top_k)
    return RoutingTrace(
        (ids % num_experts).astype(np.uint8),
        cu_seqlens=np.concatenate([[0], np.cumsum(np.array(lengths) - 1)]),
        moe_layers=range(first_layer, first_layer + num_layers),
        num_experts=num_experts,
    )


# Worked example of the format document: samples of 6 and 3 tokens, cp 2, tp 2. Routed rows 0-4, 8
# and 9 of the packed 16; last tokens 5 and 10; padding 6, 7, 11-15. Rows of the trace: 0-4, 5-6.
L, P = LAST_TOKEN, PADDING


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ({"cp": (0, 2), "tp": (0, 2), "sequence_multiple": 8}, [0, 1, P, P]),
        ({"cp": (0, 2), "tp": (1, 2), "sequence_multiple": 8}, [5, 6, P, P]),
        ({"cp": (1, 2), "tp": (0, 2), "sequence_multiple": 8}, [2, 3, 4, L]),
        ({"cp": (1, 2), "tp": (1, 2), "sequence_multiple": 8}, [L, P, P, P]),
        # samples padded to 2 * cp, the local total to tp
        (
            {"cp": (0, 2), "tp": (0, 2), "sequence_multiple": 4, "total_multiple": 2},
            [0, 1, P],
        ),
        (
            {"cp": (0, 2), "tp": (1, 2), "sequence_multiple": 4, "total_multiple": 2},
            [P, 5, P],
        ),
        # joined, then padded to cp * tp
        (
            {"layout": "contiguous", "cp": (0, 2), "tp": (0, 2), "total_multiple": 4},
            [0, 1, 2],
        ),
        (
            {"layout": "contiguous", "cp": (0, 2), "tp": (1, 2), "total_multiple": 4},
            [3, 4, L],
        ),
        ({"layout": "contiguous", "cp": (1, 2), "total_multiple": 4}, [5, 6, L, P, P, P]),
    ],
)
def test_worked_example(spec, rows):
    starts = np.array([0, 5, 7])
    assert packed_rows(starts, has_last_row=False, spec=SliceSpec(**spec)).tolist() == rows


def test_replay_19_rows_of_each_context_parallel_rank():
    assert positions([4, 4], cp=(0, 2)) == [0, 3, 4, 7]
    assert positions([4, 4], cp=(1, 2)) == [1, 2, 5, 6]


def test_replay_17_padding_of_one_sample_does_not_shift_the_next():
    rows = routed([5, 7]).slice(sequence_multiple=8, last_row="live")
    assert rows.num_rows == 16
    assert rows.source_row[8:14].tolist() == [4, 5, 6, 7, 8, 9]
    assert rows.layer_ids(0)[8, 0] == 0


def test_replay_18_padding_inside_the_packed_tensor():
    kind = routed([5, 7]).slice(sequence_multiple=8, last_row="live").kind
    assert np.flatnonzero(kind == PAD).tolist() == [5, 6, 7, 15]
    assert np.flatnonzero(kind == UNKNOWN).tolist() == [4, 14]
    assert (kind == ROUTED).sum() == 10


def test_replay_23_pipeline_stage_under_context_parallelism():
    """The trace holds all layers of the model; one stage takes layers 3-5."""
    packed = np.arange(8)[:, None, None]
    ids = (3 * packed + np.arange(1, 9)[:, None] + np.arange(2)) % 16
    keep = [0, 1, 2, 4, 5, 6]  # the last tokens, 3 and 7, have no row
    trace = RoutingTrace(ids[keep], cu_seqlens=[0, 3, 6], moe_layers=range(1, 9), num_experts=16)
    stage = trace.select(layers=[3, 4, 5])
    first = stage.slice(cp=(0, 2), last_row="live")
    second = stage.slice(cp=(1, 2), last_row="live")
    assert second.layer_ids(1)[:, 0].tolist() == [7, 10, 3, 6]
    assert second.kind.tolist() == [ROUTED] * 4
    assert first.kind.tolist() == [ROUTED, UNKNOWN, ROUTED, UNKNOWN]
    assert first.layer_ids(1)[[0, 2], 0].tolist() == [4, 0]  # rows 0 and 4
    assert first.moe_layers == (3, 4, 5)


def padded_layer(pad_fill):
    """replay-02: one layer, E 128, K 8, G 8, 3,686 even rows and 410 rows of padding."""
    a = 8 * np.arange(3686)[:, None] + np.arange(8)
    ids = (a % 8) * 16 + (a // 8) % 16
    trace = RoutingTrace(
        ids[:, None].astype(np.uint8), moe_layers=[0], num_experts=128, has_last_row=True
    )
    rows = trace.slice(sequence_multiple=4096, pad_fill=pad_fill, ep=(3, 8))
    assert np.array_equal(rows.ids[:3686, 0], ids)
    assert (np.diff(np.sort(rows.ids[3686:, 0], axis=-1)) > 0).all()
    return LoadMatrix.from_rows([rows]).totals_MLE.reshape(8, 16).sum(-1)


def test_replay_02_constant_padding_fills_one_rank():
    assert padded_layer("arange").tolist() == [6966] + [3686] * 7


def test_replay_02_rank_first_padding_is_even():
    assert padded_layer("rank_first").tolist() == [4096] * 8


def test_keep_refuses_rows_that_nobody_has():
    with pytest.raises(TraceError, match="pad_fill: need 'rank_first' or 'arange' for 6 rows"):
        routed([5, 7]).slice(sequence_multiple=8, pad_fill="keep")
    whole = routed([5, 7])
    rows = RoutingTrace(whole.ids, moe_layers=[0, 1], num_experts=16, has_last_row=True)
    assert rows.slice(pad_fill="keep").kind.tolist() == [ROUTED] * 10


def test_live_last_rows_are_not_filled():
    rows = routed([5, 7]).slice(last_row="live", pad_fill="keep")
    assert rows.layer_ids(0)[[4, 11]].tolist() == [[-1, -1], [-1, -1]]


@given(
    num_ranks=st.integers(1, 9),
    experts_per_rank=st.integers(1, 6),
    top_k=st.integers(1, 9),
    num_rows=st.integers(0, 40),
    rank=st.integers(0, 8),
    short=st.integers(0, 5),
)
def test_rank_first_is_even_and_distinct(num_ranks, experts_per_rank, top_k, num_rows, rank, short):
    num_experts = max(1, num_ranks * experts_per_rank - min(short, num_ranks - 1))
    top_k, rank = min(top_k, num_experts), rank % num_ranks
    ids = rank_first_ids(num_rows, 3, top_k, num_experts, (rank, num_ranks))
    assert ids.shape == (num_rows, 3, top_k)
    assert (np.diff(np.sort(ids, axis=-1)) > 0).all()
    for layer in range(3):
        counts = np.bincount(ids[:, layer].ravel(), minlength=num_experts)
        assert counts.max() - counts.min() <= 1
        if num_experts == num_ranks * experts_per_rank:
            ranks = counts.reshape(num_ranks, -1).sum(-1)
            assert ranks.max() - ranks.min() <= 1


def test_rank_first_is_the_documented_formula():
    """`a = (p0 + p) K + c + l G K`, `expert = (a % G) H + (a // G) % H`."""
    num_ranks, per_rank, top_k, p0 = 4, 3, 2, 3
    p, layer, column = np.ogrid[:9, :5, :top_k]
    a = (p0 + p) * top_k + column + layer * num_ranks * top_k
    expert = (a % num_ranks) * per_rank + (a // num_ranks) % per_rank
    ids = rank_first_ids(9, 5, top_k, num_ranks * per_rank, (p0, num_ranks))
    assert np.array_equal(ids, expert)


def test_ranks_do_not_begin_with_the_same_experts():
    first = [rank_first_ids(1, 1, 1, 8, (rank, 4)).item() for rank in range(4)]
    assert first == [0, 2, 4, 6]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    cp=st.integers(1, 4),
    tp=st.integers(1, 3),
    has_last_row=st.booleans(),
)
def test_every_row_is_dispatched_by_exactly_one_rank(lengths, layout, cp, tp, has_last_row):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = tp if layout == "zigzag" else tp * cp
    pieces = [
        packed_rows(
            starts,
            has_last_row=has_last_row,
            spec=SliceSpec(layout, (c, cp), (t, tp), 2 * cp, total),
        )
        for c in range(cp)
        for t in range(tp)
    ]
    assert len({len(piece) for piece in pieces}) == 1
    held = np.concatenate(pieces)
    assert np.array_equal(np.sort(held[held >= 0]), np.arange(sum(lengths)))
    assert (held == LAST_TOKEN).sum() == (0 if has_last_row else len(lengths))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"cp": (0, 2)}, "sample 0: need a length divisible by 2 * cp = 4 for zigzag, got 5"),
        ({"layout": "contiguous", "cp": (0, 2)}, "divisible by cp = 2, got 5"),
        ({"tp": (0, 2)}, "need a number of rows divisible by tp = 2, got 5"),
    ],
)
def test_lengths_that_the_cuts_do_not_divide(spec, message):
    with pytest.raises(TraceError) as raised:
        packed_rows(np.array([0, 5]), has_last_row=True, spec=SliceSpec(**spec))
    assert raised.value.code == "layout"
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": "ring"}, ValueError, "layout: need one of 'zigzag', 'contiguous', got 'ring'"),
        ({"cp": 2}, TypeError, r"cp: need a pair \(rank, size\), got 2"),
        ({"tp": (2, 2)}, ValueError, "tp: need a rank in 0..1 of size 2, got 2"),
        ({"ep": (8, 8)}, ValueError, "ep: need a rank in 0..7 of size 8, got 8"),
        ({"sequence_multiple": 0}, ValueError, "sequence_multiple: need at least 1, got 0"),
        ({"last_row": "drop"}, ValueError, "last_row: need one of 'fill', 'live', got 'drop'"),
        ({"pad_fill": "zero"}, ValueError, "pad_fill: need one of"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        routed([5]).slice(**arguments)


def test_all_ranks_of_a_cell_together_dispatch_every_padding_row_once():
    trace = routed([6, 3])
    parts = [
        trace.slice(cp=(c, 2), tp=(t, 2), sequence_multiple=8, ep=(2 * c + t, 4))
        for c in (0, 1)
        for t in (0, 1)
    ]
    assert [(part.kind == PAD).sum() for part in parts] == [2, 2, 1, 4]  # last tokens included
    assert sum(part.num_rows for part in parts) == 16
    assert all(isinstance(part, DispatchRows) for part in parts)
