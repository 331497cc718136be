"""Launches go to the device of their tensors, whatever device is the current one.

Triton launches on the current device and its current stream, and a custom op, unlike an op of torch
itself, does not switch. So every op that launches kernels gets a CUDA body that does, and that
refuses tensors of several devices.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

HOST_ARGUMENTS = frozenset({"slot_rows_n"})  # read by the host, on the CPU by contract
_NUMBERS = frozenset({int, float, bool, str, type(None)})

Result = TypeVar("Result")


def guarded(body: Callable[..., Result]) -> Callable[..., Result]:
    """The same body, run with its tensors' device as the current one.

    Args:
        body: of an op; takes tensors, lists of tensors and other values.
    """
    names = list(inspect.signature(body).parameters)
    by_device = [_counts(name) for name in names]

    @functools.wraps(body)
    def on_its_device(*args: Any, **options: Any) -> Result:
        values = (*args, *options.values()) if options else args
        flags = by_device if not options else [*by_device[: len(args)], *map(_counts, options)]
        index = _shared_index(values, flags)
        if index is None:
            found = common_device([*names[: len(args)], *options], (*args, *options.values()))
            index = -1 if found is None else found.index
        if index < 0 or index == torch.cuda.current_device():
            return body(*args, **options)
        with torch.cuda.device(torch.device("cuda", index)):
            return body(*args, **options)

    return on_its_device


def _counts(name: str) -> bool:
    return name not in HOST_ARGUMENTS


def _shared_index(values: Sequence[Any], by_device: Sequence[bool]) -> int | None:
    """Index of the CUDA device of all tensors, -1 for the CPU; None where it is not that simple.

    The usual case in two or three microseconds.
    """
    shared: int | None = None
    for value, counts in zip(values, by_device, strict=False):
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            index = value.get_device() if counts else shared
            if counts and not value.is_cpu and value.get_device() < 0:  # neither CPU nor CUDA
                return None
        elif kind is list:
            index = _shared_index(value, [counts] * len(value)) if value and counts else shared
            if index is None and value and counts:
                return None
        elif kind in _NUMBERS:
            continue
        else:
            return None
        if shared is None:
            shared = index
        elif index != shared:
            return None
    return shared


def common_device(names: Sequence[str], values: Sequence[Any]) -> torch.device | None:
    """The CUDA device of an op's tensors, None without one.

    Args:
        names: of the arguments.
        values: of the arguments.

    Raises:
        ValueError: tensors of several devices; names both arguments and both devices.

    Example:
        >>> common_device(["x_UD", "exact"], [torch.zeros(1), True]) is None
        True
        >>> common_device(["x_UD", "home_w13"], [torch.zeros(1), [torch.zeros(1, device="meta")]])
        Traceback (most recent call last):
        ValueError: home_w13: need all tensors of an op on one device, that of x_UD, cpu, got meta
    """
    first_name, first = "", None
    for name, value in zip(names, values, strict=True):
        for one in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(one, torch.Tensor) or name in HOST_ARGUMENTS:
                continue
            if first is None:
                first_name, first = name, one.device
            elif one.device != first:
                raise ValueError(
                    f"{name}: need all tensors of an op on one device, that of {first_name}, "
                    f"{first}, got {one.device}"
                )
    return first if first is not None and first.type == "cuda" else None


def guard_ops(modules: Sequence[ModuleType]) -> dict[str, Callable[..., Any]]:
    """Guards the CUDA bodies of all ops that modules define.

    An op that was registered for several devices at once runs its last body for all of them (torch
    looks it up when it is called), so the guard lets CPU tensors pass.

    Args:
        modules: of ops that launch kernels.

    Returns:
        The guarded body of every op, by the op's name without its namespace.
    """
    found = {}
    for module in modules:
        for op in list(vars(module).values()):
            if isinstance(op, CustomOpDef) and "cuda" in op._backend_fns:
                found[op._name] = guarded(op._init_fn)
                op.register_kernel("cuda")(found[op._name])
    return found
