"""The ahead-of-time gate: each of its rules finds what it is for, and the kernels pass it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "perf"))  # scripts, not a package

import aot_cases
import aot_gate
import aot_table
from aot_cubin import Binary, Needs, judge

HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;\nWARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"
GOOD = HGMMA + "UTMALDG.4D [UR8], [UR14] ;\nLDGSTS.E.BYPASS.128 [R11], desc[UR28][R8.64] ;\n"
NEEDS = Needs("sm_90", tile=128, tma_loads=True, gathers=True)


def binary(sass=GOOD, **changes):
    return dataclasses.replace(Binary(168, 0, 180224, sass), **changes)


def test_a_good_binary_passes():
    assert judge(binary(), NEEDS) == []
    assert binary().opcodes == {"HGMMA": 1, "LDGSTS": 1, "UTMALDG": 1}


@pytest.mark.parametrize(
    ("found", "needs", "message"),
    [
        (binary(stack=16), NEEDS, "stack 16 B, need at most 0"),
        (binary(stack=16), dataclasses.replace(NEEDS, stack=8), "stack 16 B, need at most 8"),
        (binary(GOOD + "LDL R1, [R2] ;\nSTL [R2], R1 ;\n"), NEEDS, "2 spill instructions"),
        (binary(shared=232449), NEEDS, "shared 232449 B, need at most 232448"),
        (binary(GOOD.replace("HGMMA", "FFMA")), NEEDS, "no HGMMA"),
        (binary(GOOD.replace("64x128", "64x64")), NEEDS, "HGMMA of ['64x64x16']"),
        (binary(GOOD.replace("gsb0, 0x1", "gsb0, 0x0")), NEEDS, "serialised"),
        (binary(GOOD.replace(".128 [", ".64 [")), NEEDS, "1 LDGSTS narrower than 128 bit"),
        (binary(GOOD.replace("LDGSTS.E.BYPASS.128", "LDG.E.128")), NEEDS, "no LDGSTS"),
        (binary(GOOD.replace("UTMALDG", "LDG")), NEEDS, "no UTMALDG"),
        (binary(), dataclasses.replace(NEEDS, gathers=False), "1 LDGSTS beside tensor descr"),
        (binary("HMMA.1688.F32.TF32 R1 ;\n"), Needs("sm_80", fp32=True), "TF32 in an fp32"),
        (binary("HMMA.16816.F32.BF16 R1 ;\n"), Needs("sm_80", fp32=True), "no FFMA"),
        (binary("HMMA.16816.F32 R1 ;\n", shared=166913), Needs("sm_80"), "at most 166912"),
        (binary(GOOD), Needs("sm_100", tma_loads=True, gathers=True), "no UTCHMMA"),
    ],
)
def test_a_bad_binary_is_refused(found, needs, message):
    wrong = judge(found, needs)
    assert any(message in text for text in wrong), wrong


def test_a_stack_within_the_allowance_of_a_kernel_passes():
    spilled = binary(GOOD + "LDL R1, [R2] ;\n", stack=8)
    assert judge(spilled, dataclasses.replace(NEEDS, stack=8)) == []


def test_the_table_of_cases_is_complete():
    """Ten kernels, five models, three architectures, and every option once an architecture."""
    keys = aot_cases.expected_keys()
    assert len(set(keys)) == len(keys) == aot_cases.NUM_ROWS
    plain = [key for key in keys if not key[3]]
    assert len(plain) == 10 * 5 * 3


def test_a_row_too_few_or_too_many_is_found():
    keys = aot_cases.expected_keys()
    rows = [dict(zip(("arch", "kernel", "model", "option"), key, strict=True)) for key in keys]
    assert aot_gate.missing_rows(rows, keys) == []
    assert aot_gate.missing_rows(rows[1:], keys) == [" ".join(keys[0])]
    assert len(aot_gate.missing_rows([*rows, rows[0]], keys)) > 0
    assert len(aot_gate.missing_rows([*rows, {**rows[0], "option": "new"}], keys)) == 1


def test_results_are_kept_by_version_of_triton(tmp_path):
    path = tmp_path / "results/aot.json"
    aot_gate.store(path, "3.7.1", [{"kernel": "F1", "seconds": 1.0}])
    aot_gate.store(path, "3.6.0", [{"kernel": "F2"}])
    aot_gate.store(path, "3.7.1", [{"kernel": "F3"}])
    assert path.read_text() == (
        '{\n"3.6.0": [\n{"kernel": "F2"}\n],\n"3.7.1": [\n{"kernel": "F3"}\n]\n}\n'
    )


@pytest.mark.parametrize("version", aot_table.VERSIONS)
def test_the_stored_results_of_a_version_are_complete_and_all_pass(version):
    """Remedy: python perf/aot_gate.py --triton-path DIR, see CONTRIBUTING.md."""
    rows = json.loads(aot_gate.RESULTS.read_text())[version]
    assert len(rows) == aot_cases.NUM_ROWS
    assert aot_gate.missing_rows(rows, aot_cases.expected_keys()) == []
    assert [row for row in rows if row["wrong"]] == []


def test_ci_compiles_with_every_stored_version(project_root):
    assert set(json.loads(aot_gate.RESULTS.read_text())) == set(aot_table.VERSIONS)
    text = (project_root / ".github/workflows/ci.yml").read_text()
    assert f"triton: {json.dumps(aot_table.VERSIONS)}" in text


@pytest.mark.xdist_group("aot")
def test_the_kernels_pass_a_part_of_the_gate(project_root, compiling_env):
    """The whole gate is `make aot`."""
    command = [sys.executable, "perf/aot_gate.py", "--fast", "--jobs", "1"]
    command += ["--cache", compiling_env["TRITON_CACHE_DIR"]]
    done = subprocess.run(
        command, env=compiling_env, capture_output=True, text=True, cwd=project_root
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
