"""Forward and gradients equal the dense reference under any plan, at every group size."""

import dataclasses

import pytest
import torch
from moe_world import Model, World, balanced, check, compare, reference

import relibra
from relibra.testing.plans import one_row_split, random_split, replica_only_split
from relibra_kernels.testing.launch import run_ranks

WORLDS = {
    "ep1-k1": World(1, 1, num_experts=8, top_k=1),
    "ep1-k8-e8-all-experts": World(1, 1, num_experts=8, top_k=8, replica_slots=0),
    "ep2-one-node": World(1, 2, num_experts=8, top_k=2, replica_slots=2),
    "ep2-two-nodes-no-replica-possible": World(2, 1, num_experts=8, top_k=2),
    "ep4-k1": World(1, 4, num_experts=16, top_k=1),
    "ep4-two-nodes-two-micro-batches": World(2, 2, 16, 2, num_layers=2, micro_batches=2),
    "ep4-k8-e128": World(1, 4, num_experts=128, top_k=8, replica_slots=2, tokens=40),
    "ep4-no-replica-slots": World(2, 2, num_experts=16, top_k=2, replica_slots=0),
    "ep4-filler-slots": World(2, 2, num_experts=10, top_k=2, replica_slots=2),
    "ep4-one-empty-rank": World(2, 2, num_experts=8, top_k=2, empty_rank=2),
    "ep4-no-tokens-at-all": World(2, 2, num_experts=8, top_k=2, tokens=0),
    "ep4-one-expert-a-rank-very-hot": World(1, 4, 4, 1, replica_slots=2, skew=8.0),
    "ep8-one-node": World(1, 8, num_experts=32, top_k=8, replica_slots=2),
    "ep8-two-nodes": World(2, 4, num_experts=16, top_k=2, replica_slots=1),
}


def plans(world):
    """Name -> plan; none, the planner's, random and absurd ones."""
    loads = {"train": world.loads()}
    config = relibra.PlannerConfig(replica_slots=world.replica_slots, proposals=500)
    for strategy in ("none", "relibra"):
        yield (
            strategy,
            relibra.plan_step(
                loads, world.topology, model=world.shape, config=config, strategy=strategy
            ),
        )
    yield "random", world.random_plan(split=random_split)
    yield "all slots used, one row each", world.random_plan(split=one_row_split, fill=1.0)
    yield "replicas take everything", world.random_plan(split=replica_only_split, fill=1.0)


def run_world(rank, num_ranks, world):
    torch.set_num_threads(1)
    expected = reference(world, rank)
    exact = []
    for name, plan in plans(world):
        compare(balanced(world, rank, plan), expected, f"{name}, reduced:")
        result = balanced(world, rank, plan, combine="exact")
        compare(result, expected, f"{name}, exact:")
        exact.append(result.y)
    compare(balanced(world, rank, None), expected, "live:")
    for other in exact[1:]:
        assert all(torch.equal(a, b) for a, b in zip(exact[0], other, strict=True))
    return True


SLOW = ("ep8-one-node", "ep4-no-replica-slots")  # ep8-two-nodes, ep2-two-nodes-... stay


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in WORLDS]
)
def test_equals_dense_reference(name):
    world = WORLDS[name]
    assert all(run_ranks(world.num_ranks, run_world, world))


def run_main_grad(rank, num_ranks, world):
    expected = reference(world, rank)
    for name, plan in plans(world):
        compare(balanced(world, rank, plan, grad_mode="main_grad"), expected, name)
    return True


def test_main_grad_mode_equals_dense_reference():
    world = WORLDS["ep4-two-nodes-two-micro-batches"]
    assert all(run_ranks(world.num_ranks, run_main_grad, world))


def run_bf16(rank, num_ranks, world):
    from relibra_kernels.testing.compare import calc_diff

    expected = reference(world, rank)
    result = balanced(world, rank, world.random_plan())
    for field in dataclasses.fields(result):
        for got, need in zip(
            getattr(result, field.name), getattr(expected, field.name), strict=True
        ):
            assert calc_diff(got.double(), need) < 1e-5, field.name
    return True


def test_bf16_stays_near_the_fp64_reference():
    world = dataclasses.replace(WORLDS["ep4-no-replica-slots"], dtype=torch.bfloat16)
    world = dataclasses.replace(world, replica_slots=1, hidden=64, expert=64)
    assert all(run_ranks(world.num_ranks, run_bf16, world))


def test_kernel_16_expert_gradients_are_not_scaled_by_the_group_size():
    """kernel-16 (megablocks#20): the same batch under EP1 and EP2, gradients of every expert."""
    world = World(1, 2, num_experts=8, top_k=2)
    model = Model(world, 0, 1)
    relibra.Runtime().attach(model)
    for source in range(2):
        x, scores, dy = world.batch(source, 0)
        model(x, scores, torch.from_numpy(world.ids(source, 0)).long()).backward(dy)
    (alone,) = model.layers
    for dw13, dw2 in run_ranks(2, run_two, world):
        for expert in range(8):
            check(dw13[expert], alone.w13.grad[expert], f"dw13 of expert {expert}")
            check(dw2[expert], alone.w2.grad[expert], f"dw2 of expert {expert}")


def run_two(rank, num_ranks, world):
    result = balanced(world, rank, world.random_plan())
    return result.dw13[0], result.dw2[0]
