"""Where the fields of one expert lie in a replica slot.

One buffer holds all replica slots of a rank, one slot after the other, so that a kernel finds a
field by base and slot stride, and a whole slot is one range of memory.

Letters: S replica slots, D model dim, F expert dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from relibra_kernels.checks import check_int

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIGN_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class SlotField:
    """One tensor of every slot.

    Attributes:
        name: such as ``w13``.
        dtype: of its elements.
        shape: in one slot.
        offset: bytes from the start of the slot, a multiple of 1024.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """Ordered named fields of a slot; weights and their gradients have one each, in one order.

    Attributes:
        fields: in the order of their offsets.
        slot_bytes: from one slot to the next, a multiple of 1024.

    Example:
        >>> shapes = {"w13": (6, 100), "b13": (6,)}
        >>> layout = SlotLayout.of({name: (torch.bfloat16, s) for name, s in shapes.items()})
        >>> [(field.name, field.offset) for field in layout.fields], layout.slot_bytes
        ([('w13', 0), ('b13', 2048)], 3072)
        >>> grads = layout.as_dtype({"w13": torch.float32, "b13": torch.float32})
        >>> [(field.name, field.offset) for field in grads.fields], grads.slot_bytes
        ([('w13', 0), ('b13', 3072)], 4096)
        >>> buffer = layout.allocate(3, torch.device("cpu"))
        >>> {name: tuple(view.shape) for name, view in layout.views(buffer).items()}
        {'w13': (3, 6, 100), 'b13': (3, 6)}
    """

    fields: tuple[SlotField, ...]
    slot_bytes: int

    @classmethod
    def of(cls, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> SlotLayout:
        """Places fields one after the other.

        Args:
            fields: name -> (dtype, shape in one slot), in order.

        Raises:
            ValueError: no field, or a negative size.
        """
        if not fields:
            raise ValueError("fields: need at least one field, got none")
        placed, end = [], 0
        for name, (dtype, shape) in fields.items():
            for size in shape:
                check_int(f"shape of {name}", size, minimum=0)
            field = SlotField(name, dtype, tuple(shape), end)
            placed.append(field)
            end += -(-field.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return cls(tuple(placed), end)

    def as_dtype(self, dtypes: Mapping[str, torch.dtype]) -> SlotLayout:
        """The same names and shapes in other dtypes, such as those of the gradients.

        Args:
            dtypes: name -> dtype of every field.
        """
        return SlotLayout.of({f.name: (dtypes[f.name], f.shape) for f in self.fields})

    def allocate(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """A zeroed buffer, uint8 ``[S, slot_bytes]``; an ordinary tensor also in inference mode.

        Args:
            num_slots: S.
            device: where.
        """
        shape = (check_int("num_slots", num_slots, minimum=0), self.slot_bytes)
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch.uint8, device=device)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Field name -> ``[S, *shape]`` inside the buffer; every slot is contiguous.

        Args:
            buffer: uint8 ``[S, slot_bytes]``, contiguous.

        Raises:
            TypeError, ValueError: another buffer.
        """
        if buffer.dtype != torch.uint8:
            raise TypeError(f"buffer: need torch.uint8, got {buffer.dtype}")
        if buffer.dim() != 2 or buffer.shape[1] != self.slot_bytes or not buffer.is_contiguous():
            raise ValueError(
                f"buffer: need a contiguous [S, {self.slot_bytes}], got {list(buffer.shape)} with "
                f"strides {buffer.stride()}"
            )
        with torch.inference_mode(False):  # there a view as another dtype is no ordinary tensor
            return {
                field.name: buffer[:, field.offset : field.offset + field.num_bytes]
                .view(field.dtype)
                .view(len(buffer), *field.shape)
                for field in self.fields
            }
