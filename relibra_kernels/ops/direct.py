"""The ops as plain functions, for the inside of an autograd node.

A custom op costs tens of microseconds of Python a call: dispatch keys, autograd, and bookkeeping of
mutated arguments. Inside a node of autograd none of that does anything, so the layer calls the body
that CUDA would run, checks and device switch included. Under a dispatch mode (fake tensors,
tracing, a logger) the registered op runs instead, so that the mode sees it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class DirectOps:
    """Namespace like ``torch.ops.relibra``; call only where autograd records nothing.

    Args:
        bodies: guarded body of each op, by its name in that namespace.

    Example:
        >>> ops = DirectOps({"double": lambda x: 2 * x})
        >>> ops.double(torch.ones(2)).tolist()
        [2.0, 2.0]
    """

    def __init__(self, bodies: Mapping[str, Callable[..., Any]]) -> None:
        for name, body in bodies.items():
            setattr(self, name, _direct(name, body))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def _direct(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body)
    def call(*args: Any, **options: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return getattr(torch.ops.relibra, name)(*args, **options)
        return body(*args, **options)

    return call
