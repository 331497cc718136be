"""`relibra check`: verdicts and exit codes."""

import base64
import json
import zipfile

import numpy as np
import pytest

from relibra.cli import main
from relibra.trace import RoutingTrace

MODEL = ("--num-layers", "6", "--moe-layers", "1-5", "--top-k", "4", "--num-experts", "16")


def run(*arguments):
    return main(["check", *(str(one) for one in arguments)])


def distinct_ids(num_rows):
    return np.random.default_rng(0).random((num_rows, 5, 16)).argsort(axis=-1)[..., :4]


@pytest.mark.parametrize(
    "file",
    [
        "sglang_int32.json",
        "sglang_uint8_named_dtype.json",
        "sglang_multiturn_start_len.json",
        "sglang_partial_resume_duplicate.json",
        "golden_moe_only_int32.npy",
    ],
)
def test_good_files_of_the_fixture(shared_dir, capsys, file):
    assert run(shared_dir / "data/formats" / file, *MODEL) == 0
    out = capsys.readouterr().out
    assert "rows 11, rows known 11" in out
    assert out.endswith(f"{file}: ok\n")


def test_refused_files_are_1(shared_dir, capsys, tmp_path):
    payloads = json.loads((shared_dir / "data/formats/bad_payloads.json").read_text())
    for name, code in (
        ("id_out_of_range", "id_range"),
        ("all_zero_moe_layer", "zero_layer"),
        ("two_rows_too_many", "surplus_rows"),
        ("truncated_buffer", "element_count"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(payloads[name]))
        assert run(path, *MODEL) == 1
        assert f"error: {code}: " in capsys.readouterr().out
        assert run(path, *MODEL, "--json") == 1
        made = json.loads(capsys.readouterr().out)
        assert made["ok"] is False
        assert made["findings"][0]["code"] == code


def test_warnings_are_1(capsys, tmp_path):
    ids = distinct_ids(8).astype(np.uint8)
    ids[2:7] = ids[2]
    np.save(tmp_path / "t.npy", ids)
    assert run(tmp_path / "t.npy", *MODEL) == 1
    out = capsys.readouterr().out
    assert "warning: repeated_rows: rows 2-6 (5 rows)" in out
    assert out.endswith("t.npy: usable, with warnings\n")


def test_rows_that_the_carrier_admits_to_miss_are_no_fault(capsys, tmp_path):
    ids = distinct_ids(8).astype(np.int16)
    ids[2:4] = -1
    np.save(tmp_path / "t.npy", ids)
    assert run(tmp_path / "t.npy", *MODEL) == 0
    assert "rows known 6, rows unknown 2" in capsys.readouterr().out


def test_files_that_bring_their_model(capsys, tmp_path):
    trace = RoutingTrace(distinct_ids(8), moe_layers=range(1, 6), num_experts=16)
    trace.save(tmp_path / "t.safetensors")
    np.savez(tmp_path / "t.npz", routed_experts=distinct_ids(8), cu_seqlens=[0, 3, 8])
    assert run(tmp_path / "t.safetensors") == 0
    assert run(tmp_path / "t.safetensors", *MODEL) == 0
    assert run(tmp_path / "t.npz") == 0
    assert "num_experts = 16 is the largest id + 1" in capsys.readouterr().out
    assert run(tmp_path / "t.safetensors", *MODEL[:-1], "32") == 1
    assert "error: id_range: need num_experts = 32, got a file of 16" in capsys.readouterr().out
    (tmp_path / "t.safetensors").write_bytes(b"hello")
    assert run(tmp_path / "t.safetensors") == 1


def test_counts_and_plans(capsys, tmp_path):
    rows = np.random.default_rng(0).integers(1, 20, (2, 3, 4, 8))
    np.savez(tmp_path / "counts.npz", rows_MLGE=rows)
    assert run(tmp_path / "counts.npz", "--json") == 0
    assert json.loads(capsys.readouterr().out)["contents"]["rows"] == rows.sum()
    plan = tmp_path / "plan.npz"
    arguments = ["--nodes", "2", "--ranks-per-node", "2", "--strategy", "none", "--out", str(plan)]
    assert main(["plan", str(tmp_path / "counts.npz"), *arguments]) == 0
    capsys.readouterr()
    assert run(plan) == 0
    assert "plan: strategy none, cost rows, nodes 2, ranks 4" in capsys.readouterr().out
    arrays = dict(np.load(plan))
    arrays["slot_rows"][0, 0, 0, 0] += 1
    np.savez(plan, **arrays)
    assert run(plan) == 1
    assert capsys.readouterr().out.endswith("plan.npz: refused\n")


def test_hostile_files_are_refused(capsys, tmp_path):
    np.savez(tmp_path / "c.npz", rows_MLGE=np.zeros((0, 1, 2, 2), int))
    assert run(tmp_path / "c.npz") == 1
    assert "error: rows_MLGE: need at least one micro-batch" in capsys.readouterr().out
    text = "(" * 9000
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    (tmp_path / "t.npy").write_bytes(head)
    assert run(tmp_path / "t.npy", *MODEL) == 1
    assert "error: bad_encoding: t.npy: need a .npy array" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "l.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows_MLGE.npy", head)
        archive.getinfo("rows_MLGE.npy").file_size = 400_000_000_000
    assert run(tmp_path / "l.npz") == 1
    assert "error: bad_encoding: l.npz: rows_MLGE.npy: need at most" in capsys.readouterr().out


def test_bad_usage_is_2(capsys, tmp_path):
    payload = {"meta_info": {"routed_experts": base64.b64encode(b"\0" * 24).decode()}}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(payload))
    assert run(path) == 2
    assert "--num-layers, --moe-layers, --top-k, --num-experts: need the sizes of the model" in (
        capsys.readouterr().err
    )
    assert run(path, "--top-k", 4, "--num-layers", 6) == 2
    assert "--moe-layers, --num-experts: need" in capsys.readouterr().err
    assert run(tmp_path / "none.json", *MODEL) == 2
    assert "FILE: need a file" in capsys.readouterr().err
    assert run(path, *MODEL[:2], "--moe-layers", "1-9", *MODEL[4:]) == 2
    assert "moe_layers: need 0 to 5, got 6" in capsys.readouterr().err
