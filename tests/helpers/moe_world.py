"""A small sharded MoE model with replayed routing, and the dense reference it must equal.

Everything is derived from a seed, so each rank can build all of it without communication.
"""

import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import relibra
from relibra.testing.plans import make_plan
from relibra_kernels.reference.moe import dense_moe
from relibra_kernels.testing.compare import calc_diff, max_err_over_rms


@dataclasses.dataclass(frozen=True)
class World:
    """Sizes of a case; `skew` > 0 makes some experts hot, `tokens_G` gives tokens by rank."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    num_experts: int = 8
    top_k: int = 2
    num_layers: int = 1
    micro_batches: int = 1
    tokens: int = 24
    hidden: int = 16
    expert: int = 16
    replica_slots: int = 1
    seed: int = 0
    skew: float = 1.5
    dy_scale: float = 1.0
    empty_rank: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def num_ranks(self):
        return self.num_nodes * self.ranks_per_node

    @property
    def topology(self):
        return relibra.Topology(self.num_nodes, self.ranks_per_node)

    @property
    def shape(self):
        return relibra.ModelShape(
            self.num_experts, self.top_k, tuple(range(1, 1 + self.num_layers)), self.hidden,
            self.expert, "float32",
        )  # fmt: skip

    def rng(self, *name):
        return np.random.default_rng([self.seed, *name])

    def tokens_of(self, rank, m):
        """Ragged: ranks and micro-batches differ."""
        if rank == self.empty_rank:
            return 0
        return self.tokens + (3 * rank + 5 * m) % 7 if self.tokens else 0

    def ids(self, rank, m):
        """int32 [T, L, K] distinct ids, skewed."""
        rng = self.rng(1, rank, m)
        heat = self.rng(2, m).normal(0, self.skew, (self.num_layers, self.num_experts))
        noise = rng.gumbel(size=(self.tokens_of(rank, m), self.num_layers, self.num_experts))
        order = np.argsort(-(heat + noise), axis=-1, kind="stable")
        return order[..., : self.top_k].astype(np.int32)

    def routes(self, rank):
        return [
            relibra.DispatchRows(self.ids(rank, m), num_experts=self.num_experts)
            for m in range(self.micro_batches)
        ]

    def loads(self, optimizer_step_M=None):
        """Gathered loads, computed without communication."""
        return relibra.LoadMatrix.stack(
            [
                relibra.LoadMatrix.from_rows(self.routes(rank), optimizer_step_M)
                for rank in range(self.num_ranks)
            ]
        )

    def weights(self, layer):
        """[E, 2F, D] and [E, D, F] of order one."""
        rng = self.rng(3, layer)
        w13 = rng.normal(size=(self.num_experts, 2 * self.expert, self.hidden))
        w2 = rng.normal(size=(self.num_experts, self.hidden, self.expert))
        return (
            torch.tensor(w13 * self.hidden**-0.5, dtype=self.dtype),
            torch.tensor(w2 * self.expert**-0.5, dtype=self.dtype),
        )

    def batch(self, rank, m):
        """x [T, D], one score matrix [T, K] a layer, dy [T, D]."""
        rng, num = self.rng(4, rank, m), self.tokens_of(rank, m)
        x, dy = rng.normal(size=(2, num, self.hidden))
        dy = dy * self.dy_scale
        scores = rng.random((self.num_layers, num, self.top_k)) + 0.1
        return tuple(torch.tensor(part, dtype=self.dtype) for part in (x, scores, dy))

    def random_plan(self, loads=None, **options):
        options.setdefault("replica_slots", self.replica_slots)
        return make_plan(
            self.rng(5), {"train": loads or self.loads()}, self.topology, self.shape, **options
        )


class Model(nn.Module):
    """Residual stack of MoE layers; scores are given, so that their gradients can be compared."""

    def __init__(self, world, rank, num_ranks):
        super().__init__()
        self.layers = nn.ModuleList(
            relibra.BalancedMoE.from_dense(
                *world.weights(layer), layer=layer, num_ranks=num_ranks, rank=rank
            )
            for layer in world.shape.moe_layers
        )

    def forward(self, x, scores, ids=None, wrap=None):
        for place, moe in enumerate(self.layers):
            chosen = moe.replayed_ids() if ids is None else ids[:, place]
            x = x + (wrap or _call)(moe, x, scores[place], chosen)
        return x


def _call(moe, x, scores, ids):
    return moe(x, scores, ids)


@dataclasses.dataclass
class Result:
    """Outputs and gradients of this rank's batches, weight gradients in expert order."""

    y: list
    dx: list
    dscores: list
    dw13: list
    dw2: list


def reference(world, rank, micro_batches=None, weights=None):
    """Dense single-process result in fp64, for this rank's tokens; weight gradients over all."""
    return references(world, micro_batches, weights)[rank]


def references(world, micro_batches=None, weights=None):
    """`reference` of every rank, by rank."""
    start = weights or [world.weights(layer) for layer in world.shape.moe_layers]
    weights = [[w.detach().double().requires_grad_() for w in pair] for pair in start]
    results = [Result([], [], [], [], []) for _ in range(world.num_ranks)]
    for source, result in enumerate(results):
        for m in range(world.micro_batches) if micro_batches is None else micro_batches:
            x, scores, dy = (part.double() for part in world.batch(source, m))
            x.requires_grad_(), scores.requires_grad_()
            ids, y = torch.from_numpy(world.ids(source, m)), x
            for place, (w13, w2) in enumerate(weights):
                y = y + dense_moe(y, ids[:, place], scores[place], w13, w2)
            y.backward(dy)
            result.y.append(y.detach())
            result.dx.append(_grad(x))
            result.dscores.append(_grad(scores))
    for result in results:
        result.dw13 = [_grad(w13) for w13, _ in weights]
        result.dw2 = [_grad(w2) for _, w2 in weights]
    return results


def _grad(leaf):
    """Zero where the dense loop never met the tensor, as with no tokens."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def balanced(world, rank, plan, group=None, **options):
    """The same through the runtime under `plan`; None runs the live path without a plan."""
    group = group or (dist.group.WORLD if world.num_ranks > 1 else None)
    runtime = relibra.Runtime(group, world.topology, replica_slots=world.replica_slots, **options)
    model = Model(world, rank, world.num_ranks)
    runtime.attach(model)
    if options.get("grad_mode") == "main_grad":
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
    result = Result([], [], [], [], [])
    if plan is None:
        for m in range(world.micro_batches):
            ids = torch.from_numpy(world.ids(rank, m)).long()
            run_micro_batch(world, rank, m, model, result, ids)
    else:
        with runtime.step(plan, {"train": world.routes(rank)}) as step:
            for m in range(world.micro_batches):
                with step.forward(micro_batch=m):
                    run_micro_batch(world, rank, m, model, result)
    collect_weight_grads(world, runtime, model, result)
    runtime.close()
    return result


def run_micro_batch(world, rank, m, model, result, ids=None):
    x, scores, dy = world.batch(rank, m)
    x.requires_grad_(), scores.requires_grad_()
    y = model(x, scores, ids)
    y.backward(dy)
    result.y.append(y.detach())
    result.dx.append(x.grad)
    result.dscores.append(scores.grad)


def collect_weight_grads(world, runtime, model, result):
    for moe in model.layers:
        for name, out in (("w13", result.dw13), ("w2", result.dw2)):
            param = getattr(moe, name)
            grad = getattr(param, "main_grad", param.grad)
            out.append(runtime.gather_experts(grad, moe.layer))


def compare(result, expected, what=""):
    """Equality of every tensor, and of every expert's weight gradient on its own."""
    for name in ("y", "dx", "dscores"):
        for m, (got, need) in enumerate(
            zip(getattr(result, name), getattr(expected, name), strict=True)
        ):
            check(got, need, f"{what} {name} micro-batch {m}")
    for name in ("dw13", "dw2"):
        for layer, (got, need) in enumerate(
            zip(getattr(result, name), getattr(expected, name), strict=True)
        ):
            check(got, need, f"{what} {name} layer {layer}")
            for expert in range(got.shape[0]):
                check(got[expert], need[expert], f"{what} {name} layer {layer} expert {expert}")


def check(got, need, what):
    diff = calc_diff(got, need)
    assert diff < 1e-12, f"{what}: calc_diff {diff}"
    error = max_err_over_rms(got, need)
    assert error < 1e-5, f"{what}: max|err|/rms {error}"
