"""One optimizer step over a transport of replicas, in the order of a pipeline stage."""

import torch
import torch.distributed as dist
from moe_world import Model, Result, collect_weight_grads
from torch.utils.checkpoint import checkpoint

import relibra


def in_turn(micro_batches):
    return [(kind, m) for m in micro_batches for kind in "FB"]


def one_ahead(micro_batches):
    """1F1B of a stage with one micro-batch of warm-up."""
    micro_batches = list(micro_batches)
    order = [("F", micro_batches[0])]
    for before, m in zip(micro_batches, micro_batches[1:], strict=False):
        order += [("F", m), ("B", before)]
    return [*order, ("B", micro_batches[-1])]


ORDERS = {"in-turn": in_turn, "1f1b": one_ahead}


def recomputed(recompute):
    """How a layer is called: as it is, or checkpointed with an operation behind it."""
    if recompute == "off":
        return None

    def region(moe, x, scores, ids):
        return moe(x, scores, ids) * torch.ones(())

    return lambda *args: checkpoint(region, *args, use_reentrant=recompute == "reentrant")


def make(world, rank, **options):
    """A runtime and its model."""
    slots = world.replica_slots
    group = options.pop("group", None) or dist.group.WORLD
    runtime = relibra.Runtime(group, world.topology, replica_slots=slots, **options)
    model = Model(world, rank, world.num_ranks)
    runtime.attach(model)
    for param in model.parameters():
        if runtime.grad_mode == "main_grad":
            param.main_grad = torch.zeros_like(param)
    return runtime, model


def run_step(world, rank, runtime, model, plan, order="in-turn", recompute="off", entered=None):
    """Outputs and gradients of inputs; those of the weights stay in the model.

    `entered` is called when the experts have moved to the layout of the plan.
    """
    result, flight = Result([], [], [], [], []), {}
    with runtime.step(plan, {"train": world.routes(rank)}) as step:
        if entered is not None:
            entered()
        for kind, m in ORDERS[order](range(world.micro_batches)):
            if kind == "F":
                x, scores, dy = world.batch(rank, m)
                x.requires_grad_(), scores.requires_grad_()
                with step.forward(micro_batch=m):
                    y = model(x, scores, wrap=recomputed(recompute))
                flight[m] = (x, scores, dy, y)
            else:
                x, scores, dy, y = flight.pop(m)
                y.backward(dy)
                result.y.append(y.detach()), result.dx.append(x.grad)
                result.dscores.append(scores.grad)
    return result


def train(world, rank, order="in-turn", recompute="off", static_slots=0, **options):
    """Results of one step, and the log of the replicas' operations."""
    runtime, model = make(world, rank, **options)
    log = []
    if runtime.domain_sync is not None:
        runtime.domain_sync.log = log
    plan = world.random_plan(fill=0.8, static_slots=static_slots)
    result = run_step(world, rank, runtime, model, plan, order, recompute)
    collect_weight_grads(world, runtime, model, result)
    runtime.close()
    return result, log
