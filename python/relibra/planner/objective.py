"""What plans are compared by: rows of the fullest rank, or modelled picoseconds.

Always integers, so that sums do not depend on their order.

Letters: C columns (micro-batches of all different passes), L layers, G ranks, N nodes, E experts,
H home, X static and S replica slots a rank, b = H + X, n = b + S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import ExpertLayout
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.layout import Int32Array, Int64Array
    from relibra.planner.problem import Problem

# Relative excess over the reachable maximum that is tried for fewer replicas in time mode.
TIME_TOLERANCES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
_PICOSECONDS = 1e12
# A row above the memory cap: more than any plan gains, so that fewer rows above it come first.
_PENALTY = 10**9
_MOST_ROWS_PENALISED = 10**5
_ADAM_BYTES = 12  # fp32 master weight and two moments of a parameter


def objective_of(
    problem: Problem,
    base_LGb: Int32Array,
    replica_CLGS: Int32Array,
    rows_CLGn: Int64Array,
    largest_CL: Int64Array,
    layers: npt.NDArray[np.int64] | None,
) -> Int64Array:
    """Weighted objective of every use, int64 `[C, L']`.

    Args:
        problem: the input.
        base_LGb: int32 `[L', G, b]`, experts of home and static slots.
        replica_CLGS: int32 `[C, L', G, S]`.
        rows_CLGn: int64 `[C, L', G, n]`.
        largest_CL: int64 `[C, L']`, rows of the fullest rank.
        layers: indices of the layers; None is all.
    """
    if problem.cost_model is None:
        value = largest_CL * problem.weight_C[:, None]
    else:
        value = _picoseconds(problem, base_LGb, replica_CLGS, rows_CLGn, layers)
    if problem.config.max_rows_per_rank is not None:
        above_CL = rows_above_cap(problem, rows_CLGn).max(2)
        value = value + _PENALTY * np.minimum(above_CL, _MOST_ROWS_PENALISED)
    return value


def rows_above_cap(problem: Problem, rows_CLGn: Int64Array) -> Int64Array:
    """Rows, slots rounded up, that a rank has no memory for, int64 `[C, L', G]`.

    Args:
        problem: the input, with `config.max_rows_per_rank`.
        rows_CLGn: int64 `[C, L', G, n]`.
    """
    cap = problem.config.max_rows_per_rank
    assert cap is not None
    multiple = problem.row_multiple
    padded: Int64Array = (-(-rows_CLGn // multiple) * multiple).sum(3)
    return np.maximum(padded - cap, 0)


def check_rows_fit(problem: Problem, rows_CLGn: Int64Array) -> None:
    """Checks a plan against `PlannerConfig.max_rows_per_rank`.

    Raises:
        PlanError: names the worst pass, micro-batch, layer and rank, and the excess.
    """
    if problem.config.max_rows_per_rank is None:
        return
    above_CLG = rows_above_cap(problem, rows_CLGn)
    if not above_CLG.any():
        return
    column, layer, rank = (int(i) for i in np.unravel_index(above_CLG.argmax(), above_CLG.shape))
    excess, first = int(above_CLG[column, layer, rank]), 0
    for name in problem.distinct_passes:
        last = first + problem.loads[name].num_micro_batches
        if column < last:
            break
        first = last
    cap = problem.config.max_rows_per_rank
    raise PlanError(
        f"max_rows_per_rank: need memory for {cap + excess} rows on rank {rank} in layer "
        f"{problem.shape.moe_layers[layer]}, micro-batch {column - first} of pass {name!r}, got "
        f"{cap}: {excess} too few ({int((above_CLG > 0).any(2).sum())} uses do not fit)"
    )


def _picoseconds(
    problem: Problem,
    base_LGb: Int32Array,
    replica_CLGS: Int32Array,
    rows_CLGn: Int64Array,
    layers: npt.NDArray[np.int64] | None,
) -> Int64Array:
    """GEMM and exposed pushes of the passes of every column, int64 `[C, L']`."""
    cost = problem.cost_model
    assert cost is not None
    out_CLG, into_CLG = push_counts(problem, base_LGb, replica_CLGS)
    window_CL = problem.window_CL if layers is None else problem.window_CL[:, layers]
    total_CL = np.zeros(rows_CLGn.shape[:2], np.int64)
    for has_backward, count_C in zip((False, True), problem.passes_2C, strict=True):
        if not count_C.any():
            continue
        seconds = cost.instance_seconds(
            rows_CLGn, out_CLG, into_CLG, window_CL, has_backward=has_backward
        )
        total_CL += np.rint(seconds * _PICOSECONDS).astype(np.int64) * count_C[:, None]
    return total_CL


def push_counts(
    problem: Problem, base_LGb: Int32Array, replica_CLGS: Int32Array
) -> tuple[Int64Array, Int64Array]:
    """Experts that each rank sends to replicas and holds as replicas, int64 `[C, L', G]` each.

    The sender is the rank of the replica's node with the expert in a home or static slot.
    """
    node_G = problem.topology.rank_to_node_G
    num_layers, num_ranks, _ = base_LGb.shape
    layer, rank, slot = np.nonzero(base_LGb >= 0)
    sender_LNE = np.zeros(
        (num_layers, problem.topology.num_nodes, problem.shape.num_experts), np.int64
    )
    sender_LNE[layer, node_G[rank], base_LGb[layer, rank, slot]] = rank
    column, layer, rank, slot = np.nonzero(replica_CLGS >= 0)
    expert = replica_CLGS[column, layer, rank, slot]
    use = column * num_layers + layer
    shape = (*replica_CLGS.shape[:2], num_ranks)
    sender = sender_LNE[layer, node_G[rank], expert]
    size = int(np.prod(shape))
    out = np.bincount(use * num_ranks + sender, minlength=size).reshape(shape)
    into = np.bincount(use * num_ranks + rank, minlength=size).reshape(shape)
    return out, into


class MovePrice:
    """What moving experts costs, in the unit of the objective and spread over the horizon.

    Args:
        problem: the input, with a base layout.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        config, cost = problem.config, problem.cost_model
        self._expert_s = 0.0
        if cost is not None:
            rates = cost.hardware
            rate = rates.nic_gb_per_s if problem.topology.num_nodes > 1 else rates.nvlink_gb_per_s
            size = cost.shape.item_bytes + _ADAM_BYTES / cost.data_parallel
            self._expert_s = cost.expert_params * size / (rate * 1e9)
            # Ranks send and receive at once; few moves do not spread over them evenly.
            ranks = max(1, problem.topology.num_ranks // 2)
            row_s = cost.row_s * problem.weight_unit
            rows = self._expert_s / ranks / row_s / config.horizon_steps
        else:
            rows = config.move_rows / config.horizon_steps / problem.weight_unit
        self.rows = int(np.ceil(rows))

    @property
    def is_free(self) -> bool:
        """Whether moves cost nothing."""
        return self.rows == 0

    def of_moves(self, old_LGH: Int32Array, new_LGH: Int32Array) -> Int64Array:
        """Price of going from some layouts to others, int64 `[L]`.

        In time mode the slowest rank's moves of a layer, all at the rate between nodes; as a sum of
        moves on ranks it keeps the triangle inequality, so planning again gains nothing.

        Args:
            old_LGH: int32 `[L, G, H]`.
            new_LGH: int32 `[L, G, H]`.
        """
        num_ranks = self.problem.topology.num_ranks
        prices = []
        for old_GH, new_GH in zip(old_LGH, new_LGH, strict=True):
            old, new = ExpertLayout(old_GH), ExpertLayout(new_GH)
            experts = new.moved_experts(old)
            if self.problem.cost_model is None:
                prices.append(self.rows * len(experts))
                continue
            most = max(
                int(np.bincount(layout.home_rank_E[experts], minlength=num_ranks).max())
                for layout in (old, new)
            )
            picoseconds = most * self._expert_s * _PICOSECONDS
            prices.append(int(np.ceil(picoseconds / self.problem.config.horizon_steps)))
        return np.asarray(prices, np.int64)
