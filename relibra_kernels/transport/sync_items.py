"""What a use of replica synchronisation hands to its engine: which bytes go where, which words.

Pure functions of the use, the layout and the addresses of an arena; nothing here waits or writes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from relibra_kernels.checks import check_tensor
from relibra_kernels.transport.group import check_list
from relibra_kernels.transport.sync_types import (
    PUBLISH_ITEM,
    PUSH_ITEM,
    REDUCE_ITEM,
    WAIT_ITEM,
    ReduceKind,
    hash_of_expert,
    hash_of_use,
    pack_credit,
    pack_word,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from relibra_kernels.slot_layout import SlotField
    from relibra_kernels.transport.arena_layout import ArenaLayout
    from relibra_kernels.transport.symmetric_heap import Arena
    from relibra_kernels.transport.sync_report import UseKey

_KINDS = {
    (torch.float32, torch.float32): ReduceKind.FP32_FROM_FP32,
    (torch.float32, torch.bfloat16): ReduceKind.FP32_FROM_BF16,
    (torch.float64, torch.float64): ReduceKind.FP64_FROM_FP64,
}


class Copy(NamedTuple):
    """One replica of a use, as its home rank or its replica rank sees it.

    Attributes:
        slot: replica slot.
        peer: the other rank, inside the domain.
        home_slot: on the home rank.
        expert: logical id, or home slot number in the domain where ids are not given.
    """

    slot: int
    peer: int
    home_slot: int
    expert: int


@dataclasses.dataclass(eq=False)
class Use:
    """One use and how far it is; made by `ReplicaSync.submit_push`.

    Attributes:
        n: number in the domain.
        key: of the use.
        plan_hash: of the plan.
        pushes: replicas of this rank's experts, by ascending (rank, slot).
        pulls: replicas on this rank, by ascending slot.
        pushed: event after this rank's copies: its weights may change then.
        q: number among the uses with gradients, -1 before `ReplicaSync.grad_slots`.
        is_retired: whether its weight buffer was given back.
        sources: tensors that were pushed.
        waited: `SyncEngine.clock` before and after the last wait for its weights.
    """

    n: int
    key: UseKey
    plan_hash: str
    pushes: tuple[Copy, ...]
    pulls: tuple[Copy, ...]
    pushed: Any = None
    q: int = -1
    is_retired: bool = False
    sources: tuple[int, ...] = ()
    waited: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        """Hash what all its words share."""
        self._hash = hash_of_use(self.key.parts(), self.plan_hash)

    def is_of(self, weights: Mapping[str, Any]) -> bool:
        """Whether these are the tensors that were pushed."""
        return self.sources == sources_of(weights)

    def hash_of(self, copy: Copy) -> int:
        """What a word of this use carries for a replica."""
        return hash_of_expert(self._hash, copy.expert)


def sources_of(weights: Mapping[str, Any]) -> tuple[int, ...]:
    """What tells home weights from others: where each field begins."""
    firsts = (w if isinstance(w, torch.Tensor) else w[0] for w in weights.values())
    return tuple(first.data_ptr() for first in firsts)


def copies_of(
    push_list: torch.Tensor,
    pull_list: torch.Tensor,
    place: Mapping[int, int],
    sizes: tuple[int, int],
    experts: Callable[[int, int], int] | None,
    rank: int,
) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
    """Pushes and pulls of a rank from its lists.

    Args:
        push_list: int32 ``[p, 3]`` = (home slot, destination EP rank, replica slot there).
        pull_list: int32 ``[q, 3]`` = (replica slot, home EP rank, home slot there).
        place: EP rank -> rank inside the domain.
        sizes: H home slots and S replica slots.
        experts: (EP rank, home slot) -> logical id; None numbers the home slots of the domain.
        rank: this EP rank.

    Raises:
        TypeError, ValueError: lists that do not fit.
    """
    num_home, num_slots = sizes

    def copy(name: str, slot: int, peer: int, home: int, home_rank: int) -> Copy:
        fits = 0 <= slot < num_slots and 0 <= home < num_home and peer in place
        if not fits:
            raise ValueError(
                f"{name}: need replica slots below {num_slots}, home slots below {num_home} and "
                f"ranks of the domain {sorted(place)}, got replica slot {slot}, home slot {home}, "
                f"rank {peer}"
            )
        expert = experts(home_rank, home) if experts else place[home_rank] * num_home + home
        return Copy(slot, place[peer], home, expert)

    pushes = [
        copy("push_list", slot, peer, home, rank)
        for home, peer, slot in check_list("push_list", push_list)
    ]
    pulls = [
        copy("pull_list", slot, peer, home, peer)
        for slot, peer, home in check_list("pull_list", pull_list)
    ]
    pushes.sort(key=lambda one: (one.peer, one.slot))
    pulls.sort(key=lambda one: one.slot)
    return tuple(pushes), tuple(pulls)


class ArenaItems:
    """Items of credits, which replicas and rows have in common.

    Args:
        arena: of the domain.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._mine, self._generation = arena.peers[arena.rank], arena.generation

    def credit(self, places: Sequence[int], count: int) -> np.ndarray:
        """This rank's credit, at all ranks.

        Args:
            places: offset of each rank's credit.
            count: how many uses have been retired.
        """
        offset, value = places[self.arena.rank], pack_credit(self._generation, count)
        return np.array([(base + offset, value) for base in self.arena.peers], PUBLISH_ITEM)

    def credits(self, places: Sequence[int], count: int, peers: Iterable[int]) -> np.ndarray:
        """That peers have given so much credit; nothing to wait for with a count below 1.

        Args:
            places: offset of each rank's credit.
            count: how many uses.
            peers: of the domain.
        """
        if count < 1:
            return np.zeros(0, WAIT_ITEM)
        credit = pack_credit(self._generation, count)
        items = [(self._mine + places[peer], credit, 0, peer, -1) for peer in peers]
        return np.array(items, WAIT_ITEM)


class SyncItems(ArenaItems):
    """Items of the uses of one arena.

    Args:
        arena: of the domain.
        layout: of the arena.
    """

    def __init__(self, arena: Arena, layout: ArenaLayout) -> None:
        super().__init__(arena)
        self.layout = layout
        fields, slots = layout.weights.fields, range(layout.num_slots)
        self._need = {f.name: (f.shape, f.dtype) for f in fields}
        self._sizes = [(f.name, f.offset, f.num_bytes) for f in fields]
        # offsets by rank; by buffer, then slot; of ``grad_ready`` by buffer, rank, slot
        ranks = range(layout.num_ranks)
        weights, grads = range(layout.weight_buffers), range(layout.grad_buffers)
        self._retired = [layout.retired(rank) for rank in ranks]
        self._grad_retired = [layout.grad_retired(rank) for rank in ranks]
        self._weight_slot = [[layout.weight_slot(b, s) for s in slots] for b in weights]
        self._full = [[layout.full(b, s) for s in slots] for b in weights]
        self._grad_slot = [[layout.grad_slot(b, s) for s in slots] for b in grads]
        self._grad_ready = [
            [[layout.grad_ready(b, rank, s) for s in slots] for rank in ranks] for b in grads
        ]

    def check_fields(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise unless home weights have the fields of a slot.

        Args:
            weights: field -> ``[H, ...]``.

        Raises:
            TypeError, ValueError: another name, shape or dtype.
        """
        got = {name: (tuple(w.shape[1:]), w.dtype) for name, w in weights.items()}
        if self._need != got:
            raise ValueError(
                f"weights: need the fields {self._need} of the replica slots, got {got}"
            )

    def weight_credits(self, use: Use) -> np.ndarray:
        """That every destination has retired the use before in this buffer."""
        count = use.n - self.layout.weight_buffers + 1
        peers = sorted({copy.peer for copy in use.pushes})
        return self.credits(self._retired, count, peers)

    def pushed(self, use: Use, weights: Mapping[str, torch.Tensor]) -> tuple[np.ndarray, Any]:
        """Copies of all fields, each slot's word with its last; and what must stay alive."""
        buffer, arrivals = self.weight_buffer(use), np.zeros(len(use.pushes), np.uint32)
        arrived, size = arrivals.ctypes.data, arrivals.itemsize
        targets, fulls = self._weight_slot[buffer], self._full[buffer]
        least = pack_word(self._generation, use.n, 0)
        homes = {copy.home_slot for copy in use.pushes}
        fields, keep = [], [arrivals]
        for name, offset, num_bytes in self._sizes if homes else ():
            sources, kept = _packed(weights[name], homes)
            fields.append((sources, offset, num_bytes))
            keep.append(kept)
        items: list[tuple[int, ...]] = []
        for place, copy in enumerate(use.pushes):
            base = self.arena.peers[copy.peer]
            slot = base + targets[copy.slot]
            for sources, offset, num_bytes in fields:
                items.append((sources[copy.home_slot], slot + offset, num_bytes, 0, 0, 0))
            signal = (base + fulls[copy.slot], least | use.hash_of(copy), arrived + place * size)
            items[-1] = (*items[-1][:3], *signal)
        return np.array(items, PUSH_ITEM), keep

    def weights_there(self, use: Use) -> np.ndarray:
        """That the weights of this rank's replicas have come, and are the right ones."""
        fulls = self._full[self.weight_buffer(use)]
        return self._words(use, use.n, [(fulls[copy.slot], copy) for copy in use.pulls])

    def weights_read(self, use: Use) -> np.ndarray:
        """That this rank has read the weights of all uses up to one, to all ranks."""
        return self.credit(self._retired, use.n + 1)

    def grad_credits(self, use: Use, peers: Iterable[int]) -> np.ndarray:
        """That homes have added what this gradient buffer held before."""
        count = use.q - self.layout.grad_buffers + 1
        return self.credits(self._grad_retired, count, peers)

    def grads_published(self, use: Use) -> np.ndarray:
        """Words at the homes of this rank's replicas."""
        offsets = self._grad_ready[self.grad_buffer(use)][self.arena.rank]
        least, peers = pack_word(self._generation, use.q, 0), self.arena.peers
        items = [
            (peers[copy.peer] + offsets[copy.slot], least | use.hash_of(copy)) for copy in use.pulls
        ]
        return np.array(items, PUBLISH_ITEM)

    def grads_there(self, use: Use) -> np.ndarray:
        """That the gradients of the replicas of this rank's experts are there."""
        offsets = self._grad_ready[self.grad_buffer(use)]
        return self._words(use, use.q, [(offsets[c.peer][c.slot], c) for c in use.pushes])

    def reduced(self, use: Use, home_grads: Mapping[str, Any]) -> tuple[np.ndarray, Any]:
        """Sums by ascending (rank, slot) of the replicas; and what must stay alive.

        Args:
            use: with gradients.
            home_grads: field -> ``[H, ...]`` or H tensors.

        Raises:
            TypeError, ValueError: a home gradient of another shape or dtype.
        """
        slots = self._grad_slot[self.grad_buffer(use)]
        by_home: dict[int, list[int]] = {}  # addresses of the replicas' gradients
        for copy in use.pushes:
            grads = by_home.setdefault(copy.home_slot, [])
            grads.append(self.arena.peers[copy.peer] + slots[copy.slot])
        fields = [field for field in self.layout.grads.fields if field.name in home_grads]
        sources = np.empty(len(fields) * len(use.pushes), np.uint64)
        address, size = sources.ctypes.data, sources.itemsize
        items: list[tuple[int, ...]] = []
        placed: list[int] = []
        keep: list[Any] = [sources]
        for field in fields if by_home else ():
            homes, kept = _home_rows(field, home_grads[field.name], by_home)
            kind, count = _KINDS[kept[0].dtype, field.dtype], math.prod(field.shape)
            keep.append(kept)
            for home_slot, grads in by_home.items():
                place = address + len(placed) * size
                items.append((homes[home_slot], place, len(grads), kind, count))
                placed += [grad + field.offset for grad in grads]
        sources[:] = placed
        return np.array(items, REDUCE_ITEM), keep

    def grads_added(self, use: Use) -> np.ndarray:
        """That this rank has added the gradients of all uses up to one, to all ranks."""
        return self.credit(self._grad_retired, use.q + 1)

    def weight_buffer(self, use: Use) -> int:
        """Of a use."""
        return use.n % self.layout.weight_buffers

    def grad_buffer(self, use: Use) -> int:
        """Of a use with gradients."""
        return use.q % self.layout.grad_buffers

    def _words(self, use: Use, number: int, words: Iterable[tuple[int, Copy]]) -> np.ndarray:
        """Waits for words of this rank that others write."""
        least, mine = pack_word(self._generation, number, 0), self._mine
        items = [
            (mine + offset, least, least | use.hash_of(copy), copy.peer, copy.slot)
            for offset, copy in words
        ]
        return np.array(items, WAIT_ITEM)


def _packed(homes: Any, slots: Collection[int]) -> tuple[dict[int, int], Any]:
    """Slot -> address of its contiguous bytes; and what must stay alive.

    Args:
        homes: ``[H, ...]`` or H tensors.
        slots: those wanted.
    """
    if isinstance(homes, torch.Tensor) and homes[0].is_contiguous():
        return _addresses(homes, slots), homes.detach()
    rows = {slot: homes[slot].detach().contiguous() for slot in slots}
    return {slot: row.data_ptr() for slot, row in rows.items()}, rows


def _home_rows(
    field: SlotField, homes: Any, slots: Collection[int]
) -> tuple[dict[int, int], list[torch.Tensor]]:
    """Slot -> address of the home gradient; and what must stay alive.

    Args:
        field: of a gradient slot.
        homes: ``[H, ...]`` or H tensors.
        slots: those wanted, at least one.
    """
    is_whole = isinstance(homes, torch.Tensor)
    rows = [homes[0]] if is_whole else [homes[slot] for slot in slots]
    for row in rows:
        check_tensor("home_grad", row, shape=field.shape, contiguous=True)
        if (row.dtype, field.dtype) not in _KINDS:
            raise TypeError(f"home_grad: need {field.dtype} sums, got {row.dtype}")
    if is_whole:
        return _addresses(homes, slots), rows
    return {slot: row.data_ptr() for slot, row in zip(slots, rows, strict=True)}, rows


def _addresses(whole: torch.Tensor, slots: Collection[int]) -> dict[int, int]:
    """Where rows of a tensor begin."""
    if max(slots, default=-1) >= whole.shape[0]:
        raise IndexError(f"slots: need below {whole.shape[0]}, got {sorted(slots)}")
    first, step = whole.data_ptr(), whole.stride(0) * whole.element_size()
    return {slot: first + slot * step for slot in slots}
