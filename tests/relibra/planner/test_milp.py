"""Replication against an exact solver: HiGHS on one node, seeded instances, none left out."""

from collections.abc import Callable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from relibra_kernels import native

NUM_INSTANCES = 100


def make_instance(seed: int) -> tuple[np.ndarray, int]:
    """Rows int64 `[P, H]` of a node and its replica slots S.

    P 2, 4, 8; H 1 to 16; S 0 to 2; rows uniform, Zipf, on few experts, equal, or an instance that
    defeated a published greedy method.
    """
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 4, 8]))
    home = int(rng.choice([1, 2, 3, 4, 8, 16]))
    slots = int(rng.integers(0, 3))
    kind = seed % 5
    if kind == 0:
        rows = rng.integers(0, 200, (ranks, home))
    elif kind == 1:
        rows = rng.permutation(2000 // np.arange(1, ranks * home + 1)).reshape(ranks, home)
    elif kind == 2:
        rows = np.where(rng.random((ranks, home)) < 0.1, rng.integers(100, 1000), 0)
        rows[0, 0] += 500
    elif kind == 3:
        rows = np.full((ranks, home), 10)
        rows[int(rng.integers(ranks))] *= 3
    else:
        rows = np.array([[600], [560], [120], [120], [20], [10], [10], [10]])
        slots = max(slots, 1)
    return rows.astype(np.int64), slots


def solver_maximum(rows: np.ndarray, slots: int) -> int:
    """Rows of the fullest rank of our plan."""
    ranks, home = rows.shape
    layout = np.arange(rows.size, dtype=np.int32).reshape(1, ranks, home)
    _, slot_rows, largest = native.planner().replicate(
        rows.reshape(1, 1, -1), layout, np.zeros(ranks, np.int32), slots, 0.0, 1
    )
    assert slot_rows.sum(3).max() == largest[0, 0]
    return int(largest[0, 0])


def exact_maximum(rows: np.ndarray, slots: int) -> int:
    """The optimum: for fixed sites a split is a flow, so the best integer maximum is the rounded-up
    real one, which a mixed-integer program with binary sites finds."""
    ranks, home = rows.shape
    if slots == 0:
        return int(rows.sum(1).max())
    expert, rank = np.divmod(np.arange(rows.size * ranks), ranks)
    elsewhere = rank != expert // home
    expert, rank = expert[elsewhere], rank[elsewhere]
    count, place = len(expert), np.arange(len(expert))
    weight = rows.reshape(-1)
    ones = np.ones(count)
    # Variables: site used (binary), rows moved, maximum. Constraints, each <= its bound:
    #   moved <= weight * used;  moved of an expert <= weight;  load <= maximum;  sites <= S
    first_load, first_slot = count + rows.size, count + rows.size + ranks
    entries = [
        (place, count + place, ones),
        (place, place, -weight[expert]),
        (count + expert, count + place, ones),
        (first_load + rank, count + place, ones),
        (first_load + expert // home, count + place, -ones),
        (first_load + np.arange(ranks), np.full(ranks, 2 * count), -np.ones(ranks)),
        (first_slot + rank, place, ones),
    ]
    row, column, value = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    matrix = coo_matrix((value, (row, column)), (first_slot + ranks, 2 * count + 1))
    limit = np.concatenate([np.zeros(count), weight, -rows.sum(1), np.full(ranks, slots)])
    low, high = np.zeros(2 * count + 1), np.concatenate([ones, np.full(count + 1, np.inf)])
    low[-1] = -(-rows.sum() // ranks)
    result = milp(
        np.append(np.zeros(2 * count), 1.0),
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, limit),
        bounds=Bounds(low, high),
        integrality=np.concatenate([ones, np.zeros(count + 1)]),
        options={"mip_rel_gap": 0.0},
    )
    assert result.success, result.message
    # Optima are multiples of 1 / (number of ranks in a bottleneck), solver errors far smaller.
    return int(np.ceil(result.fun - 0.01))


def test_no_plan_beats_the_exact_solver_and_most_equal_it(
    record_property: Callable[[str, object], None],
) -> None:
    ratios = []
    for seed in range(NUM_INSTANCES):
        rows, slots = make_instance(seed)
        ours, best = solver_maximum(rows, slots), exact_maximum(rows, slots)
        assert ours >= best, f"instance {seed}: {ours} beats the optimum {best}"
        if slots >= rows.shape[1]:
            assert ours == best == -(-rows.sum() // len(rows)), f"instance {seed}: S >= H"
        ratios.append(ours / max(best, 1))
    assert len(ratios) == NUM_INSTANCES
    close = float(np.mean(np.array(ratios) <= 1.005))
    record_property("within_half_a_percent", close)
    record_property("worst", max(ratios))
    # What is asked for is 0.95 and 1.05; without the change of single sites the worst is 1.020.
    assert close >= 0.98
    assert max(ratios) <= 1.015
