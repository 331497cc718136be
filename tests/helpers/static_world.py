"""A model that is trained under plans with static copies, on the world of their tests."""

import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from moe_world import Model, World
from torch.utils.checkpoint import checkpoint

import relibra

WORLD = World(
    2, 2, num_experts=12, top_k=3, num_layers=2, micro_batches=4, tokens=20, dy_scale=0.02
)
STEPS = [0, 1, 1, 2]  # optimizer steps of the micro-batches
X = 2


@dataclasses.dataclass
class Done:
    """What a step gave, experts in order."""

    outputs: list
    grads: list
    weights: list
    sent_bytes: int


class Trainer:
    """A model that is trained under a plan a rollout batch."""

    def __init__(self, rank, *, recompute=False, forwards_first=False, world=WORLD, **options):
        self.rank, self.recompute, self.forwards_first = rank, recompute, forwards_first
        self.runtime = relibra.Runtime(
            dist.group.WORLD, world.topology, replica_slots=1, timeout_s=30.0, **options
        )
        self.model = Model(world, rank, world.num_ranks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2e-2, momentum=0.9)
        self.runtime.attach(self.model, self.optimizer)
        self.into_main = options.get("grad_mode") == "main_grad"
        for param in self.model.parameters():
            if self.into_main:
                param.main_grad = torch.zeros_like(param)

    def logical(self, of):
        return [
            self.runtime.gather_experts(of(param), moe.layer)
            for moe in self.model.layers
            for param in (moe.w13, moe.w2)
        ]

    def step(self, world, plan, number):
        """One optimizer step."""
        outputs, flight = [], []

        def wrap(moe, *arguments):
            return checkpoint(moe, *arguments, use_reentrant=False)

        def run_backwards():
            for y, dy in flight:
                y.backward(dy)
            flight.clear()

        routes = {"train": world.routes(self.rank)}
        with self.runtime.step(plan, routes, optimizer_step=number) as step:
            for m in np.flatnonzero(np.array(STEPS) == number).tolist():
                x, scores, dy = world.batch(self.rank, m)
                with step.forward(micro_batch=m):
                    y = self.model(x, scores, wrap=wrap if self.recompute else None)
                outputs.append(y.detach())
                flight.append((y, dy))
                if not self.forwards_first:
                    run_backwards()
            run_backwards()
        if self.into_main:
            for param in self.model.parameters():
                param.grad = param.main_grad.clone()
                param.main_grad.zero_()
        grads = self.logical(lambda param: param.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Done(outputs, grads, self.logical(torch.Tensor.detach), step.static_sent_bytes)
