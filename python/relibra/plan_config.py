"""Settings of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from relibra.limits import MAX_EXPERTS
from relibra.pass_plan import check_pass_name
from relibra.presets import find_hardware
from relibra_kernels.errors import PlanError

# Break-even of a replica: about 1500 rows forward, 2000 with backward (H100, design estimate).
MIN_ROWS_PER_REPLICA = 1024
_OPTIONAL_LOWEST = {
    "row_multiple": 1,
    "min_rows_per_replica": 1,
    "max_fan_out": 0,
    "max_push_bytes": 0,
    "max_rows_per_rank": 1,
}
DEFAULT_PASS_WEIGHT: Mapping[str, int] = MappingProxyType({"train": 3})


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of `plan_step`.

    Args:
        replica_slots: S, replica slots a rank; 0 plans layouts only.
        cost: `"rows"`: row multiple 1, no minimum, no time terms; `"time"`: modelled seconds.
        proposals: swaps that the layout search of a layer tries.
        seed: of the search; mixed with the loads, so equal input gives equal plans.
        num_threads: 0 = all; the plan does not depend on it.
        allow_filler: permit E that is no multiple of G (the remaining home slots stay empty).
        tolerance: relative excess over the best reachable maximum that is given up for fewer
            replicas, 0 = none.
        pass_weight: weight of each pass in the layout search; `"train"` 3 and others 1 by default.
        static_copies: experts of other nodes that a node may hold in static slots, in each layer;
            2 is a good choice, 0 plans without. A rank has X static slots, as many as the smallest
            node needs: ceil(static_copies / its ranks); with one node there are none.
        min_rows_per_static_copy: rows of the fullest rank, summed over the micro-batches of an
            optimizer step and weighted by pass, that a static copy must save, since its weights
            and gradients travel in every optimizer step.
        full_recompute: passes with backward run their forward twice: the weight of `"train"` is 4.
        hardware: preset of the cost model when none is given; `"time"` only.
        row_multiple: rows of a replica are a multiple of it, what is left stays at home; None = 1
            in `"rows"` mode, the GEMM tile of the cost model in `"time"` mode.
        min_rows_per_replica: None = 1 in `"rows"` mode, 1024 in `"time"` mode.
        max_fan_out: most replicas of an expert in a micro-batch; None = no limit.
        max_push_bytes: most bytes of weights that a rank sends to replicas of a layer in a
            micro-batch; None = no limit.
        max_rows_per_rank: most rows that a rank has memory for in a layer and micro-batch, slots
            rounded up to `row_multiple`; None = no limit.
        move_rows: `"rows"` mode with a layout given: rows of the fullest rank, summed over a
            rollout batch of forward-only passes, that moving one expert must save; 0 = moves are
            free. In `"time"` mode the cost model says what a move costs.
        horizon_steps: rollout batches that a new layout is expected to serve.
        grouping_slack: relative excess of the objective over the plan that knows loads only, which
            is given up for fewer copies of tokens; with a token sample only.
        expert_groups: keep each of so many groups of E / expert_groups expert numbers on one node,
            as group-limited routing wants it; 0 = experts are free. It holds for `relibra` and
            `reorder_only`; other strategies know nothing of groups.

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
    static_copies: int = 0
    min_rows_per_static_copy: int = 1
    full_recompute: bool = False
    hardware: str = "H100"
    row_multiple: int | None = None
    min_rows_per_replica: int | None = None
    max_fan_out: int | None = None
    max_push_bytes: int | None = None
    max_rows_per_rank: int | None = None
    move_rows: int = 0
    horizon_steps: int = 1
    grouping_slack: float = 0.024
    expert_groups: int = 0

    def __post_init__(self) -> None:
        """Checks every value."""
        _check_whole("replica_slots", self.replica_slots, 0, 1 << 10)
        _check_whole("proposals", self.proposals, 0, 1 << 40)
        _check_whole("seed", self.seed, 0, (1 << 64) - 1)
        _check_whole("num_threads", self.num_threads, 0, 1 << 16)
        _check_whole("static_copies", self.static_copies, 0, 1 << 10)
        _check_whole("min_rows_per_static_copy", self.min_rows_per_static_copy, 0, 1 << 40)
        if self.static_copies and not self.replica_slots:
            raise PlanError(
                f"static_copies: need replica_slots >= 1, which make nodes flat inside, got "
                f"{self.static_copies} with replica_slots=0"
            )
        _check_whole("expert_groups", self.expert_groups, 0, MAX_EXPERTS)
        if self.expert_groups and self.static_copies:
            raise PlanError(
                f"expert_groups: need 0 with static copies, which leave the node of their group, "
                f"got {self.expert_groups} with static_copies={self.static_copies}"
            )
        for name, lowest in _OPTIONAL_LOWEST.items():
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), lowest, 1 << 40)
        _check_whole("move_rows", self.move_rows, 0, 1 << 30)
        _check_whole("horizon_steps", self.horizon_steps, 1, 1 << 20)
        if self.cost not in ("rows", "time"):
            raise PlanError(f"cost: need 'rows' or 'time', got {self.cost!r}")
        if self.cost == "time" and self.move_rows:
            raise PlanError(f"move_rows: need 0 with cost='time', got {self.move_rows}")
        find_hardware(self.hardware)
        for name in ("allow_filler", "full_recompute"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}: need True or False, got {getattr(self, name)!r}")
        for name in ("tolerance", "grouping_slack"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PlanError(f"{name}: need a number, got {value!r}")
            if not 0 <= value < 1:
                raise PlanError(f"{name}: need 0 <= {name} < 1, got {value!r}")
        if not isinstance(self.pass_weight, Mapping):
            raise PlanError(f"pass_weight: need a mapping of names, got {self.pass_weight!r}")
        for name, weight in self.pass_weight.items():
            check_pass_name("pass_weight", name)
            _check_whole(f"pass_weight[{name!r}]", weight, 1, 1 << 10)
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        weights = {name: int(weight) for name, weight in self.pass_weight.items()}
        object.__setattr__(self, "pass_weight", MappingProxyType(weights))

    def weight_of(self, pass_: str) -> int:
        """Weight of a pass."""
        default = DEFAULT_PASS_WEIGHT.get(pass_, 1)
        given = self.pass_weight.get(pass_, default)
        return given + (self.full_recompute and given == default and pass_ in DEFAULT_PASS_WEIGHT)

    @property
    def least_replica_rows(self) -> int:
        """`min_rows_per_replica`, or what it is by default."""
        default = MIN_ROWS_PER_REPLICA if self.cost == "time" else 1
        return default if self.min_rows_per_replica is None else self.min_rows_per_replica

    def as_dict(self) -> dict[str, object]:
        """All settings as plain values, for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"pass_weight": dict(self.pass_weight)}


def _plain(value: object) -> object:
    """A NumPy integer as a Python one, which JSON and plan files take."""
    return int(value) if isinstance(value, np.integer) else value


def _check_whole(name: str, value: object, lowest: int, highest: int) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and lowest <= value <= highest):  # type: ignore[operator]
        raise PlanError(f"{name}: need an integer {lowest}..{highest}, got {value!r}")
