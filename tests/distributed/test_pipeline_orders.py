"""Orders of pipeline stages, several EP groups and expert-data-parallel ranks, with replicas."""

import dataclasses
import time

import torch
import torch.distributed as dist
from moe_world import Model, Result, World, collect_weight_grads, compare, reference
from replica_training import make, one_ahead

from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=4, micro_batches=4, tokens=9, replica_slots=1,
    dtype=torch.float64,
)  # fmt: skip
TWO = dataclasses.replace(WORLD, num_layers=2, micro_batches=2)
CHUNKS = ((0, 1), (2, 3))  # places of the layers of each model chunk of this rank


def interleaved(num_micro_batches, warm_up=3):
    """Passes (kind, chunk, micro-batch) of one rank of two, with two model chunks each.

    The order of forwards takes two micro-batches through every chunk in turn; after the warm-up a
    forward and a backward alternate.
    """
    pairs = [range(m, m + 2) for m in range(0, num_micro_batches, 2)]
    forwards = [("F", chunk, m) for pair in pairs for chunk in (0, 1) for m in pair]
    backwards = [("B", chunk, m) for pair in pairs for chunk in (1, 0) for m in pair]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


ORDERS = {
    "1f1b": [(kind, chunk, m) for kind, m in one_ahead(range(4)) for chunk in
             ((0, 1) if kind == "F" else (1, 0))],
    "interleaved": interleaved(4),
}  # fmt: skip


def run_chunks(rank, order, said, **options):
    """One step in this order; results and the log of operations."""
    runtime, model = make(WORLD, rank, timeout_s=20.0, **options)
    log = []
    if runtime.domain_sync is not None:
        runtime.domain_sync.log = log
    runtime.set_layer_hooks(3, starts_stage=True)
    leaves, inputs, outputs, grads = {}, {}, {}, {}
    result = Result([], [], [], [], [])
    with runtime.step(WORLD.random_plan(fill=1.0), {"train": WORLD.routes(rank)}) as step:
        for place, (kind, chunk, m) in enumerate(order):
            if said:
                say(step, order, place)
            if kind == "F":
                if chunk == 0:
                    x, scores, grads[m] = WORLD.batch(rank, m)
                    leaves[m] = x.requires_grad_(), scores.requires_grad_()
                before = leaves[m][0] if chunk == 0 else outputs[m, 0].detach().requires_grad_()
                inputs[m, chunk] = y = before
                with step.forward(micro_batch=m):
                    for layer in CHUNKS[chunk]:
                        moe = model.layers[layer]
                        y = y + moe(y, leaves[m][1][layer], moe.replayed_ids())
                outputs[m, chunk] = y
            else:
                outputs[m, chunk].backward(grads[m])
                grads[m] = inputs[m, chunk].grad
    for m in range(WORLD.micro_batches):
        result.y.append(outputs[m, 1].detach())
        result.dx.append(leaves[m][0].grad), result.dscores.append(leaves[m][1].grad)
    collect_weight_grads(WORLD, runtime, model, result)
    runtime.close()
    return result, log


def say(step, order, place):
    """What runs after this pass, and before the first one that."""
    for kind, chunk, m in order[place + (place > 0) : place + 2]:
        layer = 1 + (CHUNKS[chunk][0] if kind == "F" else CHUNKS[chunk][-1])
        step.next(micro_batch=m, direction="forward" if kind == "F" else "backward", layer=layer)


def uses_of(order):
    """(micro-batch, layer, direction) of every use, and whether the use before makes it certain."""
    uses = []
    for kind, chunk, m in order:
        places = CHUNKS[chunk] if kind == "F" else CHUNKS[chunk][::-1]
        for at, place in enumerate(places):
            uses.append((m, place + 1, "forward" if kind == "F" else "backward", at > 0))
    return uses


def check_log(log, order, said):
    """Every certain use, or every one that was said, is pushed before the experts of the one before
    read their weights; no other is pushed before its own entry."""
    found = [(op, (key.micro_batch, key.layer, key.direction)) for op, key in log]
    assert not [entry for entry in found if entry[0] == "abandon"]
    uses = uses_of(order)
    assert [use for op, use in found if op == "retire"] == [tuple(use) for *use, _ in uses]
    for before, (*use, is_certain) in zip(uses, uses[1:], strict=False):
        pushed, read = found.index(("push", tuple(use))), found.index(("weights", before[:3]))
        assert (pushed < read) == (is_certain or said), use
        if not (is_certain or said):
            own = found[pushed + 1 : found.index(("weights", tuple(use)))]
            assert all(op == "push" for op, _ in own), "at its own entry"


def same(a, b):
    return all(
        torch.equal(x, y)
        for field in dataclasses.fields(Result)
        for x, y in zip(getattr(a, field.name), getattr(b, field.name), strict=True)
    )


def run_orders(rank, num_ranks):
    """Both orders, what is certain and what is said, and the same over the other transport."""
    need = reference(WORLD, rank)
    for name, grad_mode in (("1f1b", "returned"), ("interleaved", "main_grad")):
        order = ORDERS[name]
        plain, _ = run_chunks(rank, order, False, transport="dist", grad_mode=grad_mode)
        compare(plain, need, name)
        for said in (False, True):
            result, log = run_chunks(rank, order, said, transport="cpu_shm", grad_mode=grad_mode)
            assert same(result, plain), (name, said)
            check_log(log, order, said)
    return True


def test_1f1b_and_interleaved_chunks():
    assert all(run_ranks(2, run_orders))


def run_two_models(rank, num_ranks):
    """A step of the critic begins and ends between two micro-batches of the actor."""
    runtime, actor = make(TWO, rank, transport="cpu_shm", timeout_s=20.0, grad_mode="main_grad")
    critic = Model(TWO, rank, num_ranks)
    runtime.attach(critic, name="critic")
    plan, routes = TWO.random_plan(fill=1.0), {"train": TWO.routes(rank)}
    with runtime.step(plan, routes) as step:
        for m in range(TWO.micro_batches):
            if m == 1:
                step.next(micro_batch=m)
                with (
                    torch.no_grad(),
                    runtime.step(plan, routes, model="critic") as other,
                    other.forward(micro_batch=0),
                ):
                    critic(*TWO.batch(rank, 0)[:2])
            x, scores, dy = TWO.batch(rank, m)
            with step.forward(micro_batch=m):
                y = actor(x.requires_grad_(), scores.requires_grad_())
            y.backward(dy)
            is_last = m == TWO.micro_batches - 1
            assert bool(runtime.domain_sync._reducing) != is_last, "those of the last are home"
    runtime.close()
    return True


def test_the_step_of_another_model_does_not_delay_the_last_gradients():
    assert all(run_ranks(2, run_two_models))


GROUPED = dataclasses.replace(WORLD, num_layers=2)
GROUPED_PLAN = GROUPED.random_plan(GROUPED.loads([0, 0, 1, 1]), fill=1.0)
OWN_MICRO_BATCHES = 2  # of an EP group


def reduce_when_complete(model, grad_mode, group):
    """What Megatron and FSDP2 do: the reduction over expert-data-parallel ranks starts as soon as
    the last backward of a layer of this step has returned."""
    counts, reduced = {}, []

    def complete(key, params):
        counts[key] = counts.get(key, 0) + 1
        if counts[key] == OWN_MICRO_BATCHES:
            for param in params:
                dist.all_reduce(
                    param.grad if grad_mode == "returned" else param.main_grad, group=group
                )
            reduced.append(key)

    def watch(moe, args):
        params = list(moe.parameters())
        args[0].register_hook(lambda grad: complete(moe.layer, params) and None)

    for moe in model.layers:
        if grad_mode == "main_grad":
            moe.register_forward_pre_hook(watch)
            continue
        for name, param in moe.named_parameters():
            key = (moe.layer, name)
            param.register_post_accumulate_grad_hook(lambda p, key=key: complete(key, [p]))
    return reduced


def slow_home_reduce(runtime):
    """Sums come late on their own stream: who does not wait for them reduces too early."""
    for kind in runtime.domain_sync._kinds.values() if runtime.domain_sync is not None else ():
        engine, reduce = kind.sync.engine, kind.sync.engine.reduce

        def late(stream, items, keep, engine=engine, reduce=reduce):
            engine._run(stream, lambda: time.sleep(0.02))
            reduce(stream, items, keep)

        engine.reduce = late


def run_groups(rank, num_ranks):
    """Two EP groups of two ranks train the same experts on micro-batches of their own."""
    ep = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    edp = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group, ep_rank = divmod(rank, 2)
    need = reference(GROUPED, ep_rank)
    for transport in ("cpu_shm", "dist"):
        for grad_mode in ("returned", "main_grad"):
            options = {"transport": transport, "timeout_s": 20.0, "grad_mode": grad_mode}
            runtime, model = make(GROUPED, ep_rank, group=ep[group], **options)
            reduced = reduce_when_complete(model, grad_mode, edp[ep_rank])
            slow_home_reduce(runtime)
            result = Result([], [], [], [], [])
            routes = {"train": GROUPED.routes(ep_rank)}
            with runtime.step(GROUPED_PLAN, routes, optimizer_step=group) as step:
                for m in range(2 * group, 2 * group + OWN_MICRO_BATCHES):
                    x, scores, dy = GROUPED.batch(ep_rank, m)
                    x.requires_grad_(), scores.requires_grad_()
                    with step.forward(micro_batch=m):
                        y = model(x, scores)
                    y.backward(dy)
                    result.y.append(y.detach()), result.dx.append(x.grad)
                    result.dscores.append(scores.grad)
            assert len(reduced) == (2 if grad_mode == "main_grad" else 4)
            collect_weight_grads(GROUPED, runtime, model, result)
            runtime.close()
            own = slice(2 * group, 2 * group + OWN_MICRO_BATCHES)
            expected = Result(need.y[own], need.dx[own], need.dscores[own], need.dw13, need.dw2)
            compare(result, expected, f"{transport}, {grad_mode}")
    return True


def test_two_ep_groups_reduce_over_expert_data_parallel_ranks():
    assert all(run_ranks(4, run_groups))
