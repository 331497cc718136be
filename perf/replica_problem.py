"""Experts that move between ranks: sizes of published models, who sends what to whom, the gate.

Letters: P ranks, H home slots and S replica slots a rank, D and F model and expert dim.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch

from relibra.presets import MODELS
from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.arena_layout import ArenaLayout

MODEL_NAMES = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-4.5-Air", "DeepSeek-V3", "gpt-oss-120b")
NUM_HOME = NUM_SLOTS = 2  # H, S
GRAD_BYTES = 4  # fp32 on the wire

Fields = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Replicas of one use.

    Attributes:
        name: printed.
        replicas: (home rank, home slot, replica rank, replica slot) of each.
    """

    name: str
    replicas: tuple[tuple[int, int, int, int], ...]

    def lists(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Push and pull list of a rank, as `ReplicaSync.submit_push` takes them."""
        pushes = [[h, r, s] for g, h, r, s in self.replicas if g == rank]
        pulls = [[s, g, h] for g, h, r, s in self.replicas if r == rank]
        both = (torch.tensor(one, dtype=torch.int32).reshape(-1, 3) for one in (pushes, pulls))
        return next(both), next(both)

    def out_and_in(self, num_ranks: int) -> tuple[list[int], list[int]]:
        """Experts that each rank sends and gets."""
        homes, takers = [one[0] for one in self.replicas], [one[2] for one in self.replicas]
        ranks = range(num_ranks)
        return [homes.count(r) for r in ranks], [takers.count(r) for r in ranks]

    def reduced(self, rank: int) -> tuple[int, int]:
        """Replica gradients that a rank adds, and home gradients that it adds to."""
        homes = [home for owner, home, *_ in self.replicas if owner == rank]
        return len(homes), len(set(homes))


def patterns(num_ranks: int, *, few: bool = False) -> list[Pattern]:
    """One expert to f ranks for every f, a ring, two experts over one link, two homes to one rank.

    Args:
        num_ranks: P, at least 2.
        few: only those where a rank does the most.
    """
    found = [
        Pattern(f"1 to {f}", tuple((0, 0, r, 0) for r in range(1, f + 1)))
        for f in range(1, num_ranks)
    ]
    found.append(Pattern("ring", tuple((g, 0, (g + 1) % num_ranks, 0) for g in range(num_ranks))))
    found.append(Pattern("two to one rank", ((0, 0, 1, 0), (0, 1, 1, 1))))
    if num_ranks > 2:
        found.append(Pattern("two homes to one", ((1, 0, 0, 0), (2, 0, 0, 1))))
    return found[num_ranks - 2 :] if few else found


@dataclasses.dataclass(frozen=True)
class Problem:
    """One expert size.

    Attributes:
        model: name.
        hidden: D.
        expert: F.
        num_ranks: P.
        device: of weights and arenas.
    """

    model: str
    hidden: int
    expert: int
    num_ranks: int
    device: torch.device

    @property
    def layout(self) -> ArenaLayout:
        """Of the arena: bf16 weights, fp32 gradients."""
        shapes = {"w13": (2 * self.expert, self.hidden), "w2": (self.hidden, self.expert)}
        weights = SlotLayout.of({name: (torch.bfloat16, one) for name, one in shapes.items()})
        grads = weights.as_dtype(dict.fromkeys(shapes, torch.float32))
        return ArenaLayout(weights, grads, self.num_ranks, NUM_SLOTS)

    @property
    def weight_bytes(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert * torch.bfloat16.itemsize

    @property
    def grad_bytes(self) -> int:
        """Of one expert's gradient on the wire."""
        return 3 * self.hidden * self.expert * GRAD_BYTES

    def weights(self, rank: int) -> Fields:
        """Home weights of a rank by field, ``[H, ...]``; every row is another."""
        return {
            field.name: torch.stack(
                [
                    _bits(field.shape, (1, number, rank, home), self.device).view(field.dtype)
                    for home in range(NUM_HOME)
                ]
            )
            for number, field in enumerate(self.layout.weights.fields)
        }

    def grads(self, rank: int) -> Fields:
        """Replica gradients of a rank by field, ``[S, ...]``, of magnitudes that do not commute."""
        return self._floats(2, rank, NUM_SLOTS)

    def home_grads(self, rank: int) -> Fields:
        """Home gradients before any sum, ``[H, ...]``."""
        return self._floats(3, rank, NUM_HOME)

    def _floats(self, kind: int, rank: int, count: int) -> Fields:
        return {
            field.name: torch.stack(
                [
                    _bits(field.shape, (kind, number, rank, slot), self.device).float()
                    * 3.1 ** ((rank + slot + kind) % 5 - 2)
                    for slot in range(count)
                ]
            )
            for number, field in enumerate(self.layout.grads.fields)
        }


def problems(models: tuple[str, ...], num_ranks: int, device: torch.device) -> list[Problem]:
    """Published models, or "smoke" for a small size.

    Args:
        models: names.
        num_ranks: P.
        device: of everything.
    """
    sizes = {"smoke": (64, 48)}
    sizes |= {name: (MODELS[name].hidden_size, MODELS[name].expert_size) for name in MODEL_NAMES}
    return [Problem(name, *sizes[name], num_ranks, device) for name in models]


def check_weights(
    problem: Problem, pattern: Pattern, rank: int, slots: Mapping[str, torch.Tensor]
) -> None:
    """The gate of a push: content of every row of every replica of a rank.

    Args:
        problem: sizes.
        pattern: replicas.
        rank: that holds them.
        slots: field -> ``[S, ...]``.

    Raises:
        AssertionError: a row is not that of the home's weights.
    """
    for owner, home, taker, slot in pattern.replicas:
        if taker != rank:
            continue
        need = problem.weights(owner)
        for name, held in slots.items():
            rows = held[slot].view(torch.int16) == need[name][home].view(torch.int16)
            wrong = (~rows.flatten(1).all(1)).nonzero().flatten().tolist()
            assert not wrong, (
                f"{pattern.name}: rank {rank}, slot {slot}: rows {wrong[:8]} of {name} are not "
                f"those of home slot {home} of rank {owner}"
            )


def check_sums(
    problem: Problem, pattern: Pattern, rank: int, found: Mapping[str, torch.Tensor]
) -> None:
    """The gate of a reduce: bits of all home gradients of a rank.

    Args:
        problem: sizes.
        pattern: replicas.
        rank: the home.
        found: field -> ``[H, ...]``.

    Raises:
        AssertionError: a bit differs from the sum in ascending (rank, slot) order.
    """
    need = problem.home_grads(rank)
    for owner, home, taker, slot in sorted(pattern.replicas, key=lambda one: one[2:]):
        if owner == rank:
            grads = problem.grads(taker)
            for name, total in need.items():
                total[home] += grads[name][slot]
    for name, total in need.items():
        assert torch.equal(found[name], total), (
            f"{pattern.name}: rank {rank}: {name}: home gradients are not the sum of one process"
        )


def _bits(shape: tuple[int, ...], seed: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Int16 of any bits, the same on every device."""
    start = 0
    for part in seed:
        start = (start * 1009 + part + 17) % 2**31
    count = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    mixed = (count * 0x9E3779B1 + start * 0x85EBCA77) >> 13
    return (mixed & 0x7FFF).to(torch.int16).view(shape)
