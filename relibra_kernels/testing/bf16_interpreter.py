"""Right bfloat16 arithmetic in Triton's interpreter, for tests.

The interpreter keeps a bf16 value as its 16 bits and computes on them as on integers. Here every
operation sees fp32 values instead, and what it returns is rounded to the nearest bf16, ties to
even, as a GPU does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

CHECKED_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
NAN_BITS = np.uint16(0x7FC0)
ELEMENTWISE = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf")
REDUCTIONS = (("ReduceOps", "sum"), ("ReduceOps", "min_max"), ("ScanOps", "cumsum"))


def bits_to_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Values of bf16 bit patterns, exact.

    Args:
        bits: any shape.

    Returns:
        fp32, same shape.

    Example:
        >>> bits_to_values(np.array([0x3F80, 0xC040], np.uint16)).tolist()
        [1.0, -3.0]
    """
    return (bits.astype(np.uint32) << 16).view(np.float32)


def values_to_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Nearest bf16 of fp32 values, ties to even; every NaN becomes the same one.

    Args:
        values: any shape.

    Returns:
        Bit patterns, same shape.

    Example:
        >>> [hex(b) for b in values_to_bits(np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8]))]
        ['0x3f80', '0x3f80', '0x3f82']
    """
    fp32 = np.asarray(values, dtype=np.float32, order="C")
    bits = fp32.view(np.uint32)
    odd = (bits >> 16) & 1
    with np.errstate(over="ignore"):  # only a NaN's bits can wrap; they are replaced
        nearest = ((bits + (0x7FFF + odd)) >> 16).astype(np.uint16)
    return np.where(np.isnan(fp32), NAN_BITS, nearest)


def install(version: str = triton.__version__) -> None:
    """Patches the interpreter of this process; a second call changes nothing.

    Args:
        version: of Triton; the patch replaces private functions, so it must know them.

    Raises:
        RuntimeError: a version that it was not checked with.
    """
    if not re.match("|".join(rf"{re.escape(known)}\b" for known in CHECKED_VERSIONS), version):
        raise RuntimeError(
            f"Triton: need {CHECKED_VERSIONS[0]} to {CHECKED_VERSIONS[-1]} for bf16 in the "
            f"interpreter, got {version}; check the patch with it, then add it to CHECKED_VERSIONS"
        )
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "has_right_bf16", False):
        return
    for name in ELEMENTWISE:
        setattr(builder, name, _computed_in_fp32(getattr(builder, name)))
    builder.create_dot = _dot_of_values(builder.create_dot)
    builder.cast_impl = _rounding_cast(builder.cast_impl)
    builder.create_fp_to_fp = _rounding_fp_cast(builder.create_fp_to_fp, builder.cast_impl)
    builder.get_bf16 = _constant
    for class_name, name in REDUCTIONS:
        owner = getattr(interpreter, class_name)
        setattr(owner, name, _reduced_in_fp32(getattr(owner, name)))
    builder.has_right_bf16 = True


def _is_bf16(handle: Any) -> bool:
    is_handle = isinstance(handle, interpreter.TensorHandle)
    return is_handle and handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _widened(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    return interpreter.TensorHandle(bits_to_values(handle.data), tl.float32)


def _narrowed(handle: Any) -> Any:
    if handle.data.dtype != np.float32:
        return handle  # a comparison
    return interpreter.TensorHandle(values_to_bits(handle.data), tl.bfloat16)


def _constant(self: Any, value: float) -> Any:
    return interpreter.TensorHandle(values_to_bits(np.array([value], np.float32)), tl.bfloat16)


def _computed_in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, *operands: Any, **options: Any) -> Any:
        if not any(_is_bf16(operand) for operand in operands):
            return original(self, *operands, **options)
        wide = [_widened(operand) for operand in operands]
        return _narrowed(original(self, *wide, **options))

    return compute


def _dot_of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, acc: Any, *options: Any, **named: Any) -> Any:
        out = original(self, _widened(a), _widened(b), _widened(acc), *options, **named)
        return _narrowed(out) if _is_bf16(acc) else out

    return dot


def _rounding_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, source: Any, target: Any) -> Any:
        if _is_bf16(source) and target.scalar != tl.bfloat16:
            source = _widened(source)
            return source if target.scalar == tl.float32 else original(self, source, target)
        if target.scalar == tl.bfloat16 and not _is_bf16(source):
            return interpreter.TensorHandle(values_to_bits(source.data), tl.bfloat16)
        return original(self, source, target)

    return cast


def _rounding_fp_cast(original: Callable[..., Any], cast: Callable[..., Any]) -> Callable[..., Any]:
    def fp_cast(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        touches_bf16 = tl.bfloat16 in (source.dtype.scalar, target.scalar)
        if touches_bf16 and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return cast(self, source, target)
        return original(self, source, target, rounding)

    return fp_cast


def _reduced_in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_type(x: Any, handle: Any) -> Any:
        scalar = handle.dtype.scalar
        kind = tl.block_type(scalar, x.type.shape) if x.type.is_block() else scalar
        return tl.core.tensor(handle, kind)

    def reduce(self: Any, x: Any, *options: Any, **named: Any) -> Any:
        first = x[0] if isinstance(x, tuple) else x
        if not _is_bf16(first.handle):
            return original(self, x, *options, **named)
        result = original(self, as_type(first, _widened(first.handle)), *options, **named)
        if isinstance(result, (list, tuple)):
            return type(result)(as_type(part, _narrowed(part.handle)) for part in result)
        return as_type(result, _narrowed(result.handle))

    return reduce
