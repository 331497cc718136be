"""The layers of ``relibra demo --trace``: a stack of MoE layers under its own runtime.

Letters: G ranks, T tokens of this rank, D model dim, E experts, F expert dim.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from relibra.demo.model import ReplayedMoeBlock
from relibra.module import BalancedMoE
from relibra.runtime import Runtime
from relibra.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relibra.plan import StepPlan
    from relibra.shape import ModelShape
    from relibra.trace import DispatchRows

PASS = "train"


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """How a routing file is replayed.

    Attributes:
        seed: Of weights and tokens.
        hidden_size: D.
        expert_size: F.
        micro_batch_sequences: Sequences of all ranks in a micro-batch.
        max_micro_batches: Replay only the first ones; None replays all.
        num_nodes: N.
        ranks_per_node: P.
        replica_slots: S.

    Example:
        >>> ReplaySettings(hidden_size=0)
        Traceback (most recent call last):
        ...
        ValueError: hidden_size: need an integer >= 1, got 0
    """

    seed: int = 0
    hidden_size: int = 64
    expert_size: int = 64
    micro_batch_sequences: int = 8
    max_micro_batches: int | None = None
    num_nodes: int = 2
    ranks_per_node: int = 2
    replica_slots: int = 1

    def __post_init__(self) -> None:
        """Check what a user can set."""
        for name in ("hidden_size", "expert_size", "micro_batch_sequences", "max_micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: need an integer >= 1, got {value}")

    @property
    def topology(self) -> Topology:
        """Nodes and ranks."""
        return Topology(self.num_nodes, self.ranks_per_node)


@dataclasses.dataclass(frozen=True)
class ReplayBatch:
    """A routing file cut for the ranks, with both plans.

    Attributes:
        rows: ``[rank][micro-batch]``.
        plan: Balanced.
        none: Experts in order, no replicas.
        source: What the file holds and what was assumed, for the report.
    """

    rows: Sequence[Sequence[DispatchRows]]
    plan: StepPlan
    none: StepPlan
    source: dict[str, Any]


class ReplayStack(nn.Module):
    """Residual stack of MoE layers with routers, no attention.

    Args:
        shape: Sizes and layer numbers.
        num_ranks: G.
        rank: This rank.
        seed: Weights are equal on all ranks and for all stacks of a seed.
    """

    def __init__(self, shape: ModelShape, num_ranks: int, rank: int, seed: int) -> None:
        super().__init__()
        assert shape.hidden_size is not None
        assert shape.expert_size is not None
        hidden, inner, num_experts = shape.hidden_size, shape.expert_size, shape.num_experts
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList()
        for layer in shape.moe_layers:
            gate = nn.Linear(hidden, num_experts, bias=False)
            gate.weight.data.normal_(std=hidden**-0.5, generator=generator)
            w13 = torch.randn(num_experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
            w2 = torch.randn(num_experts, hidden, inner, generator=generator) * inner**-0.5
            moe = BalancedMoE.from_dense(w13, w2, layer=layer, num_ranks=num_ranks, rank=rank)
            self.blocks.append(ReplayedMoeBlock(gate, moe, norm_topk_prob=shape.top_k > 1))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply all layers to ``[T, D]``."""
        for block in self.blocks:
            x_TD = x_TD + block(F.rms_norm(x_TD, x_TD.shape[-1:]))
        return x_TD


class ReplaySide:
    """A stack under its own runtime, executing one plan."""

    def __init__(self, batch: ReplayBatch, plan: StepPlan, settings: ReplaySettings) -> None:
        group = dist.group.WORLD
        assert group is not None
        rank = dist.get_rank(group)
        self.stack = ReplayStack(plan.shape, dist.get_world_size(group), rank, settings.seed)
        slots = max(passed.replica_slots for passed in plan.passes.values())
        self.runtime = Runtime(group, settings.topology, replica_slots=slots, combine="exact")
        self.runtime.attach(self.stack)
        self.step = self.runtime.step(plan, {PASS: batch.rows[rank]})

    def run(
        self, micro_batch: int, x_TD: torch.Tensor, dy_TD: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Forward and backward; output, gradient of the tokens, and milliseconds."""
        x_TD = x_TD.clone().requires_grad_()
        start = time.perf_counter()
        with self.step.forward(micro_batch=micro_batch, pass_=PASS):
            y_TD = self.stack(x_TD)
        y_TD.backward(dy_TD)
        spent_ms = 1e3 * (time.perf_counter() - start)
        assert x_TD.grad is not None
        return {"output": y_TD.detach(), "input grad": x_TD.grad}, spent_ms

    def gradients(self) -> dict[str, torch.Tensor]:
        """Weight gradients in logical expert order; collective."""
        found = {}
        for place, block in enumerate(self.stack.blocks):
            moe, gate = block.experts, block.gate
            assert isinstance(moe, BalancedMoE)
            for name, param in moe.named_parameters():
                assert param.grad is not None
                found[f"{place}.{name}"] = self.runtime.gather_experts(param.grad, moe.layer)
            found[f"{place}.gate"] = gate.weight.grad  # type: ignore[assignment, union-attr]
        return found
