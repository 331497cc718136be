"""Checks of arguments, shared by everything above: one message shape, "name: need ..., got ...".

A wrong kind of object or dtype raises TypeError; a wrong size, device or value raises ValueError.
The checks read metadata only: no data pass, no device sync. `check_int_array` is the exception;
it looks at every number once and so is meant for host data.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

Choice = TypeVar("Choice")


def describe(value: object) -> str:
    """Short text of a value for an error message.

    Args:
        value: anything.

    Returns:
        Kind, dtype, shape and device of tensors and arrays; a clipped `repr` of the rest.

    Example:
        >>> describe(torch.zeros(2, 3))
        'torch.float32 tensor [2, 3] on cpu'
        >>> describe(np.zeros(4, np.int8))
        'int8 array [4]'
        >>> describe("x")
        "str 'x'"
    """
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} tensor {list(value.shape)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_tensor(
    name: str,
    value: object,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    ndim: int | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | str | None = None,
    contiguous: bool = False,
) -> torch.Tensor:
    """Checks kind, dtype, shape and device of a tensor.

    Args:
        name: argument name for the message.
        value: the argument.
        dtype: the dtype, or the dtypes, accepted; None accepts any.
        ndim: number of dimensions; None accepts any.
        shape: sizes, None where any size is right; decides `ndim` too.
        device: the device needed; a device without an index accepts every index.
        contiguous: whether the tensor must be contiguous.

    Returns:
        `value`, known to be a tensor.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another number of dimensions, size, device or memory order.

    Example:
        >>> check_tensor("x_TD", torch.zeros(2, 3), shape=(None, 3)).shape
        torch.Size([2, 3])
        >>> check_tensor("ids_TK", torch.zeros(2), dtype=torch.int32)
        Traceback (most recent call last):
        TypeError: ids_TK: need dtype torch.int32, got torch.float32 tensor [2] on cpu
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: need a torch.Tensor, got {describe(value)}")
    if dtype is not None:
        found = value.dtype
        if found not in dtype if isinstance(dtype, tuple) else found != dtype:
            accepted = dtype if isinstance(dtype, tuple) else (dtype,)
            need = " or ".join(str(one) for one in accepted)
            raise TypeError(f"{name}: need dtype {need}, got {describe(value)}")
    if shape is not None or ndim is not None:
        _check_sizes(name, value, value.shape, ndim, shape)
    if device is not None and value.device != device:  # seldom, or a device without an index
        need_device = torch.device(device)
        # str() of a device without an index has no colon; then every index is right.
        where = str(value.device) if ":" in str(need_device) else value.device.type
        if where != str(need_device):
            raise ValueError(f"{name}: need device {need_device}, got {describe(value)}")
    if contiguous and not value.is_contiguous():
        raise ValueError(
            f"{name}: need contiguous memory, got strides {list(value.stride())} for "
            f"{describe(value)}; call .contiguous() first"
        )
    return value


def check_int_array(
    name: str,
    value: object,
    *,
    ndim: int | None = None,
    shape: Sequence[int | None] | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
    dtype: npt.DTypeLike = np.int32,
) -> npt.NDArray[np.signedinteger]:
    """Converts host integers to one signed dtype, only where no value can change.

    Args:
        name: argument name for the message.
        value: array, CPU tensor or nested list of integers of any width. Booleans and floats,
            whole or not, are refused.
        ndim: number of dimensions; None accepts any.
        shape: sizes, None where any size is right.
        minimum: smallest value accepted; None is the smallest of `dtype`.
        maximum: largest value accepted; None is the largest of `dtype`.
        dtype: signed integer dtype of the result.

    Returns:
        Array of `dtype`, C-contiguous; `value` itself where it already is one.

    Raises:
        TypeError: the elements are no integers.
        ValueError: another shape, or a value out of range; names the first place.

    Example:
        >>> check_int_array("rank_to_node", [0, 0, 1], minimum=0)
        array([0, 0, 1], dtype=int32)
        >>> check_int_array("rows_E", [3, -2], minimum=0)
        Traceback (most recent call last):
        ValueError: rows_E: need values in 0..2147483647, got -2 at [1]
    """
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:  # NumPy has none
            raise TypeError(f"{name}: need integers, got {describe(value)}")
        value = value.detach()
        value = (value if value.is_cpu else value.cpu()).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: need a rectangular array of integers, got {error}") from None
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(dtype)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: need integers, got {_non_integer(array)}")
    _check_sizes(name, array, array.shape, ndim, shape)
    least, most = _limits(np.dtype(dtype))
    low = least if minimum is None else minimum
    high = most if maximum is None else maximum
    own_least, own_most = _limits(array.dtype)  # no pass over what the dtype itself rules out
    too_low = low > own_least and array.size and int(array.min()) < low
    if too_low or (high < own_most and array.size and int(array.max()) > high):
        place = np.argwhere((array < low) | (array > high))[0]
        found = int(array[tuple(place)])
        where = f" at [{', '.join(str(i) for i in place)}]" if len(place) else ""
        raise ValueError(f"{name}: need values in {low}..{high}, got {found}{where}")
    result: npt.NDArray[np.signedinteger] = np.ascontiguousarray(array, dtype=dtype)
    return result.reshape(array.shape)  # ascontiguousarray makes a scalar one-dimensional


def check_int(
    name: str, value: object, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Checks one integer (Python or NumPy, no boolean) and its range.

    Args:
        name: argument name for the message.
        value: the argument.
        minimum: smallest value accepted, if any.
        maximum: largest value accepted, if any.

    Returns:
        The value as a Python int.

    Raises:
        TypeError: no integer.
        ValueError: out of range.

    Example:
        >>> check_int("top_k", 0, minimum=1)
        Traceback (most recent call last):
        ValueError: top_k: need at least 1, got 0
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: need an integer, got {describe(value)}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: need an integer, got {describe(value)}") from None
    if minimum is not None and maximum is not None and not minimum <= number <= maximum:
        raise ValueError(f"{name}: need {minimum} to {maximum}, got {number}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}: need at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}: need at most {maximum}, got {number}")
    return number


def check_choice(name: str, value: Choice, options: Collection[Choice]) -> Choice:
    """Checks that a value is one of a few.

    Args:
        name: argument name for the message.
        value: the argument.
        options: what is accepted, in the order in which the message lists it.

    Returns:
        `value`.

    Raises:
        ValueError: another value.

    Example:
        >>> check_choice("layout", "zigzag", ("zigzag", "contiguous"))
        'zigzag'
        >>> check_choice("layout", "ring", ("zigzag", "contiguous"))
        Traceback (most recent call last):
        ValueError: layout: need one of 'zigzag', 'contiguous', got 'ring'
    """
    if value not in tuple(options):  # a value that cannot be hashed is none of them either
        need = ", ".join(repr(option) for option in options)
        raise ValueError(f"{name}: need one of {need}, got {value!r}")
    return value


def check_process(what: str, process: int) -> None:
    """Checks that the caller is no fork of the process that made something.

    Threads and connections stay behind in that process: a fork would wait for them for ever.

    Args:
        what: names it in the message.
        process: `os.getpid` of the process that made it.

    Raises:
        RuntimeError: another process; names both.

    Example:
        >>> check_process("the runtime", os.getpid())
    """
    here = os.getpid()
    if here != process:
        raise RuntimeError(
            f"{what}: need process {process}, which made it and runs its threads, got process "
            f"{here}, a fork of it; make a new one there"
        )


def _check_sizes(
    name: str,
    value: object,
    got: Sequence[int],
    ndim: int | None,
    shape: Sequence[int | None] | None,
) -> None:
    """Compares the sizes of a tensor or array with what is needed."""
    if shape is not None and got != shape and not _fits(got, shape):
        need = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: need shape [{need}], got {describe(value)}")
    if ndim is not None and len(got) != ndim:
        raise ValueError(f"{name}: need {ndim} dimensions, got {describe(value)}")


def _fits(got: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(got) != len(shape):
        return False
    for need, size in zip(shape, got, strict=True):  # noqa: SIM110  called dozens of times a layer
        if need is not None and need != size:
            return False
    return True


@functools.cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Smallest and largest integer of a dtype."""
    found = np.iinfo(dtype.name)
    return int(found.min), int(found.max)


def _non_integer(array: npt.NDArray[np.generic]) -> str:
    """What stands where integers should: NaN and negative infinity by name, else the dtype."""
    text = describe(array)
    if array.dtype.kind == "f" and array.size and not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0]
        return f"{text} with {array[tuple(place)]} at [{', '.join(str(i) for i in place)}]"
    return text
