"""ExpertLayout: a permutation of the experts over home slots."""

import numpy as np
import pytest
import torch

from relibra.layout import ExpertLayout
from relibra_kernels.errors import PlanError


@pytest.mark.parametrize(("experts", "ranks"), [(8, 4), (60, 8), (5, 2), (3, 4), (1, 1)])
def test_identity_is_contiguous_with_at_most_one_filler_a_rank(experts: int, ranks: int) -> None:
    layout = ExpertLayout.identity(experts, ranks)
    assert layout.num_experts == experts
    assert layout.num_ranks == ranks
    assert layout.slots_per_rank == -(-experts // ranks)
    assert (np.diff(layout.expert_to_slot) > 0).all()
    assert ((layout.home_slot_expert_GH < 0).sum(1) <= 1).all()


def test_slot_and_expert_tables_are_inverse() -> None:
    rng = np.random.default_rng(0)
    slots = np.full(12, -1)
    slots[rng.permutation(12)[:10]] = rng.permutation(10)
    layout = ExpertLayout(slots.reshape(4, 3))
    for expert in range(10):
        slot = layout.expert_to_slot[expert]
        assert layout.slot_to_expert[slot] == expert
        assert layout.home_rank_E[expert] == slot // 3


def test_moved_experts_counts_ranks_not_slots() -> None:
    before = ExpertLayout([[0, 1], [2, 3]])
    assert before.moved_experts(ExpertLayout([[1, 0], [2, 3]])).tolist() == []
    assert before.moved_experts(ExpertLayout([[2, 0], [1, 3]])).tolist() == [1, 2]


def test_value_equality_and_read_only() -> None:
    source = np.array([[0, 1], [2, 3]], np.int32)
    layout = ExpertLayout(source)
    source[0, 0] = 3
    assert layout == ExpertLayout([[0, 1], [2, 3]])
    assert layout != ExpertLayout([[1, 0], [2, 3]])
    assert hash(layout) == hash(ExpertLayout(torch.tensor([[0, 1], [2, 3]])))
    with pytest.raises(ValueError, match="read-only"):
        layout.home_slot_expert_GH[0, 0] = 1


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([[0, 1], [1, 2]], PlanError, "exactly once, got expert 1 where 2 is due"),
        ([[0, 2], [3, -1]], PlanError, "exactly once, got expert 2 where 1 is due"),
        ([[-1, -1]], PlanError, "need at least one expert"),
        ([[0, -2]], PlanError, "need values in -1"),
        ([0, 1], PlanError, "home_slot_expert_GH: need"),
        ([[0.0, 1.0]], TypeError, "home_slot_expert_GH: need integers, got"),
    ],
)
def test_what_is_refused(slots: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertLayout(slots)  # type: ignore[arg-type]
