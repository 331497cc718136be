"""The launcher that packaging compiles with: it copies an object only where all bytes are equal."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import reuse_objects

COMPILER = shutil.which("c++") or shutil.which("g++")
MARK = b"an object of the other build"
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH")


def command(root: Path) -> list[str]:
    """As CMake writes it."""
    source = root / "cuda/one.cpp"
    return [str(COMPILER), f"-I{root}/cuda", "-O1", "-o", "one.o", "-c", str(source)]


def tree(root: Path) -> Path:
    """Sources and a build folder."""
    build = root / "build"
    (root / "cuda").mkdir(parents=True)
    build.mkdir()
    (root / "cuda/one.cpp").write_text('#include "two.hpp"\nint one() { return kTwo; }\n')
    (root / "cuda/two.hpp").write_text("constexpr int kTwo = 2;\n")
    (build / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={root}\n")
    return build


@pytest.fixture
def builds(tmp_path: Path) -> tuple[Path, Path]:
    """A build with an object that tells where it is from, and one of a copy of the sources."""
    known = tree(tmp_path / "known")
    entry = {"command": " ".join(command(known.parent)), "directory": str(known)}
    (known / "compile_commands.json").write_text(json.dumps([entry]))
    (known / "one.o").write_bytes(MARK)
    return known, tree(tmp_path / "copy")


def compile_copy(known: Path, build: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = command(build.parent)
    program = [sys.executable, reuse_objects.__file__, str(known), words[0], *more, *words[1:]]
    return subprocess.run(program, cwd=build, capture_output=True, text=True)


def test_equal_bytes_are_not_compiled_again(builds):
    known, build = builds
    assert compile_copy(known, build, "-MD", "-MT", "one.o", "-MF", "one.d").returncode == 0
    assert (build / "one.o").read_bytes() == MARK


@pytest.mark.parametrize(
    "what", ["header", "source", "option", "old object", "no object", "no build"]
)
def test_anything_else_is_compiled(builds, what):
    known, build = builds
    more = ("-g",) if what == "option" else ()
    if what == "header":
        (build.parent / "cuda/two.hpp").write_text("constexpr int kTwo = 3;\n")
    if what == "source":
        (known.parent / "cuda/one.cpp").write_text("int one() { return 1; }\n")
    if what == "old object":
        later = (known / "one.o").stat().st_mtime + 10
        subprocess.run(["touch", "-d", f"@{later}", known.parent / "cuda/two.hpp"], check=True)
    if what == "no object":
        (known / "one.o").unlink()
    if what == "no build":
        shutil.rmtree(known)
    assert compile_copy(known, build, *more).returncode == 0
    assert (build / "one.o").read_bytes()[:4] == b"\x7fELF"


def test_a_header_that_is_missing_is_an_error(builds):
    known, build = builds
    (build.parent / "cuda/two.hpp").unlink()
    done = compile_copy(known, build)
    assert done.returncode != 0
    assert "two.hpp" in done.stderr
