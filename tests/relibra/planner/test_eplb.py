"""The EPLB baseline equals the example of its README."""

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.eplb import even_rank_rows, place_copies
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

README_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def test_readme_example() -> None:
    slots = place_copies(README_LOADS, num_slots=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_copies_share_their_rows_evenly() -> None:
    slots = np.array([[0, 1, 0, 2, 0, 1]])
    rows = even_rank_rows(slots, np.array([[[10, 5, 7]]]), 3)
    assert rows.tolist() == [[[4 + 3, 3 + 7, 3 + 2]]]


def test_the_strategy_matches_the_functions_on_interleaved_nodes() -> None:
    """Ranks of a node need not be contiguous: rank loads follow the real ranks."""
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=16)), (3, 1, 4, 16)).astype(np.int32)
    shape, loads = ModelShape(16, 2, (0,)), {"train": LoadMatrix(rows)}
    plans = [
        plan_step(loads, topology, model=shape, strategy="eplb_oracle")
        for topology in (Topology(2, 2), Topology(rank_to_node=[0, 1, 0, 1]))
    ]
    straight, mixed = (plan.passes["train"].slot_rows_MLGn.sum(3) for plan in plans)
    assert np.array_equal(straight[:, :, [0, 1, 2, 3]], mixed[:, :, [0, 2, 1, 3]])
    assert np.array_equal(straight.sum(2), rows.sum((2, 3)))
    assert not plans[0].is_executable


def test_more_slots_help() -> None:
    rng = np.random.default_rng(1)
    rows = rng.poisson(30 * np.exp(rng.normal(size=32)), (4, 2, 8, 32)).astype(np.int32)
    imbalance = [
        plan_step(
            {"train": LoadMatrix(rows)},
            Topology(2, 4),
            model=ModelShape(32, 2, (0, 1)),
            config=PlannerConfig(replica_slots=slots),
            strategy="eplb_oracle",
        ).report.imbalance_mean
        for slots in (0, 2, 8)
    ]
    assert imbalance[0] > imbalance[1] > imbalance[2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((15, 4, 2, 8), "num_slots: need a multiple of 8, got 15"),
        ((16, 3, 2, 8), "num_groups: need a multiple of 2, got 3"),
        ((16, 4, 2, 7), "num_slots: need a multiple of 7"),
        ((8, 4, 2, 8), "num_slots: need at least 12 experts, got 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: tuple[int, int, int, int], message: str
) -> None:
    slots, groups, nodes, ranks = sizes
    with pytest.raises(PlanError, match=message):
        place_copies(
            README_LOADS, num_slots=slots, num_groups=groups, num_nodes=nodes, num_ranks=ranks
        )
