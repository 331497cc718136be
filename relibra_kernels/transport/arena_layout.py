"""Where everything lies in an arena: replica weights, replica gradients, and the sync words.

Letters: W weight buffers, G2 gradient buffers, S replica slots, P ranks of the domain.

    weight_slot[W][S]     slots, as the weight layout says
    grad_slot[G2][S]      slots, as the gradient layout says
    full[W][S]            words, written by the home rank
    grad_ready[G2][P][S]  words, on the home rank, written by the replica rank
    retired[P]            credits: weights read, written by each rank at all ranks
    grad_retired[P]       credits: gradients added, likewise
    abort                 word: the generation of a run that failed

Every word has a line of 128 bytes to itself, so that no two writers share one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Protocol

from relibra_kernels.checks import check_int
from relibra_kernels.slot_layout import ALIGN_BYTES
from relibra_kernels.transport.symmetric_heap import round_up

if TYPE_CHECKING:
    import torch

    from relibra_kernels.slot_layout import SlotLayout

WORD_LINE_BYTES = 128
PARTS = (
    "weight_slot",
    "grad_slot",
    "full",
    "grad_ready",
    "retired",
    "grad_retired",
    "abort",
)


class AnyLayout(Protocol):
    """What is known of every layout of an arena."""

    @property
    def num_ranks(self) -> int:
        """P."""
        ...

    @property
    def abort(self) -> int:
        """Offset of the word that ends all waits."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of a rank's part."""
        ...


@dataclasses.dataclass(frozen=True)
class ArenaLayout:
    """Byte offsets inside every rank's part; the same on all ranks.

    Attributes:
        weights: fields of a weight slot.
        grads: fields of a gradient slot; the names of ``weights``, other dtypes.
        num_ranks: P.
        num_slots: S.
        weight_buffers: W, at least 2.
        grad_buffers: G2, at least 1.

    Example:
        >>> import torch
        >>> from relibra_kernels.slot_layout import SlotLayout
        >>> weights = SlotLayout.of({"w2": (torch.bfloat16, (8, 64))})
        >>> grads = weights.as_dtype({"w2": torch.float32})
        >>> layout = ArenaLayout(weights, grads, num_ranks=4, num_slots=2)
        >>> layout.weight_slot(1, 0), layout.grad_slot(0, 1), layout.full(1, 1)
        (2048, 6144, 12672)
        >>> layout.report()
        {'weight_slot': 4096, 'grad_slot': 8192, 'full': 512, 'grad_ready': 2048, 'retired': 512, \
'grad_retired': 512, 'abort': 128, 'total': 16384, 'reserved': 16384}
    """

    weights: SlotLayout
    grads: SlotLayout
    num_ranks: int
    num_slots: int
    weight_buffers: int = 2
    grad_buffers: int = 2

    def __post_init__(self) -> None:
        """Check sizes and that both slots hold the same tensors."""
        check_int("num_ranks", self.num_ranks, minimum=1)
        check_int("num_slots", self.num_slots, minimum=0)
        check_int("weight_buffers", self.weight_buffers, minimum=2)
        check_int("grad_buffers", self.grad_buffers, minimum=1)
        shapes = [{f.name: f.shape for f in slot.fields} for slot in (self.weights, self.grads)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"grads: need the fields {shapes[0]} of weights, got {shapes[1]}")

    def weight_slot(self, buffer: int, slot: int) -> int:
        """Offset of ``weight_slot[buffer][slot]``."""
        place = place_of((buffer, slot), (self.weight_buffers, self.num_slots))
        return self._starts["weight_slot"] + place * self.weights.slot_bytes

    def grad_slot(self, buffer: int, slot: int) -> int:
        """Offset of ``grad_slot[buffer][slot]``."""
        place = place_of((buffer, slot), (self.grad_buffers, self.num_slots))
        return self._starts["grad_slot"] + place * self.grads.slot_bytes

    def full(self, buffer: int, slot: int) -> int:
        """Offset of the word ``full[buffer][slot]``."""
        return self._word("full", (buffer, slot), (self.weight_buffers, self.num_slots))

    def grad_ready(self, buffer: int, rank: int, slot: int) -> int:
        """Offset of the word ``grad_ready[buffer][rank][slot]``."""
        sizes = (self.grad_buffers, self.num_ranks, self.num_slots)
        return self._word("grad_ready", (buffer, rank, slot), sizes)

    def retired(self, rank: int) -> int:
        """Offset of the credit ``retired[rank]``."""
        return self._word("retired", (rank,), (self.num_ranks,))

    def grad_retired(self, rank: int) -> int:
        """Offset of the credit ``grad_retired[rank]``."""
        return self._word("grad_retired", (rank,), (self.num_ranks,))

    @property
    def abort(self) -> int:
        """Offset of the word ``abort``."""
        return self._starts["abort"]

    @property
    def nbytes(self) -> int:
        """Size of a rank's part, a multiple of 1024."""
        return round_up(self._starts["abort"] + WORD_LINE_BYTES, ALIGN_BYTES)

    def weight_views(self, base: torch.Tensor, buffer: int) -> dict[str, torch.Tensor]:
        """Field name -> ``[S, *shape]`` of one weight buffer.

        Args:
            base: a rank's part, uint8 ``[nbytes]``.
            buffer: below W.
        """
        return self._views(base, "weight_slot", buffer, self.weight_buffers, self.weights)

    def grad_views(self, base: torch.Tensor, buffer: int) -> dict[str, torch.Tensor]:
        """Field name -> ``[S, *shape]`` of one gradient buffer.

        Args:
            base: a rank's part, uint8 ``[nbytes]``.
            buffer: below G2.
        """
        return self._views(base, "grad_slot", buffer, self.grad_buffers, self.grads)

    def report(self, granule_bytes: int = 1) -> dict[str, int]:
        """Bytes of each part on one rank, before anything is allocated.

        Args:
            granule_bytes: of the provider, see `SymmetricHeap`.

        Returns:
            Part -> bytes, then ``total`` (what is asked for) and ``reserved`` (what it takes).
        """
        starts = [self._starts[part] for part in PARTS] + [self.abort + WORD_LINE_BYTES]
        sizes = {p: end - start for p, start, end in zip(PARTS, starts, starts[1:], strict=False)}
        return {**sizes, "total": self.nbytes, "reserved": round_up(self.nbytes, granule_bytes)}

    def digest(self) -> str:
        """16 hexadecimal digits that differ where any offset or field does."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @functools.cached_property
    def _starts(self) -> dict[str, int]:
        line = WORD_LINE_BYTES
        sizes = {
            "weight_slot": self.weight_buffers * self.num_slots * self.weights.slot_bytes,
            "grad_slot": self.grad_buffers * self.num_slots * self.grads.slot_bytes,
            "full": self.weight_buffers * self.num_slots * line,
            "grad_ready": self.grad_buffers * self.num_ranks * self.num_slots * line,
            "retired": self.num_ranks * line,
            "grad_retired": self.num_ranks * line,
            "abort": line,
        }
        starts, end = {}, 0
        for part in PARTS:
            starts[part] = end
            end += sizes[part]
        return starts

    def _word(self, part: str, index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        return self._starts[part] + place_of(index, sizes) * WORD_LINE_BYTES

    def _views(
        self, base: torch.Tensor, part: str, buffer: int, buffers: int, slot: SlotLayout
    ) -> dict[str, torch.Tensor]:
        if base.numel() != self.nbytes:
            raise ValueError(f"base: need {self.nbytes} bytes, got {base.numel()}")
        size = self.num_slots * slot.slot_bytes
        start = self._starts[part] + place_of((buffer,), (buffers,)) * size
        return slot.views(base[start : start + size].view(self.num_slots, slot.slot_bytes))


def place_of(index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Row-major place; an index out of range would be another part's memory.

    Args:
        index: of an element.
        sizes: of the array.

    Raises:
        IndexError: out of range.

    Example:
        >>> place_of((1, 2), (2, 3))
        5
    """
    place = 0
    for number, size in zip(index, sizes, strict=True):
        if not 0 <= number < size:
            raise IndexError(f"index: need below {sizes} in each place, got {index}")
        place = place * size + number
    return place
