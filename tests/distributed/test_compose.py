"""Composing changes no gradient of an optimizer step, on the CPU layer."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_world import Model, Result, World, check, collect_weight_grads

import relibra
from relibra import Budgets, Composition, Samples
from relibra_kernels.testing.launch import run_ranks

WORLD = World(2, 2, num_experts=16, top_k=2, num_layers=2, micro_batches=8, tokens=12, skew=2.0)
SAMPLES_PER_CELL = 2


def sample_rows(world):
    """Rows of sample j = micro-batch * G + rank of the world's batches."""
    return [
        relibra.DispatchRows(world.ids(j % world.num_ranks, j // world.num_ranks),
                             num_experts=world.num_experts)
        for j in range(world.micro_batches * world.num_ranks)
    ]  # fmt: skip


def samples_of(world, rows):
    counts = [relibra.LoadMatrix.from_rows([each]).rows_MLGE[0, :, 0] for each in rows]
    return Samples(np.stack(counts), [each.num_rows for each in rows])


def compositions(world, samples):
    """Before: batches 2 m and 2 m + 1 of each rank make micro-batch m. After: composed."""
    j = np.arange(len(samples))
    micro_batches = world.micro_batches // SAMPLES_PER_CELL
    before = Composition(
        j // world.num_ranks // SAMPLES_PER_CELL,
        j % world.num_ranks,
        np.zeros(micro_batches, int),
        world.num_ranks,
    )
    after = relibra.compose(
        samples, world.num_ranks, Budgets(micro_batches, count=SAMPLES_PER_CELL), current=before,
        loss_normalisation="step", num_threads=1,
    )  # fmt: skip
    return before, after


def run_step(world, rank, composition, rows, per_micro_batch=False):
    """One optimizer step through the runtime: weight gradients, and dx by sample."""
    routes = relibra.composed_rows(composition, rank, rows)
    loads = relibra.LoadMatrix.stack(
        [
            relibra.LoadMatrix.from_rows(relibra.composed_rows(composition, cell, rows))
            for cell in range(world.num_ranks)
        ]
    )
    config = relibra.PlannerConfig(replica_slots=world.replica_slots, proposals=500)
    plan = relibra.plan_step({"train": loads}, world.topology, model=world.shape, config=config)
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, replica_slots=world.replica_slots)
    model = Model(world, rank, world.num_ranks)
    runtime.attach(model)
    result, dx_of = Result([], [], [], [], []), {}
    with runtime.step(plan, {"train": routes}) as step:
        for m in range(composition.num_micro_batches):
            samples = composition.samples_of(m, rank)
            parts = [world.batch(j % world.num_ranks, j // world.num_ranks) for j in samples]
            x = torch.cat([part[0] for part in parts]).requires_grad_()
            dy = torch.cat([part[2] for part in parts])
            if per_micro_batch:
                dy = dy / len(dy)
            with step.forward(micro_batch=m):
                model(x, torch.cat([part[1] for part in parts], dim=1)).backward(dy)
            dx_of |= dict(zip(samples, x.grad.split([len(part[0]) for part in parts]), strict=True))
    collect_weight_grads(world, runtime, model, result)
    runtime.close()
    return dx_of, result


def run_before_and_after(rank, num_ranks, world, per_micro_batch):
    torch.set_num_threads(1)
    rows = sample_rows(world)
    samples = samples_of(world, rows)
    pair = compositions(world, samples)
    moved = int((pair[0].micro_batch_J != pair[1].micro_batch_J).sum())
    spread = pair[1].report.spread_before[0], pair[1].report.spread_after[0]
    runs = [run_step(world, rank, each, rows, per_micro_batch) for each in pair]
    return moved, spread, [run[0] for run in runs], [run[1] for run in runs]


def test_gradients_of_a_step_are_equal_before_and_after():
    results = run_ranks(WORLD.num_ranks, run_before_and_after, WORLD, False)
    moved, spread, _, (before, after) = results[0]
    assert moved > 8  # of 32 samples
    assert spread[1] < 0.8 * spread[0]
    for layer in range(WORLD.num_layers):
        for name in ("dw13", "dw2"):
            need, got = getattr(before, name)[layer], getattr(after, name)[layer]
            for expert in range(WORLD.num_experts):
                check(got[expert], need[expert], f"{name} layer {layer} expert {expert}")
    dx_before, dx_after = ({}, {})
    for _, _, (one, other), _ in results:
        dx_before |= one
        dx_after |= other
    assert sorted(dx_before) == sorted(dx_after) == list(range(32))
    for j, need in dx_before.items():
        check(dx_after[j], need, f"dx of sample {j}")


def test_a_loss_normalised_by_micro_batch_would_change():
    """Why compose refuses it: the same comparison fails."""
    results = run_ranks(WORLD.num_ranks, run_before_and_after, WORLD, True)
    _, _, _, (before, after) = results[0]
    with pytest.raises(AssertionError, match="max"):
        check(after.dw13[0].double(), before.dw13[0].double(), "max")


def test_rows_of_the_composition_are_the_samples_rows():
    world = dataclasses.replace(WORLD, num_layers=1)
    rows = sample_rows(world)
    samples = samples_of(world, rows)
    _, after = compositions(world, samples)
    loads = relibra.LoadMatrix.stack(
        [
            relibra.LoadMatrix.from_rows(relibra.composed_rows(after, cell, rows))
            for cell in range(world.num_ranks)
        ]
    )
    assert np.array_equal(relibra.composed_loads(after, samples).rows_MLGE, loads.rows_MLGE)
