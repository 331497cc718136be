"""Groups of experts stay on one node when asked, for routers that limit the groups of a token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, PlanStream, plan_groups, plan_step
from relibra.shape import ModelShape
from relibra.token_sample import TokenSample
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

CONFIG = PlannerConfig(proposals=2000, expert_groups=8)


def make_loads(
    topology: Topology, experts: int, seed: int, skew: float = 1.0, layers: int = 2
) -> dict[str, LoadMatrix]:
    rng = np.random.default_rng(seed)
    hot = np.exp(skew * rng.normal(size=(3, layers, 1, experts)))
    shape = (3, layers, topology.num_ranks, experts)
    return {"train": LoadMatrix(rng.poisson(np.broadcast_to(30 * hot, shape)).astype(np.int32))}


def split_groups(layout: ExpertLayout, topology: Topology, groups: int) -> int:
    """Groups on more than one node, found from the table of slots alone."""
    nodes: list[set[int]] = [set() for _ in range(groups)]
    for rank, experts in enumerate(layout.home_slot_expert_GH.tolist()):
        for expert in experts:
            if expert >= 0:
                nodes[expert * groups // layout.num_experts].add(topology.rank_to_node[rank])
    return sum(len(one) > 1 for one in nodes)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Topology, int, int, int, PlannerConfig, bool]:
    """A topology, experts, groups that fill its nodes, a seed, settings, and what to start from."""
    nodes, per_node = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 3))
    ranks_per_node, size = draw(st.sampled_from([(2, 2), (2, 4), (4, 4), (1, 3)]))
    rank_to_node = np.repeat(np.arange(nodes), ranks_per_node)
    seed = draw(st.integers(0, 1 << 16))
    if draw(st.booleans()):
        rank_to_node = np.random.default_rng(seed).permutation(rank_to_node)
    config = PlannerConfig(
        proposals=draw(st.sampled_from([0, 500])),
        expert_groups=nodes * per_node,
        replica_slots=draw(st.integers(0, 2)),
        move_rows=draw(st.sampled_from([0, 50])),
    )
    topology = Topology(rank_to_node=rank_to_node.tolist())
    return topology, nodes * per_node * size, nodes * per_node, seed, config, draw(st.booleans())


@settings(max_examples=80)
@given(problems(), st.sampled_from(["relibra", "reorder_only"]))
def test_no_group_is_ever_split(
    problem: tuple[Topology, int, int, int, PlannerConfig, bool], strategy: str
) -> None:
    topology, experts, groups, seed, config, shuffled = problem
    loads, shape = make_loads(topology, experts, seed), ModelShape(experts, 2, (0, 1))
    base = None
    if shuffled:  # a start that no group-limited job has, such as the end of another kind of plan
        rng = np.random.default_rng(seed)
        slots = rng.permutation(experts).reshape(topology.num_ranks, -1).astype(np.int32)
        base = [ExpertLayout(slots), ExpertLayout.identity(experts, topology.num_ranks)]
    plan = plan_step(loads, topology, model=shape, layout=base, config=config, strategy=strategy)
    assert all(split_groups(one, topology, groups) == 0 for one in plan.layouts)
    none = plan_step(loads, topology, model=shape, config=config, strategy="none")
    if all(split_groups(one, topology, groups) == 0 for one in none.layouts):
        largest = [one.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0) for one in (plan, none)]
        assert (largest[0] <= largest[1]).all()
    again = plan_step(
        loads, topology, model=shape, layout=plan.layouts, config=config, strategy=strategy
    )
    assert again.layouts == plan.layouts
    other = make_loads(topology, experts, seed + 1)
    onward = plan_step(
        other, topology, model=shape, layout=plan.layouts, config=config, strategy=strategy
    )
    assert all(split_groups(one, topology, groups) == 0 for one in onward.layouts)


def test_free_experts_are_split_and_kept_groups_cost_balance_between_nodes() -> None:
    topology, shape = Topology(4, 2), ModelShape(64, 4, (0, 1))
    loads = make_loads(topology, 64, 1)
    kept = plan_step(loads, topology, model=shape, config=CONFIG)
    free = plan_step(loads, topology, model=shape, config=replace(CONFIG, expert_groups=0))
    assert sum(split_groups(one, topology, 8) for one in free.layouts) > 0
    assert free.report.imbalance_mean <= kept.report.imbalance_mean
    stay = plan_step(loads, topology, model=shape, config=CONFIG, strategy="replicate_only")
    assert kept.report.imbalance_mean < stay.report.imbalance_mean - 0.01


def test_the_search_finds_the_best_pairs_of_groups() -> None:
    """Two groups a node, hot with cold: by hand 80 + 20 and 60 + 40 on two nodes of one rank."""
    rows = np.zeros((1, 1, 2, 8), np.int32)
    rows[0, 0, 0] = [40, 40, 30, 30, 20, 20, 10, 10]
    config = PlannerConfig(expert_groups=4, replica_slots=0)
    plan = plan_step(
        {"train": LoadMatrix(rows)}, Topology(2, 1), model=ModelShape(8, 1, (0,)), config=config
    )
    assert plan.passes["train"].slot_rows_MLGn.sum(3).tolist() == [[[100, 100]]]
    homes = [set(experts) for experts in plan.layouts[0].home_slot_expert_GH.tolist()]
    assert {0, 1, 6, 7} in homes


@pytest.mark.parametrize("cost", ["rows", "time"])
def test_the_same_loads_again_move_nothing_and_threads_do_not_matter(cost: str) -> None:
    topology = Topology(4, 2)
    shape = ModelShape(64, 4, (0, 1), hidden_size=1024, expert_size=512)
    config = replace(CONFIG, cost=cost)
    loads = make_loads(topology, 64, 2)
    one, many = (
        plan_step(loads, topology, model=shape, config=replace(config, num_threads=threads))
        for threads in (1, 3)
    )
    assert one.hash == many.hash
    again = plan_step(loads, topology, model=shape, layout=one.layouts, config=config)
    assert again.layouts == one.layouts


def test_moves_that_cost_more_than_they_save_are_not_made() -> None:
    topology, shape = Topology(4, 2), ModelShape(64, 4, (0, 1))
    first = plan_step(make_loads(topology, 64, 3), topology, model=shape, config=CONFIG).layouts
    moved = []
    for move_rows in (0, 5, 1 << 20):
        plan = plan_step(
            make_loads(topology, 64, 4, skew=0.5),
            topology,
            model=shape,
            layout=first,
            config=replace(CONFIG, move_rows=move_rows),
        )
        pairs = zip(plan.layouts, first, strict=True)
        moved.append(sum(len(new.moved_experts(old)) for new, old in pairs))
    assert moved[0] > moved[1] >= moved[2] == 0


def paired(topology: Topology, pairs: list[tuple[int, int]]) -> list[ExpertLayout]:
    """Groups of 8 of 64 experts by node, two a node, on two ranks each."""
    by_node = [[*range(8 * a, 8 * a + 8), *range(8 * b, 8 * b + 8)] for a, b in pairs]
    rank_experts = [
        by_node[node][8 * rail : 8 * rail + 8]
        for node, rail in zip(topology.rank_to_node, topology.rank_to_rail, strict=True)
    ]
    return [ExpertLayout(np.asarray(rank_experts, np.int32))]


def test_equal_loads_keep_the_layout_that_is_there() -> None:
    topology, shape = Topology(4, 2), ModelShape(64, 4, (0,))
    base = paired(topology, [(0, 5), (6, 3), (1, 4), (2, 7)])
    loads = {"train": LoadMatrix(np.full((2, 1, 8, 64), 5, np.int32))}
    plan = plan_step(loads, topology, model=shape, layout=base, config=CONFIG)
    assert list(plan.layouts) == base


def test_no_price_keeps_a_layout_that_is_worse_than_none() -> None:
    topology, shape = Topology(4, 2), ModelShape(64, 4, (0,))
    slots = np.arange(64, dtype=np.int32).reshape(8, 8)
    slots[0, 4:], slots[1, :4] = [8, 9, 10, 11], [4, 5, 6, 7]
    base = [ExpertLayout(slots)]
    rows = np.full((2, 1, 8, 64), 5, np.int32)
    rows[..., [0, 1, 2, 3, 8, 9, 10, 11]] = 50  # halves of groups 0 and 1, all on rank 0
    loads = {"train": LoadMatrix(rows)}
    config = replace(CONFIG, move_rows=1 << 20, replica_slots=0)
    plan, stay, none = (
        plan_step(loads, topology, model=shape, layout=base, config=config, strategy=strategy)
        for strategy in ("relibra", "replicate_only", "none")
    )
    assert stay.report.imbalance_mean > none.report.imbalance_mean >= plan.report.imbalance_mean
    assert split_groups(plan.layouts[0], topology, 8) == 0


@pytest.mark.parametrize("rank_to_node", [[0, 0, 1, 1, 2, 2, 3, 3], [3, 3, 2, 2, 1, 1, 0, 0]])
def test_exchanged_groups_are_whole_wherever_ranks_lie(rank_to_node: list[int]) -> None:
    """Moves that cost a little are exchanges of groups near the layout that is there."""
    topology, shape = Topology(rank_to_node=rank_to_node), ModelShape(64, 4, (0,))
    base = paired(topology, [(0, 1), (2, 3), (4, 5), (6, 7)])
    rows = np.full((2, 1, 8, 64), 5, np.int32)
    rows[..., 0:16] = rows[..., 32:40] = 50
    rows[..., 48:56] = 30
    plan = plan_step(
        {"train": LoadMatrix(rows)},
        topology,
        model=shape,
        layout=base,
        config=replace(CONFIG, move_rows=1, replica_slots=8),
    )
    assert split_groups(plan.layouts[0], topology, 8) == 0
    moved = plan.layouts[0].moved_experts(base[0])
    assert len(moved) == 16  # one exchange: group 0 or 1 for a cold one
    assert plan.report.imbalance_mean < 1.2


def test_pieces_and_several_ep_groups_keep_groups_too() -> None:
    topology, shape = Topology(4, 2), ModelShape(64, 4, (0, 1))
    loads = make_loads(topology, 64, 5)
    whole = plan_step(loads, topology, model=shape, config=CONFIG)
    assert PlanStream(loads, topology, model=shape, config=CONFIG).finish().hash == whole.hash
    plans = plan_groups([loads, make_loads(topology, 64, 6)], topology, model=shape, config=CONFIG)
    for plan in plans:
        assert all(split_groups(one, topology, 8) == 0 for one in plan.layouts)


@pytest.mark.parametrize(
    ("groups", "topology", "message"),
    [
        (7, Topology(4, 2), "expert_groups: need a divisor of 64 experts, got 7"),
        (
            4,
            Topology(8, 1),
            r"expert_groups: need groups that fill whole nodes, got 4 groups of 16 experts and "
            r"nodes for \[8, 8, 8, 8, 8, 8, 8, 8\] experts \(8 nodes x 1 ranks\)",
        ),
        (
            8,
            Topology(rank_to_node=[0, 0, 0, 1]),
            None,
        ),
        (
            4,
            Topology(rank_to_node=[0, 0, 0, 0, 0, 1, 1, 1]),
            r"got 4 groups of 16 experts and nodes for \[40, 24\] experts",
        ),
    ],
)
def test_groups_that_do_not_fill_nodes_are_refused(
    groups: int, topology: Topology, message: str | None
) -> None:
    config = replace(CONFIG, expert_groups=groups)
    loads, shape = make_loads(topology, 64, 0), ModelShape(64, 4, (0, 1))
    if message is None:  # uneven nodes that groups do fill
        plan = plan_step(loads, topology, model=shape, config=config)
        assert all(split_groups(one, topology, groups) == 0 for one in plan.layouts)
        return
    with pytest.raises(PlanError, match=message):
        plan_step(loads, topology, model=shape, config=config)


def test_what_does_not_go_with_groups_is_refused() -> None:
    with pytest.raises(PlanError, match="expert_groups: need 0 with static copies.*got 8 with"):
        replace(CONFIG, static_copies=2)
    with pytest.raises(PlanError, match="expert_groups: need an integer 0..65536, got -1"):
        replace(CONFIG, expert_groups=-1)
    topology = Topology(4, 2)
    sample = TokenSample(np.zeros((4, 2, 1), np.int32))
    with pytest.raises(PlanError, match="token_sample: need none with expert_groups=8"):
        plan_step(
            make_loads(topology, 64, 0),
            topology,
            model=ModelShape(64, 4, (0, 1)),
            config=CONFIG,
            token_sample=sample,
        )
