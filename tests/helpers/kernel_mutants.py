"""Kernels with one wrong line, to show that a test would notice it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

TRITON_OPS = Path(__file__).resolve().parents[2] / "triton_ops"
_count = itertools.count()


@dataclasses.dataclass(frozen=True)
class Kill:
    """A mutant that a test noticed.

    Attributes:
        name: of the mutant.
        test: file and name of the test.
        how: first line of what it said.
    """

    name: str
    test: str
    how: str


KILLS: list[Kill] = []  # of this process; `--list-mutants` prints them


@contextlib.contextmanager
def killed(
    name: str,
    errors: type[Exception] | tuple[type[Exception], ...] = AssertionError,
    match: str | None = None,
) -> Iterator[None]:
    """The body must fail, since it runs a mutant; the kill is noted.

    Args:
        name: of the mutant.
        errors: how it may fail.
        match: pattern that the message has.
    """
    with pytest.raises(errors, match=match) as caught:
        yield
    place = os.environ.get("PYTEST_CURRENT_TEST", "").split("[")[0].removesuffix(" (call)")
    lines = [line.strip() for line in str(caught.value).splitlines() if line.strip()]
    said = lines[0] if lines else type(caught.value).__name__
    KILLS.append(Kill(name, place, said))


def mutated(name: str, before: str, after: str, folder: Path) -> ModuleType:
    """A second copy of a module of `triton_ops` in which one piece of source text is replaced.

    Args:
        name: of the module.
        before: text that occurs in it exactly once.
        after: what takes its place.
        folder: where the copy is written; Triton reads the source of its kernels again.
    """
    source = (TRITON_OPS / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(before) == 1, f"{before!r} occurs {source.count(before)} times in {name}.py"
    path = folder / f"mutant_{next(_count)}_{name}.py"
    path.write_text(source.replace(before, after), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
