"""Parts of a plan: one pass, and the view of one use of a layer. Letters as in `relibra.plan`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from relibra.layout import ExpertLayout, Int32Array, Int64Array, frozen_ints, frozen_static
from relibra_kernels.checks import describe
from relibra_kernels.errors import PlanError

# Names are keys in files, and parts of messages and tables.
_PASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", re.ASCII)


def check_pass_name(where: str, name: object) -> None:
    """Refuses names that are unsafe as keys of a file.

    Args:
        where: argument name for messages.
        name: at most 64 letters, digits, `_`, `.`, `+` and `-`; the first a letter or digit.

    Raises:
        TypeError: no text.
        PlanError: another character, or too long.

    Example:
        >>> check_pass_name("passes", "ref_logprob")
    """
    if not isinstance(name, str):
        raise TypeError(f"{where}: need names of type str, got {describe(name)}")
    if not _PASS_NAME.fullmatch(name):
        raise PlanError(
            f"{where}: need names of 1 to 64 letters, digits and '_.+-' that begin with a letter "
            f"or digit, got {describe(name)}"
        )


@dataclass(frozen=True, eq=False)
class PassPlan:
    """Replicas and rows of one pass.

    Args:
        replica_slot_expert_MLGS: int32 `[M, L, G, S]`, expert copied into each replica slot, -1
            free.
        slot_rows_MLGn: int64 `[M, L, G, n]`, rows executed in each slot.

    Raises:
        PlanError: shapes that do not fit, or values out of range.

    Example:
        >>> one = PassPlan([[[[1], [-1]]]], [[[[3, 2], [2, 0]]]])
        >>> one.num_micro_batches, one.replica_slots
        (1, 1)
    """

    replica_slot_expert_MLGS: Int32Array
    slot_rows_MLGn: Int64Array

    def __post_init__(self) -> None:
        """Takes read-only arrays and checks their shapes."""
        replicas = frozen_ints(
            "replica_slot_expert_MLGS",
            self.replica_slot_expert_MLGS,
            np.int32,
            shape=(None, None, None, None),
            minimum=-1,
        )
        rows = frozen_ints(
            "slot_rows_MLGn",
            self.slot_rows_MLGn,
            np.int64,
            shape=(*replicas.shape[:3], None),
            minimum=0,
        )
        if len(rows) == 0:
            raise PlanError("slot_rows_MLGn: need at least one micro-batch, got none")
        if rows.shape[3] <= replicas.shape[3]:
            raise PlanError(
                f"slot_rows_MLGn: need more than the {replicas.shape[3]} replica slots a rank, "
                f"got {rows.shape[3]} slots"
            )
        object.__setattr__(self, "replica_slot_expert_MLGS", replicas)
        object.__setattr__(self, "slot_rows_MLGn", rows)

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return int(self.slot_rows_MLGn.shape[0])

    @property
    def replica_slots(self) -> int:
        """S."""
        return int(self.replica_slot_expert_MLGS.shape[3])


@dataclass(frozen=True, eq=False)
class ReportSlots:
    """Slots of a pass that break the rules of plans, so that reports can still count traffic.

    Args:
        slot_expert_MLGn: int32 `[M, L, G, n]`, -1 none; an expert may be twice on a rank.
        slot_rows_MLGn: int64 `[M, L, G, n]`; those of an expert add up to its rows.
    """

    slot_expert_MLGn: Int32Array
    slot_rows_MLGn: Int64Array


@dataclass(frozen=True, eq=False)
class ReplicaPlan:
    """View of a plan for one (pass, micro-batch, layer).

    Args:
        layout: home slots of the layer.
        replica_slot_expert_GS: int32 `[G, S]`, -1 free.
        slot_rows_Gn: int64 `[G, n]`.
        static_slot_expert_GX: int32 `[G, X]`, -1 free; None is X = 0.

    Example:
        >>> view = ReplicaPlan(ExpertLayout([[0], [1]]), [[1], [-1]], [[3, 2], [2, 0]])
        >>> view.slot_expert_Gn.tolist(), view.num_replicas, view.rank_rows_G.tolist()
        ([[0, 1], [1, -1]], 1, [5, 2])
    """

    layout: ExpertLayout
    replica_slot_expert_GS: Int32Array
    slot_rows_Gn: Int64Array
    static_slot_expert_GX: Int32Array = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        """Makes the arrays read-only."""
        ranks = self.layout.num_ranks
        replicas = frozen_ints(
            "replica_slot_expert_GS",
            self.replica_slot_expert_GS,
            np.int32,
            shape=(ranks, None),
            minimum=-1,
        )
        static = frozen_static(self.static_slot_expert_GX, (ranks,), "GX")
        if len(static) != ranks:
            raise PlanError(f"static_slot_expert_GX: need {ranks} ranks, got {len(static)}")
        slots = self.layout.slots_per_rank + static.shape[1] + replicas.shape[1]
        rows = frozen_ints(
            "slot_rows_Gn", self.slot_rows_Gn, np.int64, shape=(ranks, slots), minimum=0
        )
        object.__setattr__(self, "static_slot_expert_GX", static)
        object.__setattr__(self, "replica_slot_expert_GS", replicas)
        object.__setattr__(self, "slot_rows_Gn", rows)

    @cached_property
    def slot_expert_Gn(self) -> Int32Array:
        """int32 `[G, n]`, expert of each slot, -1 = none."""
        experts = np.concatenate(
            [
                self.layout.home_slot_expert_GH,
                self.static_slot_expert_GX,
                self.replica_slot_expert_GS,
            ],
            axis=1,
        )
        experts.flags.writeable = False
        return experts

    @property
    def num_replicas(self) -> int:
        """Replica slots in use."""
        return int((self.replica_slot_expert_GS >= 0).sum())

    @property
    def rank_rows_G(self) -> Int64Array:
        """int64 `[G]`, rows of each rank."""
        rows: Int64Array = self.slot_rows_Gn.sum(1)
        return rows
