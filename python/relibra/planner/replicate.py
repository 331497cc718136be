"""Intra-batch stage: replicas and rows of every micro-batch for given layouts.

Letters as in `relibra.planner.reorder`; X static slots, n = H + X + S slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from relibra.planner import static_copies
from relibra.planner.objective import TIME_TOLERANCES, objective_of, rows_above_cap
from relibra_kernels import native

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem


# Arrays of `Replicated` whose first axis is L; the others begin with C, L.
_BY_LAYER = ("home_LGH", "static_LGX")


@dataclass(frozen=True, eq=False)
class Replicated:
    """Layouts of some layers with the replicas of all columns.

    Args:
        home_LGH: int32 `[L, G, H]`.
        replica_CLGS: int32 `[C, L, G, S]`, -1 free.
        rows_CLGn: int64 `[C, L, G, n]`.
        largest_CL: int64 `[C, L]`, rows of the fullest rank.
        objective_CL: int64 `[C, L]`, weighted: rows of the fullest rank, or picoseconds.
        static_LGX: int32 `[L, G, X]`, -1 free.
    """

    home_LGH: Int32Array
    replica_CLGS: Int32Array
    rows_CLGn: Int64Array
    largest_CL: Int64Array
    objective_CL: Int64Array
    static_LGX: Int32Array

    @property
    def objective_L(self) -> Int64Array:
        """int64 `[L]`, sum over columns."""
        total: Int64Array = self.objective_CL.sum(0)
        return total

    def replace(self, layers: npt.NDArray[np.int64], other: Replicated) -> Replicated:
        """This with some layers taken from `other`, whose layers are exactly those."""
        arrays = {}
        for each in fields(self):
            mine, theirs = getattr(self, each.name).copy(), getattr(other, each.name)
            if each.name in _BY_LAYER:
                mine[layers] = theirs
            else:
                mine[:, layers] = theirs
            arrays[each.name] = mine
        return Replicated(**arrays)

    def select(self, chosen: npt.NDArray[np.bool_]) -> Replicated:
        """Only some layers; `chosen` is bool `[L]`."""
        arrays = {}
        for each in fields(self):
            mine = getattr(self, each.name)
            arrays[each.name] = mine[chosen] if each.name in _BY_LAYER else mine[:, chosen]
        return Replicated(**arrays)


def replicate(
    problem: Problem,
    home_LGH: Int32Array,
    layers: npt.NDArray[np.int64] | None = None,
    *,
    replica_slots: int | None = None,
    static_LGX: Int32Array | None = None,
) -> Replicated:
    """Plans every column of some layers; columns without rows get no replicas.

    With replicas and static slots, static copies are chosen and rows are split between nodes first.

    Args:
        problem: the input.
        home_LGH: int32 `[L', G, H]`, layouts of `layers`.
        layers: int64 `[L']`, indices of the layers; None is all.
        replica_slots: None is the setting; fewer plans with fewer, in arrays of the full width.
        static_LGX: int32 `[L', G, X]`, static copies; None chooses them.
    """
    width = problem.config.replica_slots
    used = width if replica_slots is None else replica_slots
    base = _base_of(problem, home_LGH, layers, used, static_LGX)
    found = _solve(problem, base, used, problem.config.tolerance)
    if problem.cost_model is not None and used:
        # Fewer replicas where that is modelled to be faster: the least of c1 * C * (1 + eps) and
        # what pushes cost. None at all comes last, so no use is slower than without replicas.
        for tolerance in TIME_TOLERANCES:
            if tolerance > problem.config.tolerance:
                found = found.or_better(_solve(problem, base, used, tolerance))
        found = found.or_better(_solve(problem, base, 0, 0.0))
    has_cap = problem.config.max_rows_per_rank is not None
    if used and has_cap and rows_above_cap(problem, found.rows_CLGn).any():
        # Memory comes before time: small replicas where rows are too many otherwise.
        found = found.or_better(_solve(problem, base, used, 0.0, least_rows=1))
    found = found.widened(width)
    return Replicated(
        home_LGH,
        found.replica_CLGS,
        found.rows_CLGn,
        found.largest_CL,
        found.objective_CL,
        base.static_LGX,
    )


@dataclass(frozen=True, eq=False)
class _Base:
    """Rows before replication.

    Args:
        layers: int64 `[L']`, indices of the layers; None is all.
        slot_expert_LGb: int32 `[L', G, b]`, b = H + X.
        rows_CLGb: int64 `[C, L', G, b]`; None = the totals of the experts at their homes.
        static_LGX: int32 `[L', G, X]`.
    """

    layers: npt.NDArray[np.int64] | None
    slot_expert_LGb: Int32Array
    rows_CLGb: Int64Array | None
    static_LGX: Int32Array


@dataclass(frozen=True, eq=False)
class _Uses:
    """Replicas of every use, with S slots a rank or fewer."""

    replica_CLGS: Int32Array
    rows_CLGn: Int64Array
    largest_CL: Int64Array
    objective_CL: Int64Array

    def or_better(self, other: _Uses) -> _Uses:
        """Use by use the better one, `other` when they are equal."""
        other = other.widened(self.replica_CLGS.shape[3])
        better_CL = other.objective_CL <= self.objective_CL
        better_CL11 = better_CL[:, :, None, None]
        return _Uses(
            np.where(better_CL11, other.replica_CLGS, self.replica_CLGS),
            np.where(better_CL11, other.rows_CLGn, self.rows_CLGn),
            np.where(better_CL, other.largest_CL, self.largest_CL),
            np.where(better_CL, other.objective_CL, self.objective_CL),
        )

    def widened(self, slots: int) -> _Uses:
        """The same with `slots` replica slots a rank, the last ones free."""
        spare = [(0, 0)] * 3 + [(0, slots - self.replica_CLGS.shape[3])]
        if spare[3][1] == 0:
            return self
        return replace(
            self,
            replica_CLGS=np.pad(self.replica_CLGS, spare, constant_values=-1),
            rows_CLGn=np.pad(self.rows_CLGn, spare),
        )


def _base_of(
    problem: Problem,
    home_LGH: Int32Array,
    layers: npt.NDArray[np.int64] | None,
    replica_slots: int,
    static_LGX: Int32Array | None,
) -> _Base:
    """Home and static slots with their rows."""
    if replica_slots and problem.static_slots:
        if static_LGX is None:
            static_LGX = static_copies.choose_copies(problem, home_LGH, layers)
        rows = static_copies.split_between_nodes(problem, home_LGH, static_LGX, layers)
        return _Base(layers, np.concatenate([home_LGH, static_LGX], axis=2), rows, static_LGX)
    none_LGX = np.zeros((*home_LGH.shape[:2], 0), np.int32)
    return _Base(layers, np.ascontiguousarray(home_LGH), None, none_LGX)


def _solve(
    problem: Problem,
    base: _Base,
    replica_slots: int,
    tolerance: float,
    *,
    least_rows: int | None = None,
) -> _Uses:
    """Replicas of all uses, under the limits of the configuration."""
    config = problem.config
    least = config.least_replica_rows if least_rows is None else least_rows
    node_G, threads = problem.topology.rank_to_node_G, config.num_threads
    totals = problem.totals_CLE if base.layers is None else problem.totals_CLE[:, base.layers]
    is_limited = config.max_fan_out is not None or problem.max_pushes is not None
    if problem.row_multiple > 1 or least > 1 or is_limited:
        found = _solve_limited(problem, base, replica_slots, tolerance, least)
    elif base.rows_CLGb is None:
        found = native.planner().replicate(
            np.ascontiguousarray(totals),
            base.slot_expert_LGb,
            node_G,
            replica_slots,
            tolerance,
            threads,
        )
    else:
        found = native.planner().replicate_slots(
            base.rows_CLGb, base.slot_expert_LGb, node_G, replica_slots, tolerance, threads
        )
    objective = objective_of(problem, base.slot_expert_LGb, *found, base.layers)
    return _Uses(*found, objective)


def _solve_limited(
    problem: Problem, base: _Base, replica_slots: int, tolerance: float, least_rows: int
) -> tuple[Int32Array, Int64Array, Int64Array]:
    """Replicas in whole multiples of rows; what is left of an expert stays at home.

    A slot of x rows takes ceil(x / BM) tiles, and moving whole tiles changes no sum of tiles, so
    the solver works on tiles: those of an expert that are full can move, a last partial one cannot.
    """
    config, multiple = problem.config, problem.row_multiple
    rows_CLGb = base.rows_CLGb
    if rows_CLGb is None:
        rows_CLGb = problem.slot_rows(base.slot_expert_LGb, base.layers)
    full_CLGb, part_CLGb = np.divmod(rows_CLGb, multiple)
    most = np.iinfo(np.int32).max
    replica_CLGS, tiles_CLGn, _ = native.planner().replicate_limited(
        full_CLGb,
        (part_CLGb > 0).sum(3),
        base.slot_expert_LGb,
        problem.topology.rank_to_node_G,
        replica_slots,
        tolerance,
        -(-least_rows // multiple),
        most if config.max_fan_out is None else config.max_fan_out,
        most if problem.max_pushes is None else problem.max_pushes,
        config.num_threads,
    )
    rows_CLGn = tiles_CLGn * multiple
    rows_CLGn[..., : part_CLGb.shape[3]] += part_CLGb
    return replica_CLGS, rows_CLGn, rows_CLGn.sum(3).max(2)
