"""Replication of one node against an exact solver (HiGHS): seeded instances, none left out."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from relibra_kernels import native

NUM_INSTANCES = 300
KINDS = ("uniform", "Zipf", "one-hot", "equal", "counter-example")

# Rows [P, H] that defeat published greedy methods: even splits, or donors that only give.
COUNTER_EXAMPLES = (
    [[600], [560], [120], [120], [20], [10], [10], [10]],
    [[14], [12], [4], [10]],
    [[100, 0], [60, 0], [0, 0], [0, 0]],
    [[90, 10], [70, 30], [50, 50], [6, 6]],
    [[1000, 1], [400, 1], [300, 1], [200, 1], [60, 1], [30, 1], [8, 1], [1, 1]],
)


def make_instance(seed: int) -> tuple[np.ndarray, int]:
    """Rows int64 `[P, H]` of a node and its replica slots S: P 2, 4, 8; H 1 to 16; S 0 to 2."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 4, 8]))
    home = int(rng.choice([1, 2, 3, 4, 8, 16]))
    slots = int(rng.integers(0, 3))
    kind = KINDS[seed % len(KINDS)]
    if kind == "uniform":
        rows = rng.integers(0, 200, (ranks, home))
    elif kind == "Zipf":
        rows = rng.permutation(2000 // np.arange(1, ranks * home + 1)).reshape(ranks, home)
    elif kind == "one-hot":
        rows = np.where(rng.random((ranks, home)) < 0.1, rng.integers(100, 1000), 0)
        rows[0, 0] += 500
    elif kind == "equal":
        rows = np.full((ranks, home), 10)
        rows[int(rng.integers(ranks))] *= 3
    else:
        rows = np.array(COUNTER_EXAMPLES[seed // len(KINDS) % len(COUNTER_EXAMPLES)])
        rows = rng.permutation(rows) * int(rng.integers(1, 50))
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


@dataclass(frozen=True)
class MilpRecord:
    """One instance: our maximum beside the optimum."""

    seed: int
    kind: str
    shape: tuple[int, int]
    slots: int
    ours: int
    best: int

    @property
    def ratio(self) -> float:
        return self.ours / max(self.best, 1)


def run_instances(count: int = NUM_INSTANCES) -> list[MilpRecord]:
    records = []
    for seed in range(count):
        rows, slots = make_instance(seed)
        records.append(
            MilpRecord(
                seed,
                KINDS[seed % len(KINDS)],
                rows.shape,
                slots,
                solver_maximum(rows, slots),
                exact_maximum(rows, slots),
            )
        )
    return records
