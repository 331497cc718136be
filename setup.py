"""Builds the native parts with CMake and Ninja; everything else is in pyproject.toml.

Options are environment variables, read at build time only (the same names work as CMake options):

* ``RELIBRA_CUDA``, ``RELIBRA_NVSHMEM``: ``AUTO`` (default), ``ON`` or ``OFF``.
* ``RELIBRA_CUDA_ARCHS``: a CMake list of architectures, such as ``90a-real;100-real``.

No GPU is queried and torch is not needed. What was left out, and why, is printed and stored in
``relibra_kernels/_build_info.json``.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = Path(__file__).parent.resolve()
SOURCE_ROOT = ROOT / "python"
OPTION_DEFAULTS = {
    "RELIBRA_CUDA": "AUTO",
    "RELIBRA_NVSHMEM": "AUTO",
    "RELIBRA_CUDA_ARCHS": "80-real;90a-real;100-real;100-virtual",
}


def find_tool(name: str) -> str:
    """Path of a build tool: the Python package of that name first, then PATH."""
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for candidate in (Path(folder) / "data" / "bin" / name, Path(folder) / "bin" / name):
            if candidate.is_file():
                return str(candidate)
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.is_file() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} not found. Remedy: pip install {name}")
    return found


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake project in place of compiling an Extension."""

    def run(self) -> None:
        """Remembers whether the source tree is the destination (setuptools clears the flag)."""
        self.into_source_tree = bool(self.inplace) or getattr(self, "editable_mode", False)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Builds all native libraries; `ext` only names the place where they go."""
        import pybind11

        # In place: a build folder that stays, so that the next build compiles only what changed.
        kept = ROOT / "build" / "native"
        build = kept if self.into_source_tree else Path(self.build_temp).resolve() / "native"
        build.mkdir(parents=True, exist_ok=True)
        cmake = find_tool("cmake")
        options = {
            name: os.environ.get(name) or default for name, default in OPTION_DEFAULTS.items()
        }
        options |= {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        configure = [cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *definitions]
        configured = subprocess.run(configure, stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(configured.stderr)
        if configured.returncode != 0:
            # Said again at the end, where it is read: the remedy is in CMake's message.
            raise ExecError(f"cmake could not configure the build:\n{configured.stderr}")
        subprocess.check_call([cmake, "--build", str(build)])
        # An editable install copies only the declared extension out of the build folder and stops
        # when it is not there, so the libraries go to both places.
        package_parent = Path(self.get_ext_fullpath(ext.name)).resolve().parent.parent
        for prefix in {package_parent, SOURCE_ROOT} if self.into_source_tree else {package_parent}:
            subprocess.check_call([cmake, "--install", str(build), "--prefix", str(prefix)])


setup(
    ext_modules=[Extension("relibra_kernels._planner", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
