"""Files and payloads with random damage are read, or refused with TraceError; nothing else."""

import base64
import json
import random
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from relibra.formats import load_routing
from relibra.formats.trace_file import open_trace
from relibra.trace import RoutingTrace
from relibra_kernels.errors import TraceError

IDS = np.random.default_rng(0).random((12, 5, 16)).argsort(axis=-1)[..., :4].astype(np.uint8)


def write_safetensors(path):
    RoutingTrace(IDS, moe_layers=range(5), num_experts=16).save(path)


def write_npz(path):
    np.savez(path, routed_experts=IDS, cu_seqlens=[0, 5, 12])


def write_deflated_npz(path):
    np.savez_compressed(path, routed_experts=IDS, cu_seqlens=[0, 5, 12])


def damage(data, rng):
    """Flips bits, cuts, or repeats a piece."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place] = rng.randrange(256)
        elif kind == 2 and len(data) > 50:
            del data[place : place + rng.randint(1, 20)]
        else:
            data[place:place] = data[place : place + rng.randint(1, 20)]
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.safetensors", write_safetensors),
        ("t.npz", write_npz),
        ("d.npz", write_deflated_npz),
    ],
)
def test_damaged_files(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    whole, rng = path.read_bytes(), random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        path.write_bytes(damage(whole, rng))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trace = open_trace(path)
            assert trace.ids.shape[1:] == (trace.num_layers, trace.top_k)
            outcomes["read"] += 1
        except TraceError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 200


def test_damaged_replies(shared_dir):
    whole = (shared_dir / "data/formats/sglang_uint8_named_dtype.json").read_bytes()
    model = {"num_layers": 6, "moe_layers": range(1, 6), "top_k": 4, "num_experts": 16}
    rng, refused = random.Random(0), 0
    for _ in range(400):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_routing(damage(whole, rng), **model)
        except TraceError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    "payload",
    [
        {"meta_info": {"routed_experts": "", "prompt_tokens": 10**30, "completion_tokens": 1}},
        {"meta_info": {"routed_experts": "AAAA", "routed_experts_dtype": "uint8"}},
        {"meta_info": {"routed_experts": "AAAA", "routed_experts_start_len": 10**30}},
        {"meta_info": {"routed_experts": "", "prompt_tokens": True, "completion_tokens": 1}},
        {"meta_info": {"routed_experts": "", "routed_experts_dtype": ["uint8"]}},
        {"meta_info": []},
        {"meta_info": None},
        {"routed_experts": {}},
        [[]],
        [None],
        [{"meta_info": {"routed_experts": ""}}, 7],
        "[" * 100_000,
        '{"meta_info": {"routed_experts": NaN}}',
        json.dumps({"meta_info": {"routed_experts": "AAAA\ud800"}}),
        b"\xff\xfe",
        7,
    ],
)
def test_hostile_payloads(payload):
    model = {"num_layers": 6, "moe_layers": range(1, 6), "top_k": 4, "num_experts": 16}
    for options in ({}, {"format": "sglang"}):
        with pytest.raises(TraceError):
            load_routing(payload, **model, **options)


MODEL = {"num_layers": 2, "moe_layers": (1,), "top_k": 2, "num_experts": 8}


def turn(**info):
    rows = base64.b64encode((np.arange(16, dtype=np.int32) % 8).tobytes()).decode()
    counts = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"meta_info": {**counts, "routed_experts": rows, **info}}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            [turn(), turn(routed_experts=None, prompt_tokens=10**12)],
            "turn 1: prompt_tokens: need an integer 0..16777216, got int 1000000000000",
        ),
        (
            [
                turn(),
                turn(routed_experts=None),
                turn(routed_experts_start_len=10**10, prompt_tokens=10**10 + 3),
            ],
            "turn 2: prompt_tokens: need an integer 0..16777216",
        ),
        (
            [turn(), turn(routed_experts=None, routed_experts_start_len=10**10)],
            "turn 1: routed_experts_start_len: need an integer 0..16777216",
        ),
    ],
)
def test_token_counts_that_nothing_bears_out(turns, message):
    with pytest.raises(TraceError, match=message):
        load_routing(turns, **MODEL)


def test_holes_take_little_memory(monkeypatch):
    """The counts are possible, but one row of 4096 layers is followed by 2^20 unknown ones."""
    wide = {"num_layers": 4096, "moe_layers": range(4096), "top_k": 8, "num_experts": 8}
    rows = np.arange(8, dtype=np.uint8).reshape(1, 1, 8).repeat(4096, axis=1)
    info = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        "routed_experts_dtype": "uint8",
    }
    hole = {**info, "routed_experts": None, "prompt_tokens": 1 << 20}
    tracemalloc.start()
    with pytest.raises(TraceError, match="turn_gap: need at most 1073741824 bytes of rows that no"):
        load_routing([{"meta_info": info}, {"meta_info": hole}], **wide)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    monkeypatch.setattr("relibra.formats.turns.MAX_HOLE_BYTES", 8 * 50)
    null, far = turn(routed_experts=None), {"routed_experts_start_len": 44, "prompt_tokens": 46}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = load_routing([turn(), null, turn(**far)], **MODEL)
        assert (~trace.valid).sum() == 40
        # A second hole counts together with the first.
        further = {"routed_experts_start_len": 60, "prompt_tokens": 62}
        with pytest.raises(TraceError, match="got 53 unknown rows"):
            load_routing([turn(), null, turn(**far), null, turn(**further)], **MODEL)


@pytest.mark.parametrize(
    ("existing", "error", "message"),
    [
        (3, TypeError, "existing: need a RoutingTrace, got int 3"),
        (
            RoutingTrace(np.zeros((1, 1, 3), np.uint8), moe_layers=[1], num_experts=8),
            TraceError,
            "top_k: existing: need 2 choices a token, got 3",
        ),
    ],
)
def test_rows_to_continue_that_do_not_fit(existing, error, message):
    with pytest.raises(error, match=message):
        load_routing(turn(routed_experts_start_len=1, prompt_tokens=4), existing=existing, **MODEL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "text",
    [
        "(" * 9000,
        "{'descr':'<i4','fortran_order':False,'shape':(True,2,2)}",
        "{'descr':'<i4','fortran_order':False,'shape':(99999999999999999999999,2,2)}",
    ],
)
def test_headers_that_numpy_fails_on(tmp_path, text):
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(64)
    (tmp_path / "t.npy").write_bytes(data)
    with pytest.raises(TraceError, match=r"bad_encoding: t.npy: need a .npy array of plain numb"):
        load_routing(tmp_path / "t.npy", **MODEL)
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("routed_experts.npy", data)
    with pytest.raises(TraceError, match=r"bad_encoding: t.npz: routed_experts.npy: need"):
        open_trace(tmp_path / "t.npz")


def test_ids_that_no_model_has(tmp_path):
    ids = IDS.astype(np.int32)
    ids[3, 1, 0] = 2_000_000_000
    np.savez(tmp_path / "t.npz", routed_experts=ids, cu_seqlens=[0, 12])
    with pytest.raises(TraceError, match="id_range: .* 65536 experts, got id 2000000000 and K 4"):
        open_trace(tmp_path / "t.npz")
    with pytest.raises(ValueError, match="num_experts: need 1 to 65536, got 2000000000"):
        open_trace(tmp_path / "t.npz", 2_000_000_000)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_experts", str(2**34), "num_experts: need at most 65536, got 17179869184"),
        ("moe_layers", "[0, 1, 2, 3, 99999999999]", "moe_layers: need 5 rising layer numbers bel"),
        *((name, "[" * 100_000, f"{name}: need JSON, got") for name in ("moe_layers", "notes")),
    ],
)
def test_metadata_that_no_model_has(tmp_path, name, value, message):
    write_safetensors(tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    head["__metadata__"][name] = value
    text = json.dumps(head).encode()
    (tmp_path / "t.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + data[8 + length :]
    )
    for load in (RoutingTrace.load, open_trace):
        with pytest.raises(TraceError, match=message) as raised:
            load(tmp_path / "t.safetensors")
        assert len(str(raised.value)) < 400


def test_a_size_behind_a_zero(tmp_path):
    """Such a tensor has no bytes, and is nevertheless no array."""
    head = {
        "__metadata__": {},
        "ids": {"dtype": "I32", "shape": [0, 2**61, 2], "data_offsets": [0, 0]},
    }
    text = json.dumps(head).encode()
    (tmp_path / "t.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(TraceError, match="bad_encoding: t.safetensors: ids: need sizes of an arr"):
        open_trace(tmp_path / "t.safetensors")
