"""The layer on Triton kernels, in the interpreter, equals the dense reference under any plan."""

import dataclasses

import pytest
import torch
from moe_world import World, balanced, compare, reference

from relibra.testing.plans import one_row_split, random_split, replica_only_split
from relibra_kernels.testing.launch import run_ranks

# The interpreter takes seconds for a layer: few tokens, and each rank's kernels on its own core.
SMALL = {"hidden": 64, "expert": 64, "tokens": 10}
WORLDS = {
    "ep1": World(1, 1, num_experts=4, top_k=2, **SMALL),
    "ep2-two-replica-slots": World(1, 2, num_experts=4, top_k=2, replica_slots=2, **SMALL),
    "ep4-two-nodes-filler-slots-and-an-empty-rank": World(
        2, 2, num_experts=6, top_k=2, empty_rank=1, **SMALL
    ),
}


def run_world(rank, num_ranks, world):
    torch.set_num_threads(1)
    expected = reference(world, rank)
    exact = []
    for split, fill in ((random_split, 0.0), (random_split, None), (replica_only_split, 1.0)):
        options = {} if fill is None else {"fill": fill}
        plan = world.random_plan(split=split, **options)
        result = balanced(world, rank, plan, combine="exact", kernels="triton")
        compare(result, expected, f"{split.__name__} {fill}, exact:")
        exact.append(result.y)
    plan = world.random_plan(split=one_row_split, fill=1.0)
    main = balanced(world, rank, plan, grad_mode="main_grad", kernels="triton")
    compare(main, expected, "one row each, reduced, main_grad:")
    for other in exact[1:]:
        assert all(torch.equal(a, b) for a, b in zip(exact[0], other, strict=True))
    return True


SLOW = ("ep2-two-replica-slots",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in WORLDS]
)
def test_equals_dense_reference(name):
    world = WORLDS[name]
    assert all(run_ranks(world.num_ranks, run_world, world, timeout=110.0))


def run_narrow(rank, num_ranks, world):
    with pytest.raises(ValueError, match="hidden_size: need a multiple of 64, got 72"):
        balanced(world, rank, world.random_plan(), kernels="triton")
    return True


def test_kernel_06_sizes_that_are_no_multiple_of_64_are_refused_by_name():
    world = dataclasses.replace(WORLDS["ep1"], hidden=72)
    assert all(run_ranks(1, run_narrow, world))
