"""Several optimizer steps and an epoch on one rollout batch: one plan, counts exact throughout."""

import numpy as np
import torch
import torch.distributed as dist
from moe_world import Model, World, check, reference

import relibra
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    2, 2, num_experts=16, top_k=2, num_layers=2, micro_batches=6, tokens=32, dy_scale=0.01
)
STEPS = [0, 0, 1, 1, 2, 2]


def make_optimizer(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def logical(runtime, model):
    return [
        [runtime.gather_experts(w.detach(), moe.layer) for w in (moe.w13, moe.w2)]
        for moe in model.layers
    ]


def train(rank, num_ranks):
    """Two epochs of three steps beside dense training; returns the largest difference."""
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, timeout_s=30.0)
    model = Model(WORLD, rank, num_ranks)
    optimizer = make_optimizer(model.parameters())
    runtime.attach(model, optimizer)
    dense = [[w.clone() for w in WORLD.weights(layer)] for layer in WORLD.shape.moe_layers]
    dense_optimizer = make_optimizer([w.requires_grad_() for pair in dense for w in pair])
    routes = WORLD.routes(rank)
    loads = runtime.gather_loads(relibra.LoadMatrix.from_rows(routes, STEPS))
    config = relibra.PlannerConfig(proposals=500)
    plan = runtime.plan_step({"train": loads}, WORLD.shape, config=config)
    assert plan.report.replicas > 0
    moved = []
    for _epoch in range(2):
        for number in range(3):
            micro_batches = [m for m, step in enumerate(STEPS) if step == number]
            expected = reference(WORLD, rank, micro_batches, logical(runtime, model))
            optimizer.zero_grad()
            with runtime.step(plan, {"train": routes}, optimizer_step=number) as step:
                for place, m in enumerate(micro_batches):
                    x, scores, dy = WORLD.batch(rank, m)
                    with step.forward(micro_batch=m):
                        for layer, moe in enumerate(model.layers):
                            counts = np.bincount(moe.replayed_ids().reshape(-1), minlength=16)
                            assert np.array_equal(
                                counts, plan.loads["train"].rows_MLGE[m, layer, rank]
                            )
                        y = model(x, scores)
                    check(y.detach(), expected.y[place], f"step {number} y")
                    y.backward(dy)
            moved.append(step.moved_experts)
            optimizer.step()
            control = reference(WORLD, rank, micro_batches, dense)
            for pair, dw13, dw2 in zip(dense, control.dw13, control.dw2, strict=True):
                pair[0].grad, pair[1].grad = dw13.float(), dw2.float()
            dense_optimizer.step()
    assert moved[0] > 0
    assert not any(moved[1:])
    pairs = zip(logical(runtime, model), dense, strict=True)
    start = [WORLD.weights(layer) for layer in WORLD.shape.moe_layers]
    changed = max(
        float((new - old).detach().abs().max())
        for pair, old_pair in zip(dense, start, strict=True)
        for new, old in zip(pair, old_pair, strict=True)
    )
    assert changed > 1e-3
    return max(
        float((got - need.detach()).abs().max())
        for both in pairs
        for got, need in zip(*both, strict=True)
    )


def test_two_epochs_of_three_optimizer_steps_equal_dense_training():
    assert max(run_ranks(4, train)) <= 1e-6
