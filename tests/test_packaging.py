"""The package builds without a GPU or nvcc, holds what it must, and says what it left out.

Objects that `make setup` has made of the same bytes are not made again: see `reuse_objects`.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pybind11
import pytest
import reuse_objects

# The tests share one build, so they stay in one test process; a whole build takes minutes on a
# busy machine.
pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (
    ".*",
    "build",
    "dist",
    "*.egg-info",
    "*.so",
    "*.fatbin",
    "__pycache__",
    "_build_info.json",
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def build_environment(**options: str) -> dict[str, str]:
    """Environment without a GPU, without nvcc (CUDACXX names nothing) and without our options."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RELIBRA_")}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "CUDACXX": "no-nvcc-here"} | options


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs a command to its end; its whole output is in the message if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env or build_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with its links and without anything built."""
    copy = tmp_path_factory.mktemp("packaging") / "project"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return copy


@pytest.fixture(scope="module")
def sdist(project: Path) -> Path:
    """Source archive made from the copy."""
    target = project.parent / "sdist"
    code = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, str(target), cwd=project)
    (archive,) = target.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel_and_log(project: Path, sdist: Path) -> tuple[Path, str]:
    """Wheel made from the source archive alone, and what the build printed."""
    target = project.parent / "wheel"
    options = ("--no-build-isolation", "--no-deps", "--no-cache-dir")
    command = (*PIP, "wheel", "-v", *options, "-w", str(target), str(sdist))
    launcher = (sys.executable, reuse_objects.__file__, str(ROOT / "build/native"))
    env = build_environment(CMAKE_CXX_COMPILER_LAUNCHER=";".join(map(str, launcher)))
    log = run(*command, cwd=project.parent, env=env)
    (wheel,) = target.iterdir()
    return wheel, log


@pytest.fixture(scope="module")
def installed(project: Path, wheel_and_log: tuple[Path, str]) -> Path:
    """Folder with the wheel installed."""
    target = project.parent / "installed"
    wheel = str(wheel_and_log[0])
    run(*PIP, "install", "-qq", "--no-deps", "--target", str(target), wheel, cwd=project.parent)
    return target


def python_modules(root: Path) -> set[str]:
    """Files of both packages as the wheel must hold them, from their real folders."""
    found = set()
    for folder, name in [
        ("python/relibra", "relibra"),
        ("relibra_kernels", "relibra_kernels"),
        ("triton_ops", "relibra_kernels/triton_ops"),
    ]:
        for path in (root / folder).rglob("*"):
            if path.suffix in {".py", ".pyi"} or path.name == "py.typed":
                found.add(f"{name}/{path.relative_to(root / folder).as_posix()}")
    return found


def missing_init_files() -> list[str]:
    """Folders with Python files and no `__init__.py`; setuptools would leave them out silently."""
    folders = {
        path.parent
        for top in ("python/relibra", "relibra_kernels", "triton_ops")
        for path in (ROOT / top).rglob("*.py")
    }
    return sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file())


def test_links_are_relative() -> None:
    links = {"python/relibra_kernels": "../relibra_kernels"}
    links["relibra_kernels/triton_ops"] = "../triton_ops"
    for link, target in links.items():
        assert (ROOT / link).is_symlink(), f"{link} must be a link to {target}"
        assert os.readlink(ROOT / link) == target


def test_every_folder_is_a_package() -> None:
    assert missing_init_files() == []


def test_source_archive_is_complete(project: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    native = [path for path in (project / "cuda").rglob("*") if path.is_file()]
    needed = {f"python/{name}" for name in python_modules(project)}
    needed |= {path.relative_to(project).as_posix() for path in native}
    needed |= {"CMakeLists.txt", "pyproject.toml", "setup.py", "LICENSE", "README.md"}
    assert needed - files.keys() == set()
    assert all(member.isfile() or member.isdir() for member in files.values()), "no links"
    assert [name for name in files if name.endswith((".so", ".pyc"))] == []


def test_wheel_holds_both_packages_and_nothing_else(
    project: Path, wheel_and_log: tuple[Path, str]
) -> None:
    with zipfile.ZipFile(wheel_and_log[0]) as archive:
        files = set(archive.namelist())
        (points,) = [name for name in files if name.endswith("entry_points.txt")]
        assert "relibra = relibra.cli:main" in archive.read(points).decode()
    assert python_modules(project) - files == set()
    libraries = [name for name in files if name.endswith(".so")]
    for part in ("_planner", "_replica_sync"):
        assert [name for name in libraries if name.startswith(f"relibra_kernels/{part}.")]
    tops = {name.split("/")[0] for name in files}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        "relibra",
        "relibra_kernels",
    }


def test_comm_07_wheel_without_nvcc_says_what_was_left_out(
    wheel_and_log: tuple[Path, str], installed: Path
) -> None:
    info = json.loads((installed / "relibra_kernels" / "_build_info.json").read_text())
    assert info["cuda_left_out"]
    assert info["nvshmem_left_out"]
    (line,) = {text.strip() for text in wheel_and_log[1].splitlines() if "left out:" in text}
    assert info["cuda_left_out"] in line
    assert info["nvshmem_left_out"] in line


def test_comm_07_installed_wheel_imports_from_elsewhere(installed: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import relibra, relibra_kernels.triton_ops, relibra_kernels._planner\n"
        "import relibra_kernels._replica_sync\n"
        "print([module.__file__ for name, module in sys.modules.items()"
        " if name.partition('.')[0] in ('relibra', 'relibra_kernels')])\n"
    )
    printed = run(sys.executable, "-I", "-c", code, str(installed), cwd=Path("/"))
    files = ast.literal_eval(printed.splitlines()[-1])
    assert len(files) >= 4
    assert all(Path(file).is_relative_to(installed) for file in files)


def test_wheel_from_the_checkout_follows_the_links(project: Path) -> None:
    """The Python half of a wheel built without a source archive in between."""
    target = project.parent / "lib"
    run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(target), cwd=project)
    built = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert python_modules(project) - built == set()


@pytest.mark.parametrize("option", ["RELIBRA_CUDA", "RELIBRA_NVSHMEM"])
def test_comm_07_a_part_that_is_off_says_so(project: Path, tmp_path: Path, option: str) -> None:
    configure = ("cmake", "-S", str(project), "-B", str(tmp_path), f"-D{option}=OFF")
    paths = f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"
    run(sys.executable, "-m", *configure, *paths, cwd=project)
    info = json.loads((tmp_path / "_build_info.json").read_text())
    assert info[f"{option.removeprefix('RELIBRA_').lower()}_left_out"] == f"{option}=OFF"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"RELIBRA_CUDA": "ON"}, "no CUDA compiler (nvcc) on PATH"),
        ({"RELIBRA_NVSHMEM": "ON"}, "Remedy: build with RELIBRA_NVSHMEM=AUTO"),
        ({"RELIBRA_CUDA": "maybe"}, "need AUTO, ON or OFF, got 'maybe'"),
        ({"CXX": "no-such-compiler"}, "no-such-compiler"),
    ],
    ids=["cuda-on", "nvshmem-on", "bad-option", "no-compiler"],
)
def test_an_impossible_build_names_the_remedy(
    project: Path, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(tmp_path)]
    done = subprocess.run(
        [*command, "--build-lib", str(tmp_path / "lib")],
        cwd=project,
        env=build_environment(**options),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).split())
