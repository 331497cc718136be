"""What the README shows is run: its Python block, and its `relibra` commands."""

import copy
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "perf"))  # scripts, not a package

import aot_cases
import aot_table

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BASH_BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.timeout(300)  # 17 s with nine other busy processes on a core
@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_python_blocks_run_and_print_what_is_said(number, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(PYTHON_BLOCKS[number])
    done = subprocess.run(
        [sys.executable, script],
        check=True,
        cwd=tmp_path,
        timeout=280,
        capture_output=True,
        text=True,
    )
    after = TEXT.split(PYTHON_BLOCKS[number])[1]
    printed = re.match(r"```\s+Prints `([^`]+)`", after)
    assert printed, "say after the block what it prints"
    assert printed[1] in done.stdout


@pytest.mark.timeout(600)  # 108 s there
@pytest.mark.parametrize("number", range(len(BASH_BLOCKS)))
def test_commands_run_one_after_the_other(number, tmp_path):
    for line in BASH_BLOCKS[number].splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "relibra"
        program = [sys.executable, "-m", "relibra", *words[1:]]
        subprocess.run(program, check=True, cwd=tmp_path, timeout=280, capture_output=True)


def test_pictures_and_linked_files_are_there():
    linked = re.findall(r"\]\(([^):]+)\)", TEXT)
    pictures = [ROOT / name for name in linked if name.endswith(".png")]
    assert pictures
    assert all((ROOT / name).is_file() for name in linked)
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
    assert all(
        picture.relative_to(ROOT).as_posix() in TEXT.split("--plot ")[1] for picture in pictures
    )


def test_readme_shows_commands_and_a_quick_start():
    assert PYTHON_BLOCKS
    assert BASH_BLOCKS
    assert "make demo" in TEXT
    assert "make test" in TEXT
    assert max(len(block.splitlines()) for block in PYTHON_BLOCKS) <= 30


def test_the_table_of_kernels_is_what_the_gate_stored():
    """Remedy: python perf/aot_table.py --write"""
    results = json.loads(aot_table.RESULTS.read_text())
    block = aot_table.BLOCK.search(TEXT)
    assert block is not None
    assert block[0] == block[1] + aot_table.table(results) + block[2]
    changed = copy.deepcopy(results)
    row = next(one for one in changed[aot_table.REQUIRED] if not one["option"])
    row["registers"] += 1000
    assert aot_table.table(changed) not in TEXT


def test_every_kernel_of_the_gate_has_a_row_that_claims_no_more_than_was_run():
    results = json.loads(aot_table.RESULTS.read_text())
    assert {row["kernel"] for row in results[aot_table.REQUIRED]} == set(aot_table.KERNELS)
    measured = list((ROOT / "perf/results").glob("**/gpu_steps.txt"))
    block = aot_table.BLOCK.search(TEXT)
    assert block is not None
    rows = [line for line in block[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(aot_table.KERNELS) + len(aot_table.OTHERS)
    assert measured or all(row.endswith("| compiled, not run |") for row in rows)


def test_every_triton_kernel_is_in_the_table():
    launched = {kernel.function for kernel in aot_cases.KERNELS.values()}
    launched |= {name for functions in aot_table.OTHERS.values() for name in functions}
    sources = (ROOT / "triton_ops").glob("*.py")
    written = {
        name
        for path in sources
        for name in re.findall(r"^def (_\w+_kernel)", path.read_text(), re.M)
    }
    assert launched == written
