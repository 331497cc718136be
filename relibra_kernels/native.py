"""The compiled parts, loaded at first use.

A part that does not load keeps the reason, and every use raises it; nothing falls back to slower
code in silence.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

_REMEDY = "pip install -e . --no-build-isolation"


def planner() -> Any:
    """The native planner core; its functions are described in `_planner.pyi`.

    Raises:
        RuntimeError: it is not built or does not load; names the reason and the remedy.
    """
    return _loaded("relibra_kernels._planner")


def replica_sync() -> Any:
    """Replica synchronisation on the CPU; its functions are described in `_replica_sync.pyi`.

    Raises:
        RuntimeError: it is not built or does not load; names the reason and the remedy.
    """
    return _loaded("relibra_kernels._replica_sync")


@cache
def load(name: str) -> tuple[Any, str]:
    """A compiled module by its full name.

    Returns:
        The module and "", or None and the reason why it does not load; decided once a process.

    Example:
        >>> load("relibra_kernels._no_such_part")
        (None, "No module named 'relibra_kernels._no_such_part'")
    """
    try:
        return importlib.import_module(name), ""
    except (ImportError, OSError) as error:
        return None, str(error)


def _loaded(name: str) -> Any:
    module, reason = load(name)
    if module is None:
        raise RuntimeError(f"{name} does not load: {reason}. Remedy: {_REMEDY}")
    return module
