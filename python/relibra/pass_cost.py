"""Seconds and memory of one pass of a plan, by part.

Letters as in `relibra.cost_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from relibra.cost_model import CostModel, push_counts

if TYPE_CHECKING:
    from relibra.layout import Int64Array
    from relibra.plan import StepPlan
    from relibra.token_copies import FloatArray, TokenCopies

# Bytes of a parameter beside its bf16 weight: fp32 gradient; fp32 master weight and two moments.
GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 12


@dataclass(frozen=True, eq=False)
class PassCost:
    """Seconds of a pass; arrays are float64 `[M, L]`, one entry a micro-batch and layer.

    Args:
        dense: dense part of the slowest rank, forward.
        dense_mean: of the mean rank.
        all_to_all: dispatch and combine of one forward (a backward takes as long).
        gemm: forward GEMM of the slowest rank.
        gemm_backward: backward GEMM and replica gradients in memory, slowest rank.
        replica: what the replica gradients add to `gemm_backward`.
        push: exposed part of the pushes of a forward.
        push_backward: exposed part of the second push and of gradients going home.
        rest_M: float64 `[M]`, layers without experts and the head, forward.
        forwards: a.
        backwards: b.
    """

    dense: FloatArray
    dense_mean: FloatArray
    all_to_all: FloatArray
    gemm: FloatArray
    gemm_backward: FloatArray
    replica: FloatArray
    push: FloatArray
    push_backward: FloatArray
    rest_M: FloatArray
    forwards: int
    backwards: int

    def layer_seconds(self, *, net: bool = True, dense: str = "max") -> FloatArray:
        """T(l, m), float64 `[M, L]`.

        Args:
            net: with exposed pushes and replica gradients.
            dense: `max` waits for the rank with most dense work, `mean` has none.
        """
        a, b = self.forwards, self.backwards
        own = self.dense if dense == "max" else self.dense_mean
        seconds = (a + 2 * b) * own + (a + b) * self.all_to_all
        seconds = seconds + a * self.gemm + b * (self.gemm_backward - self.replica)
        if net:
            seconds = seconds + a * self.push + b * (self.push_backward + self.replica)
        return seconds

    def seconds(self, *, net: bool = True, dense: str = "max", stages: int = 1) -> float:
        """Of the whole pass: sum over micro-batches and layers, and the rest.

        Args:
            net: as in `layer_seconds`.
            dense: as in `layer_seconds`.
            stages: pipeline stages, which share out the layers (see `stage_layers`) and the rest
                evenly; the result is then that of `pipeline_seconds`.
        """
        layer_ML = self.layer_seconds(net=net, dense=dense)
        rest_M = (self.forwards + 2 * self.backwards) * self.rest_M / stages
        parts = stage_layers(layer_ML.shape[1], stages)
        return pipeline_seconds([layer_ML[:, one].sum(1) + rest_M for one in parts])

    def parts(self) -> dict[str, float]:
        """Seconds by part, all layers and micro-batches; they add up to `seconds()`."""
        a, b = self.forwards, self.backwards
        return {
            "dense": (a + 2 * b) * float(self.dense.sum() + self.rest_M.sum()),
            "all_to_all": (a + b) * float(self.all_to_all.sum()),
            "gemm": float((a * self.gemm + b * (self.gemm_backward - self.replica)).sum()),
            "replica_gradients": b * float(self.replica.sum()),
            "exposed_push": float((a * self.push + b * self.push_backward).sum()),
        }


def pass_cost(
    plan: StepPlan,
    pass_: str,
    cost: CostModel,
    copies: TokenCopies,
    *,
    dense_MG: FloatArray,
    rows_copies: TokenCopies | None = None,
    slot_rows_MLGn: Int64Array | None = None,
    has_backward: bool | None = None,
) -> PassCost:
    """Seconds of a pass.

    Args:
        plan: the plan.
        pass_: name of the pass.
        cost: the model.
        copies: tokens that travel (`relibra.token_copies.plan_copies`).
        dense_MG: float64 `[M, G]`, forward seconds of a layer's dense part.
        rows_copies: rows that travel, needed for the combine mode `exact`; None = `copies`.
        slot_rows_MLGn: rows that are executed in fact; None = those of the plan.
        has_backward: None = only for the pass `train`.
    """
    one = plan.passes[pass_]
    rows = executed_rows(plan, pass_) if slot_rows_MLGn is None else slot_rows_MLGn
    if has_backward is None:
        has_backward = pass_ == "train"
    home_LE = np.stack([layout.home_rank_E for layout in plan.layouts])
    out, into = push_counts(one.replica_slot_expert_MLGS, home_LE)
    shape = rows.shape[:2]
    dense_M1 = dense_MG.max(1)[:, None]
    window = dense_M1 if cost.window_s is None else cost.window_s
    parts = cost.use_parts(rows, out, into, window)
    back = copies if cost.combine == "reduced" or rows_copies is None else rows_copies
    there_s = cost.all_to_all_seconds(copies, cost.dispatch_bytes).max(-1)
    back_s = cost.all_to_all_seconds(back, cost.combine_bytes).max(-1)
    tokens_MG = plan.loads[pass_].rows_MLGE[:, 0].sum(-1) / plan.shape.top_k
    forwards, backwards = cost.repeats(has_backward)
    return PassCost(
        np.broadcast_to(dense_M1, shape),
        np.broadcast_to(dense_MG.mean(1)[:, None], shape),
        there_s + back_s,
        **parts,
        rest_M=rest_seconds(cost, tokens_MG, dense_MG, shape[1]).max(1),
        forwards=forwards,
        backwards=backwards,
    )


def executed_rows(plan: StepPlan, pass_: str) -> Int64Array:
    """Rows of each slot, int64 `[M, L, G, n]`.

    A plan for reports only that names no slots spreads a rank's rows evenly over its slots.

    Args:
        plan: the plan.
        pass_: name of the pass.
    """
    slot_rows_MLGn = plan.passes[pass_].slot_rows_MLGn
    if plan.is_executable:
        return slot_rows_MLGn
    if pass_ in plan.report_slots:
        return plan.report_slots[pass_].slot_rows_MLGn
    slots = slot_rows_MLGn.shape[-1]
    rank_rows = slot_rows_MLGn.sum(-1, keepdims=True)
    rows: Int64Array = rank_rows // slots + (np.arange(slots) < rank_rows % slots)
    return rows


def rest_seconds(
    cost: CostModel, tokens_MG: FloatArray, dense_MG: FloatArray, num_layers: int
) -> FloatArray:
    """Forward seconds of layers without experts and of the head, float64 `[M, G]`.

    With fewer MoE layers than the model has, the same share of the rest.

    Args:
        cost: the model.
        tokens_MG: `[M, G]`, tokens of each rank.
        dense_MG: float64 `[M, G]`, dense part of a layer.
        num_layers: L, MoE layers that are simulated.
    """
    model = cost.model
    if model is None:
        return np.zeros(np.shape(tokens_MG))
    rate = cost.hardware.dense_tflop_per_s * 1e12
    feed_forward = 6.0 * model.hidden_size * model.dense_size * tokens_MG / rate
    head = 2.0 * model.hidden_size * model.vocabulary * tokens_MG / rate
    share = num_layers / len(model.moe_layers)
    rest: FloatArray = share * (model.dense_layers * (dense_MG + feed_forward) + head)
    return rest


def stage_layers(num_layers: int, stages: int) -> list[slice]:
    """Layers of each pipeline stage: neighbours, as equal in number as can be.

    Args:
        num_layers: L.
        stages: of the pipeline, at most L.

    Example:
        >>> stage_layers(5, 2)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    bounds = [-(-num_layers * stage // stages) for stage in range(stages + 1)]
    return [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]


def pipeline_seconds(stage_M: list[FloatArray]) -> float:
    """Seconds of a step with pipeline stages.

    Sum over micro-batches of the slowest stage, and the bubble, which fills and drains the others.

    Args:
        stage_M: for each stage float64 `[M]`.

    Example:
        >>> pipeline_seconds([np.array([1.0, 2.0]), np.array([2.0, 1.0])])
        5.5
    """
    slowest = np.stack(stage_M).max(0)
    bubble = float(np.stack(stage_M).mean(1).sum() - np.stack(stage_M).mean(1).max())
    return float(slowest.sum()) + bubble


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of the rank that needs most, in bytes.

    Args:
        rank: that rank.
        rows: most rows of any rank in one use.
        rows_padded: the same with slots rounded up to tiles.
        activation_bytes: saved activations of the micro-batches in flight.
        working_bytes: largest buffers of one layer's backward.
        expert_bytes: weights, gradients and optimizer state of its home experts.
        replica_bytes: weights and fp32 gradients of its replica slots, shared by all layers.
        available_bytes: of the GPU.
    """

    rank: int
    rows: int
    rows_padded: int
    activation_bytes: int
    working_bytes: int
    expert_bytes: int
    replica_bytes: int
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything but dense weights and fragmentation."""
        return self.activation_bytes + self.working_bytes + self.expert_bytes + self.replica_bytes

    @property
    def fits(self) -> bool:
        """Whether the forecast is below the GPU's memory."""
        return self.total_bytes <= self.available_bytes

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        values: dict[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"total_bytes": self.total_bytes, "fits": self.fits}


def memory_forecast(
    plan: StepPlan,
    pass_: str,
    cost: CostModel,
    copies: TokenCopies,
    slot_rows_MLGn: Int64Array | None = None,
    *,
    num_layers: int | None = None,
) -> MemoryForecast:
    """What the fullest rank needs, dense weights left out.

    Saved for each layer and micro-batch: the layer's input, and without recomputation the received
    tokens (D) and the rows before the activation (2F, padded). One layer's backward holds the
    gradients of both, the activation (F) and the gradient of the rows (D).

    Args:
        plan: the plan.
        pass_: name of the pass.
        cost: the model.
        copies: tokens that travel.
        slot_rows_MLGn: rows that are executed in fact; None = those of the plan.
        num_layers: MoE layers that a rank has, for which those of the plan stand; None = these.
    """
    one = plan.passes[pass_]
    rows = executed_rows(plan, pass_) if slot_rows_MLGn is None else slot_rows_MLGn
    layers = rows.shape[1] if num_layers is None else num_layers
    padded = (-(-rows // cost.block_rows) * cost.block_rows).sum(-1).astype(np.float64)
    hidden, item = cost.hidden_size, cost.shape.item_bytes
    inner = cost.expert_params // (3 * hidden)
    tokens = plan.loads[pass_].rows_MLGE.sum(-1) / plan.shape.top_k
    saved = tokens * hidden
    inside = copies.received_G * hidden + padded * 2 * inner
    working = padded * (3 * inner + hidden) + 2 * copies.received_G * hidden
    if cost.recompute == "none":
        saved = saved + inside
    else:
        working = working + inside
    by_micro_batch = saved.sum(1) * (item * layers / rows.shape[1])
    alive = min(cost.in_flight, len(by_micro_batch))
    sums = np.concatenate([np.zeros((1, rows.shape[2])), np.cumsum(by_micro_batch, axis=0)])
    activations_G = (sums[alive:] - sums[:-alive]).max(0)
    working_G = working.max((0, 1)) * item
    rank = int((activations_G + working_G).argmax())
    home = plan.layouts[0].slots_per_rank
    optimizer = OPTIMIZER_BYTES / cost.data_parallel
    state = layers * home * cost.expert_params * (item + GRADIENT_BYTES + optimizer)
    copies_bytes = one.replica_slots * cost.expert_params * (item + GRADIENT_BYTES)
    return MemoryForecast(
        rank,
        int(rows.sum(-1).max(initial=0)),
        int(padded.max(initial=0)),
        int(activations_G[rank]),
        int(working_G[rank]),
        int(state),
        int(copies_bytes),
        int(cost.hardware.memory_gb * 1e9),
    )
