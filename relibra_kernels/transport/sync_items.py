"""What a use of replica synchronisation hands to its engine: which bytes go where, which words.

Pure functions of the use, the layout and the addresses of an arena; nothing here waits or writes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

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
    hash16,
    pack_credit,
    pack_word,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from relibra_kernels.transport.arena_layout import ArenaLayout
    from relibra_kernels.transport.symmetric_heap import Arena
    from relibra_kernels.transport.sync_report import UseKey

_KINDS = {
    (torch.float32, torch.float32): ReduceKind.FP32_FROM_FP32,
    (torch.float32, torch.bfloat16): ReduceKind.FP32_FROM_BF16,
    (torch.float64, torch.float64): ReduceKind.FP64_FROM_FP64,
}


@dataclasses.dataclass(frozen=True)
class Copy:
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

    def is_of(self, weights: Mapping[str, Any]) -> bool:
        """Whether these are the tensors that were pushed."""
        return self.sources == sources_of(weights)

    def hash_of(self, copy: Copy) -> int:
        """What a word of this use carries for a replica."""
        return hash16(self.key.parts(), copy.expert, self.plan_hash)


def sources_of(weights: Mapping[str, Any]) -> tuple[int, ...]:
    """What tells home weights from others: where each field begins."""
    return tuple(w[0].data_ptr() if len(w) else 0 for w in weights.values())


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


class SyncItems:
    """Items of the uses of one arena.

    Args:
        arena: of the domain.
        layout: of the arena.
    """

    def __init__(self, arena: Arena, layout: ArenaLayout) -> None:
        self.arena, self.layout = arena, layout
        self._mine, self._generation = arena.peers[arena.rank], arena.generation

    def check_fields(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise unless home weights have the fields of a slot.

        Args:
            weights: field -> ``[H, ...]``.

        Raises:
            TypeError, ValueError: another name, shape or dtype.
        """
        need = {f.name: (f.shape, f.dtype) for f in self.layout.weights.fields}
        got = {name: (tuple(w.shape[1:]), w.dtype) for name, w in weights.items()}
        if need != got:
            raise ValueError(f"weights: need the fields {need} of the replica slots, got {got}")

    def weight_credits(self, use: Use) -> np.ndarray:
        """That every destination has retired the use before in this buffer."""
        count = use.n - self.layout.weight_buffers + 1
        peers = sorted({copy.peer for copy in use.pushes}) if count > 0 else []
        return self._credits(self.layout.retired, count, peers)

    def pushed(self, use: Use, weights: Mapping[str, torch.Tensor]) -> tuple[np.ndarray, Any]:
        """Copies of all fields, each slot's word with its last; and what must stay alive."""
        buffer, arrivals = self.weight_buffer(use), np.zeros(len(use.pushes), np.uint32)
        items: list[tuple[int, ...]] = []
        keep: list[Any] = [arrivals]
        for place, copy in enumerate(use.pushes):
            base = self.arena.peers[copy.peer]
            slot = base + self.layout.weight_slot(buffer, copy.slot)
            for field in self.layout.weights.fields:
                source = weights[field.name][copy.home_slot].detach().contiguous()
                keep.append(source)
                items.append((source.data_ptr(), slot + field.offset, field.num_bytes, 0, 0, 0))
            word = pack_word(self._generation, use.n, use.hash_of(copy))
            full = base + self.layout.full(buffer, copy.slot)
            arrived = arrivals.ctypes.data + place * arrivals.itemsize
            items[-1] = (*items[-1][:3], full, word, arrived)
        return np.array(items, PUSH_ITEM), keep

    def weights_there(self, use: Use) -> np.ndarray:
        """That the weights of this rank's replicas have come, and are the right ones."""
        buffer = self.weight_buffer(use)
        words = [(self.layout.full(buffer, copy.slot), copy) for copy in use.pulls]
        return self._words(use, use.n, words)

    def grad_credits(self, use: Use, peers: Iterable[int]) -> np.ndarray:
        """That homes have added what this gradient buffer held before."""
        count = use.q - self.layout.grad_buffers + 1
        return self._credits(self.layout.grad_retired, count, peers)

    def grads_published(self, use: Use) -> np.ndarray:
        """Words at the homes of this rank's replicas."""
        buffer, me = self.grad_buffer(use), self.arena.rank
        items = [
            (
                self.arena.peers[copy.peer] + self.layout.grad_ready(buffer, me, copy.slot),
                pack_word(self._generation, use.q, use.hash_of(copy)),
            )
            for copy in use.pulls
        ]
        return np.array(items, PUBLISH_ITEM)

    def grads_there(self, use: Use) -> np.ndarray:
        """That the gradients of the replicas of this rank's experts are there."""
        buffer = self.grad_buffer(use)
        words = [(self.layout.grad_ready(buffer, c.peer, c.slot), c) for c in use.pushes]
        return self._words(use, use.q, words)

    def reduced(self, use: Use, home_grads: Mapping[str, Any]) -> tuple[np.ndarray, Any]:
        """Sums by ascending (rank, slot) of the replicas; and what must stay alive.

        Args:
            use: with gradients.
            home_grads: field -> ``[H, ...]`` or H tensors.

        Raises:
            TypeError, ValueError: a home gradient of another shape or dtype.
        """
        items: list[tuple[int, ...]] = []
        keep: list[Any] = []
        by_home: dict[int, list[Copy]] = {}
        for copy in use.pushes:
            by_home.setdefault(copy.home_slot, []).append(copy)
        for field in (f for f in self.layout.grads.fields if f.name in home_grads):
            for home_slot, copies in by_home.items():
                home = home_grads[field.name][home_slot]
                check_tensor("home_grad", home, shape=field.shape, contiguous=True)
                if (home.dtype, field.dtype) not in _KINDS:
                    raise TypeError(f"home_grad: need {field.dtype} sums, got {home.dtype}")
                grads = [self._grad(use, copy) + field.offset for copy in copies]
                sources = np.array(grads, np.uint64)
                kind = int(_KINDS[home.dtype, field.dtype])
                address = sources.ctypes.data
                items.append((home.data_ptr(), address, len(grads), kind, home.numel()))
                keep += [home, sources]
        return np.array(items, REDUCE_ITEM), keep

    def credit(self, place: Callable[[int], int], count: int) -> np.ndarray:
        """This rank's credit, at all ranks."""
        offset, value = place(self.arena.rank), pack_credit(self._generation, count)
        return np.array([(base + offset, value) for base in self.arena.peers], PUBLISH_ITEM)

    def weight_buffer(self, use: Use) -> int:
        """Of a use."""
        return use.n % self.layout.weight_buffers

    def grad_buffer(self, use: Use) -> int:
        """Of a use with gradients."""
        return use.q % self.layout.grad_buffers

    def _grad(self, use: Use, copy: Copy) -> int:
        slot = self.layout.grad_slot(self.grad_buffer(use), copy.slot)
        return self.arena.peers[copy.peer] + slot

    def _words(self, use: Use, number: int, words: Iterable[tuple[int, Copy]]) -> np.ndarray:
        """Waits for words of this rank that others write."""
        least = pack_word(self._generation, number, 0)
        items = [
            (
                self._mine + offset,
                least,
                pack_word(self._generation, number, use.hash_of(copy)),
                copy.peer,
                copy.slot,
            )
            for offset, copy in words
        ]
        return np.array(items, WAIT_ITEM)

    def _credits(self, place: Callable[[int], int], count: int, peers: Iterable[int]) -> np.ndarray:
        credit = pack_credit(self._generation, max(count, 0))
        items = [(self._mine + place(peer), credit, 0, peer, -1) for peer in peers]
        return np.array(items, WAIT_ITEM)
