"""Topology: both ways to say it, derived tables, and what is refused."""

import tracemalloc

import numpy as np
import pytest

from relibra.limits import MAX_RANKS
from relibra.topology import Topology
from relibra_kernels.errors import PlanError
from relibra_kernels.testing.launch import run_ranks


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
        ({"rank_to_node": [0, 2]}, r"every node 0\.\.2 to have a rank, got none for \[1\]"),
        ({"rank_to_node": [0, 0], "rank_to_rail": [0]}, "rank_to_rail: need 2 entries"),
        ({"rank_to_node": [0], "rank_to_rail": [70000]}, "rank_to_rail.*65535"),
        ({"num_nodes": 1, "ranks_per_node": 70000}, "rank_to_rail.*65535"),
        ({"num_nodes": 10**8, "ranks_per_node": 8}, "need at most 1048576 ranks, got 100000000"),
        ({"rank_to_node": range(10**12)}, "rank_to_node: need at most 1048576 ranks, got more"),
        ({"rank_to_node": [0, 10**12]}, r"every node 0\.\.1000000000000 .* got none for \[1, 2,"),
        ({"rank_to_node": [3 * 10**7, 0]}, r"every node 0\.\.30000000 to have a rank"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Topology(**arguments)  # type: ignore[arg-type]


def test_as_many_ranks_as_are_accepted_take_linear_time() -> None:
    """Quadratic work on 2^20 ranks would take hours; the limit of the test is 120 s."""
    uniform = Topology(num_nodes=1 << 17, ranks_per_node=8)
    assert uniform.num_ranks == MAX_RANKS
    assert uniform == Topology(rank_to_node=uniform.rank_to_node)
    assert uniform.rank_to_rail[-9:] == (7, 0, 1, 2, 3, 4, 5, 6, 7)
    assert [uniform.ranks_of_node(node) for node in range(1 << 17)][77] == tuple(range(616, 624))
    assert uniform.ranks_of_node(-1) == uniform.ranks_of_node(1 << 17) == ()


def test_a_wrong_node_number_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(PlanError):
        Topology(rank_to_node=[0, 10**7])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_names_of_nodes_become_numbers_and_etp_groups_one_rank() -> None:
    topology = Topology.from_names(["x", "x", "y", "y", "y", "y"], [4, 5, 0, 1, 2, 3], etp=2)
    assert topology.rank_to_node == (0, 1, 1)
    assert topology.rank_to_rail == (4, 0, 2)
    assert Topology.from_names(["x", "y", "x"], [3, None, 1]).rank_to_rail == (0, 0, 1)
    with pytest.raises(PlanError, match=r"etp: need ranks 0\.\.1 of one ETP group .*'x', 'y'"):
        Topology.from_names(["x", "y"], etp=2)
    with pytest.raises(PlanError, match="group: need a multiple of etp 2 ranks, got 3"):
        Topology.from_names(["x", "x", "x"], etp=2)


def topology_of_rank(rank: int, _: int) -> tuple[Topology, Topology]:
    return (
        Topology.from_group(None, node=f"domain {rank // 2}", rail=rank % 2),
        Topology.from_group(None, etp=2),
    )


def test_a_process_group_agrees_on_its_topology() -> None:
    by_domain = Topology(num_nodes=2, ranks_per_node=2)
    for found in run_ranks(4, topology_of_rank):
        assert found == (by_domain, Topology(num_nodes=1, ranks_per_node=2))
