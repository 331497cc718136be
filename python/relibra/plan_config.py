"""Settings of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from relibra_kernels.errors import PlanError

DEFAULT_PASS_WEIGHT: Mapping[str, int] = MappingProxyType({"train": 3})


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of `plan_step`.

    Args:
        replica_slots: S, replica slots a rank; 0 plans layouts only.
        cost: `"rows"`, the only mode of this version: no row multiple, no minimum, no time terms.
        proposals: swaps that the layout search of a layer tries.
        seed: of the search; mixed with the loads, so equal input gives equal plans.
        num_threads: 0 = all; the plan does not depend on it.
        allow_filler: permit E that is no multiple of G (the remaining home slots stay empty).
        tolerance: relative excess over the best reachable maximum that is given up for fewer
            replicas, 0 = none.
        pass_weight: weight of each pass in the layout search; `"train"` 3 and others 1 by default.

    Raises:
        PlanError: a value is out of range.

    Example:
        >>> config = PlannerConfig(replica_slots=2)
        >>> config.weight_of("train"), config.weight_of("logprob"), config.as_dict()["cost"]
        (3, 1, 'rows')
    """

    replica_slots: int = 1
    cost: str = "rows"
    proposals: int = 100_000
    seed: int = 0
    num_threads: int = 0
    allow_filler: bool = True
    tolerance: float = 0.0
    pass_weight: Mapping[str, int] = field(default_factory=lambda: DEFAULT_PASS_WEIGHT)

    def __post_init__(self) -> None:
        """Checks every value."""
        _check_whole("replica_slots", self.replica_slots, 0, 1 << 10)
        _check_whole("proposals", self.proposals, 0, 1 << 40)
        _check_whole("seed", self.seed, 0, (1 << 64) - 1)
        _check_whole("num_threads", self.num_threads, 0, 1 << 16)
        if self.cost != "rows":
            raise PlanError(f"cost: need 'rows', got {self.cost!r}")
        if not isinstance(self.allow_filler, bool):
            raise PlanError(f"allow_filler: need True or False, got {self.allow_filler!r}")
        tolerance: object = self.tolerance
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
            raise PlanError(f"tolerance: need a number, got {tolerance!r}")
        if not 0 <= tolerance < 1:
            raise PlanError(f"tolerance: need 0 <= tolerance < 1, got {self.tolerance!r}")
        if not isinstance(self.pass_weight, Mapping):
            raise PlanError(f"pass_weight: need a mapping of names, got {self.pass_weight!r}")
        for name, weight in self.pass_weight.items():
            _check_whole(f"pass_weight[{name!r}]", weight, 1, 1 << 10)
        object.__setattr__(self, "pass_weight", MappingProxyType(dict(self.pass_weight)))

    def weight_of(self, pass_: str) -> int:
        """Weight of a pass."""
        return self.pass_weight.get(pass_, DEFAULT_PASS_WEIGHT.get(pass_, 1))

    def as_dict(self) -> dict[str, object]:
        """All settings as plain values, for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"pass_weight": dict(self.pass_weight)}


def _check_whole(name: str, value: object, lowest: int, highest: int) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and lowest <= value <= highest):  # type: ignore[operator]
        raise PlanError(f"{name}: need an integer {lowest}..{highest}, got {value!r}")
