"""Flags of the planner, the hardware and the model, which `plan` and `simulate` share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from relibra.cli_input import whole_number
from relibra.cost_model import CostModel
from relibra.plan_config import PlannerConfig
from relibra.presets import HARDWARE, MODELS, Hardware, ModelPreset, find_hardware
from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

# Fields of the planner that have a flag of their own, or that a file's single pass does not need.
_OWN_FLAGS = {
    "replica_slots": "--replica-slots",
    "cost": "--cost",
    "proposals": "--proposals",
    "seed": "--seed",
    "num_threads": "--threads",
    "static_copies": "--static-copies",
    "horizon_steps": "--horizon-steps",
    "hardware": "--hardware",
    "full_recompute": "--recompute",
}
DEFAULT_HARDWARE = "H100"
_NOT_OFFERED = ("pass_weight",)
# Fields of the cost model that `--set` takes beside those of the hardware and the model.
COST_FIELDS = (
    "block_rows", "dispatch_bytes", "combine_bytes", "sequence_tokens", "window_s", "in_flight",
    "data_parallel",
)  # fmt: skip


@dataclass(frozen=True)
class Platform:
    """What `--hardware`, `--model` and `--set` say.

    Args:
        hardware: rates.
        model: sizes; None where no model was named.
        cost_fields: fields of the cost model by name.
    """

    hardware: Hardware
    model: ModelPreset | None
    cost_fields: Mapping[str, Any]


def add_planner_flags(parser: argparse.ArgumentParser, *, cost: str) -> None:
    """Adds what the planner and its cost model can be told.

    Args:
        parser: of a command.
        cost: default of `--cost`.
    """
    add, natural = parser.add_argument, whole_number(0)
    add("--cost", default=cost, metavar="MODE", help="what the planner compares plans by: rows, or "
        f"time, the modelled seconds (default {cost})")  # fmt: skip
    add("--replica-slots", type=natural, default=1, metavar="S", help="of a rank (default 1)")
    add("--static-copies", type=natural, default=0, metavar="X", help="experts of other nodes that "
        "a node holds for a whole rollout batch (default 0; 2 is a good choice)")  # fmt: skip
    add("--horizon-steps", type=whole_number(1), default=1, metavar="N", help="rollout batches "
        "that moved experts stay where they are, so that moves may pay (default 1)")  # fmt: skip
    add("--recompute", default="none", metavar="NAME", help="of activations: none (default), full")
    add("--proposals", type=natural, default=100_000, metavar="N", help="swaps that the layout "
        "search of a layer tries (default 100000)")  # fmt: skip
    add("--seed", type=natural, default=0, help="of the layout search (default 0)")
    add("--threads", type=natural, default=0, help="0 = all (default); the plan is the same")
    add("--config", action="append", default=[], metavar="FIELD=VALUE", help="other settings of "
        f"the planner: {', '.join(_config_fields())}")  # fmt: skip
    add("--hardware", metavar="NAME", help=f"{', '.join(HARDWARE)} (default H100)")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the hardware, the "
        "model or the cost model; a wrong name lists all")  # fmt: skip


def planner_config(args: argparse.Namespace) -> PlannerConfig:
    """Settings of the planner from the flags.

    Args:
        args: parsed arguments.

    Raises:
        ValueError: a field that does not exist, or a value out of range.
    """
    check_choice("--cost", args.cost, ("rows", "time"))
    check_choice("--recompute", args.recompute, ("none", "full"))
    known = {each.name: each for each in fields(PlannerConfig) if each.name in _config_fields()}
    more: dict[str, Any] = {}
    for name, text in _pairs("--config", args.config):
        if name in _OWN_FLAGS:
            raise ValueError(f"--config: need {_OWN_FLAGS[name]} for {name}")
        if name not in known:
            raise ValueError(f"--config: need one of {', '.join(known)}, got {name!r}")
        more[name] = _value("--config", name, text, str(known[name].type))
    return PlannerConfig(
        replica_slots=args.replica_slots,
        cost=args.cost,
        static_copies=args.static_copies,
        horizon_steps=args.horizon_steps,
        full_recompute=args.recompute == "full",
        proposals=args.proposals,
        seed=args.seed,
        num_threads=args.threads,
        hardware=find_hardware(args.hardware or DEFAULT_HARDWARE).name,
        **more,
    )


def platform(args: argparse.Namespace, model: ModelPreset | None) -> Platform:
    """Hardware, model and constants of the cost model, with everything that `--set` changes.

    Args:
        args: parsed arguments.
        model: preset that is changed; None where no model was named.

    Raises:
        ValueError: a field that does not exist, or a value out of range.
    """
    own = {
        "hardware": _settable(Hardware, ("name", "sources", "domain_ranks")),
        "model": _settable(ModelPreset, ("name", "source")),
        "cost model": {
            name: kind for name, kind in _settable(CostModel, ()).items() if name in COST_FIELDS
        },
    }
    given: dict[str, dict[str, Any]] = {what: {} for what in own}
    for name, text in _pairs("--set", args.set):
        if name == "domain_ranks":
            raise ValueError("--set: need --ranks-per-node for domain_ranks")
        places = [what for what, known in own.items() if name in known]
        if not places:
            lists = "; ".join(f"{what}: {', '.join(known)}" for what, known in own.items())
            raise ValueError(f"--set: need a field of {lists}; got {name!r}")
        given[places[0]][name] = _value("--set", name, text, own[places[0]][name])
    if given["model"] and model is None:
        raise ValueError(f"--set: need --model for {next(iter(given['model']))}: {_models()}")
    if model is not None and given["model"]:
        model = replace(model, name=f"{model.name} (changed)", **given["model"])
    hardware = find_hardware(args.hardware or DEFAULT_HARDWARE).with_values(**given["hardware"])
    return Platform(hardware, model, given["cost model"])


def _models() -> str:
    return f"one of {', '.join(MODELS)}"


def _config_fields() -> list[str]:
    hidden = {*_OWN_FLAGS, *_NOT_OFFERED}
    return [each.name for each in fields(PlannerConfig) if each.name not in hidden]


def _settable(kind: Any, hidden: Iterable[str]) -> dict[str, str]:
    """Names and types of the fields of a dataclass."""
    return {each.name: str(each.type) for each in fields(kind) if each.name not in {*hidden}}


def _pairs(flag: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ValueError(f"{flag}: need FIELD=VALUE, got {text!r}")
        pairs.append((name.strip().replace("-", "_"), value.strip()))
    return pairs


def _value(flag: str, name: str, text: str, kind: str) -> Any:
    """A number, True or False, or None, as the field's annotation wants it."""
    plain = kind.removeprefix("<class '").removesuffix("'>")
    if "None" in plain and text.lower() == "none":
        return None
    if "bool" in plain:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{flag}: need true or false for {name}, got {text!r}")
        return text.lower() == "true"
    whole = "int" in plain and "float" not in plain
    try:
        return int(text) if whole else float(text)
    except ValueError:
        need = "an integer" if whole else "a number"
        raise ValueError(f"{flag}: need {need} for {name}, got {text!r}") from None
