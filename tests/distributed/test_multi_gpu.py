"""The layer over several GPUs equals the dense reference.

    TRITON_INTERPRET=0 torchrun --standalone --nproc-per-node=gpu -m pytest -m multi_gpu \
        tests/distributed/test_multi_gpu.py

Tests marked `multi_gpu` need that command; what they call also runs here on the CPU, over gloo.
"""

import dataclasses
import datetime
import os

import pytest
import torch
import torch.distributed as dist
from moe_world import Result, World, balanced, reference

import relibra
from relibra_kernels.testing.compare import MAX_CALC_DIFF, calc_diff
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.rank_messages import RefusedError

NAMES = ("y", "dx", "dscores", "dw13", "dw2")
DISPATCHES = ("flat", "two_hop")


@dataclasses.dataclass(frozen=True)
class DeviceWorld(World):
    """A world whose tensors lie on a device; its routing stays on the CPU."""

    device: str = "cpu"

    def weights(self, layer):
        return tuple(w.to(self.device) for w in super().weights(layer))

    def batch(self, rank, m):
        return tuple(part.to(self.device) for part in super().batch(rank, m))


def world_of(num_ranks, device, **sizes):
    """Two nodes where both hops of a two-hop dispatch then move something, else one."""
    num_nodes = 2 if num_ranks >= 4 and num_ranks % 2 == 0 else 1
    defaults = {"num_experts": 4 * num_ranks, "top_k": 3, "replica_slots": 2, "hidden": 64}
    defaults |= {"expert": 64, "num_layers": 2, "device": device}
    return DeviceWorld(num_nodes, num_ranks // num_nodes, **(defaults | sizes))


def on_cpu(result):
    return Result(*([x.cpu() for x in getattr(result, name)] for name in NAMES))


def expected(world, rank):
    return reference(dataclasses.replace(world, device="cpu"), rank)


def pairs(first, second):
    """Tensors of two results, weight gradients by expert."""
    for name in NAMES:
        for place, two in enumerate(zip(getattr(first, name), getattr(second, name), strict=True)):
            yield f"{name} {place}", *two
            if name.startswith("dw"):
                for expert, parts in enumerate(zip(*two, strict=True)):
                    yield f"{name} {place} expert {expert}", *parts


def compare(found, needed, what, device):
    """By norms: of 64 columns the largest error over the root mean square is 1e-5 from rounding."""
    dtype = found.y[0].dtype
    limit = MAX_CALC_DIFF[dtype]
    if dtype == torch.float32 and device != "cpu":
        limit = 1e-10
    for name, got, need in pairs(found, needed):
        assert got.dtype == dtype
        # In bf16 few numbers average less, and y and dx have the residual, which is exact.
        few = dtype == torch.bfloat16 and ("expert" in name or "dscores" in name)
        diff = calc_diff(got, need)
        assert diff < limit * (2 if few else 1), f"{what}: {name}: {diff}"


def check_exact(rank, world):
    """In `exact` all plans give the same outputs bit for bit, and both dispatches everything."""
    outputs = []
    for fill in (0.0, 1.0):
        plan = world.random_plan(fill=fill)
        flat, two_hop = (
            on_cpu(balanced(world, rank, plan, combine="exact", dispatch=dispatch))
            for dispatch in DISPATCHES
        )
        compare(flat, expected(world, rank), f"fill {fill}", world.device)
        for name, a, b in pairs(flat, two_hop):
            assert torch.equal(a, b), f"fill {fill}: {name}"
        outputs.append(flat.y)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    return True


def check_reduced(rank, world):
    """The faster sum, with gradients that add to `main_grad`."""
    plan = world.random_plan(fill=1.0)
    for dispatch in DISPATCHES:
        found = balanced(world, rank, plan, dispatch=dispatch, grad_mode="main_grad")
        compare(on_cpu(found), expected(world, rank), f"{dispatch}, reduced", world.device)
    return True


def check_bf16(rank, world):
    """bf16 rounds no more than its products may."""
    for dispatch in DISPATCHES:
        found = on_cpu(balanced(world, rank, world.random_plan(), dispatch=dispatch))
        assert found.y[0].dtype == torch.bfloat16
        compare(found, expected(world, rank), dispatch, world.device)
    return True


def check_migration(rank, world):
    """Experts move to other home ranks and back, each with all of its bits."""
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, replica_slots=2)
    (layer,) = world.shape.moe_layers
    whole = world.weights(layer)
    moe = relibra.BalancedMoE.from_dense(*whole, layer=layer, num_ranks=world.num_ranks, rank=rank)
    runtime.attach(moe)
    with runtime.step(world.random_plan(), {"train": world.routes(rank)}) as step:
        assert step.moved_experts > 0
    for param, need in zip((moe.w13, moe.w2), whole, strict=True):
        assert torch.equal(runtime.gather_experts(param.detach(), layer).cpu(), need.cpu())
    runtime.close()
    return True


def check_transports(rank, world):
    """Replicas by every way that is here: the bits of `dist`, over several layers ahead."""
    plan = world.random_plan(fill=1.0)
    found = on_cpu(balanced(world, rank, plan, transport="dist", grad_mode="main_grad"))
    compare(found, expected(world, rank), "dist", world.device)
    for name in TRANSPORTS[torch.device(world.device).type]:
        try:
            other = balanced(world, rank, plan, transport=name, grad_mode="main_grad")
        except RefusedError as error:  # on all ranks
            print(f"{name} is not here: {error}")  # noqa: T201
            continue
        for what, a, b in pairs(found, on_cpu(other)):
            assert torch.equal(a, b), f"{name}: {what}"
    return True


TRANSPORTS = {"cpu": ("cpu_shm",), "cuda": ("torch_symm", "nvshmem")}
CHECKS = {  # check, sizes
    "transports": (check_transports, {"num_layers": 3, "micro_batches": 2}),
    "exact": (check_exact, {}),
    "reduced": (check_reduced, {"micro_batches": 2}),
    "bf16": (check_bf16, {"dtype": torch.bfloat16, "num_layers": 1}),
    "migration": (check_migration, {"num_layers": 1}),
}
NAMED = pytest.mark.parametrize("name", CHECKS)


def run_checks(rank, num_ranks):
    torch.set_num_threads(1)
    for check, sizes in CHECKS.values():
        assert check(rank, world_of(num_ranks, "cpu", **sizes))
    return True


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_checks_on_the_cpu(num_ranks):
    assert all(run_ranks(num_ranks, run_checks))


def test_a_wrong_gradient_is_found():
    world = world_of(1, "cpu", num_layers=1)
    found, needed = (expected(world, 0) for _ in range(2))
    for name in NAMES:
        setattr(found, name, [x.float() for x in getattr(found, name)])
    compare(found, needed, "same", "cpu")
    found.dw2[0][1] *= 1.00001
    with pytest.raises(AssertionError, match="changed: dw2 0"):
        compare(found, needed, "changed", "cpu")


@pytest.fixture(scope="module")
def gpu_rank():
    """Rank, number of ranks and device of this process in the group that torchrun started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        pytest.skip("needs torchrun, one process a GPU: see the docstring of this file")
    local, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks < 2:
        pytest.skip(f"needs two or more processes, torchrun started {num_ranks}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=device)
    yield dist.get_rank(), num_ranks, str(device)
    dist.destroy_process_group()


@pytest.mark.multi_gpu
@NAMED
def test_over_nccl(name, gpu_rank):
    rank, num_ranks, device = gpu_rank
    check, sizes = CHECKS[name]
    assert check(rank, world_of(num_ranks, device, **sizes))
