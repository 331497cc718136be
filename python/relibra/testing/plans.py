"""Plans that no planner would make, for tests: every valid plan must give the same numbers.

Letters: M micro-batches, L MoE layers, G ranks, E experts; H home, X static and S replica slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra.plan import PassPlan, StepPlan

if TYPE_CHECKING:
    from relibra.load_matrix import LoadMatrix
    from relibra.shape import ModelShape
    from relibra.topology import Topology

Splitter = Callable[[np.random.Generator, int, int], np.ndarray]


def random_layout(rng: np.random.Generator, num_experts: int, num_ranks: int) -> ExpertLayout:
    """A random permutation of the experts over the home slots."""
    home = ExpertLayout.identity(num_experts, num_ranks).home_slot_expert_GH
    return ExpertLayout(rng.permutation(home.reshape(-1)).reshape(home.shape))


def random_split(rng: np.random.Generator, rows: int, copies: int) -> np.ndarray:
    """Rows over the home copy and its replicas, at random; any part may be empty."""
    cuts = np.sort(rng.integers(0, rows + 1, copies - 1))
    return np.diff(np.concatenate([[0], cuts, [rows]]))


def one_row_split(rng: np.random.Generator, rows: int, copies: int) -> np.ndarray:
    """One row for every replica while there are rows, the rest at home."""
    part = np.zeros(copies, np.int64)
    part[1 : 1 + min(rows, copies - 1)] = 1
    part[0] = rows - part.sum()
    return part


def replica_only_split(rng: np.random.Generator, rows: int, copies: int) -> np.ndarray:
    """Every row on the last replica: the home computes nothing."""
    part = np.zeros(copies, np.int64)
    part[-1] = rows
    return part


def make_plan(
    rng: np.random.Generator,
    loads: Mapping[str, LoadMatrix],
    topology: Topology,
    shape: ModelShape,
    *,
    replica_slots: int,
    base: tuple[ExpertLayout, ...] | None = None,
    split: Splitter = random_split,
    fill: float = 0.8,
    reorder: bool = True,
    static_slots: int = 0,
) -> StepPlan:
    """A valid plan with random homes, random copies and rows split by ``split``.

    Args:
        rng: source of randomness; the same state gives the same plan on every rank.
        loads: gathered loads by pass.
        topology: nodes and rails of the ranks.
        shape: of the model.
        replica_slots: S.
        base: layouts to start from, by default identity.
        split: ``(rng, rows, copies) -> rows of each copy``, home first.
        fill: probability that a replica slot or a static slot is used.
        reorder: False keeps the base layout.
        static_slots: X; static copies may lie on any node.
    """
    num_ranks = topology.num_ranks
    base = base or (ExpertLayout.identity(shape.num_experts, num_ranks),) * shape.num_layers
    layouts = base
    if reorder:
        layouts = tuple(random_layout(rng, shape.num_experts, num_ranks) for _ in base)
    static = [np.zeros((num_ranks, 0), np.int32) for _ in layouts]
    if static_slots:
        one_node = np.zeros(num_ranks, np.int32)
        static = [
            _random_copies(rng, layout.home_slot_expert_GH, one_node, static_slots, fill)
            for layout in layouts
        ]
    held = [
        np.concatenate([layout.home_slot_expert_GH, chosen], 1)
        for layout, chosen in zip(layouts, static, strict=True)
    ]
    passes = {}
    for name in sorted(loads):
        totals = loads[name].totals_MLE
        replicas, rows = [], []
        for m in range(totals.shape[0]):
            for layout, slots, total in zip(layouts, held, totals[m], strict=True):
                chosen = _random_copies(rng, slots, topology.rank_to_node_G, replica_slots, fill)
                replicas.append(chosen)
                slots = np.concatenate([slots, chosen], 1)
                rows.append(_slot_rows(rng, layout, slots, total, split))
        size = (totals.shape[0], len(layouts), num_ranks)
        passes[name] = PassPlan(
            np.stack(replicas).reshape(*size, replica_slots), np.stack(rows).reshape(*size, -1)
        )
    return StepPlan.from_arrays(
        topology,
        shape,
        layouts,
        passes,
        loads,
        base_layouts=base,
        static_slot_expert_LGX=np.stack(static),
    )


def _random_copies(
    rng: np.random.Generator,
    slot_expert_Gn: np.ndarray,
    rank_to_node_G: np.ndarray,
    slots: int,
    fill: float,
) -> np.ndarray:
    """Copies of experts that the node has and the rank has not, int32 `[G, slots]`."""
    chosen = np.full((len(slot_expert_Gn), slots), -1, np.int32)
    for rank, node in enumerate(rank_to_node_G):
        held = np.unique(slot_expert_Gn[rank_to_node_G == node])
        near = held[(held >= 0) & ~np.isin(held, slot_expert_Gn[rank])]
        experts = rng.permutation(near)[:slots]
        used = rng.random(len(experts)) < fill
        chosen[rank, : len(experts)] = np.where(used, experts, -1)
    return chosen


def _slot_rows(
    rng: np.random.Generator,
    layout: ExpertLayout,
    slot_expert: np.ndarray,
    total_E: np.ndarray,
    split: Splitter,
) -> np.ndarray:
    rows = np.zeros(slot_expert.shape, np.int64)
    flat, flat_rows = slot_expert.reshape(-1), rows.reshape(-1)
    num_home, num_slots = layout.home_slot_expert_GH.shape[1], slot_expert.shape[1]
    for expert in range(layout.num_experts):
        slots = np.flatnonzero(flat == expert)
        slots = slots[np.argsort(slots % num_slots >= num_home, kind="stable")]  # home first
        flat_rows[slots] = split(rng, int(total_E[expert]), len(slots))
    return rows
