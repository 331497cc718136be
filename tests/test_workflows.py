"""The workflows are valid against GitHub's schema, and run what exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Validates against the copy of the schema in the package: no network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "gpu.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_valid(path):
    done = check(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_invalid_workflow_is_refused(tmp_path):
    path = tmp_path / "ci.yml"
    path.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert check(path).returncode == 1


def test_ci_installs_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(extras["optional-dependencies"])
    for name, need in (("Makefile", {"dev", "demo"}), (".ci/run", {"dev", "demo", "cuda"}),
                       (".github/workflows/ci.yml", {"dev", "demo", "cuda"})):  # fmt: skip
        found = re.findall(r"EXTRAS ?(?:\?=|=|:) ?([\w,]+)", (ROOT / name).read_text())
        assert found, name
        assert set(found[0].split(",")) == need <= known


@pytest.mark.parametrize(
    ("fails", "status", "calls"),
    [
        ("nothing", 0, ["setup dev,demo,cuda", "test dev,demo,cuda"]),
        ("setup dev,demo,cuda", 0, ["setup dev,demo,cuda", "test dev,demo"]),
        ("test dev,demo,cuda", 1, ["setup dev,demo,cuda", "test dev,demo,cuda"]),
    ],
)
def test_ci_goes_on_without_the_cuda_extra_but_not_without_tests(tmp_path, fails, status, calls):
    make, log = tmp_path / "make", tmp_path / "log"
    make.write_text(f'#!/bin/sh\necho "$1 $EXTRAS" >>{log}\n[ "$1 $EXTRAS" != "{fails}" ]\n')
    make.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", ROOT / ".ci/run"], env=env, capture_output=True, text=True)
    assert done.returncode == status
    assert log.read_text().splitlines() == calls
    assert ("going on without" in done.stdout) == (calls[1] == "test dev,demo")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_and_files_that_exist(path):
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for file in re.findall(r"\bperf/\w+\.(?:py|sh)", text):
        assert (ROOT / file).is_file(), file
