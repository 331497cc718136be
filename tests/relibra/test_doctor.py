"""`relibra doctor`: every probe answers, and only what the CPU version needs is a problem."""

import json
import shutil

import pytest
import torch

from relibra import doctor
from relibra.cli import main
from relibra_kernels import native
from relibra_kernels.transport import nvshmem_library


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
    for name in ("nvshmem4py", "nvshmem_library", "nvshmem_owner"):
        assert software[name]["value"]
    for name in ("cpu_cores", "openmp_threads", "cuda_driver", "dev_shm", "p2p_matrix"):
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
    assert machine["p2p_matrix"] == {
        "status": "ok", "value": "0: 1; 1: 0; 2: 0, 1", "remedy": ""
    }  # fmt: skip


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
    for name in ("gpu", "p2p_matrix"):
        assert made["machine"][name] == {"status": "absent", "value": expected, "remedy": ""}


def test_comm_02_shared_memory_and_its_remedy(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    for total, status, text in ((2**26, "absent", "64 MiB, 1 MiB free: little"),
                                (2**30, "ok", "1024 MiB, 1 MiB free")):  # fmt: skip
        sized = usage._replace(total=total, free=2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, sized=sized: sized)
        fact = doctor._shared_memory()
        assert (fact.status, fact.value.startswith(text)) == (status, True)
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_SHM", tmp_path / "none")
    fact = doctor._shared_memory()
    assert (fact.status, fact.remedy) == ("absent", "containers: --shm-size or --ipc=host")
    assert "No such file or directory: no cpu_shm transport" in fact.value


def test_comm_02_nvshmem_release_and_owner(monkeypatch):
    class Library:
        @classmethod
        def open(cls):
            return cls()

        def version(self):
            return 3, 8, 0

    monkeypatch.setattr(nvshmem_library, "NvshmemLibrary", Library)
    monkeypatch.setattr(nvshmem_library, "owner", lambda: "other code in this process: PE 0 of 8")
    assert [fact.value for fact in doctor._nvshmem()] == [
        "3.8.0",
        "other code in this process: PE 0 of 8",
    ]


def test_transports_say_why_they_do_not_work(capsys, monkeypatch):
    works = facts(capsys)[1]["what_works"]
    for name in ("torch_symm_transport", "nvshmem_transport", "gpu_kernels"):
        assert works[name]["status"] == "absent"
        assert "CUDA device" in works[name]["value"]
    assert works["cpu_shm_transport"]["status"] == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._gpu_kernels() == ("ok", "works")
