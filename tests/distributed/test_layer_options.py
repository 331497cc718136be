"""Options and biases over two ranks: any plan, moving experts, optimizer moments."""

import pytest
import torch
import torch.distributed as dist
from moe_world import World
from option_worlds import CASES, OneLayer, compare, reference, run_layer

import relibra
from relibra.testing.plans import random_layout, random_split, replica_only_split
from relibra_kernels.testing.launch import run_ranks

# Five experts on six home slots: one is a filler.
WORLD = World(
    1, 2, num_experts=5, top_k=2, replica_slots=2, hidden=12, expert=10, tokens=15, micro_batches=2
)


def run_cases(rank, num_ranks):
    torch.set_num_threads(1)
    for name, case in CASES.items():
        expected = reference(WORLD, rank, case)
        plans = {"no plan": None}
        for split in (random_split, replica_only_split):
            plans[split.__name__] = WORLD.random_plan(split=split, fill=1.0)
        results = {}
        for what, plan in plans.items():
            results[what] = run_layer(WORLD, rank, case, plan)
            compare(results[what], expected, f"{name}, {what}:")
        if case.combine == "exact":
            for what, result in results.items():
                for m in range(WORLD.micro_batches):
                    first = results["no plan"][f"y{m}"]
                    assert torch.equal(result[f"y{m}"], first), f"{name}, {what}: y{m}"
    return True


def test_any_plan_under_every_option_equals_the_dense_layer():
    assert all(run_ranks(2, run_cases, timeout=110.0))


def run_per_expert(rank, num_ranks, grad_mode):
    """One parameter an expert, with replicas on the other rank; gradients by home slot."""
    case = CASES["gpt-oss"]
    expected = reference(WORLD, rank, case)
    plan = WORLD.random_plan(split=random_split, fill=1.0)
    runtime = relibra.Runtime(
        dist.group.WORLD, WORLD.topology, replica_slots=2, grad_mode=grad_mode
    )
    moe = OneLayer(WORLD, rank, case).moe
    runtime.attach(moe)
    results, got = {}, {}
    with runtime.step(plan, {"train": WORLD.routes(rank)}) as step:  # experts lie in the new layout
        fields = {n: p.detach() for n, p in moe.named_parameters()}
        split = {n: tuple(e.clone().requires_grad_() for e in fields[n]) for n in ("w13", "w2")}
        biases = {n: fields[n].clone().requires_grad_() for n in ("b13", "b2")}
        flat = [*split["w13"], *split["w2"], *biases.values()]
        for param in flat:
            param.main_grad = torch.zeros_like(param)
        for m in range(WORLD.micro_batches):
            x, scores, dy = WORLD.batch(rank, m)
            x.requires_grad_(), scores.requires_grad_()
            with step.forward(micro_batch=m):
                y = relibra.balanced_moe(
                    x, scores[0], split["w13"], split["w2"], handle=step.handle(1), **biases,
                    options=case.options,
                )  # fmt: skip
            y.backward(dy)
            results |= {f"y{m}": y.detach(), f"dx{m}": x.grad, f"dscores{m}": scores.grad[0]}
    for name, part in (split | biases).items():
        grads = [
            p.main_grad if grad_mode == "main_grad" else p.grad
            for p in (part if isinstance(part, tuple) else [part])
        ]
        got[name] = torch.stack(grads) if isinstance(part, tuple) else grads[0]
        results[f"d{name}"] = runtime.gather_experts(got[name], 1)
    pushed = int((plan.passes["train"].replica_slot_expert_MLGS >= 0).sum())
    runtime.close()
    compare(results, expected, f"per expert, {grad_mode}:")
    return pushed


@pytest.mark.parametrize("grad_mode", ["returned", "main_grad"])
def test_one_parameter_an_expert_with_replicas(grad_mode):
    assert min(run_ranks(2, run_per_expert, grad_mode, timeout=60.0)) > 0


def move_experts(rank, num_ranks):
    """Weights, biases and all moments, by expert, before and after a change of the layout."""
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, replica_slots=2)
    model = OneLayer(WORLD, rank, CASES["gpt-oss"])
    optimizer = torch.optim.Adam(model.parameters())
    runtime.attach(model, optimizer)
    x, scores, dy = WORLD.batch(rank, 0)
    ids = torch.from_numpy(WORLD.ids(rank, 0))[:, 0].long()
    model(x, scores[0], ids).backward(dy)
    optimizer.step()

    def by_expert():
        found = {}
        for name, param in model.moe.named_parameters():
            moments = {k: v for k, v in optimizer.state[param].items() if v.dim() > 0}
            for key, value in {"weight": param, "grad": param.grad, **moments}.items():
                found[f"{name}.{key}"] = runtime.gather_experts(value, 1)
        exported = dict(runtime.export_experts(1))
        found |= {f"{e}.{n}": w for e, part in exported.items() for n, w in part.items()}
        return found | runtime.logical_state_dict()

    before = by_expert()
    moved = runtime.set_layout([random_layout(WORLD.rng(9), 5, 2)])
    after = by_expert()
    runtime.close()
    different = [n for n, value in before.items() if not torch.equal(value, after[n])]
    return moved, sorted(before), different


def test_biases_and_their_moments_move_with_their_expert():
    for moved, names, different in run_ranks(2, move_experts, timeout=60.0):
        assert moved > 0
        assert {"b13.weight", "b13.grad", "b13.exp_avg", "b2.exp_avg_sq", "0.b2"} <= set(names)
        assert "moe.b13" in names
        assert different == []


def with_other_options(rank, num_ranks):
    """Both ranks must hear of it, and neither may hang."""
    names = ("redispatch-recompute", "swiglu-bias")  # tensors of the same shapes
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, replica_slots=2, timeout_s=20.0)
    model = OneLayer(WORLD, rank, CASES[names[rank]])
    try:
        runtime.attach(model)
    except Exception as error:
        return str(error)
    return "nothing"


def test_ranks_with_other_options_are_refused():
    for message in run_ranks(2, with_other_options, timeout=60.0):
        assert "attach: need the same options of the layers on all ranks, got rank 0: " in message
