"""Replica synchronisation under ThreadSanitizer, and seeded bugs that must be found."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "cuda/tests/protocol_test.cpp"
TSAN_EXIT = 66
# One compiled program for all of them.
pytestmark = pytest.mark.xdist_group("tsan")

# Seeded bug -> what finds it: ThreadSanitizer, an oracle on data, or an error record. Where several
# are named, the order of the threads decides.
FOUND_BY = {
    "relaxed_store": {"tsan"},
    "relaxed_load": {"tsan"},
    "missing_block_sync": {"tsan"},
    "ignored_generation": {"tsan", "record"},
    "abort_per_thread": {"oracle"},
    "missing_weight_wait": {"tsan", "oracle"},
    "missing_weight_credit": {"tsan", "oracle", "record"},
    "missing_grad_wait": {"tsan", "oracle"},
    "missing_grad_credit": {"tsan", "oracle", "record"},
    "missing_retire": {"record"},
    "missing_grad_retire": {"record"},
    "retire_before_read": {"tsan", "oracle", "record"},
    "early_retire": {"tsan", "oracle", "record"},
    "grad_retire_before_reduce": {"tsan", "oracle", "record"},
    "double_use": {"tsan", "oracle", "record"},
    "stale_hash": {"record"},
    "grad_slot_by_use": {"tsan", "oracle", "record"},
    "word_before_last_field": {"tsan", "oracle"},
    "grad_word_before_last_field": {"tsan", "oracle"},
    "unordered_main_grad": {"tsan", "oracle"},
}
NEEDS_SLOW_HOME = {"missing_grad_credit", "grad_retire_before_reduce", "unordered_main_grad"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command of the protocol test, built with ThreadSanitizer."""
    built = tmp_path_factory.mktemp("tsan") / "protocol_test"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=thread"]
    command = [compiler, *flags, f"-I{ROOT / 'cuda'}", str(SOURCE), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip(f"{compiler} has no ThreadSanitizer library")
    assert done.returncode == 0, done.stderr[:4000]
    for wrapper in ([], ["setarch", "-R"]):  # some kernels need address randomisation off
        listed = subprocess.run([*wrapper, str(built), "--list"], capture_output=True, text=True)
        if "unexpected memory mapping" not in listed.stderr:
            assert listed.stdout.split() == list(FOUND_BY)
            return [*wrapper, str(built)]
    pytest.skip(f"ThreadSanitizer does not run on this kernel: {listed.stderr.strip()[:200]}")


def run(program: list[str], **options: object) -> tuple[int, str]:
    """Exit status and output of one run."""
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    env = os.environ | {"TSAN_OPTIONS": f"halt_on_error=1 exitcode={TSAN_EXIT}"}
    command = [*program, *(word.replace("_", "-", 1) if word[0] == "-" else word for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    return done.returncode, done.stdout + done.stderr


def verdict(status: int, output: str) -> str:
    """Who found something; "" = nobody."""
    if status == TSAN_EXIT:
        assert "ThreadSanitizer: data race" in output, output[-2000:]
        return "tsan"
    found = re.search(r"caught by (oracle|record)", output)
    assert (status == 0) == (found is None), output[-2000:]
    return found[1] if found else ""


@pytest.mark.parametrize(
    "options", [{"seed": 1}, {"seed": 2}, {"seed": 3, "slow_home": 1}], ids=str
)
def test_the_protocol_is_clean(program: list[str], options: dict[str, int]) -> None:
    status, output = run(program, **options)
    assert status == 0, output[-4000:]
    assert output.split("\n")[0] == "28 uses, 4 PEs, 0 records, 0 oracle failures"


@pytest.mark.parametrize("mutant", FOUND_BY)
def test_a_seeded_bug_is_found(program: list[str], mutant: str) -> None:
    slow_home = int(mutant in NEEDS_SLOW_HOME)
    timeout_ms = 500 if FOUND_BY[mutant] == {"record"} else 5000
    for seed in range(1, 6):  # plans differ; most bugs show with the first
        options = {"mutant": mutant, "seed": seed, "slow_home": slow_home}
        found_by = verdict(*run(program, **options, timeout_ms=timeout_ms))
        if found_by:
            break
    print(f"{mutant}: found by {found_by or 'nobody'}, seed {seed}")  # noqa: T201
    assert found_by in FOUND_BY[mutant]


def records(output: str) -> dict[int, tuple[int, ...]]:
    """Rank -> (code, op, peer, slot, use) of its record."""
    pattern = r"code (\d+) rank (\d+) op (\d+) peer (-?\d+) slot (-?\d+) use (\d+)"
    found = [tuple(map(int, match)) for match in re.findall(pattern, output)]
    return {rank: (code, op, peer, slot, use) for code, rank, op, peer, slot, use in found}


def test_a_diverged_plan_ends_every_rank_and_names_the_one_that_differs(program: list[str]) -> None:
    status, output = run(program, fault="diverge", timeout_ms=20000)
    assert status == 1, output[-4000:]
    found = records(output)
    assert sorted(found) == [0, 1, 2, 3]
    finders = [record for record in found.values() if record[0] == 2]
    assert finders
    assert {(op, peer, use) for _, op, peer, _, use in finders} == {(2, 1, 7)}
    assert {record[0] for record in found.values()} <= {2, 3}


def test_a_rank_that_stops_ends_every_rank_by_the_time_out(program: list[str]) -> None:
    status, output = run(program, fault="stop", timeout_ms=500)
    assert status == 1, output[-4000:]
    found = records(output)
    assert sorted(found) == [0, 1, 2, 3]
    assert {record[0] for record in found.values()} <= {1, 3}
    late = [record for record in found.values() if record[0] == 1]
    assert late
    assert all(use >= 7 for *_, use in late)
    assert all(peer == 1 for _, op, peer, _, _ in late if op == 2), (
        "weights of the one that stopped"
    )
