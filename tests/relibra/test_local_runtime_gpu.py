"""Eight ranks on one device: a whole EP group with replicas, against the dense reference.

    TRITON_INTERPRET=0 python -m pytest -m gpu tests/relibra/test_local_runtime_gpu.py

What the GPU tests call also runs here on the CPU.
"""

import dataclasses

import pytest
import torch
from local_world import DeviceWorld, train_local
from moe_world import Result, World, compare, references

from relibra_kernels.testing.compare import MAX_CALC_DIFF, calc_diff

FIELDS = [field.name for field in dataclasses.fields(Result)]


def check_eight_ranks(device, dtype, order="1f1b", recompute="non-reentrant", **options):
    """Outputs and gradients of every rank, and of every expert; `exact` twice, bit for bit."""
    num_layers = 1 if dtype == torch.bfloat16 else 2  # whose rounding adds up
    world = DeviceWorld(
        1, 8, num_experts=32, top_k=3, num_layers=num_layers, micro_batches=2, tokens=40,
        replica_slots=2, hidden=64, expert=64, dtype=dtype, device=device,
    )  # fmt: skip
    plan = world.random_plan(fill=1.0)
    call = {"plan": plan, "order": order, "recompute": recompute, "timeout_s": 20.0, **options}
    found, again = train_local(world, **call), train_local(world, **call)
    limit = MAX_CALC_DIFF[dtype] if device == "cpu" or dtype != torch.float32 else 1e-10
    for rank, need in enumerate(references(dataclasses.replace(world, device="cpu"))):
        for name in FIELDS:
            parts = (getattr(result[rank], name) for result in (found, again))
            for place, (got, same) in enumerate(zip(*parts, strict=True)):
                what = f"rank {rank} {name} {place}"
                assert torch.equal(got, same), f"{what}: another result the second time"
                # In bf16 few numbers average less; y and dx have the residual, which is exact.
                few = 2 if dtype == torch.bfloat16 and name == "dscores" else 1
                diff = calc_diff(got.cpu(), getattr(need, name)[place])
                assert diff < limit * few, f"{what}: {diff}"


def test_eight_ranks_on_the_cpu():
    check_eight_ranks("cpu", torch.float32, combine="exact")


@pytest.mark.slow
def test_four_ranks_on_triton_kernels_in_the_interpreter():
    world = World(
        1, 4, num_experts=8, top_k=2, num_layers=2, micro_batches=2, tokens=8, hidden=64, expert=64
    )
    for rank, result in enumerate(train_local(world, order="1f1b", kernels="triton")):
        compare(result, references(world)[rank], f"rank {rank}:")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad_mode", ["returned", "main_grad"])
def test_eight_ranks_on_one_gpu(dtype, grad_mode):
    if grad_mode == "main_grad":
        check_eight_ranks("cuda", dtype, "in-turn", "off", grad_mode=grad_mode, combine="exact")
    else:
        check_eight_ranks("cuda", dtype)
