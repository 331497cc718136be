"""Every code of the loader's checks: place, need, found, likely cause."""

import warnings

import numpy as np
import pytest

from relibra.formats import load_routing
from relibra.formats.row_checks import scan_rows
from relibra_kernels.errors import TraceError, TraceWarning

MODEL = {"num_layers": 6, "moe_layers": range(1, 6), "top_k": 4, "num_experts": 16}


def rows(num_rows=12, num_layers=6, dtype=np.int16, seed=0):
    """Distinct ids; layer 0 of six is dense and zero."""
    rng = np.random.default_rng(seed)
    ids = rng.random((num_rows, num_layers, 16)).argsort(axis=-1)[..., :4].astype(dtype)
    if num_layers == 6:
        ids[:, 0] = 0
    return ids


def changed(place, value):
    ids = rows()
    ids[place] = value
    return ids


def everything(payload, **options):
    """Trace or error, and the codes of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = load_routing(payload, **{**MODEL, **options})
        except TraceError as error:
            result = error
    return result, [each.message for each in caught]


@pytest.mark.parametrize(
    ("payload", "options", "code", "place", "words"),
    [
        (rows(dtype=np.int8), {"num_experts": 200}, "dtype_too_narrow", {}, ["199", "127"]),
        (rows(num_layers=4), {}, "layer_axis", {}, ["6 decoder", "5 MoE", "got 4"]),
        (rows(num_layers=7), {}, "layer_axis", {}, ["got 7", "MTP layers?"]),
        (rows()[..., :3], {}, "top_k", {}, ["need 4", "got 3"]),
        (np.concatenate([rows(), rows()[..., :1]], -1), {}, "top_k", {}, ["fused shared-expert"]),
        (
            changed((3, 2, 1), 16),
            {},
            "id_range",
            {"layer": 2, "row": 3},
            ["0..15", "got 16", "layer 2, row 3, column 1"],
        ),
        (changed((3, 2, 1), -2), {}, "id_range", {"layer": 2, "row": 3}, ["got -2"]),
        (rows() * 2, {}, "id_range", {}, ["slot ids of a balancer"]),
        (
            changed((5, 3), [-1, 1, 2, 3]),
            {},
            "partly_negative",
            {"layer": 3, "row": 5},
            ["[-1, 1, 2, 3]"],
        ),
        (changed((5, 3), -1), {}, "partly_negative", {"layer": 3, "row": 5}, ["layer 3"]),
        (
            changed((6, 4), [3, 9, 3, 5]),
            {},
            "duplicate_id",
            {"layer": 4, "row": 6},
            ["3 twice", "allow_duplicates"],
        ),
        (
            changed((slice(None), 4), 0),
            {},
            "zero_layer",
            {"layer": 4},
            ["layer 4", "pipeline stages", "dense layer listed in moe_layers"],
        ),
        (
            rows(),
            {"moe_layers": range(6)},  # replay-01: a dense layer taken for an MoE layer
            "zero_layer",
            {"layer": 0},
            ["layer 0"],
        ),
        (
            changed(slice(2, 5), 0),
            {},
            "unset_rows",
            {"row": 2},
            ["rows 2-4 (3 rows)", "capture buffer", "cached prefix"],
        ),
        (rows(14), {"num_tokens": 12}, "surplus_rows", {}, ["need 11 rows, got 14"]),
        (
            np.concatenate([rows(8), rows(8), rows(8, seed=1)[5:]]),
            {"num_tokens": 12},
            "surplus_rows",
            {},
            ["need 11 rows, got 19", "row 8 repeats row 0", "resumed parts"],  # replay-05
        ),
        (rows(9), {"num_tokens": 12}, "short_rows", {}, ["need 11 rows, got 9"]),
    ],
)
def test_errors(payload, options, code, place, words):
    error, caught = everything(payload, **options)
    assert isinstance(error, TraceError)
    assert error.code == code
    assert code in str(error)
    assert {name: getattr(error, name) for name in place} == place
    assert [word for word in words if word not in str(error)] == []
    assert caught == []


def test_dense_layer_used_is_a_warning():
    trace, caught = everything(changed((3, 0), [1, 2, 3, 4]))
    assert np.array_equal(trace.ids, rows()[:, 1:])
    assert [(each.code, each.layer) for each in caught] == [("dense_layer_used", 0)]
    assert isinstance(caught[0], TraceWarning)


@pytest.mark.parametrize(("length", "warned"), [(3, False), (4, True), (7, True)])
def test_repeated_rows_need_a_run_of_four(length, warned):
    ids = rows()
    ids[2 : 2 + length] = ids[2]
    trace, caught = everything(ids)
    assert trace.valid.all()
    assert [each.code for each in caught] == ["repeated_rows"] * warned
    if warned:
        assert f"rows 2-{1 + length} ({length} rows)" in str(caught[0])


def test_two_runs_are_counted_together():
    ids = rows(20)
    ids[2:6], ids[10:15] = ids[2], ids[10]
    trace, caught = everything(ids, suspect="live")
    assert "rows 2-5 (4 rows) and 5 rows elsewhere" in str(caught[0])
    assert np.flatnonzero(~trace.valid).tolist() == [2, 3, 4, 5, 10, 11, 12, 13, 14]


def test_a_single_layer_may_repeat():
    ids = rows()
    ids[:, 3] = ids[0, 3]
    assert everything(ids)[1] == []


def test_small_models_repeat_without_a_warning():
    ids = np.zeros((8, 1, 2), np.uint8) + np.array([1, 2], np.uint8)
    model = {"num_layers": 1, "moe_layers": [0], "top_k": 2, "num_experts": 4}
    assert everything(ids, **model)[1] == []


def test_runs_end_with_their_sample(tmp_path):
    ids = rows(8, num_layers=5)
    ids[2:6] = ids[2]  # two rows in each sample
    path = tmp_path / "t.npz"
    np.savez(path, routed_experts=ids, cu_seqlens=[0, 4, 8])
    assert everything(path)[1] == []
    np.savez(path, routed_experts=ids, cu_seqlens=[0, 1, 8])
    _, caught = everything(path)
    assert [(each.code, each.sample, each.row) for each in caught] == [("repeated_rows", 1, 1)]


@pytest.mark.parametrize(("length", "refused"), [(31, False), (32, True)])
def test_zero_rows_of_top_1_need_a_long_run(length, refused):
    """Expert 0 is a normal choice when K is 1."""
    ids = np.ones((50, 2, 1), np.uint8)
    ids[::2] = 2
    ids[10 : 10 + length] = 0
    model = {"num_layers": 2, "moe_layers": [0, 1], "top_k": 1, "num_experts": 4}
    result, _ = everything(ids, **model)
    assert isinstance(result, TraceError) == refused
    if refused:
        assert "rows 10-41 (32 rows)" in str(result)


def test_zero_runs_of_top_1_end_with_their_sample(tmp_path):
    ids = np.ones((80, 2, 1), np.uint8)
    ids[20:60] = 0
    model = {"num_layers": 2, "moe_layers": [0, 1], "top_k": 1, "num_experts": 4}
    path = tmp_path / "t.npz"
    np.savez(path, routed_experts=ids, cu_seqlens=[0, 40, 80])
    assert everything(path, **model)[0].valid.all()
    np.savez(path, routed_experts=ids, cu_seqlens=[0, 25, 80])
    error, _ = everything(path, **model)
    assert (error.code, error.sample, error.row) == ("unset_rows", 1, 0)
    assert "sample 1, rows 0-34 (35 rows)" in str(error)


def test_duplicates_count_twice_when_they_are_allowed():
    trace, caught = everything(changed((6, 4), [3, 9, 3, 3]), allow_duplicates=True)
    assert caught == []
    assert trace.counts(4).sum() == 12 * 4
    assert trace.layer(4)[6].tolist() == [3, 9, 3, 3]


def test_unset_rows_are_no_duplicates():
    trace, caught = everything(changed(slice(2, 5), 0), suspect="live")
    assert [each.code for each in caught] == ["unset_rows"]
    assert np.flatnonzero(~trace.valid).tolist() == [2, 3, 4]


def test_suspect_error_refuses_what_report_only_warns_about():
    ids = rows()
    ids[2:8] = ids[2]
    assert everything(ids, suspect="error")[0].code == "repeated_rows"


def test_marked_rows_with_a_null_dense_layer():
    trace, caught = everything(changed(slice(0, 7), -1))
    assert caught == []
    assert np.flatnonzero(trace.valid).tolist() == [7, 8, 9, 10, 11]
    assert everything(changed(slice(0, 7), -1), missing="error")[0].code == "unset_rows"


def test_the_order_inside_a_row_is_kept():
    ids = rows()
    assert np.array_equal(everything(ids)[0].layer(3), ids[:, 3])


def test_scan_across_chunks():
    """A run that crosses the border of two chunks is one run."""
    ids = np.tile(np.arange(8, dtype=np.int32), (70_000, 1, 1))  # 2.2 MB, three chunks
    scan = scan_rows(ids)
    assert not scan.repeated[0]
    assert scan.repeated[1:].all()
    assert not scan.zero.any()


def test_real_routing_is_clean(shared_dir):
    path = shared_dir / "data/routing/gptoss20b_routing.npz"
    model = {"num_layers": 24, "moe_layers": range(24), "top_k": 4, "num_experts": 32}
    trace, caught = everything(path, **model)
    assert caught == []
    assert trace.num_samples == 88
    assert trace.valid.all()
