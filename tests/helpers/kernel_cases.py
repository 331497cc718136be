"""Seeded cases for tests of single kernels: tables, weights, guarded buffers, program orders."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
import sys
from typing import TYPE_CHECKING, Literal
from unittest import mock

import numpy as np
import torch
from kernel_mutants import TRITON_OPS, mutated
from triton.runtime import interpreter

from relibra_kernels.reference.build_rows import build_rows
from relibra_kernels.tables import m_tiles, slot_bases
from relibra_kernels.weights import WeightSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

BLOCK_ROWS = 16
CANARY = 64  # elements before and after a guarded buffer
Layout = Literal["contiguous", "strided", "interleaved", "transposed", "transposed_pairs", "table"]


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """Rows of each slot, and the tables that follow from them.

    Attributes:
        name: id of the case.
        slot_rows: rows of each slot: home, static, then replica slots.
        num_home: H.
        num_static: X.
        num_choices: K.
        spare_tokens: tokens beyond those that the rows need; their choices are -1.
        spare_rows: rows of the buffers after the last tile, which nobody may touch.
        block_rows: BM.
    """

    name: str
    slot_rows: tuple[int, ...]
    num_home: int
    num_static: int = 0
    num_choices: int = 2
    spare_tokens: int = 3
    spare_rows: int = 0
    block_rows: int = BLOCK_ROWS

    def __str__(self) -> str:
        return self.name

    @property
    def num_replica(self) -> int:
        return len(self.slot_rows) - self.num_home - self.num_static

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.slot_base[-1]) + self.spare_rows

    @property
    def num_tokens(self) -> int:
        """U."""
        return math.ceil(sum(self.slot_rows) / self.num_choices) + self.spare_tokens

    @property
    def slot_base(self) -> torch.Tensor:
        """int32 [n+1]."""
        return slot_bases(self.slot_rows, self.block_rows)

    @property
    def mtile(self) -> torch.Tensor:
        """int32 [B, 4]."""
        return m_tiles(self.slot_rows, self.num_home, self.block_rows, self.num_static)

    @property
    def num_tiles(self) -> torch.Tensor:
        """int32 [1], as the kernels read it."""
        return torch.tensor([len(self.mtile)], dtype=torch.int32)

    @property
    def row_to_slot(self) -> torch.Tensor:
        """int64 [R], -1 on pad and spare rows."""
        slot_R = torch.full((self.num_rows,), -1)
        bases = self.slot_base.tolist()
        for slot, (base, rows) in enumerate(zip(bases, self.slot_rows, strict=False)):
            slot_R[base : base + rows] = slot
        return slot_R

    @property
    def is_tile_row(self) -> torch.Tensor:
        """bool [R]: real and pad rows; False on spare rows."""
        return torch.arange(self.num_rows) < int(self.slot_base[-1])

    @property
    def token_choice_to_row(self) -> torch.Tensor:
        """int32 [U, K]; a slot's rows belong to ascending tokens, -1 = computed elsewhere."""
        rng = np.random.default_rng(len(self.name))
        rows = np.flatnonzero(self.row_to_slot.numpy() >= 0)
        spots = np.full(self.num_tokens * self.num_choices, -1, np.int32)
        chosen = rng.permutation(spots.size)[: rows.size]
        owner = self.row_to_slot.numpy()[rows]
        for slot in np.unique(owner):
            spots[np.sort(chosen[owner == slot])] = rows[owner == slot]
        return torch.from_numpy(spots.reshape(self.num_tokens, self.num_choices))

    @property
    def row_to_token(self) -> torch.Tensor:
        """int32 [R], -1 on pad and spare rows; token 0 behind it, for mutants that read on."""
        return surrounded(build_rows(self.token_choice_to_row, self.num_rows)[0], 0)

    @property
    def row_to_choice(self) -> torch.Tensor:
        """int32 [R] = u * K + k, -1 on pad and spare rows."""
        return build_rows(self.token_choice_to_row, self.num_rows)[1]

    @property
    def choice_scores(self) -> torch.Tensor:
        """fp32 [U, K]."""
        gen = torch.Generator().manual_seed(7)
        return torch.rand(self.num_tokens, self.num_choices, generator=gen) * 0.9 + 0.1

    @property
    def row_score(self) -> torch.Tensor:
        """fp32 [R], NaN on pad and spare rows."""
        choice = self.row_to_choice.long()
        score = self.choice_scores.reshape(-1)[choice.clamp(min=0)]
        return torch.where(choice >= 0, score, torch.nan)

    def tokens(self, width: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
        """[U, width] ~ N(0, 1)."""
        return normal((self.num_tokens, width), dtype, seed)

    def rows(self, width: int, dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
        """[R, width] ~ N(0, 1), NaN on pad and spare rows."""
        return self.poison(normal((self.num_rows, width), dtype, seed))

    def poison(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy with NaN in pad and spare rows."""
        return surrounded(rows.masked_fill((self.row_to_slot < 0)[:, None], torch.nan), torch.nan)

    def weights(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        *,
        halves: int = 1,
        layout: Layout = "contiguous",
        seed: int = 3,
    ) -> WeightSet:
        """Weights ~ N(0, 1 / columns) of every family; equal values in every layout."""
        count = self.num_home, self.num_static, self.num_replica
        families = [
            normal((slots, halves, rows, columns), dtype, seed + i) / math.sqrt(columns)
            for i, slots in enumerate(count)
        ]
        stored = [store(x, layout) for x in families]
        home = tuple(x.clone() for x in stored[0]) if layout == "table" else stored[0]
        return WeightSet(
            home,
            static=stored[1] if count[1] else None,
            replica=stored[2] if count[2] else None,
            halves=halves,
            interleaved=layout in ("interleaved", "transposed_pairs"),
            transposed=layout in ("transposed", "transposed_pairs"),
        )

    def bias(self, rows: int, dtype: torch.dtype, halves: int = 1) -> list[torch.Tensor | None]:
        """Biases [slots, halves * rows] ~ N(0, 1) of home, static, replica; None if no slots."""
        count = self.num_home, self.num_static, self.num_replica
        return [
            normal((slots, halves * rows), dtype, 20 + i) if slots else None
            for i, slots in enumerate(count)
        ]

    def multiply(self, rows64: torch.Tensor, weights: WeightSet, half: int = 0) -> torch.Tensor:
        """Oracle, fp64: ``out[r] = w[slot of r] @ rows[r]``, zeros on pad and spare rows."""
        slots = slot_weights(weights)
        out = torch.zeros(self.num_rows, slots[0].shape[1], dtype=torch.float64)
        slot_R = self.row_to_slot
        for slot, weight in enumerate(slots):
            out[slot_R == slot] = rows64[slot_R == slot].double() @ weight[half].double().T
        return out


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Seeded values of order one."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def store(logical: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Logical weights [slots, halves, rows, columns] in a storage layout, as `WeightSet` takes it.

    All are views of larger buffers full of NaN; in "strided", rows and slots have gaps behind them.
    """
    slots, halves, rows, columns = logical.shape
    is_paired = layout in ("interleaved", "transposed_pairs")
    paired = logical.transpose(1, 2) if is_paired else logical
    flat = paired.reshape(slots, halves * rows, columns)
    if layout in ("transposed", "transposed_pairs"):
        return surrounded(flat.transpose(1, 2), torch.nan)
    if layout == "strided":
        buffer = flat.new_full((slots, halves * rows + 4, columns + 32), torch.nan)
        return buffer[:, : halves * rows, :columns].copy_(flat)
    return surrounded(flat, torch.nan)


def surrounded(x: torch.Tensor, beyond: float) -> torch.Tensor:
    """A contiguous copy in a larger buffer: a mutant may read a block too many at either end."""
    room = CANARY * math.prod(x.shape[2:])  # whole rows, and 16 bytes stay aligned
    buffer = x.new_full((x.numel() + 2 * room,), beyond)
    return buffer[room : room + x.numel()].view(x.shape).copy_(x)


def slot_weights(weights: WeightSet) -> list[torch.Tensor]:
    """Logical [halves, rows, columns] of every slot: home, static, replica."""
    home = weights.home if isinstance(weights.home, tuple) else (weights.home,)
    families = [*home, weights.static, weights.replica]
    return [slot for x in families if x is not None for slot in weights.view(x)]


def poison_empty_slots(case: KernelCase, weights: WeightSet) -> WeightSet:
    """NaN in the weights of slots without rows, which no kernel may read."""
    for rows, slot in zip(case.slot_rows, slot_weights(weights), strict=True):
        if rows == 0:
            slot.fill_(torch.nan)
    return weights


CASES = [
    KernelCase("ragged_with_empty_slots", (37, 0, 16, 21, 0), num_home=3, spare_rows=16),
    KernelCase("three_families", (20, 5, 33, 17), num_home=2, num_static=1, num_choices=8),
    KernelCase("one_expert", (50, 0, 0, 0), num_home=3, num_choices=1),
    KernelCase("replica_serves_all", (0, 0, 45), num_home=2, num_choices=3),
    KernelCase("one_home_no_replica", (41,), num_home=1, num_choices=4),
    KernelCase("full_tiles", (16, 32, 16), num_home=2, num_choices=4, spare_tokens=0),
    KernelCase("no_rows", (0, 0, 0), num_home=2, num_choices=2, spare_rows=16),
]
CASE = {case.name: case for case in CASES}


# ---- buffers -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Guarded:
    """A tensor that fills the middle of a larger buffer of canaries."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    canary: float | int

    def check(self) -> None:
        """Fails when a canary has changed."""
        for border in (self.buffer[:CANARY], self.buffer[len(self.buffer) - CANARY :]):
            assert bool((border == self.canary).all()), "wrote outside of a buffer"


_torch_empty = torch.empty


def sparse_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are touched, for addresses beyond 2^31 elements."""
    reserve_nothing = 0x4000  # MAP_NORESERVE on Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
    pages = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> Guarded:
    """NaN-filled (integers: the largest one) tensor with canaries before and after it."""
    size, canary = math.prod(shape), 77
    buffer = _torch_empty(size + 2 * CANARY, dtype=dtype).fill_(canary)
    inner = buffer[CANARY : CANARY + size].view(shape)
    inner.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
    return Guarded(inner, buffer, canary)


@contextlib.contextmanager
def guarded_allocations() -> Iterator[list[Guarded]]:
    """Every `torch.empty` and `new_empty` is guarded inside; canaries are checked at the end."""
    made: list[Guarded] = []

    def empty(*shape: object, dtype: torch.dtype = torch.float32, **_: object) -> torch.Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        made.append(guarded(tuple(sizes), dtype))  # type: ignore[arg-type]
        return made[-1].tensor

    def new_empty(like: torch.Tensor, *shape: object, **options: object) -> torch.Tensor:
        return empty(*shape, **{"dtype": like.dtype, **options})  # type: ignore[arg-type]

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield made
    for one in made:
        one.check()


# ---- orders of programs --------------------------------------------------------------------------
@contextlib.contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """The interpreter runs the programs of every launch in a seeded random order."""
    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx
    order: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        if (x, y, z) == (0, 0, 0):  # a new launch
            order.clear()
            ids = list(itertools.product(*map(range, builder.grid_dim)))
            shuffled = np.random.default_rng(seed).permutation(len(ids))
            order.update({one: ids[j] for one, j in zip(ids, shuffled.tolist(), strict=True)})
        original(*order[x, y, z])

    with mock.patch.object(builder, "set_grid_idx", set_grid_idx):
        yield


def run_orders(
    launch: Callable[[int], tuple[torch.Tensor, ...]], num_tiles: int, num_orders: int = 5
) -> tuple[torch.Tensor, ...]:
    """Launches with 1, 3, 7 and B programs and in random orders; all results have equal bits.

    Args:
        launch: takes the number of programs, returns the results.
        num_tiles: B, output tiles of the launch.
        num_orders: random orders tried, with as many programs as tiles.

    Returns:
        The results.
    """
    first = launch(1)
    for programs in (3, 7, max(num_tiles, 1)):
        assert_same_bits(launch(programs), first)
    for seed in range(num_orders):
        with shuffled_programs(seed):
            assert_same_bits(launch(max(num_tiles, 1)), first)
    return first


def assert_same_bits(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Fails unless all tensors have equal bits (NaN where NaN, -0.0 where -0.0)."""
    bits = torch.uint8
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours.contiguous().view(bits), theirs.contiguous().view(bits))


def check_pads(case: KernelCase, *outputs: torch.Tensor) -> None:
    """Pad rows of tiles hold exact zeros (no -0.0 either); spare rows are as they were, NaN."""
    pad_R = (case.row_to_slot < 0) & case.is_tile_row
    for out in outputs:
        bits = torch.zeros_like(out[pad_R])
        assert_same_bits((out[pad_R],), (bits,))
        assert bool(out[~case.is_tile_row].isnan().all())


def split_case(
    case: KernelCase, num_replica: int, seed: int
) -> tuple[KernelCase, torch.Tensor, torch.Tensor]:
    """The rows of a case with home slots only, some of them moved to replica slots at random.

    Returns:
        The new case; int64 [S], the home slot that each replica slot copies; int64 [R of the old
        case], the row in the new case, -1 on pads.
    """
    rng = np.random.default_rng(seed)
    assert len(case.slot_rows) == case.num_home
    owner = rng.integers(case.num_home, size=num_replica)  # expert that each replica copies
    slot_of_row = np.repeat(np.arange(case.num_home), case.slot_rows)
    for i, expert in enumerate(owner):
        mine = (slot_of_row == expert) & (rng.random(slot_of_row.size) < 0.4)
        slot_of_row[mine] = case.num_home + i
    rows = np.bincount(slot_of_row, minlength=case.num_home + num_replica)
    new = KernelCase(f"{case.name}_{seed}", tuple(rows.tolist()), case.num_home)
    base = new.slot_base.numpy()
    moved = np.full(case.num_rows, -1)
    for slot in range(rows.size):
        old = np.flatnonzero(case.row_to_slot.numpy() >= 0)[slot_of_row == slot]
        moved[rng.permutation(old)] = base[slot] + np.arange(old.size)
    return new, torch.from_numpy(owner), torch.from_numpy(moved)


# ---- mutants -------------------------------------------------------------------------------------
def mutate(op: str, old: str, new: str, folder: Path) -> ModuleType:
    """The module of an op with one change in its source or, if `old` is not there, in `tiles`."""
    if old in (TRITON_OPS / f"{op}.py").read_text(encoding="utf-8"):
        return mutated(op, old, new, folder)
    tiles = mutated("tiles", old, new, folder)
    sys.modules[tiles.__name__] = tiles
    return mutated(op, "relibra_kernels.triton_ops.tiles", tiles.__name__, folder)
