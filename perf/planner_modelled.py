"""Whether plans of `cost="time"` are ever modelled slower than `none`, on the seeded generator.

Both plans are timed here from their arrays by the cost model of `relibra simulate` (dense part,
all-to-all, GEMM, pushes and replica gradients, forward and backward), with two-hop and flat
dispatch; Qwen3-30B-A3B's sizes on H100 rates, and its own number of experts where the generator has
as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from planner_inputs import KINDS, RANKS_PER_NODE, generator_rows

from relibra.cost_model import CostModel
from relibra.load_matrix import LoadMatrix
from relibra.pass_cost import pass_cost
from relibra.planner import PlannerConfig, plan_step
from relibra.presets import HARDWARE, MODELS
from relibra.shape import ModelShape
from relibra.token_copies import plan_copies
from relibra.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relibra.plan import StepPlan

THINNING = 256  # leaves some 32 tokens of a rank in a micro-batch
_PASS = "train"
_PICOSECONDS = 1e12


@dataclass(frozen=True)
class ModelledRecord:
    """One load matrix.

    Args:
        order: of the samples.
        thinning: what rows were divided by.
        slower_layers: layers whose time, summed over micro-batches, is above that of `none`.
        slower_micro_batches: micro-batches whose time, summed over layers, is.
        ratio: modelled time of the plan over that of `none`.
    """

    order: str
    thinning: int
    slower_layers: int
    slower_micro_batches: int
    ratio: float


def modelled_ML(plan: StepPlan, cost: CostModel) -> np.ndarray:
    """Modelled picoseconds of every use, int64 `[M, L]`."""
    tokens_MG = plan.loads[_PASS].rows_MLGE[:, 0].sum(2, dtype=np.int64) / plan.shape.top_k
    copies = plan_copies(plan, _PASS, dispatch=cost.dispatch)
    one = pass_cost(plan, _PASS, cost, copies, dense_MG=cost.dense_seconds(tokens_MG))
    return np.rint(one.layer_seconds() * _PICOSECONDS).astype(np.int64)


def compare(
    kind: str,
    *,
    ep: int,
    experts: int,
    order: str,
    dispatch: str,
    layers: int = 8,
    thinning: int = 1,
) -> ModelledRecord:
    """Plans one load matrix by modelled time, and `none`; rows are divided by `thinning`."""
    rows = generator_rows(kind, ep=ep, experts=experts, order=order, seed=0, layers=layers)
    rows = np.ascontiguousarray(rows // thinning)
    preset = MODELS["Qwen3-30B-A3B"]
    sizes = preset.shape()
    model = ModelShape(
        experts,
        8,
        range(layers),
        hidden_size=sizes.hidden_size,
        expert_size=sizes.expert_size,
        dtype=sizes.dtype,
    )
    topology = Topology(ep // RANKS_PER_NODE, RANKS_PER_NODE)
    dense = preset if preset.shape().num_experts == experts else None
    cost = CostModel(HARDWARE["H100"], model, topology, dense, dispatch=dispatch)
    config = PlannerConfig(cost="time", num_threads=1)
    plan, none = (
        plan_step(
            {_PASS: LoadMatrix(rows)},
            topology,
            model=model,
            config=config,
            strategy=strategy,
            cost_model=cost,
        )
        for strategy in ("relibra", "none")
    )
    ours_ML, none_ML = modelled_ML(plan, cost), modelled_ML(none, cost)
    return ModelledRecord(
        order,
        thinning,
        int((ours_ML.sum(0) > none_ML.sum(0)).sum()),
        int((ours_ML.sum(1) > none_ML.sum(1)).sum()),
        float(ours_ML.sum() / none_ML.sum()),
    )


def modelled_records(*, smoke: bool) -> Iterator[ModelledRecord]:
    """All kinds, both orders and dispatches, EP8 to EP64; also with so few rows that little pays.

    With `smoke` one small case an order.
    """
    for order in ("grouped", "random"):
        if smoke:
            yield compare(KINDS[0], ep=16, experts=128, order=order, dispatch="two_hop", layers=2)
            continue
        for kind in KINDS:
            for ep, experts in ((8, 128), (16, 128), (32, 256), (64, 128)):
                for dispatch in ("flat", "two_hop"):
                    yield compare(kind, ep=ep, experts=experts, order=order, dispatch=dispatch)
            for ep in (8, 16, 64):
                yield compare(
                    kind, ep=ep, experts=128, order=order, dispatch="two_hop", thinning=THINNING
                )
