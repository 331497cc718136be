"""Our own files, `.npz` files and plain arrays: memory, round trips, damage."""

import json
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from relibra.formats import load_routing
from relibra.formats.trace_file import open_trace
from relibra.trace import RoutingTrace
from relibra_kernels.errors import TraceError

MODEL = {"num_layers": 6, "moe_layers": range(1, 6), "top_k": 4, "num_experts": 16}


def distinct_ids(num_rows, num_layers=5, seed=0, dtype=np.uint8):
    rng = np.random.default_rng(seed)
    return rng.random((num_rows, num_layers, 16)).argsort(axis=-1)[..., :4].astype(dtype)


def make_trace(dtype=np.uint8):
    return RoutingTrace(
        distinct_ids(12, dtype=dtype),
        np.arange(12) != 7,
        [0, 5, 12],
        moe_layers=range(1, 6),
        num_experts=16,
        notes=("a note",),
    )


# --- safetensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64])
def test_save_and_load(tmp_path, dtype):
    trace = make_trace(dtype)
    trace.save(tmp_path / "t.safetensors")
    again = RoutingTrace.load(tmp_path / "t.safetensors")
    for name in ("ids", "valid", "cu_seqlens"):
        assert np.array_equal(getattr(again, name), getattr(trace, name))
    assert again.ids.dtype == dtype
    assert (again.moe_layers, again.num_experts) == (trace.moe_layers, 16)
    assert (again.has_last_row, again.notes) == (False, ("a note",))
    assert list(tmp_path.iterdir()) == [tmp_path / "t.safetensors"]


def test_a_view_of_layers_is_saved_whole(tmp_path):
    part = make_trace().select([1], layers=[2, 4])
    part.save(tmp_path / "t.safetensors")
    assert np.array_equal(RoutingTrace.load(tmp_path / "t.safetensors").ids, part.ids)


def test_an_empty_trace(tmp_path):
    make_trace().select([]).save(tmp_path / "t.safetensors")
    assert RoutingTrace.load(tmp_path / "t.safetensors").num_rows == 0


def test_loading_checks_the_model(tmp_path):
    path = tmp_path / "t.safetensors"
    make_trace().save(path)
    assert np.array_equal(load_routing(path, **MODEL).ids, make_trace().ids)
    stage = load_routing(path, **{**MODEL, "moe_layers": [2, 3]})
    assert np.array_equal(stage.ids, make_trace().ids[:, 1:3])
    for change, code in (
        ({"num_experts": 32}, "id_range"),
        ({"top_k": 3}, "top_k"),
        ({"moe_layers": range(6)}, "layer_axis"),
    ):
        with pytest.raises(TraceError) as raised:
            load_routing(path, **{**MODEL, **change})
        assert raised.value.code == code


def test_ids_stay_on_disk_until_they_are_used(tmp_path):
    ids = np.broadcast_to(np.arange(4, dtype=np.uint8), (100_000, 40, 4))  # 16 MB
    trace = RoutingTrace(ids, moe_layers=range(40), num_experts=4)
    trace.save(tmp_path / "t.safetensors")
    tracemalloc.start()
    again = RoutingTrace.load(tmp_path / "t.safetensors")
    part = again.select([0], layers=[3]).layer(3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.shape == (100_000, 4)
    assert peak < 6e6  # one layer in int32 is 1.6 MB, looking at a chunk 1 MB


def test_replay_11_a_shard_of_mapped_files(tmp_path):
    """One data rank takes 2 of 16 samples and layers 0-11 of 47."""
    base = np.arange(32767)[:, None, None] + 3 * np.arange(47)[:, None]
    ids = ((base + 16 * np.arange(4)) % 64).astype(np.uint8)
    for sample in range(2):
        np.save(tmp_path / f"{sample}.npy", np.roll(ids, sample, axis=0))
    del base
    tracemalloc.start()
    shard = RoutingTrace.concat(
        [
            load_routing(
                tmp_path / f"{sample}.npy",
                num_layers=47,
                moe_layers=range(47),
                top_k=4,
                num_experts=64,
                num_tokens=32768,
            ).select(layers=range(12))
            for sample in range(2)
        ]
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(shard.ids[:32767], ids[:, :12])
    assert shard.ids.dtype == np.uint8
    assert peak <= 1.5 * 2 * 32767 * 12 * 4 * 4


def damaged(path, change):
    make_trace().save(path)
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: b"this is no safetensors file at all",
        lambda data: struct.pack("<Q", 2**62) + data[8:],
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[8,'),
        lambda data: data.replace(b'"I64"', b'"I32"'),
        lambda data: data.replace(b'"U8"', b'"F4"'),
    ],
)
def test_damaged_files_are_refused(tmp_path, change):
    path = damaged(tmp_path / "t.safetensors", change)
    for load in (RoutingTrace.load, open_trace, lambda p: load_routing(p, **MODEL)):
        with pytest.raises(TraceError, match="bad_encoding: t.safetensors: need a whole safet"):
            load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.replace(b"[1, 2, 3, 4, 5]", b"[1, 2, 3, 4, 4]"), "moe_layers: need 5"),
        (lambda data: data.replace(b"[1, 2, 3, 4, 5]", b"[1, 2, 3, 4,{}]"), "moe_layers: need 5"),
        (
            lambda data: data.replace(b'"16"', b'"-1"'),
            "num_experts: need an integer of at least K = 4, got -1",
        ),
        (lambda data: data.replace(b'"16"', b'"15"'), "need ids in 0..14, got 15"),
        (lambda data: data.replace(b"relibra_trace", b"relibra_tracf"), "need metadata kind"),
        (lambda data: data.replace(b'"valid"', b'"vblid"'), "need tensors ids, valid, cu_seqlens"),
    ],
)
def test_files_that_do_not_hold_what_they_say(tmp_path, change, message):
    path = damaged(tmp_path / "t.safetensors", change)
    with pytest.raises(TraceError, match=message):
        RoutingTrace.load(path)


def test_foreign_safetensors_files(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(TraceError, match=r"dtype: weights.safetensors: w: need integers, got F32"):
        open_trace(path)
    save_file({"w": np.zeros(3, np.int32)}, path)
    with pytest.raises(TraceError, match=r"field_missing: .* got None and None with tensors w"):
        load_routing(path, **MODEL)
    with pytest.raises(FileNotFoundError):
        open_trace(tmp_path / "none.safetensors")


# --- npz ------------------------------------------------------------------------------------------


def write_npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def test_npz_with_sequences(tmp_path):
    ids = np.concatenate([np.zeros_like(distinct_ids(12)[:, :1]), distinct_ids(12)], axis=1)
    path = write_npz(tmp_path / "t.npz", routed_experts=ids, cu_seqlens=[0, 5, 12])
    trace = load_routing(path, **MODEL)
    assert np.array_equal(trace.ids, distinct_ids(12))
    assert trace.num_samples == 2
    assert load_routing(path, last_row="keep", **MODEL).has_last_row
    dropped = load_routing(path, last_row="drop", **MODEL)
    assert dropped.cu_seqlens.tolist() == [0, 4, 10]
    assert np.array_equal(dropped.ids, np.delete(distinct_ids(12), [4, 11], axis=0))
    with pytest.raises(TraceError, match="need one sample of 12 rows for num_tokens = 13"):
        load_routing(path, num_tokens=13, **MODEL)


def test_npz_without_a_model(tmp_path):
    path = write_npz(tmp_path / "t.npz", routed_experts=distinct_ids(12), cu_seqlens=[0, 12])
    trace = open_trace(path)
    assert (trace.num_experts, trace.moe_layers) == (16, (0, 1, 2, 3, 4))
    assert trace.notes == ("num_experts = 16 is the largest id + 1 of t.npz",)
    assert open_trace(path, 20).notes == ()
    with pytest.raises(TraceError, match=r"need ids in 0..9, got 1[0-5]"):
        open_trace(path, 10)


IDS = distinct_ids(3)


@pytest.mark.parametrize(
    ("arrays", "code", "message"),
    [
        ({"routed_experts": IDS}, "field_missing", "cu_seqlens"),
        ({"routed_experts": IDS, "cu_seqlens": [0, 4]}, "sample_count", "from 0 up to 3 rows"),
        ({"routed_experts": IDS, "cu_seqlens": [0, 2, 1, 3]}, "sample_count", "do not decrease"),
        ({"routed_experts": IDS, "cu_seqlens": [0.0, 3.0]}, "dtype", "cu_seqlens: need integers"),
        ({"routed_experts": IDS * 1.0, "cu_seqlens": [0, 3]}, "dtype", "got float64"),
        ({"routed_experts": IDS > 3, "cu_seqlens": [0, 3]}, "dtype", "got bool"),
        ({"routed_experts": IDS[:, 0], "cu_seqlens": [0, 3]}, "layer_axis", "need [rows, L, K]"),
        (
            {"routed_experts": np.array([{}], object), "cu_seqlens": [0, 1]},
            "dtype",
            "need plain numbers, got pickled objects",
        ),
    ],
)
def test_npz_files_that_are_refused(tmp_path, arrays, code, message):
    path = write_npz(tmp_path / "t.npz", **arrays)
    with pytest.raises(TraceError) as raised:
        open_trace(path)
    assert raised.value.code == code
    assert message in str(raised.value)


def test_npz_sizes_are_checked_before_memory_is_taken(tmp_path):
    """The header asks for 2^60 bytes; the member has 24."""
    path = tmp_path / "t.npz"
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({2**60}, 1, 1), }}".ljust(117)
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.encode() + b"\n" + b"\0" * 24
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("routed_experts.npy", member)
        archive.writestr("cu_seqlens.npy", member)
    with pytest.raises(TraceError, match=f"need {2**60} bytes for uint8"):
        open_trace(path)


@pytest.mark.parametrize("keep", [0, 30, -30])
def test_truncated_npz(tmp_path, keep):
    path = write_npz(tmp_path / "t.npz", routed_experts=IDS, cu_seqlens=[0, 3])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TraceError, match="bad_encoding: t.npz: need a zip file"):
        open_trace(path)


def test_npz_with_a_wrong_checksum(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, routed_experts=IDS, cu_seqlens=[0, 3])
    data = bytearray(path.read_bytes())
    place = data.find(IDS.tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match="bad_encoding: t.npz"):
        open_trace(path)


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [
        lambda ids: ids,
        lambda ids: ids.astype(np.uint16),
        lambda ids: ids.astype(">i4"),
        lambda ids: torch.from_numpy(ids),
        lambda ids: torch.from_numpy(ids.astype(np.int64)),
        lambda ids: torch.from_numpy(ids.astype(np.uint16)),
    ],
)
def test_arrays_and_tensors(convert):
    assert np.array_equal(load_routing(convert(distinct_ids(9)), **MODEL).ids, distinct_ids(9))


def test_replay_13_a_read_only_array_is_not_copied():
    ids = distinct_ids(11)
    ids.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = load_routing(ids, num_tokens=12, **MODEL)
        trace.slice(ep=(0, 4))
        trace.counts(1)
    assert np.shares_memory(trace.ids, ids)
    assert np.array_equal(ids, distinct_ids(11))


def test_all_layers_of_an_array_are_not_copied_either():
    ids = np.concatenate([np.zeros((11, 1, 4), np.uint8), distinct_ids(11)], axis=1)
    assert np.shares_memory(load_routing(ids, **MODEL).ids, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_tensors_that_are_no_integers(dtype):
    with pytest.raises(TraceError) as raised:
        load_routing(torch.zeros(3, 5, 4, dtype=dtype), **MODEL)
    assert raised.value.code == "dtype"


def test_npy_files_are_mapped(tmp_path):
    np.save(tmp_path / "t.npy", distinct_ids(9))
    assert np.array_equal(load_routing(tmp_path / "t.npy", **MODEL).ids, distinct_ids(9))
    assert np.array_equal(load_routing(str(tmp_path / "t.npy"), **MODEL).ids, distinct_ids(9))
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(TraceError, match="need a .npy array of plain numbers"):
        load_routing(tmp_path / "o.npy", **MODEL)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(TraceError, match="need a .npy array of plain numbers"):
        load_routing(tmp_path / "b.npy", **MODEL)


def test_undecided_payloads_list_what_was_tried(tmp_path):
    for name in ("t.pt", "t.jsonl", "t.txt", "t.json"):
        path = tmp_path / name
        path.write_text(json.dumps({"data": "AAAA", "shape": [1, 1, 3], "dtype": "uint8"}))
        with pytest.raises(TraceError) as raised:
            load_routing(path, **MODEL)
        assert raised.value.code == "field_missing"
        assert "tried: relibra needs" in str(raised.value)
        assert "sglang needs" in str(raised.value)
    with pytest.raises(FileNotFoundError, match=r"none.json: need a file"):
        load_routing(tmp_path / "none.json", **MODEL)
