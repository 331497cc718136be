"""Presets: published totals, sources of every number, and unknown names."""

import dataclasses

import pytest

from relibra.presets import HARDWARE, MODELS, Hardware, ModelPreset, find_hardware, find_model
from relibra_kernels.errors import PlanError

NUMBERS = [
    each.name for each in dataclasses.fields(Hardware) if each.name not in ("name", "sources")
]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235),
        ("GLM-4.5-Air", 106),
        ("DeepSeek-V3", 671),
        ("gpt-oss-120b", 116.8),
        ("gpt-oss-20b", 20.9),
    ],
)
def test_sizes_add_up_to_the_published_parameters(name: str, billions: float) -> None:
    assert MODELS[name].total_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_shapes() -> None:
    deepseek = find_model("deepseek-v3")
    assert deepseek.shape().moe_layers == tuple(range(3, 61))
    assert deepseek.shape().expert_bytes == 3 * 7168 * 2048 * 2
    assert deepseek.shape(num_layers=4, num_experts=64).num_experts == 64
    assert find_model("Qwen3-235B-A22B").shape().num_layers == 94


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=lambda one: one.name)
def test_every_constant_has_a_source(hardware: Hardware) -> None:
    assert set(hardware.sources) == set(NUMBERS)
    assert all(len(text) > 5 for text in hardware.sources.values())


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda one: one.name)
def test_every_model_has_a_source(model: ModelPreset) -> None:
    assert model.source.startswith("config.json of huggingface.co/")


def test_h100_has_the_defaults_of_the_design() -> None:
    h100 = find_hardware("H100")
    rates = (h100.gemm_tflop_per_s, h100.nvlink_gb_per_s, h100.nic_gb_per_s, h100.hbm_gb_per_s)
    assert rates == (600, 360, 42.5, 2850)
    assert find_hardware("NVL72").domain_ranks == 72


def test_every_constant_can_be_replaced() -> None:
    for name in NUMBERS:
        changed = HARDWARE["H200"].with_values(**{name: 7})
        assert getattr(changed, name) == 7
        assert changed.sources[name] == "given by the caller"
        assert changed != HARDWARE["H200"]


@pytest.mark.parametrize("find", [find_hardware, find_model])
def test_unknown_names_list_the_known(find) -> None:
    known = HARDWARE if find is find_hardware else MODELS
    with pytest.raises(PlanError, match="need one of .*'TPU'") as error:
        find("TPU")
    assert all(name in str(error.value) for name in known)


@pytest.mark.parametrize("value", [0, -1.0, 1e-320, 1e308, float("nan"), float("inf"), True, "x"])
def test_numbers_that_are_none(value: object) -> None:
    with pytest.raises(PlanError, match="nic_gb_per_s: need a number 0.001..1e\\+12"):
        HARDWARE["H100"].with_values(nic_gb_per_s=value)


def test_unknown_field() -> None:
    with pytest.raises(PlanError, match="hardware: need one of gemm_tflop_per_s.*'warp_speed'"):
        HARDWARE["H100"].with_values(warp_speed=9)
