"""Files and payloads with random damage are read, or refused with TraceError; nothing else."""

import json
import random
import warnings

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
