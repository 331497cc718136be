"""What the launches of one use share, made once with its tables and found again through them.

An op takes tensors and numbers only, so what was made ahead reaches it as an attribute of the
tables that it is given: it lives as long as they do, and an op whose tables carry nothing makes
everything itself. Weights are remembered by an object that somebody else owns and clears, because
what is remembered keeps their storage alive; the tables hold a reference to it.

Letters: B tiles, n slots a rank, H home slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from relibra_kernels.checks import check_int
from relibra_kernels.tables import count_padded_rows, w_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra_kernels.weights import WeightSet

_ATTRIBUTE = "_relibra_launch"
ALIGN_WORDS = 32  # of every table
REPLICA_BUFFERS = 4  # that a field is kept for
FIELDS_OF_A_LAYER = 8  # weights and main_grad of w13, w2 and their biases


class WgradShape(NamedTuple):
    """What the tiles of a weight-gradient launch depend on besides the slots' rows.

    See ``relibra_kernels.tables.w_tiles``.
    """

    num_home: int
    num_static: int
    block_rows: int
    tiles13: int
    tiles2: int
    accumulate_home: bool

    def fits(self, num_slots: int) -> bool:
        """Whether tables of that many slots can have it: plans differ in their static slots."""
        return self.num_home + self.num_static <= num_slots


class WeightCache:
    """Weight fields of one layer with their launch arguments (descriptors, tables of addresses).

    A field is found by shape, strides and dtype of all its families; a home or static tensor at
    another address (a parameter that an optimizer or FSDP gave new storage) replaces it. Replica
    slots alternate between a few buffers: a field is kept for each. The owner clears the cache when
    storage may be given back: at the end of a training step.

    Args:
        limit: fields that are kept; the oldest goes first.
    """

    def __init__(self, limit: int = FIELDS_OF_A_LAYER) -> None:
        self.limit = check_int("limit", limit, minimum=1)
        self.num_made = 0  # for tests and reports
        self.wgrad_shapes: list[WgradShape] = []  # the last two
        # layout and options -> addresses of home and static slots, field by address of replicas
        self._known: dict[tuple[Any, ...], tuple[list[int], dict[int, WeightSet]]] = {}

    def __len__(self) -> int:
        """Fields that are kept, those of several replica buffers once."""
        return len(self._known)

    def get(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        options: tuple[Any, ...],
        make: Callable[[], WeightSet],
    ) -> WeightSet:
        """The remembered field of these tensors, or a new one.

        Args:
            tensors: of all families, those of the replica slots last; None for one not there.
            options: storage: whatever else the field depends on.
            make: builds the field.
        """
        layout = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
        *own, replica = [0 if x is None else x.data_ptr() for x in tensors]
        key = (*layout, options)
        addresses, by_buffer = self._known.get(key, (None, {}))
        if addresses != own:
            by_buffer = {}
        found = by_buffer.get(replica)
        if found is not None:
            return found
        made = make()
        self.num_made += 1
        self._known.pop(key, None)
        while len(self._known) >= self.limit:
            del self._known[next(iter(self._known))]
        while len(by_buffer) >= REPLICA_BUFFERS:
            del by_buffer[next(iter(by_buffer))]
        by_buffer[replica] = made
        self._known[key] = (own, by_buffer)
        return made

    def note_wgrad(self, shape: WgradShape) -> None:
        """A weight-gradient launch of this layer had this shape, and the next ones will too."""
        self.wgrad_shapes = [known for known in self.wgrad_shapes if known != shape][-1:] + [shape]

    def clear(self) -> None:
        """Lets go of all weights."""
        self._known.clear()


class LaunchData:
    """What the launches of one use of one layer take besides its tables.

    Args:
        mtile_B4: int32 ``[B, 4]`` on the device of the launches.
        slot_rows_n: integers ``[n]`` on the CPU.
        weights: of the layer; None remembers no weights.
        block_rows: rows of the tiles, where it is known that they cover all slots; else None.

    Attributes:
        num_tiles: int32 ``[1]``, B.
        counter: int32 ``[1]``, from which the weight gradients' programs take tiles.
        weights: see above.
    """

    def __init__(
        self,
        mtile_B4: torch.Tensor,
        slot_rows_n: torch.Tensor,
        weights: WeightCache | None = None,
        block_rows: int | None = None,
    ) -> None:
        device = mtile_B4.device
        num_tiles = mtile_B4.shape[0]
        self.num_tiles = torch.full((1,), num_tiles, dtype=torch.int32, device=device)
        self.counter = torch.empty(1, dtype=torch.int32, device=device)  # launches set it
        self.weights = weights
        self._num_mtiles = num_tiles
        self._rows_version = _version(slot_rows_n)
        self._padded = {} if block_rows is None else {block_rows: num_tiles * block_rows}
        self._wtiles: dict[WgradShape, tuple[torch.Tensor, torch.Tensor]] = {}
        for shape in () if weights is None else weights.wgrad_shapes:
            if shape.fits(slot_rows_n.shape[0]):
                self._wtiles[shape] = make_wtile(slot_rows_n, shape, device)

    def fits(self, table: torch.Tensor) -> bool:
        """Whether the table is as it was; of tiles only their number counts."""
        if table.dim() == 2:
            return table.shape[0] == self._num_mtiles
        return self._rows_version is not None and _version(table) == self._rows_version

    def padded_rows(self, slot_rows_n: torch.Tensor, block_rows: int) -> int:
        """R, the rows of all slots padded to whole tiles."""
        if block_rows not in self._padded:
            self._padded[block_rows] = count_padded_rows(slot_rows_n, block_rows)
        return self._padded[block_rows]

    def wtile(
        self, slot_rows_n: torch.Tensor, shape: WgradShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tiles of a weight-gradient launch and their number; see `make_wtile`."""
        if shape not in self._wtiles:
            self._wtiles[shape] = make_wtile(slot_rows_n, shape, self.num_tiles.device)
            if self.weights is not None:
                self.weights.note_wgrad(shape)
        return self._wtiles[shape]

    def tensors(self) -> list[torch.Tensor]:
        """Everything that lies on the device."""
        return [self.num_tiles, self.counter, *(x for pair in self._wtiles.values() for x in pair)]

    def move(self, places: list[torch.Tensor]) -> None:
        """Takes copies of `tensors`, in their order, instead of them."""
        self.num_tiles, self.counter = places[:2]
        pairs = zip(places[2::2], places[3::2], strict=True)
        self._wtiles = dict(zip(self._wtiles, pairs, strict=True))


def make_wtile(
    slot_rows_n: torch.Tensor, shape: WgradShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and int32 ``[1]`` their number on a device, without waiting for its stream.

    Args:
        slot_rows_n: integers ``[n]`` on the CPU.
        shape: of the launch.
        device: of the launch.
    """
    return on_device(w_tiles(slot_rows_n, *shape), device)


def on_device(tiles_B4: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and int32 ``[1]`` their number on a device, without waiting for its stream."""
    count = torch.full((1,), len(tiles_B4), dtype=torch.int32, device=device)
    return tiles_B4.to(device, non_blocking=True), count


def uploaded(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Small int32 tensors on a device; those that lie on the CPU travel in one copy.

    No stream is waited for: they are packed into pinned memory, which lives until they were read.

    Args:
        tensors: each another one; some may be on the device already.
        device: of the results.

    Returns:
        On the CPU the tensors themselves; elsewhere each starts on a 128-byte boundary.

    Example:
        >>> tables = [torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)]
        >>> one, two = uploaded(tables, torch.device("meta"))
        >>> one.shape, two.device
        (torch.Size([2]), device(type='meta'))
    """
    if device.type == "cpu":
        return [one.to(device) for one in tensors]
    host = [one for one in tensors if one.is_cpu and one.dtype == torch.int32]
    packed, sizes = _packed(host, pin_memory=device.type == "cuda")
    parts = torch.split(packed.to(device, non_blocking=True), sizes)
    there = dict(zip(map(id, host), parts, strict=True))
    return [
        there[id(one)][: one.numel()].view(one.shape)
        if id(one) in there
        else one.to(device, non_blocking=True)
        for one in tensors
    ]


def _packed(tensors: Sequence[torch.Tensor], *, pin_memory: bool) -> tuple[torch.Tensor, list[int]]:
    """The tensors one after the other, and the words that each takes, padding included."""
    sizes = [-(-one.numel() // ALIGN_WORDS) * ALIGN_WORDS for one in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pin_memory)
    words, first = packed.numpy(), 0
    for one, size in zip(tensors, sizes, strict=True):
        words[first : first + one.numel()] = one.numpy().reshape(-1)
        first += size
    return packed, sizes


def attach(data: LaunchData, *tables: torch.Tensor) -> None:
    """Makes launch data known to the ops that are given these tables.

    Args:
        data: of one use.
        tables: ``mtile_B4`` and ``slot_rows_n`` that the data were made from.

    Example:
        >>> tiles, rows = torch.zeros(3, 4, dtype=torch.int32), torch.tensor([5, 6])
        >>> attach(LaunchData(tiles, rows), tiles, rows)
        >>> int(launch_data(tiles).num_tiles), launch_data(rows.clone()) is None
        (3, True)
    """
    for table in tables:
        setattr(table, _ATTRIBUTE, data)


def launch_data(table: torch.Tensor) -> LaunchData | None:
    """What was made ahead for a table; None if nothing was, or the table changed since.

    Args:
        table: ``mtile_B4`` or ``slot_rows_n``.
    """
    data: LaunchData | None = getattr(table, _ATTRIBUTE, None)
    return data if data is not None and data.fits(table) else None


def _version(tensor: torch.Tensor) -> int | None:
    """Number of in-place changes; inference tensors do not count them."""
    return None if tensor.is_inference() else tensor._version
