"""The real launch code of every wrapper, on a stand-in GPU of each architecture."""

import pytest

OTHERS = ("sm_80", "sm_100")  # `make aot` compiles for all of them too
ARCHS = ("sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in OTHERS))
KERNELS = {  # wrapper -> the Triton functions it launches
    "expert_up": {"_expert_up_kernel"},
    "grouped_gemm": {"_grouped_gemm_kernel"},
    "grouped_gemm backward": {"_grouped_gemm_kernel"},
    "combine": {"_combine_kernel"},
    "combine backward": {
        "_claims_kernel",
        "_combine_rows_grad_kernel",
        "_combine_scores_grad_kernel",
    },
    "expert_down_backward": {"_expert_down_backward_kernel", "_score_gradient_kernel"},
    "expert_wgrad": {"_expert_wgrad_kernel"},
    "expert_bias_grad": {"_expert_bias_grad_kernel"},
    "row_scores": {"_row_scores_kernel"},
    "copy_rows_to_peers": {"_copy_rows_to_peers_kernel"},
    "permute": {"_copy_rows_kernel", "_build_rows_kernel"},
    "dispatch": {
        "_rank_in_block_kernel",
        "_scan_blocks_kernel",
        "_assign_kernel",
        "_send_tables_kernel",
    },
}
# Python time of a layer's launches, microseconds; printed, never asserted: tests share cores.
TARGET = {"forward": 150, "backward": 300}

pytestmark = pytest.mark.xdist_group("aot")  # one process compiles, the others wait for nothing


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("wrapper", KERNELS)
def test_one_variant_serves_every_plan(launch_results, arch, wrapper):
    """Token counts 0, 1, 15, 16, 17 and 2^20, with tables on and off 16-byte boundaries."""
    found = launch_results(arch)["variants"][wrapper]
    assert found == dict.fromkeys(KERNELS[wrapper], 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_03_grids_for_a_million_tokens_fit(launch_results, arch):
    grids = launch_results(arch)["grids"]
    assert {name for name, _ in grids} == set().union(*KERNELS.values())
    for name, grid in grids:
        x, y, z = (*grid, 1, 1)[:3]
        assert 1 <= x <= 2**31 - 1, name
        assert max(y, z) <= 65535, name


@pytest.mark.parametrize("arch", ARCHS)
def test_a_launch_with_too_much_shared_memory_is_refused(launch_results, arch):
    found = launch_results(arch)["too much"]
    assert found["name"] == "shared memory"
    assert found["required"] > found["limit"] == {"sm_80": 166912}.get(arch, 232448)


@pytest.mark.parametrize("arch", ARCHS)
def test_python_time_of_a_launch_is_printed(launch_results, arch, record_property):
    found = launch_results(arch)
    for name, cost in found["costs"].items():
        record_property(name, cost)
    for direction, target in TARGET.items():
        cost = f"{found[direction]:.0f} us of Python, target {target}"
        record_property(direction, f"{arch}: launches of a layer's {direction}: {cost}")
        assert found[direction] > 0
