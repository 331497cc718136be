"""A world of `moe_world` with all its ranks in this process: joined batches, results by rank."""

import dataclasses

import torch
from moe_world import Model, Result, World
from replica_training import ORDERS, recomputed

import relibra
from relibra_kernels.reference.combine import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class DeviceWorld(World):
    """A world whose tensors lie on a device; its routing stays on the CPU."""

    device: str = "cpu"

    def weights(self, layer):
        return tuple(w.to(self.device) for w in super().weights(layer))

    def batch(self, rank, m):
        return tuple(part.to(self.device) for part in super().batch(rank, m))


def make_local(world, optimizer=None, **options):
    """A runtime over virtual ranks, and a model that holds all experts."""
    runtime = relibra.Runtime(
        topology=world.topology, transport="local", replica_slots=world.replica_slots, **options
    )
    model = Model(world, 0, 1)
    runtime.attach(model, None if optimizer is None else optimizer(model))
    if runtime.grad_mode == "main_grad":
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param, dtype=accumulation_dtype(param.dtype))
    return runtime, model


def all_routes(world):
    return [world.routes(rank) for rank in range(world.num_ranks)]


def joined_batch(world, m):
    """x, scores and dy of all ranks; leaves."""
    x, scores, dy = zip(*(world.batch(rank, m) for rank in range(world.num_ranks)), strict=True)
    return torch.cat(x).requires_grad_(), torch.cat(scores, 1).requires_grad_(), torch.cat(dy)


def run_local_step(world, runtime, model, plan, order="in-turn", recompute="off"):
    """Results by rank without those of the weights, which stay in the model."""
    results, flight = [Result([], [], [], [], []) for _ in range(world.num_ranks)], {}
    with runtime.step(plan, {"train": all_routes(world)}) as step:
        for kind, m in ORDERS[order](range(world.micro_batches)):
            if kind == "F":
                x, scores, dy = joined_batch(world, m)
                with step.forward(micro_batch=m):
                    y = model(x, scores, wrap=recomputed(recompute))
                flight[m] = (x, scores, dy, y)
            else:
                x, scores, dy, y = flight.pop(m)
                y.backward(dy)
                tokens = [world.tokens_of(rank, m) for rank in range(world.num_ranks)]
                parts = y.detach().split(tokens), x.grad.split(tokens), scores.grad.split(tokens, 1)
                for result, *part in zip(results, *parts, strict=True):
                    result.y.append(part[0]), result.dx.append(part[1])
                    result.dscores.append(part[2])
    return results


def weight_grads(runtime, model, results):
    """Adds the weights' gradients in expert order, the same for every rank."""
    for moe in model.layers:
        for name in ("w13", "w2"):
            param = getattr(moe, name)
            whole = runtime.gather_experts(getattr(param, "main_grad", param.grad), moe.layer)
            for result in results:
                getattr(result, f"d{name}").append(whole)


def train_local(
    world, order="in-turn", recompute="off", static_slots=0, plan=None, logs=None, **options
):
    """Results of `replica_training.train` on every rank, by rank; their logs go to ``logs``."""
    runtime, model = make_local(world, **options)
    for rank in runtime.ranks if logs is not None else ():
        rank.domain_sync.log = []
        logs.append(rank.domain_sync.log)
    plan = plan or world.random_plan(fill=0.8, static_slots=static_slots)
    results = run_local_step(world, runtime, model, plan, order, recompute)
    weight_grads(runtime, model, results)
    runtime.close()
    return results
