"""Groups, nodes and cells of jobs that number their ranks tp-cp-ep-dp-pp."""

import pytest

from relibra.rank_order import expert_groups
from relibra_kernels.errors import PlanError


def test_qwen3_30b_stock_script() -> None:
    """TP4 with sequence parallelism, EP8, ETP1: an EP group is a node with two cells of four."""
    groups = expert_groups(32, tp=4, ep=8, etp=1)
    assert len(groups) == 4
    for index, group in enumerate(groups):
        assert group.stage == 0
        assert (group.topology.ranks_per_node, group.topology.num_nodes) == (8, 1)
        assert group.members == tuple((8 * index + i,) for i in range(8))
        assert group.cells == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_qwen3_30b_with_the_default_etp() -> None:
    """Experts cut by the same TP4: eight ETP groups, two on a node."""
    (group,) = expert_groups(32, tp=4, ep=8)
    assert (group.topology.ranks_per_node, group.topology.num_nodes) == (2, 4)
    assert group.members[3] == (12, 13, 14, 15)
    assert group.topology.rank_to_rail == (0, 4) * 4
    assert group.cells == tuple((i,) for i in range(8))


def test_qwen3_235b_stock_script() -> None:
    """TP4, PP4, CP2, EP16: two nodes, each a cell; every stage has its own groups."""
    groups = expert_groups(128, tp=4, cp=2, ep=16, pp=4, etp=1)
    assert [group.stage for group in groups] == [0, 0, 1, 1, 2, 2, 3, 3]
    for group in groups:
        assert (group.topology.ranks_per_node, group.topology.num_nodes) == (8, 2)
        assert group.cells == (tuple(range(8)), tuple(range(8, 16)))
    assert groups[2].members[0] == (32,)


def test_kimi_k2_stock_script() -> None:
    """TP8, PP8, CP4, EP32: four nodes that are one cell."""
    groups = expert_groups(256, tp=8, cp=4, ep=32, pp=8, etp=1)
    assert [group.stage for group in groups] == list(range(8))
    for group in groups:
        assert (group.topology.ranks_per_node, group.topology.num_nodes) == (8, 4)
        assert group.cells == (tuple(range(32)),)
        assert group.topology.rank_to_rail == tuple(range(8)) * 4


def test_several_groups_share_a_node_and_groups_cross_boundaries() -> None:
    groups = expert_groups(24, ep=6)
    assert [str(group.topology) for group in groups] == [
        "1 nodes x 6 ranks",
        "2 nodes of [2, 4] ranks",
        "2 nodes of [4, 2] ranks",
        "1 nodes x 6 ranks",
    ]
    assert groups[1].topology.rank_to_rail == (6, 7, 0, 1, 2, 3)
    halves = expert_groups(8, ep=4)
    assert [group.members[0] for group in halves] == [(0,), (4,)]


def test_nodes_can_be_given() -> None:
    (group,) = expert_groups(4, ep=4, rank_to_node=[7, 3, 3, 3])
    assert group.topology.rank_to_node == (0, 1, 1, 1)
    assert group.topology.rank_to_rail == (0, 0, 1, 2)


def test_another_order_is_another_grouping() -> None:
    groups = expert_groups(8, ep=2, order="tp-cp-dp-ep-pp")
    assert [group.members for group in groups][:2] == [((0,), (4,)), ((1,), (5,))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 12, "ep": 8}, r"multiple of 8 \(tp 1 x ep 8 x pp 1\), got 12"),
        ({"world_size": 12, "tp": 8, "ep": 1, "etp": 1}, "world_size: need a multiple of 8"),
        ({"world_size": 8, "ep": 0}, "ep: need an integer >= 1, got 0"),
        ({"world_size": 10**12}, "world_size: need at most 1048576 ranks, got 1000000000000"),
        ({"world_size": 8, "order": "tp-ep-dp-pp"}, "order: need each of tp, cp, ep, dp, pp once"),
        ({"world_size": 8, "tp": 4, "ep": 2, "gpus_per_node": 2}, "etp: need .* got nodes"),
        ({"world_size": 4, "rank_to_node": [0]}, "rank_to_node: need 4 entries, got 1"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        expert_groups(**arguments)  # type: ignore[arg-type]
