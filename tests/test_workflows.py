"""The workflows are valid against GitHub's schema, and run what exists."""

import re
import subprocess
import sys
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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_and_files_that_exist(path):
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for file in re.findall(r"\bperf/\w+\.(?:py|sh)", text):
        assert (ROOT / file).is_file(), file
