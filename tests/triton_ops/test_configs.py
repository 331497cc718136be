"""The table of block sizes: complete, independent of the plan, and clear about what it lacks."""

import inspect

import pytest
import torch

from relibra_kernels.triton_ops import configs
from relibra_kernels.triton_ops.configs import ARCHS, KERNELS, SIZE_CLASSES, TABLE, GemmConfig
from relibra_kernels.triton_ops.descriptors import count_processors

MODELS = {
    "Qwen3-30B-A3B": (2048, 768),
    "Qwen3-235B-A22B": (4096, 1536),
    "GLM-4.5-Air": (4096, 1408),
    "DeepSeek-V3": (7168, 2048),
    "gpt-oss": (2880, 2880),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_row_for_every_model_dtype_and_architecture(kernel, arch):
    for dtype in DTYPES:
        for sizes in MODELS.values():
            config = configs.lookup(kernel, arch, dtype, *sizes)
            tile_rows = configs.block_rows(arch)  # the tables of all kernels are built with it
            if kernel == "grouped_gemm_wgrad":
                assert tile_rows % config.block_k == 0
            else:
                assert config.block_m == tile_rows
            assert not config.tma or arch in ("sm_90", "sm_100")


def test_the_table_has_no_row_that_nobody_asks_for():
    assert {key[0] for key in TABLE} == set(KERNELS)
    assert {key[1] for key in TABLE} == set(ARCHS)
    assert {key[3] for key in TABLE} == set(SIZE_CLASSES)
    assert {configs.size_class(*sizes) for sizes in MODELS.values()} == set(SIZE_CLASSES)


def test_every_row_says_whether_it_ran():
    for key, row in TABLE.items():
        expected = "interpreter" if key[1] == "interpreter" else "not run"
        assert expected in row.provenance, key


def test_fp16_shares_the_rows_of_bf16_and_fp32_has_smaller_ones():
    def volume(dtype, arch):
        c = configs.lookup("expert_up", arch, dtype, 2048, 768)
        return c.block_m * c.block_n * c.block_k

    for arch in ("sm_80", "sm_90", "sm_100"):
        assert volume(torch.float16, arch) == volume(torch.bfloat16, arch)
        assert volume(torch.float32, arch) < volume(torch.bfloat16, arch)


def test_the_key_has_no_row_count():
    """A config that changed with rows per slot would make results depend on the plan."""
    assert list(inspect.signature(configs.lookup).parameters) == [
        "kernel",
        "arch",
        "dtype",
        "hidden_size",
        "expert_size",
    ]


@pytest.mark.parametrize(
    ("kernel", "arch", "dtype", "message"),
    [
        ("expert_up", "sm_75", torch.float16, "arch: need one of sm_80, .* got sm_75; .*reference"),
        ("expert_up", "sm_90", torch.float64, "dtype: need one of .*, got torch.float64; .*tune_"),
        ("expert_sideways", "sm_90", torch.float16, "kernel: .* got expert_sideways"),
    ],
)
def test_kernel_10_an_unknown_key_is_named_with_the_remedy(kernel, arch, dtype, message):
    with pytest.raises(ValueError, match=message):
        configs.lookup(kernel, arch, dtype, 2048, 768)


def test_kernel_10_a_missing_row_is_named(monkeypatch):
    key = ("expert_up", "sm_90", "fp32", "narrow")
    monkeypatch.delitem(TABLE, key)
    configs.lookup.cache_clear()
    with pytest.raises(ValueError, match=r"got key \('expert_up', 'sm_90', 'fp32', 'narrow'\)"):
        configs.lookup("expert_up", "sm_90", torch.float32, 2048, 768)
    configs.lookup.cache_clear()


def test_variants_are_what_a_layer_launches():
    found = configs.variants("sm_90", torch.bfloat16, 4096, 1536)
    assert [name for name, _ in found] == list(KERNELS)
    assert all(
        config == configs.lookup(name, "sm_90", torch.bfloat16, 4096, 1536)
        for name, config in found
    )


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(configs.triton.knobs.runtime, "interpret", False)
    configs.arch_of.cache_clear()
    with pytest.raises(ValueError, match="need a CUDA device .* got cpu; set TRITON_INTERPRET"):
        configs.arch_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_n": 48}, "block_n: need a power of two, got 48"),
        ({"num_warps": 3}, "num_warps: need a power of two, got 3"),
        ({"num_stages": 0}, "num_stages"),
        ({"block_k": 0}, "block_k"),
    ],
)
def test_a_config_checks_itself(fields, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(**{"block_m": 16, "block_n": 32, "block_k": 32, **fields})


def test_the_interpreter_is_an_architecture_with_several_programs():
    configs.arch_of.cache_clear()
    cpu = torch.device("cpu")
    assert configs.arch_of(cpu) == "interpreter"
    assert count_processors(cpu) > 1, "tiles shared among programs are part of every test"
