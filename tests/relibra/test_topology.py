"""Topology: both ways to say it, derived tables, and what is refused."""

import numpy as np
import pytest

from relibra.topology import Topology
from relibra_kernels.errors import PlanError


def test_uniform_nodes_number_ranks_node_by_node() -> None:
    topology = Topology(num_nodes=3, ranks_per_node=2)
    assert topology.rank_to_node == (0, 0, 1, 1, 2, 2)
    assert topology.rank_to_rail == (0, 1, 0, 1, 0, 1)
    assert (topology.num_ranks, topology.num_nodes, topology.ranks_per_node) == (6, 3, 2)
    assert topology == Topology(rank_to_node=[0, 0, 1, 1, 2, 2])
    assert topology.rank_to_node_G.dtype == np.int32
    assert not topology.rank_to_rail_G.flags.writeable
    assert str(topology) == "3 nodes x 2 ranks"


def test_nodes_may_be_uneven_and_interleaved() -> None:
    topology = Topology(rank_to_node=[1, 0, 1, 1], rank_to_rail=[3, 3, 0, 1])
    assert topology.ranks_of_node(1) == (0, 2, 3)
    assert topology.node_sizes == (1, 3)
    assert topology.rank_to_rail == (3, 3, 0, 1)
    with pytest.raises(PlanError, match=r"ranks_per_node: need equal nodes, got sizes \[1, 3\]"):
        _ = topology.ranks_per_node


def test_the_default_rail_is_the_position_inside_the_node() -> None:
    assert Topology(rank_to_node=[1, 0, 1, 1]).rank_to_rail == (0, 0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "need num_nodes and ranks_per_node, or rank_to_node"),
        ({"num_nodes": 2}, "ranks_per_node=None"),
        ({"num_nodes": 0, "ranks_per_node": 2}, "num_nodes: need an integer >= 1, got 0"),
        (
            {"num_nodes": 2, "ranks_per_node": 2.0},
            r"ranks_per_node: need an integer >= 1, got 2\.0",
        ),
        ({"num_nodes": 1, "ranks_per_node": 2, "rank_to_node": [0]}, "got both"),
        ({"rank_to_node": []}, "rank_to_node: need at least one rank"),
        ({"rank_to_node": [0, -1]}, r"rank_to_node\[1\]: need an integer >= 0, got -1"),
        ({"rank_to_node": [0, 2, 2]}, r"every node 0\.\.2 to have a rank, got none for \[1\]"),
        ({"rank_to_node": [0, 2]}, "need node numbers below the 2 ranks, got 2"),
        ({"rank_to_node": [0, 0], "rank_to_rail": [0]}, "rank_to_rail: need 2 entries"),
        ({"rank_to_node": [0], "rank_to_rail": [70000]}, "rank_to_rail.*65535"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Topology(**arguments)  # type: ignore[arg-type]


def test_huge_node_numbers_are_refused_before_anything_is_allocated():
    with pytest.raises(PlanError, match="need node numbers below the 2 ranks, got 30000000000"):
        Topology(rank_to_node=[0, 3 * 10**10])
