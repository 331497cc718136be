"""Replicas of many random plans."""

import numpy as np

from relibra_kernels import native


def test_no_expert_is_twice_on_a_rank_in_ten_thousand_random_plans() -> None:
    """Planners with even copies put two on one rank in 8.5 % of the ranks of a published test."""
    rng = np.random.default_rng(0)
    plans = 0
    for _ in range(100):
        node_of = np.repeat(np.arange(rng.integers(1, 4)), rng.integers(2, 9)).astype(np.int32)
        ranks, home, slots = len(node_of), int(rng.integers(1, 9)), int(rng.integers(1, 4))
        experts = ranks * home - int(rng.integers(0, home))
        order = np.full(ranks * home, -1, np.int32)
        order[rng.permutation(ranks * home)[:experts]] = np.arange(experts)
        skew = np.exp(rng.choice([0.5, 1.0, 3.0]) * rng.normal(size=(100, 1, experts)))
        totals = rng.poisson(100 * skew).astype(np.int64)
        layout = order.reshape(1, ranks, home)
        replicas, rows, largest = native.planner().replicate(
            totals, layout, rng.permutation(node_of), slots, 0.0, 1
        )
        plans += len(replicas)
        held = np.concatenate([np.broadcast_to(layout, (100, 1, ranks, home)), replicas], axis=3)
        held = np.sort(held, axis=3)
        assert not ((held[..., 1:] == held[..., :-1]) & (held[..., 1:] >= 0)).any()
        assert np.array_equal(rows.sum(3).max(2), largest)
        assert np.array_equal(rows.sum((2, 3)), totals.sum(2))
    assert plans == 10_000
