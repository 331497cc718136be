"""Flags that `plan` and `simulate` share."""

import argparse

import pytest

from relibra.cli_settings import add_planner_flags, planner_config, platform
from relibra.plan_config import PlannerConfig
from relibra.presets import HARDWARE, MODELS


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_planner_flags(parser, cost="rows")
    return parser.parse_args(arguments)


def test_defaults_are_those_of_the_planner() -> None:
    args = parsed()
    assert planner_config(args) == PlannerConfig()
    target = platform(args, None)
    assert (target.hardware, target.model, target.cost_fields) == (HARDWARE["H100"], None, {})


def test_every_setting_of_the_planner_can_be_given() -> None:
    flags = {
        "replica_slots": ("--replica-slots", "2"),
        "cost": ("--cost", "time"),
        "proposals": ("--proposals", "7"),
        "seed": ("--seed", "3"),
        "num_threads": ("--threads", "1"),
        "static_copies": ("--static-copies", "4"),
        "full_recompute": ("--recompute", "full"),
        "hardware": ("--hardware", "b200"),
        "horizon_steps": ("--horizon-steps", "5"),
    }
    by_hand = {"pass_weight"}  # a file has one pass
    alone = {"move_rows", "expert_groups"}  # exclude the time mode, and static copies
    values = {"allow_filler": "false", "tolerance": "0.25", "grouping_slack": "0.5"}
    arguments = [word for pair in flags.values() for word in pair]
    numbers = set(PlannerConfig.__dataclass_fields__) - set(flags) - by_hand - set(values)
    for name in numbers - alone:
        values[name] = "9"
    for name, value in values.items():
        arguments += ["--config", f"{name}={value}"]
    config = planner_config(parsed(*arguments))
    default = PlannerConfig()
    for name in set(PlannerConfig.__dataclass_fields__) - by_hand - alone:
        assert getattr(config, name) != getattr(default, name), name
    for name in alone:
        assert getattr(planner_config(parsed("--config", f"{name}=9")), name) == 9


def test_what_is_set_goes_where_it_belongs() -> None:
    args = parsed("--set", "hbm-gb-per-s=1e3", "--set", "window_s=none", "--set", "window=128")
    target = platform(args, MODELS["Qwen3-30B-A3B"])
    assert target.hardware.hbm_gb_per_s == 1000
    assert target.cost_fields == {"window_s": None}
    assert target.model.window == 128
    assert target.model.name == "Qwen3-30B-A3B (changed)"
    assert MODELS["Qwen3-30B-A3B"].window is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sources=1", "need a field of hardware"),
        ("name=x", "need a field of hardware"),
        ("dispatch=flat", "need a field of hardware"),
        ("=1", "need FIELD=VALUE"),
        ("slot_us=", "need FIELD=VALUE"),
        ("slot_us=nan", "slot_us: need a number 0..1e\\+06"),
        ("num_layers=1.5", "need an integer for num_layers"),
        ("top_k=999", "top_k: need <= num_experts"),
        ("num_layers=0", "num_layers: need 1 to 4096, got 0"),
        ("num_layers=999999999999999999999", "num_layers: need 1 to 4096"),
        ("dense_layers=48", "dense_layers: need fewer than num_layers"),
        ("hidden_size=99999999999999999999", "hidden_size: need at most 1048576"),
        ("projection_params=99999999999999999999", "projection_params: need 1 to"),
        ("window=0", "window: need 1 to"),
    ],
)
def test_what_cannot_be_set(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        platform(parsed("--set", name), MODELS["Qwen3-30B-A3B"])
