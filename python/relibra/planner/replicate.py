"""Intra-batch stage: replicas and rows of every micro-batch for given layouts.

Letters as in `relibra.planner.reorder`; n = H + S slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relibra_kernels import native

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem


@dataclass(frozen=True, eq=False)
class Replicated:
    """Layouts of some layers with the replicas of all columns.

    Args:
        home_LGH: int32 `[L, G, H]`.
        replica_CLGS: int32 `[C, L, G, S]`, -1 free.
        rows_CLGn: int64 `[C, L, G, n]`.
        largest_CL: int64 `[C, L]`, rows of the fullest rank.
    """

    home_LGH: Int32Array
    replica_CLGS: Int32Array
    rows_CLGn: Int64Array
    largest_CL: Int64Array

    def objective_L(self, problem: Problem) -> Int64Array:
        """int64 `[L]`, weighted sum over columns of the fullest rank."""
        return problem.weigh(self.largest_CL)

    def replace(self, layers: npt.NDArray[np.int64], other: Replicated) -> Replicated:
        """This with some layers taken from `other`, whose layers are exactly those."""
        copies = [array.copy() for array in self._arrays()]
        for mine, theirs in zip(copies, other._arrays(), strict=True):
            if mine is copies[0]:
                mine[layers] = theirs
            else:
                mine[:, layers] = theirs
        return Replicated(*copies)

    def select(self, chosen: npt.NDArray[np.bool_]) -> Replicated:
        """Only some layers; `chosen` is bool `[L]`."""
        first, *others = self._arrays()
        return Replicated(first[chosen], *(array[:, chosen] for array in others))

    def _arrays(self) -> tuple[npt.NDArray[np.signedinteger], ...]:
        return self.home_LGH, self.replica_CLGS, self.rows_CLGn, self.largest_CL


def replicate(
    problem: Problem,
    home_LGH: Int32Array,
    layers: npt.NDArray[np.int64] | None = None,
    *,
    replica_slots: int | None = None,
) -> Replicated:
    """Plans every column of some layers; columns without rows get no replicas.

    Args:
        problem: the input.
        home_LGH: int32 `[L', G, H]`, layouts of `layers`.
        layers: int64 `[L']`, indices of the layers; None is all.
        replica_slots: None is the setting; fewer plans with fewer, in arrays of the full width.
    """
    totals_CLE = problem.totals_CLE if layers is None else problem.totals_CLE[:, layers]
    width = problem.config.replica_slots
    used = width if replica_slots is None else replica_slots
    replica_CLGS, rows_CLGn, largest_CL = native.planner().replicate(
        np.ascontiguousarray(totals_CLE),
        np.ascontiguousarray(home_LGH),
        problem.topology.rank_to_node_G,
        used,
        problem.config.tolerance,
        problem.config.num_threads,
    )
    if used < width:
        spare = [(0, 0)] * 3 + [(0, width - used)]
        replica_CLGS = np.pad(replica_CLGS, spare, constant_values=-1)
        rows_CLGn = np.pad(rows_CLGn, spare)
    return Replicated(home_LGH, replica_CLGS, rows_CLGn, largest_CL)
