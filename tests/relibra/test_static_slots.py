"""Static slots on one rank: who is copied from whom, tiles, sums of gradients, and memory."""

import dataclasses

import numpy as np
import pytest
import torch
from local_world import make_local, run_local_step, weight_grads
from moe_world import Model, World, compare, references

import relibra
from relibra.copy_lists import copy_lists
from relibra.expert_weights import ExpertWeights
from relibra.rank_tables import LayerTables, SourceRoute
from relibra.static_slots import LayerCopies
from relibra_kernels.tables import HOME, REPLICA, STATIC, tile_weights

NODES = np.array([0, 0, 1, 1], np.int32)
HOMES = np.array([[0], [1], [2], [3]], np.int32)
WORLD = World(2, 3, num_experts=12, top_k=3, tokens=40, replica_slots=2, seed=3)


def lists(static, replicas):
    """Push and pull lists of all four ranks; every replica has rows."""
    replicas = np.array(replicas, np.int32)
    every = np.ones_like(replicas, np.int64)
    found = [
        copy_lists(HOMES, replicas, every, rank, np.array(static, np.int32), NODES)
        for rank in range(4)
    ]
    return [[part.tolist() for part in pair] for pair in found]


def test_a_replica_far_from_home_is_copied_from_the_static_copy_in_its_node():
    """Expert 1 is at home on rank 1 and has a static copy on rank 2: slot 1 = H + 0 there."""
    assert lists([[-1], [-1], [1], [-1]], [[1], [-1], [-1], [1]]) == [
        [[], [[0, 1, 0]]],
        [[[0, 0, 0]], []],
        [[[1, 3, 0]], []],
        [[], [[0, 2, 1]]],
    ]


def test_home_comes_first_then_the_lowest_rank():
    near_home = lists([[1], [-1], [-1], [-1]], [[-1], [-1], [-1], [-1]])
    assert near_home == [[[], []]] * 4
    nodes = np.array([0, 1, 1, 1], np.int32)
    static = np.array([[-1], [-1], [0], [0]], np.int32)
    replicas = np.array([[-1], [0], [-1], [-1]], np.int32)
    push, _ = copy_lists(HOMES, replicas, np.ones((4, 1), np.int64), 2, static, nodes)
    assert push.tolist() == [[1, 1, 0]]
    # A static copy in the node of the home is no source.
    static = np.array([[-1], [-1], [3], [-1]], np.int32)
    replicas = np.array([[-1], [3], [-1], [-1]], np.int32)
    push, _ = copy_lists(HOMES, replicas, np.ones((4, 1), np.int64), 3, static, nodes)
    assert push.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("seed", range(4))
def test_lists_match_on_both_ends_and_stay_in_the_node(seed):
    world = dataclasses.replace(WORLD, seed=seed)
    plan = world.random_plan(static_slots=2)
    node_G = world.topology.rank_to_node_G
    sources = sources_of(world, plan)
    view = plan.replica_plan("train", 0, 0)
    held = np.concatenate([view.layout.home_slot_expert_GH, view.static_slot_expert_GX], 1)
    pushed, pulled = set(), set()
    for rank, source in enumerate(sources):
        pushed |= {(rank, slot, to, there) for slot, to, there in source.push_list.tolist()}
        pulled |= {(home, there, rank, slot) for slot, home, there in source.pull_list.tolist()}
    assert pushed == pulled
    assert any(slot >= view.layout.slots_per_rank for _, slot, _, _ in pushed)
    for rank, slot, to, there in pushed:
        assert held[rank, slot] == view.replica_slot_expert_GS[to, there]
        assert node_G[rank] == node_G[to]


def sources_of(world, plan):
    view, quota = plan.replica_plan("train", 0, 0), plan.source_quota("train", 0, 0)
    return [
        SourceRoute.build(
            view.layout, view.replica_slot_expert_GS, quota, rank, 4,
            static_slot_expert_GX=view.static_slot_expert_GX,
            rank_to_node_G=world.topology.rank_to_node_G,
        )
        for rank in range(world.num_ranks)
    ]  # fmt: skip


def test_tiles_have_three_families():
    plan = WORLD.random_plan(static_slots=2)
    seen = set()
    for rank, source in enumerate(sources_of(WORLD, plan)):
        ids = torch.from_numpy(WORLD.ids(rank, 0)[:, 0].copy())
        splits = source.count_sends(ids, WORLD.num_ranks).tolist()
        tables = LayerTables.build(
            ids, source, splits, [0] * WORLD.num_ranks,
            lambda x, send, recv: x[:0], num_home=2, block_rows=4,
        )  # fmt: skip
        assert tables.num_static == source.num_static == 2
        family, weight = tile_weights(tables.mtile_B4)
        slot = np.array([0, 2, 4])[family] + weight
        rows = np.bincount(slot, tables.mtile_B4[:, 2], minlength=6)
        assert np.array_equal(rows, source.slot_rows_n.numpy())
        seen |= set(family.tolist())
    assert seen == {HOME, STATIC, REPLICA}


def copies():
    moe = relibra.BalancedMoE(4, 8, 8, layer=3)
    empty = torch.empty(0, 3, dtype=torch.int32)
    return LayerCopies(
        moe, {}, {"w2": torch.ones(1, 8, 8)}, {"w2": torch.full((1, 8, 8), 9.0)}, empty, empty
    )


def test_gradients_add_up_until_the_step_ends():
    one = copies()
    assert one.in_order() == []
    assert float(one.add(["w2"])["w2"].mean()) == 1.0
    assert float(one.add(["w2"])["w2"].mean()) == 2.0
    assert one.in_order() == ["w2"]
    one.summed.clear()
    assert float(one.add(["w2"])["w2"].mean()) == 1.0


def test_home_experts_must_be_the_parameters_that_were_copied():
    one = copies()
    one.check_home(one.moe.expert_weights, "use")
    one.check_home(ExpertWeights(tuple(one.moe.w13.unbind()), one.moe.w2.detach()), "use")
    with pytest.raises(ValueError, match="w2: need the parameter of the attached layer 3 for use"):
        one.check_home(ExpertWeights(one.moe.w13, one.moe.w2.clone()), "use")


def test_slots_keep_their_memory_between_plans_and_lose_it_without_static_copies():
    world = World(1, 1, num_experts=4, num_layers=2, micro_batches=1)
    runtime = relibra.Runtime(None, world.topology)
    model = Model(world, 0, 1)
    runtime.attach(model)
    static = runtime.attachment().static
    rows = {"train": world.routes(0)}
    x, scores, dy = world.batch(0, 0)

    def held(plan):
        model.zero_grad()
        with runtime.step(plan, rows) as step:
            with step.forward(micro_batch=0):
                y = model(x, scores)
            y.backward(dy)
        return {name: one["w13"].data_ptr() for name, one in static._memory.items()}, y

    plans = [
        dataclasses.replace(world, seed=seed).random_plan(world.loads(), static_slots=slots)
        for seed, slots in ((0, 1), (1, 1), (2, 2), (3, 0))
    ]
    plans = [dataclasses.replace(plan, base_layouts=()) for plan in plans]
    found = []
    for plan in plans:
        runtime.set_layout(plan.base_layout)
        found.append(held(plan))
    (first, y), (same, again), (other, _), (none, last) = found
    assert first == same
    assert len(first) == 5  # weights and sums of two layers, one set of gradients
    assert not set(first) & set(other)
    assert len(other) == 5
    assert none == {}
    for one in (again, last):
        assert torch.allclose(one, y)


def test_kernels_follow_plans_with_other_numbers_of_static_slots():
    """What launches remember of one plan must not be made for the tables of the next."""
    world = World(
        2, 1, num_experts=4, top_k=2, micro_batches=1, hidden=64, expert=64, tokens=9,
        replica_slots=0, dtype=torch.float32,
    )  # fmt: skip
    runtime, model = make_local(world, kernels="triton")
    for slots in (2, 0, 1):
        model.zero_grad()
        plan = world.random_plan(static_slots=slots, base=runtime.layout)
        results = run_local_step(world, runtime, model, plan)
        weight_grads(runtime, model, results)
        for result, need in zip(results, references(world), strict=True):
            compare(result, need, f"{slots} static slots")
    runtime.close()


def test_warm_up_covers_layers_with_and_without_static_slots(monkeypatch):
    specs = []
    monkeypatch.setattr("relibra.runtime_warmup.warmup", lambda spec, **_: specs.append(spec))
    runtime = relibra.Runtime(None)
    runtime.attach(Model(World(1, 1, num_experts=4, num_layers=2), 0, 1))
    assert len(runtime.warmup(2)) == 1
    assert len(runtime.warmup(2, static_slots=3)) == 2
    assert [spec.num_static for spec in specs] == [0, 0, 3]
