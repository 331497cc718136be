"""What a launch passes for matrices and weights: tensor descriptors (TMA), or pointers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from relibra_kernels.weights import WeightSet

ALIGN_BYTES = 16  # of a descriptor's base and strides
MAX_STRIDE_BYTES = 1 << 40  # what a descriptor can hold
INTERPRETER_PROGRAMS = 3  # several, so that tests see tiles shared among programs


@functools.cache
def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 3 for the CPU, where the interpreter runs programs.

    Args:
        device: where a kernel runs.
    """
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def fits_descriptor(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be described: unit last stride, all else in steps of 16 bytes.

    Args:
        tensor: any strided tensor with elements.

    Example:
        >>> fits_descriptor(torch.zeros(4, 64)), fits_descriptor(torch.zeros(4, 65))
        (True, False)
    """
    step = ALIGN_BYTES // tensor.element_size()
    outer = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return (
        tensor.stride(-1) == 1
        and all(s > 0 and s % step == 0 for s in outer)
        and tensor.data_ptr() % ALIGN_BYTES == 0
    )


def matrix_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Blocks ``[rows, columns]`` of a matrix; what lies outside loads as zeros and is not stored.

    Args:
        matrix: ``[R, N]``, contiguous columns; the row stride is a multiple of 16 bytes.
        rows: rows of a block.
        columns: columns of a block.
    """
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def weight_descriptor(view: torch.Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Blocks of one family of weights in storage order, None where a descriptor cannot be.

    Args:
        view: logical ``[slots, halves, N, K]``, see ``WeightSet.view``; where the rows are the
            contiguous dimension (transposed storage) blocks are ``[1, 1, columns, rows]``.
        rows: rows of a block.
        columns: columns of a block.
    """
    block = [1, 1, rows, columns]
    if view.stride(-1) != 1:
        view, block = view.transpose(2, 3), [1, 1, columns, rows]
    if not fits_descriptor(view):
        return None
    step = ALIGN_BYTES // view.element_size()
    # The stride of a dimension of one entry is never used, but the hardware checks it.
    strides = [s if n > 1 else step for s, n in zip(view.stride(), view.shape, strict=True)]
    strides[-1] = 1
    return TensorDescriptor(view, list(view.shape), strides, block)


class WeightOperands(NamedTuple):
    """Launch arguments for one weight field.

    Attributes:
        home: descriptor, tensor, or int64 table of the addresses of all slots.
        static: descriptor, tensor, or None.
        replica: likewise.
        strides: elements between (slots, halves, lines of storage), home, static, replica; None
            where they equal home's, or nobody reads them.
        counts: (H, X) with a table, else (None, None).
        constexprs: W_TMA, TRANSPOSED, UNIT (elements between neighbours in a line), TABLE.
        apart: 1 where gate and up weights of home are two tensors, 2 where the descriptor has them
            in the order up, gate; else 0.
    """

    home: Any
    static: Any
    replica: Any
    strides: tuple[int | None, ...]
    counts: tuple[int | None, int | None]
    constexprs: dict[str, Any]
    apart: int = 0

    @property
    def pointers(self) -> tuple[Any, ...]:
        """Home, static, replica."""
        return self.home, self.static, self.replica


def weight_operands(weights: WeightSet, rows: int, columns: int, tma: bool) -> WeightOperands:
    """How a kernel reads a weight field in blocks; remembered by the field.

    Descriptors where ``tma`` and the storage of every family allows them; pointers otherwise.

    Args:
        weights: the field.
        rows: rows of a block.
        columns: columns of a block.
        tma: whether the device has tensor descriptors.

    Raises:
        ValueError: home experts are separate tensors, and another family differs in strides.
    """
    key = (rows, columns, tma)
    several = not isinstance(weights.home, torch.Tensor)
    addresses = tuple(x.data_ptr() for x in weights.home) if several else ()
    known = weights.launches.get(key)
    if known is None or known[0] != addresses:  # a parameter moved: its address is in the table
        make = _table_operands if weights.is_table else _family_operands
        known = weights.launches[key] = (addresses, make(weights, rows, columns, tma))
    operands: WeightOperands = known[1]
    return operands


def _family_operands(weights: WeightSet, rows: int, columns: int, tma: bool) -> WeightOperands:
    by_name = dict(weights.families())
    tensors = [by_name.get(name) for name in ("home", "static", "replica")]
    present = [x if x is not None and len(x) else None for x in tensors]
    views = [None if x is None else weights.view(x) for x in present]
    constexprs = {"TRANSPOSED": weights.transposed, "UNIT": unit_stride(weights), "TABLE": False}
    apart = int(weights.halves_apart)
    if tma:
        made = [None if v is None else weight_descriptor(v, rows, columns) for v in views]
        if weights.halves_apart:
            made[0], apart = _pair_descriptor(weights, made[0])
        if all(d is not None for d, v in zip(made, views, strict=True) if v is not None):
            constexprs["W_TMA"] = True
            return WeightOperands(*_three(made), (None,) * 9, (None, None), constexprs, apart)
    home = line_strides(weights, weights.view(weights.families()[0][1]))
    if weights.halves_apart:
        home = home[0], _distance(weights), home[2]
        apart = 1
    strides: list[int | None] = list(home)
    for view in views[1:]:
        own = home if view is None else line_strides(weights, view)
        strides += [None if a == b else a for a, b in zip(own, home, strict=True)]
    constexprs["W_TMA"] = False
    return WeightOperands(*_three(present), tuple(strides), (None, None), constexprs, apart)


def _distance(weights: WeightSet) -> int:
    """Elements from the gate to the up weights of home, which are two tensors."""
    gate, up = weights.home
    return (up.data_ptr() - gate.data_ptr()) // gate.element_size()


def _pair_descriptor(
    weights: WeightSet, gate: TensorDescriptor | None
) -> tuple[TensorDescriptor | None, int]:
    """Two tensors of equal strides as one, whose halves are as far apart as the tensors.

    A descriptor's strides are positive: where the up weights lie first, so do they in the result.

    Args:
        weights: the field.
        gate: of the gate weights alone.

    Returns:
        The descriptor, None where there cannot be one, and `WeightOperands.apart`.
    """
    distance = _distance(weights)
    far = abs(distance) * weights.home[0].element_size()
    aligned = far % ALIGN_BYTES == 0 and far < MAX_STRIDE_BYTES
    if gate is None or not aligned:
        return None, 1
    base = gate.base if distance > 0 else weights.view(weights.home[1])
    shape, strides = list(gate.shape), list(gate.strides)
    shape[1], strides[1] = 2, abs(distance)
    return TensorDescriptor(base, shape, strides, gate.block_shape), 1 if distance > 0 else 2


def _three(families: list[Any]) -> tuple[Any, Any, Any]:
    home, static, replica = families
    return home, static, replica


def _table_operands(weights: WeightSet, rows: int, columns: int, tma: bool) -> WeightOperands:
    slots = list(weights.home)
    for name in ("static", "replica"):
        family = getattr(weights, name)
        if family is not None:
            if len(family) and family.stride()[1:] != slots[0].stride():
                raise ValueError(
                    f"{name}: need the strides {slots[0].stride()} of home[0], since home experts "
                    f"are separate tensors, got {family.stride()[1:]}"
                )
            slots += list(family)
    aligned = all(x.data_ptr() % ALIGN_BYTES == 0 for x in slots)
    view = weights.view(slots[0])
    if not aligned:
        raise ValueError(f"home: need tensors that start at multiples of {ALIGN_BYTES} bytes")
    addresses = torch.tensor([x.data_ptr() for x in slots], dtype=torch.int64)
    table = addresses.to(view.device, non_blocking=True)  # `device=` would wait for the stream
    use_tma = tma and weight_descriptor(view, rows, columns) is not None
    if use_tma and view.is_cuda:
        triton.set_allocator(_device_scratch)
    strides = (None, *line_strides(weights, view)[1:], *(None,) * 6)
    static = 0 if weights.static is None else len(weights.static)
    constexprs = {"TRANSPOSED": weights.transposed, "UNIT": unit_stride(weights), "TABLE": True}
    counts = (len(weights.home), static)
    return WeightOperands(table, None, None, strides, counts, {"W_TMA": use_tma, **constexprs})


class BiasOperands(NamedTuple):
    """Launch arguments for a bias field, likewise; `constexprs` has BIAS_PAIRS and BIAS_TABLE."""

    pointers: tuple[Any, ...]
    strides: tuple[int | None, ...]
    counts: tuple[int | None, int | None]
    constexprs: dict[str, bool]


def bias_operands(bias: WeightSet | None) -> BiasOperands:
    """How a kernel reads a bias: contiguous in each slot, by pointers.

    Args:
        bias: ``[slots, N, 1]``, not transposed; None without bias.
    """
    if bias is None:
        none = (None, None, None)
        return BiasOperands(none, none, (None, None), {"BIAS_PAIRS": False, "BIAS_TABLE": False})
    constexprs = {"BIAS_PAIRS": bias.interleaved, "BIAS_TABLE": bias.is_table}
    w = weight_operands(bias, 1, 1, tma=False)
    return BiasOperands(w.pointers, w.strides[::3], w.counts, constexprs)


def _device_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory in which a kernel builds its descriptors; the alignment is that of any allocation."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def unit_stride(weights: WeightSet) -> int:
    """Elements between neighbouring logical rows (transposed) or columns in a line of storage."""
    return 2 if weights.transposed and weights.interleaved else 1


def line_strides(weights: WeightSet, view: torch.Tensor) -> tuple[int, int, int]:
    """Elements between slots, halves, and lines of storage (columns if transposed, else rows)."""
    slot, half, row, column = view.stride()
    return slot, half, column if weights.transposed else row
