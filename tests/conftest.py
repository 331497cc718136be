"""Set-up of every test process; the environment is set before torch and Triton are imported."""

import os
import random
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; 0 for tests on a GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms on a GPU

import numpy as np
import pytest
import torch

try:
    import hypothesis
except ImportError:  # a GPU machine without the development tools
    hypothesis = None

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # torch.empty is full of NaN
torch.set_num_threads(1)  # several test processes and ranks share the cores

if os.environ["TRITON_INTERPRET"] == "1":
    from relibra_kernels.testing import bf16_interpreter

    bf16_interpreter.install()

if hypothesis is not None:
    hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
    hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

ROOT = Path(__file__).resolve().parents[1]

collect_ignore = ["helpers/native_asan.py"]  # a plugin of a process with AddressSanitizer


def pytest_addoption(parser: pytest.Parser) -> None:
    """``-k mutant --list-mutants``: what killed each mutant."""
    parser.addoption("--list-mutants", action="store_true", help="print every killed mutant")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """One line a mutant, where asked for."""
    if not config.getoption("--list-mutants"):
        return
    import kernel_mutants

    for kill in kernel_mutants.KILLS:
        terminalreporter.write_line(f"{kill.name!r} killed by {kill.test}: {kill.how[:100]}")
    terminalreporter.write_line(f"{len(kernel_mutants.KILLS)} mutants killed")


@pytest.fixture(scope="session")
def project_root() -> Path:
    """Top folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of traces and cases beside the checkout; tests that need it are skipped without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared beside the checkout, which is missing")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed does not hang on the tests before it in its process."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)


def missing_hardware(item: pytest.Item) -> str | None:
    """Why a marked test cannot run here; None if it can."""
    needed = {"gpu": 1, "nvshmem": 2, "multi_gpu": 2}
    count = max((n for name, n in needed.items() if item.get_closest_marker(name)), default=0)
    if count == 0:
        return None
    if torch.cuda.device_count() < count:
        return f"needs {count} CUDA GPU(s), found {torch.cuda.device_count()}"
    if os.environ["TRITON_INTERPRET"] == "1":
        return "needs kernels on the GPU: set TRITON_INTERPRET=0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests whose hardware is not here."""
    for item in items:
        if reason := missing_hardware(item):
            item.add_marker(pytest.mark.skip(reason=reason))
