"""Kernels with one wrong line, to show that a test would notice it."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

TRITON_OPS = Path(__file__).resolve().parents[2] / "triton_ops"
_count = itertools.count()


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
