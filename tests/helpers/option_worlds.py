"""Layers with every option, and the plain dense layer that they must equal.

The oracle is one loop over experts in fp64 with plain autograd. It builds the stored form of the
weights from the logical one by its own few lines, and shares no code with the layer.
"""

import dataclasses

import torch
import torch.distributed as dist
from moe_world import World, check
from torch import nn

import relibra
from relibra import LayerOptions

NAMES = ("w13", "w2", "b13", "b2")


@dataclasses.dataclass(frozen=True)
class Case:
    """Options of a layer, whether it has biases, and how the runtime combines."""

    options: LayerOptions
    bias: bool = True
    combine: str = "reduced"
    grad_mode: str = "returned"


CASES = {
    "swiglu-bias": Case(LayerOptions()),
    "gpt-oss": Case(
        LayerOptions("clamped_swiglu", limit=0.7, interleaved=True, transposed=True),
        combine="exact",
    ),
    "gelu-bias-main-grad": Case(LayerOptions("gelu"), grad_mode="main_grad"),
    "relu2-transposed": Case(LayerOptions("relu2", transposed=True), bias=False, combine="exact"),
    "scores-at-activation": Case(
        LayerOptions(score_at="activation", interleaved=True), grad_mode="main_grad"
    ),
    "scores-at-activation-exact": Case(
        LayerOptions("gelu", score_at="activation", save="redispatch"), combine="exact"
    ),
    "redispatch-recompute": Case(
        LayerOptions("clamped_swiglu", alpha=1.3, save="redispatch", recompute_h=True)
    ),
    "transposed-recompute": Case(
        LayerOptions(transposed=True, recompute_h=True), bias=False, grad_mode="main_grad"
    ),
}


def logical_weights(world, case, layer=1):
    """Gate, up (None without a gate), down and biases of all experts, of order one, fp32."""
    rng = world.rng(6, layer)

    def draw(*shape, fan_in):
        values = rng.normal(size=(world.num_experts, *shape)) * fan_in**-0.5
        return torch.tensor(values, dtype=torch.float32)

    gated = case.options.activation in ("swiglu", "clamped_swiglu")
    parts = {"gate": draw(world.expert, world.hidden, fan_in=world.hidden)}
    if gated:
        parts["up"] = draw(world.expert, world.hidden, fan_in=world.hidden)
    parts["down"] = draw(world.hidden, world.expert, fan_in=world.expert)
    if case.bias:
        parts["gate_bias"] = draw(world.expert, fan_in=1)
        if gated:
            parts["up_bias"] = draw(world.expert, fan_in=1)
        parts["down_bias"] = draw(world.hidden, fan_in=1)
    return parts


def stored(parts, case):
    """Field name -> tensor of all experts, as the options store it; differentiable."""
    options = case.options

    def join(gate, up):
        if up is None:
            return gate
        if options.interleaved:
            return torch.stack((gate, up), 2).flatten(1, 2)
        return torch.cat((gate, up), 1)

    fields = {"w13": join(parts["gate"], parts.get("up")), "w2": parts["down"]}
    if options.transposed:
        fields = {name: w.mT.contiguous() for name, w in fields.items()}
    if case.bias:
        fields["b13"] = join(parts["gate_bias"], parts.get("up_bias"))
        fields["b2"] = parts["down_bias"]
    return fields


def dense(x, ids, scores, parts, options):
    """The layer as its definition reads, expert by expert."""
    out = torch.zeros_like(x)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        score = scores[token, choice, None]
        rows = x[token]
        gate = rows @ parts["gate"][expert].t()
        if "gate_bias" in parts:
            gate = gate + parts["gate_bias"][expert]
        if "up" in parts:
            up = rows @ parts["up"][expert].t()
            if "up_bias" in parts:
                up = up + parts["up_bias"][expert]
        if options.activation == "swiglu":
            a = gate * torch.sigmoid(gate) * up
        elif options.activation == "clamped_swiglu":
            gate = torch.clamp(gate, max=options.limit)
            up = torch.clamp(up, -options.limit, options.limit)
            a = (up + 1) * gate * torch.sigmoid(options.alpha * gate)
        elif options.activation == "gelu":
            a = 0.5 * gate * (1 + torch.erf(gate / 2**0.5))
        else:
            a = torch.clamp(gate, min=0) ** 2
        if options.score_at == "activation":
            a = score * a
        y = a @ parts["down"][expert].t()
        if "down_bias" in parts:
            y = y + parts["down_bias"][expert]
        if options.score_at == "output":
            y = score * y
        out = out.index_add(0, token, y)
    return out


def reference(world, rank, case):
    """Results of one rank and weight gradients over all, by name, in fp64."""
    leaves = {n: w.double().requires_grad_() for n, w in logical_weights(world, case).items()}
    results = {}
    fields = stored(leaves, case)
    for field in fields.values():
        field.retain_grad()
    for source in range(world.num_ranks):
        for m in range(world.micro_batches):
            x, scores, dy = (part.double() for part in world.batch(source, m))
            x.requires_grad_()
            score = scores[0].clone().requires_grad_()
            parts = unstored(fields, case)
            y = dense(x, torch.from_numpy(world.ids(source, m))[:, 0], score, parts, case.options)
            y.backward(dy, retain_graph=True)
            if source == rank:
                results |= {f"y{m}": y.detach(), f"dx{m}": x.grad, f"dscores{m}": score.grad}
    return results | {f"d{name}": field.grad for name, field in fields.items()}


def unstored(fields, case):
    """Inverse of `stored`."""
    options, parts = case.options, {}
    w13, w2 = (fields[n].mT if options.transposed else fields[n] for n in ("w13", "w2"))
    biases = (fields["b13"], fields["b2"]) if case.bias else None
    parts["down"] = w2
    if options.activation in ("gelu", "relu2"):
        parts["gate"] = w13
        if biases:
            parts["gate_bias"], parts["down_bias"] = biases
        return parts

    def split(both):
        return (both[:, ::2], both[:, 1::2]) if options.interleaved else both.chunk(2, 1)

    parts["gate"], parts["up"] = split(w13)
    if biases:
        parts["gate_bias"], parts["up_bias"] = split(biases[0])
        parts["down_bias"] = biases[1]
    return parts


class OneLayer(nn.Module):
    """A layer alone, as a model to attach."""

    def __init__(self, world, rank, case, dtype=torch.float32):
        super().__init__()
        fields = {n: w.to(dtype) for n, w in stored(logical_weights(world, case), case).items()}
        self.moe = relibra.BalancedMoE.from_dense(
            fields.pop("w13"), fields.pop("w2"), layer=1, num_ranks=world.num_ranks, rank=rank,
            **fields, options=case.options,
        )  # fmt: skip

    def forward(self, x, scores, ids=None):
        return self.moe(x, scores, ids)


def run_layer(world, rank, case, plan, compiled=None, **options):
    """Results and gradients by name through the runtime; a plan of None runs live."""
    group = dist.group.WORLD if world.num_ranks > 1 else None
    options = {"combine": case.combine, "grad_mode": case.grad_mode} | options
    runtime = relibra.Runtime(group, world.topology, replica_slots=world.replica_slots, **options)
    model = OneLayer(world, rank, case)
    runtime.attach(model)
    for param in model.parameters():
        if options["grad_mode"] == "main_grad":
            param.main_grad = torch.zeros_like(param)
    run = model if compiled is None else torch.compile(model.moe, **compiled)
    results = {}

    def micro_batch(m, ids=None):
        x, scores, dy = world.batch(rank, m)
        x.requires_grad_()
        score = scores[0].clone().requires_grad_()
        y = run(x, score, ids)
        y.backward(dy)
        results.update({f"y{m}": y.detach(), f"dx{m}": x.grad, f"dscores{m}": score.grad})

    if plan is None:
        for m in range(world.micro_batches):
            micro_batch(m, torch.from_numpy(world.ids(rank, m))[:, 0].long())
    else:
        with runtime.step(plan, {"train": world.routes(rank)}) as step:
            for m in range(world.micro_batches):
                with step.forward(micro_batch=m):
                    micro_batch(m)
    for name, param in model.moe.named_parameters():
        results[f"d{name}"] = runtime.gather_experts(getattr(param, "main_grad", param.grad), 1)
    runtime.close()
    return results


def compare(got, expected, what):
    """Every result by name."""
    assert sorted(got) == sorted(expected), what
    for name, need in expected.items():
        check(got[name], need, f"{what} {name}")


SMALL = World(1, 1, num_experts=4, top_k=2, hidden=12, expert=10, micro_batches=1)
