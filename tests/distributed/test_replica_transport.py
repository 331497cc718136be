"""Training over ``cpu_shm`` equals the dense reference, and bit for bit training over ``dist``."""

import dataclasses

import pytest
import torch
from moe_world import Result, World, compare, reference
from replica_training import train

from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 4, num_experts=8, top_k=2, num_layers=4, micro_batches=3, tokens=9, replica_slots=2,
    dtype=torch.float64,
)  # fmt: skip
NARROW = dataclasses.replace(WORLD, dtype=torch.float32)
TWO_NODES = dataclasses.replace(WORLD, num_nodes=2, ranks_per_node=2, micro_batches=2)
CASES = {  # world, order, recompute, grad_mode
    "fp32": (NARROW, "in-turn", "off", "returned"),
    "1f1b-main_grad": (WORLD, "1f1b", "off", "main_grad"),
    "recompute-main_grad": (WORLD, "in-turn", "non-reentrant", "main_grad"),
    "1f1b-recompute": (WORLD, "1f1b", "non-reentrant", "returned"),
    "1f1b-reentrant": (WORLD, "1f1b", "reentrant", "returned"),
    "fp32-1f1b-main_grad": (NARROW, "1f1b", "off", "main_grad"),
    "two-nodes": (TWO_NODES, "in-turn", "off", "returned"),
    "static-copies": (TWO_NODES, "1f1b", "off", "main_grad", 1),
}


def run_both(rank, num_ranks, world, order, recompute, grad_mode, static_slots=0):
    torch.set_num_threads(1)
    options = {"grad_mode": grad_mode, "timeout_s": 20.0, "static_slots": static_slots}
    shared, log = train(world, rank, order, recompute, transport="cpu_shm", **options)
    plain, nothing = train(world, rank, order, recompute, transport="dist", **options)
    assert log
    assert not nothing
    for field in dataclasses.fields(Result):
        pairs = zip(getattr(shared, field.name), getattr(plain, field.name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), field.name
    if world.dtype == torch.float64:  # fp32 rounding grows over four layers
        compare(shared, reference(world, rank), "cpu_shm")
    return True


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_and_dist(name):
    assert all(run_ranks(4, run_both, *CASES[name]))
