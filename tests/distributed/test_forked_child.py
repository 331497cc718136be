"""A process that a rank forks has none of its threads, groups and streams, and is told so."""

import torch
import torch.distributed as dist
from forked import told_in_fork
from moe_world import Model, World, check, reference

import relibra
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=2, tokens=9, replica_slots=1, dtype=torch.float64
)


def use_in_forks(rank, num_ranks):
    """What forked children are told, while their parents train on."""
    options = {"transport": "cpu_shm", "dispatch": "peer", "timeout_s": 20.0}
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, replica_slots=1, **options)
    model, plan = Model(WORLD, rank, num_ranks), WORLD.random_plan(fill=1.0)
    runtime.attach(model)
    routes, need, told = {"train": WORLD.routes(rank)}, reference(WORLD, rank), []
    for _ in range(2):
        x, scores, dy = WORLD.batch(rank, 0)
        x.requires_grad_(), scores.requires_grad_()
        with runtime.step(plan, routes) as step:
            with step.forward(micro_batch=0):
                told.append(told_in_fork(lambda x=x, scores=scores: model(x, scores)))
                y = model(x, scores)
            told.append(told_in_fork(lambda y=y, dy=dy: y.backward(dy)))
            y.backward(dy)
        check(y.detach(), need.y[0], "y")
        check(x.grad, need.dx[0], "dx")
        told.append(told_in_fork(lambda: runtime.step(plan, routes)))
        told.append(told_in_fork(lambda: runtime.agree({}, what="a fork")))
        told.append(told_in_fork(runtime.suspend))
        assert told_in_fork(runtime.close) == "nothing"
    runtime.close()
    return told


def test_a_forked_child_of_a_rank_is_told_and_its_parent_trains_on():
    need = (
        "the runtime: need process PARENT, which made it and runs its threads, got process CHILD, "
        "a fork of it; make a new one there"
    )
    for told in run_ranks(2, use_in_forks, timeout=120):
        assert told == [need] * 10
