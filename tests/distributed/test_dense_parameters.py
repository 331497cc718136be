"""Dense parameters under DDP or FSDP2 beside balanced experts; replicas are never parameters."""

import pytest
import torch
import torch.distributed as dist
from moe_world import Model, World, check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import relibra
from relibra_kernels.reference.moe import dense_moe
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 2, num_experts=4, top_k=2, num_layers=2, micro_batches=2, tokens=9, replica_slots=1,
    dtype=torch.float64,
)  # fmt: skip
PLAN = WORLD.random_plan(fill=1.0)


class Net(nn.Module):
    """A dense layer in front of the MoE layers, equal on all ranks."""

    def __init__(self, rank):
        super().__init__()
        self.dense = nn.Linear(WORLD.hidden, WORLD.hidden, dtype=WORLD.dtype)
        self.moe = Model(WORLD, rank, WORLD.num_ranks)
        with torch.no_grad():
            for seed, param in enumerate(self.dense.parameters()):
                rng = WORLD.rng(9, seed)
                param.copy_(torch.from_numpy(rng.normal(size=param.shape) * WORLD.hidden**-0.5))

    def forward(self, x, scores):
        return self.moe(x + self.dense(x), scores)


def reference(dense):
    """Outputs by (rank, micro-batch); dense gradients as mean over ranks, the experts' as sums."""
    weights = [[w.requires_grad_() for w in WORLD.weights(n)] for n in WORLD.shape.moe_layers]
    outputs = {}
    for rank in range(WORLD.num_ranks):
        for m in range(WORLD.micro_batches):
            x, scores, dy = WORLD.batch(rank, m)
            ids, y = torch.from_numpy(WORLD.ids(rank, m)), x + dense(x)
            for place, (w13, w2) in enumerate(weights):
                y = y + dense_moe(y, ids[:, place], scores[place], w13, w2)
            y.backward(dy)
            outputs[rank, m] = y.detach()
    return (
        outputs,
        [param.grad / WORLD.num_ranks for param in dense.parameters()],
        [[w.grad for w in pair] for pair in weights],
    )


def wrapped(net, kind):
    """The same model with its dense part under DDP or FSDP2, which leave the experts alone."""
    experts = [f"moe.{name}" for name, _ in net.moe.named_parameters()]
    if kind == "ddp":
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(net, experts)
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (WORLD.num_ranks,))
    return fully_shard(net, mesh=mesh, ignored_params=set(net.moe.parameters()))


def whole(param):
    grad = param.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def run_dense(rank, num_ranks, grad_mode):
    outputs, dense_grads, expert_grads = reference(Net(rank).dense)
    for kind in ("ddp", "fsdp2"):
        net = Net(rank)
        runtime = relibra.Runtime(
            dist.group.WORLD, WORLD.topology, replica_slots=1, transport="cpu_shm",
            grad_mode=grad_mode, timeout_s=20.0,
        )  # fmt: skip
        outer = wrapped(net, kind)
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        names = [name for name, _ in outer.named_parameters()], list(outer.state_dict())
        held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        runtime.attach(net.moe, optimizer)
        for param in net.moe.parameters():
            param.main_grad = torch.zeros_like(param)
        with runtime.step(PLAN, {"train": WORLD.routes(rank)}) as step:
            for m in range(WORLD.micro_batches):
                x, scores, dy = WORLD.batch(rank, m)
                with step.forward(micro_batch=m):
                    y = outer(x.requires_grad_(), scores.requires_grad_())
                y.backward(dy)
                check(y.detach(), outputs[rank, m], f"{kind} y")
        for param, need in zip(net.dense.parameters(), dense_grads, strict=True):
            check(whole(param), need, f"{kind} dense gradient")
        for moe, (dw13, dw2) in zip(net.moe.layers, expert_grads, strict=True):
            for param, need in ((moe.w13, dw13), (moe.w2, dw2)):
                grad = param.grad if grad_mode == "returned" else param.main_grad
                check(runtime.gather_experts(grad, moe.layer), need, f"{kind} expert gradient")
        assert ([name for name, _ in outer.named_parameters()], list(outer.state_dict())) == names
        assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == held
        assert not any(is_of_arena(p, runtime) for p in [*outer.parameters(), *outer.buffers()])
        optimizer.step()
        runtime.close()
    return True


def is_of_arena(param, runtime):
    """Whether a tensor lies in memory of replicas."""
    local = getattr(param, "_local_tensor", param)
    for kind in runtime.domain_sync._kinds.values():
        arena = kind.sync.arena
        begin = arena.peers[arena.rank]
        if begin <= local.data_ptr() < begin + arena.nbytes:
            return True
    return False


@pytest.mark.parametrize("grad_mode", ["returned", "main_grad"])
def test_dense_parameters_under_ddp_and_fsdp2(grad_mode):
    assert all(run_ranks(2, run_dense, grad_mode))
