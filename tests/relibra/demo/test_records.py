import numpy as np
import pytest

from relibra.demo.records import StepLoads, Stopwatch, imbalance, node_rows
from relibra.topology import Topology

TOPOLOGY = Topology(2, 2)


def test_imbalance_weighs_instances_by_their_rows():
    rows = np.array([[[4, 0, 0, 0]], [[25, 25, 25, 25]]])
    assert imbalance(rows) == pytest.approx((4 + 25) / (1 + 25))
    assert imbalance(np.zeros((1, 1, 4), np.int64)) == 1.0


def test_nodes_add_their_ranks():
    assert node_rows(np.array([[[1, 2, 3, 4]]]), TOPOLOGY).tolist() == [[[3, 7]]]


def test_imbalances_before_and_after():
    loads = StepLoads(np.array([[[8, 0, 0, 0]]]), np.array([[[3, 1, 2, 2]]]), TOPOLOGY)
    assert loads.imbalances() == {
        "rank_imbalance_none": 4.0,
        "rank_imbalance": 1.5,
        "node_imbalance_none": 2.0,
        "node_imbalance": 1.0,
    }


def test_a_lost_row_is_refused():
    with pytest.raises(ValueError, match="as many rows as none_MLG"):
        StepLoads(np.array([[[8, 0, 0, 0]]]), np.array([[[3, 1, 2, 1]]]), TOPOLOGY)


def test_stopwatch_adds_up():
    watch = Stopwatch()
    for _ in range(2):
        with watch.time("stage"):
            pass
    assert list(watch.seconds) == ["stage"]
    assert watch.seconds["stage"] >= 0
