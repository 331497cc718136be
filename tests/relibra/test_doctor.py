"""`relibra doctor`: every probe answers, and only what the CPU version needs is a problem."""

import json

import pytest
import torch

from relibra import doctor
from relibra.cli import main
from relibra_kernels import native


def facts(capsys):
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_comm_02_versions_or_the_reason_why_absent(capsys):
    code, made = facts(capsys)
    assert code == 0, made
    assert made["ok"] is True
    software, machine = made["software"], made["machine"]
    assert software["torch"]["value"].startswith(torch.__version__)
    for name in ("python", "relibra", "triton", "numpy", "native_planner", "native_compiler",
                 "native_cuda_part", "native_nvshmem_part", "nvcc", "nvshmem_wheel"):  # fmt: skip
        assert software[name]["value"]
    for name in ("cpu_cores", "openmp_threads", "cuda_driver"):
        assert machine[name]["value"]
    assert any(name.startswith("gpu") for name in machine)
    assert set(made["what_works"]) >= {"plan_check", "train_on_cpu_gloo", "demo", "nccl"}


def test_text_has_one_line_a_fact(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ok      native planner" in out
    assert out.endswith("all that this version needs works\n")


def test_a_planner_that_does_not_load_is_a_problem_with_a_remedy(capsys, monkeypatch):
    monkeypatch.setattr(native, "load", lambda name: (None, "undefined symbol: xyz"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM native planner" in out
    assert "does not load: undefined symbol: xyz" in out
    assert "remedy: pip install -e . --no-build-isolation" in out
    assert "see the problems above" in out


def test_a_missing_build_record_is_a_problem(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.relibra_kernels, "__file__", str(tmp_path / "__init__.py"))
    code, made = facts(capsys)
    assert code == 1
    assert "no record of the native build" in made["software"]["native_build"]["value"]


def test_nvcc_is_asked_for_its_version(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    assert doctor._nvcc().value == f"12.9 ({nvcc})"
    monkeypatch.setenv("CUDACXX", str(tmp_path / "none"))
    assert "version unknown" in doctor._nvcc().value
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor._nvcc().status == "absent"


def test_missing_packages():
    assert doctor._package("x", ("no-such-package",)).status == "absent"
    assert doctor._package("x", ("no-such-package",), needed=True).status == "problem"
    assert doctor._package("x", ("no-such-package", "numpy")).value.endswith("(numpy)")


class FakeProperties:
    name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 * 2**30


def test_gpus_are_listed_with_their_peers(capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeProperties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 2)
    machine = facts(capsys)[1]["machine"]
    assert machine["gpu_0"]["value"] == "NVIDIA H200, sm_90, 141 GiB, peers 1"
    assert machine["gpu_2"]["value"].endswith("peers 0, 1")


@pytest.mark.parametrize("available", [True, False])
def test_a_cuda_torch_without_a_gpu(capsys, monkeypatch, available):
    def fail():
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", fail if available else lambda: 0)
    code, made = facts(capsys)
    assert code == 0
    expected = "driver too old" if available else "torch sees no CUDA device"
    assert made["machine"]["gpu"] == {"status": "absent", "value": expected, "remedy": ""}
