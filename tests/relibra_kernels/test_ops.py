"""What holds for the registry as a whole."""

import subprocess
import sys

import pytest
import torch

import relibra_kernels  # noqa: F401  registers the ops
from relibra_kernels.testing.op_checks import GemmCase

relibra = torch.ops.relibra

NAMES = [
    "build_route",
    "build_rows",
    "combine",
    "combine_backward",
    "count_sends",
    "expert_bias_grad",
    "expert_down",
    "expert_down_backward",
    "expert_up",
    "expert_up_backward",
    "expert_wgrad",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_wgrad",
    "home_reduce",
    "moe_backward",
    "moe_forward",
    "replica_push",
    "route_to_slots",
    "row_scores",
    "swiglu",
    "swiglu_backward",
    "token_permute",
    "token_unpermute",
    "token_unpermute_backward",
]


def test_every_op_is_registered_with_a_cpu_body_and_a_fake():
    for name in NAMES:
        schema = getattr(relibra, name).default._schema
        assert schema.name == f"relibra::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, "Meta")


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("grouped_gemm_wgrad", {"home_grad_HND", "replica_grad_SND"}),
        (
            "expert_wgrad",
            {
                *("home_grad13", "static_grad13", "replica_grad13", "home_grads13"),
                *("home_grad2", "static_grad2", "replica_grad2", "home_grads2"),
            },
        ),
        ("replica_push", {"replica_w"}),
        ("home_reduce", {"home_grad"}),
        ("combine", set()),
    ],
)
def test_schemas_name_what_an_op_writes(name, mutated):
    arguments = getattr(relibra, name).default._schema.arguments
    assert {a.name for a in arguments if a.alias_info and a.alias_info.is_write} == mutated


def test_shapes_and_dtypes_on_meta_tensors():
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def table(*shape):
        return meta(*shape, dtype=torch.int32)

    lists = table(5), table(9), table(9), table(9)
    shapes = [tuple(t.shape) for t in relibra.build_route(table(6, 3), *lists, 4, 2, 11)]
    assert shapes == [(6, 3), (11,), (11, 3), (6, 2)]
    assert relibra.count_sends(table(6, 3), *lists[:3], 4, 2).shape == (2,)
    assert relibra.route_to_slots(meta(6, 3, dtype=torch.int64), *lists[:3]).dtype == torch.int32
    assert [t.shape for t in relibra.build_rows(table(6, 3), 40)] == [(40,), (40,)]
    assert relibra.token_permute(meta(6, 8), table(40), table(6, 3)).shape == (40, 8)
    assert relibra.token_unpermute(meta(40, 8), table(6, 3)).shape == (6, 3, 8)
    out = relibra.combine(meta(40, 8), table(6, 3), meta(6, 3, dtype=torch.float32))
    assert (out.shape, out.dtype) == ((6, 8), torch.bfloat16)
    weights = meta(4, 10, 8), meta(1, 10, 8), table(7, 4), 16, False
    assert relibra.grouped_gemm(meta(40, 8), *weights).shape == (40, 10)
    assert relibra.grouped_gemm_dgrad(meta(40, 10), *weights).shape == (40, 8)
    assert relibra.swiglu(meta(40, 10)).shape == (40, 5)


def test_the_registry_imports_no_kernel_language_and_no_native_code():
    code = (
        "import sys, relibra_kernels;"
        "print([n for n in sys.modules if n == 'triton' or n.endswith('_planner')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ops_run_inside_a_compiled_function():
    case = GemmCase(slot_rows=(3, 2), num_home=1)
    rows = torch.where(case.real[:, None], case.rows, 0)

    def layer(rows, home, replica, mtile):
        out = relibra.grouped_gemm(rows, home, replica, mtile, 4, False)
        return relibra.swiglu(out).sum()

    leaves = [t.clone().requires_grad_() for t in (rows, case.home, case.replica)]
    expected = torch.autograd.grad(layer(*leaves, case.mtile), leaves)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, two in zip(
        torch.autograd.grad(compiled(*leaves, case.mtile), leaves), expected, strict=True
    ):
        torch.testing.assert_close(one, two)
