"""SGLang payloads: replies, turns, and what is refused."""

import base64
import json
import warnings

import numpy as np
import pytest

from relibra.formats import load_routing
from relibra_kernels.errors import TraceError, TraceWarning

MODEL = {"num_layers": 6, "moe_layers": range(1, 6), "top_k": 4, "num_experts": 16}


def golden_like(num_rows, seed=0):
    """Distinct ids `[rows, 5, 4]`."""
    rng = np.random.default_rng(seed)
    return rng.random((num_rows, 5, 16)).argsort(axis=-1)[..., :4].astype(np.uint8)


def with_dense(ids):
    """All six decoder layers, the first of them zero."""
    return np.concatenate([np.zeros_like(ids[:, :1]), ids], axis=1)


def reply(rows, num_tokens=None, start=None, dtype="uint8", **info):
    """A reply with these rows, prompt 1 token."""
    num_tokens = len(rows) + 1 if num_tokens is None else num_tokens
    info = {"prompt_tokens": 1, "completion_tokens": num_tokens - 1, **info}
    if dtype is not None:
        info["routed_experts_dtype"] = dtype
    if start is not None:
        info["routed_experts_start_len"] = start
    raw = np.ascontiguousarray(rows, dtype=dtype or "int32").tobytes()
    info["routed_experts"] = base64.b64encode(raw).decode()
    return {"text": "", "meta_info": info}


def refusal(payload, **options):
    with pytest.raises(TraceError) as raised:
        load_routing(payload, **{**MODEL, **options})
    return raised.value


# --- the fixture files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "sglang_int32.json",
        "sglang_uint8_named_dtype.json",
        "sglang_multiturn_start_len.json",
        "sglang_partial_resume_duplicate.json",  # replay-05
    ],
)
def test_good_files_load_to_the_golden_rows(shared_dir, file):
    formats = shared_dir / "data" / "formats"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = load_routing(formats / file, **MODEL)
    golden = np.load(formats / "golden_moe_only_int32.npy")
    assert np.array_equal(trace.ids, golden)
    assert trace.valid.all()
    counts = json.loads((formats / "golden.json").read_text())["tokens_per_expert"]
    assert [trace.counts(layer).tolist() for layer in range(1, 6)] == counts


@pytest.mark.parametrize(
    ("key", "code", "place"),
    [
        ("id_out_of_range", "id_range", {"layer": 2, "row": 4}),
        ("all_zero_moe_layer", "zero_layer", {"layer": 4}),
        ("two_rows_too_many", "surplus_rows", {}),  # replay-16
        ("truncated_buffer", "element_count", {}),
    ],
)
def test_bad_payloads_of_the_fixture(shared_dir, key, code, place):
    payloads = json.loads((shared_dir / "data/formats/bad_payloads.json").read_text())
    error = refusal(payloads[key])
    assert error.code == code
    assert code in str(error)
    assert {name: getattr(error, name) for name in place} == place


def test_replay_16_one_row_too_many_is_the_last_token(shared_dir):
    formats = shared_dir / "data" / "formats"
    payloads = json.loads((formats / "bad_payloads.json").read_text())
    trace = load_routing(payloads["one_row_too_many_for_n_minus_1"], **MODEL)
    assert np.array_equal(trace.ids, np.load(formats / "golden_moe_only_int32.npy"))


def test_truncated_buffer_names_both_counts(shared_dir):
    payloads = json.loads((shared_dir / "data/formats/bad_payloads.json").read_text())
    assert "264 = 11 x 6 x 4" in str(refusal(payloads["truncated_buffer"]))
    assert "got 261 of int32" in str(refusal(payloads["truncated_buffer"]))


# --- the reported cases ---------------------------------------------------------------------------


def case(shared_dir, name):
    return json.loads((shared_dir / "cases" / name).read_text())


def test_replay_01_a_count_that_fits_two_readings(shared_dir):
    payload = case(shared_dir, "replay_01_hybrid_layers.json")["ambiguous_count_six_tokens"]
    trace = load_routing(payload, **MODEL)
    golden = np.load(shared_dir / "data/formats/golden_moe_only_int32.npy")
    assert np.array_equal(trace.ids, golden[:5])


def test_replay_03_constant_completion(shared_dir):
    payload = case(shared_dir, "replay_03_constant_completion.json")["payload"]
    with pytest.warns(TraceWarning, match=r"repeated_rows: rows 9-31 \(23 rows\)") as caught:
        trace = load_routing(payload, **MODEL)
    assert (caught[0].message.code, caught[0].message.row) == ("repeated_rows", 9)
    assert trace.valid.sum() == 32
    with pytest.warns(TraceWarning, match="follow the live router"):
        trace = load_routing(payload, suspect="live", **MODEL)
    assert np.flatnonzero(trace.valid).tolist() == list(range(9))
    error = refusal(payload, suspect="error")
    assert error.code == "repeated_rows"
    assert "rows 9-31 (23 rows)" in str(error)


def test_replay_04_small_capture_buffer(shared_dir):
    payload = case(shared_dir, "replay_04_small_capture_buffer.json")["payload"]
    error = refusal(payload)
    assert (error.code, error.row) == ("unset_rows", 32)
    assert "rows 32-127 (96 rows)" in str(error)
    with pytest.warns(TraceWarning, match="unset_rows"):
        trace = load_routing(payload, suspect="live", **MODEL)
    assert np.flatnonzero(trace.valid).tolist() == list(range(32))
    assert all(trace.counts(layer)[0] < 32 for layer in range(1, 6))


def test_replay_06_three_turns(shared_dir):
    turns = case(shared_dir, "replay_06_three_turns.json")["turns"]
    golden = np.load(shared_dir / "cases/replay_06_golden_int32.npy")
    whole = load_routing(turns, **MODEL)
    assert np.array_equal(whole.ids, golden)
    held = None
    for turn in turns:
        before = None if held is None else held.ids.copy()
        held = load_routing(turn, existing=held, **MODEL)
        if before is not None:
            assert np.array_equal(held.ids[: len(before)], before)
    assert np.array_equal(held.ids, golden)


def test_replay_07_missing_turn(shared_dir):
    turns = case(shared_dir, "replay_07_missing_turn.json")["turns"]
    golden = np.load(shared_dir / "cases/replay_06_golden_int32.npy")
    trace = load_routing(turns, **MODEL)
    assert np.flatnonzero(~trace.valid).tolist() == list(range(7, 12))
    assert np.array_equal(trace.ids[trace.valid], golden[trace.valid])
    assert trace.counts(1).sum() == 12 * 4
    assert refusal(turns, missing="error").code == "unset_rows"


def test_replay_15_zero_prompt(shared_dir):
    payload = case(shared_dir, "replay_15_zero_prompt.json")["payload"]
    assert "rows 0-6 (7 rows)" in str(refusal(payload))


def test_replay_24_the_server_was_not_asked():
    error = refusal({"meta_info": {"prompt_tokens": 7, "completion_tokens": 5}})
    assert error.code == "field_missing"
    for word in ("routed_experts", "--enable-return-routed-experts", "return_routed_experts"):
        assert word in str(error)


# --- payload shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", None])
@pytest.mark.parametrize("layers", [with_dense, lambda ids: ids])
def test_dtypes_and_both_layer_axes(dtype, layers):
    ids = golden_like(9)
    trace = load_routing(reply(layers(ids), dtype=dtype), **MODEL)
    assert np.array_equal(trace.ids, ids)
    assert trace.ids.dtype == np.dtype(dtype or "int32")


def test_the_payload_is_the_only_copy():
    payload = reply(with_dense(golden_like(9)))
    trace = load_routing(payload, **MODEL)
    base = trace.ids
    while base.base is not None and not isinstance(base.base, bytes):
        base = base.base
    assert isinstance(base.base, bytes)  # the decoded base64, nothing after it


@pytest.mark.parametrize(
    "wrap",
    [
        lambda r: r["meta_info"],
        lambda r: {"choices": [r]},
        lambda r: [r],
        json.dumps,
        lambda r: json.dumps(r).encode(),
    ],
)
def test_a_reply_in_other_wrappings(wrap):
    ids = golden_like(5)
    assert np.array_equal(load_routing(wrap(reply(ids)), **MODEL).ids, ids)


def test_bare_base64_needs_the_format():
    ids = golden_like(5)
    text = reply(with_dense(ids), dtype=None)["meta_info"]["routed_experts"]
    trace = load_routing(text, format="sglang", num_tokens=6, **MODEL)
    assert np.array_equal(trace.ids, ids)
    assert refusal(text).code == "field_missing"


def test_last_row_keep():
    ids = golden_like(6)
    trace = load_routing(reply(ids, num_tokens=6), last_row="keep", **MODEL)
    assert (trace.num_rows, trace.has_last_row) == (6, True)
    assert load_routing(reply(ids, num_tokens=6), **MODEL).num_rows == 5
    assert refusal(reply(ids, num_tokens=7), last_row="keep").code == "short_rows"


def test_rows_marked_minus_one_are_unknown():
    ids = with_dense(golden_like(6)).astype(np.int32)
    ids[2:4] = -1
    trace = load_routing(reply(ids, dtype="int32"), **MODEL)
    assert np.flatnonzero(~trace.valid).tolist() == [2, 3]
    error = refusal(reply(ids, dtype="int32"), missing="error")
    assert error.code == "unset_rows"
    assert "rows 2-3 (2 rows)" in str(error)


# --- turns ----------------------------------------------------------------------------------------


def test_the_later_turn_wins_and_differences_are_noted():
    old, new = golden_like(7), golden_like(9, seed=1)
    new[3] = old[3]
    trace = load_routing([reply(old), reply(new[3:], num_tokens=10, start=3)], **MODEL)
    assert np.array_equal(trace.ids, np.concatenate([old[:3], new[3:]]))
    assert trace.notes == (
        "turn 1: 3 of 4 repeated rows differ from the earlier ones; the later turn was taken",
    )


def test_rows_that_were_unknown_do_not_count_as_different():
    ids = golden_like(11)
    null = {"meta_info": {"prompt_tokens": 6, "completion_tokens": 2, "routed_experts": None}}
    trace = load_routing([reply(ids[:4]), null, reply(ids[7:], 12, start=7), reply(ids)], **MODEL)
    assert np.array_equal(trace.ids, ids)
    assert trace.valid.all()
    assert trace.notes == ()


def test_a_part_without_start_is_absolute():
    ids = golden_like(11)
    first, second = reply(ids[:8]), reply(ids)
    assert np.array_equal(load_routing([first, second], **MODEL).ids, ids)


def test_start_argument_for_payloads_that_do_not_say():
    ids = golden_like(11)
    held = load_routing(reply(ids[:8]), **MODEL)
    trace = load_routing(reply(ids[8:], num_tokens=12), start=8, existing=held, **MODEL)
    assert np.array_equal(trace.ids, ids)
    assert (
        refusal(reply(ids[8:], num_tokens=12, start=7), start=8, existing=held).code == "turn_gap"
    )


def test_a_trailing_null_turn_leaves_its_rows_unknown():
    ids = golden_like(7)
    null = {"meta_info": {"prompt_tokens": 9, "completion_tokens": 2, "routed_experts": None}}
    trace = load_routing([reply(ids), null], **MODEL)
    assert trace.num_rows == 10
    assert np.flatnonzero(~trace.valid).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("turns", "code", "words"),
    [
        (
            [reply(golden_like(4), start=0), reply(golden_like(2), 9, start=6)],
            "turn_gap",
            "rows 4-5",
        ),
        ([reply(golden_like(4), 9, start=4)], "turn_gap", "at most 0"),
        (
            [reply(golden_like(4)), reply(golden_like(2), 9)],
            "short_rows",
            "turn 1: need 8 rows, got 2",
        ),
        ([{"meta_info": {"routed_experts": None}}], "field_missing", "null in all"),
        ([reply(golden_like(4)), {"meta_info": {}}], "field_missing", "turn 1"),
        ([], "field_missing", "a list of 0"),
    ],
)
def test_turns_that_leave_a_hole(turns, code, words):
    error = refusal(turns)
    assert error.code == code
    assert words in str(error)


# --- refusals -------------------------------------------------------------------------------------


def broken(**changes):
    payload = reply(golden_like(5))
    payload["meta_info"].update(changes)
    return payload


@pytest.mark.parametrize(
    ("payload", "code", "words"),
    [
        (broken(routed_experts="not base64!"), "bad_encoding", "need base64, got 'not base64!'"),
        (broken(routed_experts="AAAA AAAA"), "bad_encoding", "need base64"),
        (broken(routed_experts=[[1, 2]]), "field_missing", "tried"),
        (broken(routed_experts_dtype="float32"), "dtype", "uint8, uint16, int32, got 'float32'"),
        (broken(routed_experts_dtype=7), "dtype", "got 7"),
        (broken(prompt_tokens="7"), "bad_encoding", "prompt_tokens: need an integer"),
        (broken(completion_tokens=-1), "bad_encoding", "completion_tokens"),
        (broken(routed_experts_start_len=-2), "bad_encoding", "routed_experts_start_len"),
        (broken(routed_experts="AAAA", routed_experts_dtype="uint16"), "element_count", "3 bytes"),
        (broken(routed_experts=""), "short_rows", "need 5 rows, got 0"),
        ('{"meta_info": ', "bad_encoding", "need JSON"),
        ({"choices": [reply(golden_like(2))] * 2}, "sample_count", "need one sample, got 2"),
        ({"choices": [{"moe_topk_indices": []}]}, "field_missing", "tried: relibra needs"),
        ("nrlre1:int8:12x5x4:AAAA", "field_missing", "tried: relibra needs"),
        (None, "field_missing", "NoneType"),
    ],
)
def test_broken_payloads(payload, code, words):
    error = refusal(payload)
    assert error.code == code
    assert words in str(error)


def test_a_dtype_that_was_not_named_is_suggested():
    payload = reply(with_dense(golden_like(11)))
    del payload["meta_info"]["routed_experts_dtype"]
    error = refusal(payload)
    assert error.code == "element_count"
    assert "got 66 of int32; as uint8 it would be 11 x 6 x 4" in str(error)


def test_num_tokens_must_agree_with_the_payload():
    error = refusal(reply(golden_like(5)), num_tokens=9)
    assert error.code == "element_count"
    assert "need num_tokens = 9, got a payload of 6" in str(error)


def test_ambiguous_counts_without_a_way_to_decide():
    """K 1: both readings of 30 zero-free elements look right."""
    rows = np.arange(30).reshape(-1, 1, 1) % 3 + 1
    payload = {"meta_info": {"routed_experts_dtype": "uint8"}}
    payload["meta_info"]["routed_experts"] = base64.b64encode(
        np.where(np.arange(30) % 6 == 0, 0, rows.ravel()).astype(np.uint8).tobytes()
    ).decode()
    with pytest.raises(
        TraceError, match="5 rows x 6 layers and 6 rows x 5 layers; pass num_tokens"
    ):
        load_routing(payload, num_layers=6, moe_layers=range(1, 6), top_k=1, num_experts=4)


def test_layer_base_and_formats_are_checked():
    with pytest.raises(ValueError, match="format: need one of 'auto', 'relibra', 'sglang'"):
        load_routing(reply(golden_like(2)), format="vllm", **MODEL)
    with pytest.raises(ValueError, match="layer_base: need at least 0"):
        load_routing(reply(golden_like(2)), layer_base=-1, **MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers: need 1 to 4096"),
        ({"num_layers": 10**9, "moe_layers": range(10**12)}, "num_layers: need 1 to 4096"),
        ({"moe_layers": range(10**12)}, "moe_layers: need at most 4096 layers"),
        ({"moe_layers": [1, 6]}, "moe_layers: need 0 to 5, got 6"),
        ({"moe_layers": [2, 1]}, "moe_layers: need rising"),
        ({"moe_layers": []}, "moe_layers: need rising"),
        ({"top_k": 17}, "top_k: need 1 to 16, got 17"),
        ({"start": -1}, "start: need 0 to 16777216"),
        ({"num_tokens": 0}, "num_tokens: need 1 to 16777216"),
        ({"missing": "skip"}, "missing: need one of"),
        ({"suspect": "skip"}, "suspect: need one of"),
        ({"last_row": "fill"}, "last_row: need one of"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        load_routing(reply(golden_like(2)), **{**MODEL, **changes})
