"""Whole layers on a stand-in GPU: a warm-up compiles everything, and a step waits for nothing."""

import json
import os
import subprocess
import sys

import pytest

OPTIONS = ("plain", "bias", "transposed", "less memory")

pytestmark = pytest.mark.xdist_group("aot")  # as the other tests that compile


@pytest.fixture(scope="module")
def layer_results(project_root, compiling_env):
    """What `layer_child.py` found on an architecture, run once each."""
    known = {}
    path = os.pathsep.join([compiling_env["PYTHONPATH"], str(project_root / "tests/helpers")])

    def results(arch):
        if arch not in known:
            command = [sys.executable, str(project_root / "tests/aot/layer_child.py"), arch]
            env = compiling_env | {"PYTHONPATH": path}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            known[arch] = json.loads(done.stdout.splitlines()[-1])
        return known[arch]

    return results


@pytest.mark.parametrize(
    ("arch", "option"),
    [
        *(("sm_90", option) for option in OPTIONS),
        pytest.param("sm_80", "plain", marks=pytest.mark.slow),
    ],
)
def test_after_a_warmup_nothing_is_compiled(layer_results, arch, option):
    """Micro-batches of 0 to 100 tokens; tables on and off 16-byte boundaries."""
    warmed, by_steps, by_other_tables = layer_results(arch)["compiles"][option]
    assert by_steps == by_other_tables == 0
    assert warmed > 0 or option == "less memory", "which launches the kernels of a plain layer"


def test_the_guard_refuses_what_waits_for_a_device(layer_results):
    refused, tried = layer_results("sm_90")["refused"]
    assert refused == tried
    assert len(tried) == 11


def test_comm_06_a_planned_step_waits_for_no_device(layer_results):
    """The child fails at the first read of a device's value; this is what its profiler saw."""
    assert layer_results("sm_90")["syncs"] == []


@pytest.mark.parametrize("option", OPTIONS)
def test_weights_are_described_once_a_step_and_not_once_a_launch(layer_results, option):
    """Six micro-batches of two layers: w13 and w2, and main_grad where gradients stay there."""
    returned, main_grad = layer_results("sm_90")["fields"][option]
    assert returned == [2, 2]
    assert main_grad == [4, 4]
