"""Seconds of moving experts between batches and of refreshing static copies.

Letters as in `relibra.cost_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relibra.pass_cost import GRADIENT_BYTES, OPTIMIZER_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.cost_model import CostModel
    from relibra.plan import StepPlan
    from relibra.token_copies import FloatArray


def move_seconds(plan: StepPlan, pass_: str, cost: CostModel) -> float:
    """Seconds of moving experts with their optimizer state from the base layouts, all layers.

    Args:
        plan: the plan.
        pass_: name of the pass.
        cost: the model.
    """
    return float(move_seconds_L(plan, pass_, cost).sum())


def move_seconds_L(plan: StepPlan, pass_: str, cost: CostModel) -> FloatArray:
    """The same layer by layer, float64 `[L]`.

    Every rank sends and receives at once; those that leave the node use the rail. Strategies for
    reports that name slots (EPLB) leave optimizer states where they are: every copy that is new on
    a rank gets its weights from the base home and sends its gradient back, none of it hidden.

    Args:
        plan: the plan.
        pass_: name of the pass.
        cost: the model.
    """
    node = plan.topology.rank_to_node_G
    if pass_ in plan.report_slots:
        return _copy_seconds(plan, pass_, cost)
    state = cost.expert_params * (cost.shape.item_bytes + OPTIMIZER_BYTES / cost.data_parallel)
    seconds_L = np.zeros(len(plan.layouts))
    for layer, (old, new) in enumerate(zip(plan.base_layouts, plan.layouts, strict=True)):
        experts = new.moved_experts(old)
        sender, receiver = old.home_rank_E[experts], new.home_rank_E[experts]
        seconds_L[layer] = _transfer_seconds(sender, receiver, node, state, cost)
    return seconds_L


def _copy_seconds(plan: StepPlan, pass_: str, cost: CostModel) -> FloatArray:
    """Weights out and gradients home of copies that were not on their rank before, `[L]`."""
    experts_MLGn = plan.report_slots[pass_].slot_expert_MLGn
    size = cost.expert_params * (cost.shape.item_bytes + GRADIENT_BYTES)
    node, seconds_L = plan.topology.rank_to_node_G, np.zeros(len(plan.layouts))
    for layer, layout in enumerate(plan.base_layouts):
        before = np.zeros((plan.topology.num_ranks, layout.num_experts), np.bool_)
        before[layout.home_rank_E, np.arange(layout.num_experts)] = True
        for slots_Gn in experts_MLGn[:, layer]:
            now = np.zeros_like(before)
            rank, slot = np.nonzero(slots_Gn >= 0)
            now[rank, slots_Gn[rank, slot]] = True
            new_rank, expert = np.nonzero(now & ~before)
            home = layout.home_rank_E[expert]
            seconds_L[layer] += _transfer_seconds(home, new_rank, node, size, cost)
            before = now
    return seconds_L


def static_seconds(plan: StepPlan, pass_: str, cost: CostModel) -> float:
    """Seconds of refreshing the static copies and of their gradients, every optimizer step.

    Args:
        plan: the plan.
        pass_: name of the pass.
        cost: the model.
    """
    return float(static_seconds_L(plan, pass_, cost).sum())


def static_seconds_L(plan: StepPlan, pass_: str, cost: CostModel) -> FloatArray:
    """The same layer by layer, float64 `[L]`.

    Args:
        plan: the plan.
        pass_: name of the pass.
        cost: the model.
    """
    node, seconds_L = plan.topology.rank_to_node_G, np.zeros(len(plan.layouts))
    for layer, layout in enumerate(plan.layouts):
        static_GX = plan.static_slot_expert_LGX[layer]
        ranks, slots = np.nonzero(static_GX >= 0)
        home = layout.home_rank_E[static_GX[ranks, slots]]
        weights = cost.expert_params * cost.shape.item_bytes
        gradients = cost.expert_params * GRADIENT_BYTES
        seconds_L[layer] = _transfer_seconds(home, ranks, node, weights, cost)
        seconds_L[layer] += _transfer_seconds(ranks, home, node, gradients, cost)
    return seconds_L * len(np.unique(plan.loads[pass_].optimizer_step_M))


def _transfer_seconds(
    sender: npt.NDArray[np.integer],
    receiver: npt.NDArray[np.integer],
    node_G: npt.NDArray[np.integer],
    size: float,
    cost: CostModel,
) -> float:
    """Slowest link when items of `size` bytes go from rank to rank at once."""
    far = node_G[sender] != node_G[receiver]
    seconds = 0.0
    for chosen, rate in ((far, cost.hardware.nic_gb_per_s), (~far, cost.hardware.nvlink_gb_per_s)):
        for ranks in (sender[chosen], receiver[chosen]):
            most = int(np.bincount(ranks, minlength=len(node_G)).max())
            seconds = max(seconds, most * size / (rate * 1e9))
    return seconds
