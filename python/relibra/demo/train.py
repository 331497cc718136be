"""One GRPO step of the balanced model: count, plan, reorder, replicate, train.

Letters: B samples of this rank, n tokens of a sample, c completion tokens, r = n-1 rows of a
sample, L MoE layers, K choices a token, M micro-batches, H home slots a rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from relibra.module import BalancedMoE
from relibra.trace import DispatchRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from relibra.demo.rollout import Rollout
    from relibra.demo.settings import DemoSettings
    from relibra.plan import StepPlan
    from relibra.runtime import Runtime

PASS = "train"


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of one rank as the learner sees them.

    Attributes:
        tokens_Bn: int64 ``[B, n]``.
        old_log_probs_Bc: float32 ``[B, c]``, of the rollout.
        advantages_B: float32 ``[B]``.
        ids_BrLK: int64 ``[B, n-1, L, K]``, routing to replay.
        loss_scale: 1 / completion tokens of all ranks.
    """

    tokens_Bn: torch.Tensor
    old_log_probs_Bc: torch.Tensor
    advantages_B: torch.Tensor
    ids_BrLK: torch.Tensor
    loss_scale: float

    @classmethod
    def of(cls, rollout: Rollout, rewards_B: torch.Tensor, settings: DemoSettings) -> Batch:
        """Batch of a rollout; samples of one prompt are neighbours."""
        num_tokens = rollout.log_probs_Bc.numel() * settings.num_ranks
        advantages_B = grpo_advantages(rewards_B, settings.samples_per_prompt)
        return cls(
            rollout.tokens_Bn,
            rollout.log_probs_Bc,
            advantages_B,
            rollout.ids_BrLK,
            1.0 / num_tokens,
        )

    def micro_batch(self, index: int, size: int) -> Batch:
        """Samples ``index*size`` to ``(index+1)*size``."""
        part = slice(index * size, (index + 1) * size)
        return Batch(
            self.tokens_Bn[part],
            self.old_log_probs_Bc[part],
            self.advantages_B[part],
            self.ids_BrLK[part],
            self.loss_scale,
        )


def grpo_advantages(rewards_B: torch.Tensor, samples_per_prompt: int) -> torch.Tensor:
    """Rewards relative to the other samples of the same prompt.

    Source: GRPO (DeepSeekMath, section 4.1): (reward - mean) / standard deviation of the group.

    Args:
        rewards_B: float32 ``[B]``, samples of one prompt are neighbours.
        samples_per_prompt: Size of a group.

    Returns:
        float32 ``[B]``; zero where all samples of a prompt earn the same.

    Example:
        >>> grpo_advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), 2)
        tensor([-0.7070,  0.7070,  0.0000,  0.0000])
    """
    groups = rewards_B.view(-1, samples_per_prompt)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def completion_log_probs(model: Any, tokens_Bn: torch.Tensor, num_completion: int) -> torch.Tensor:
    """Log-probs of the completion tokens, float32 ``[B, c]``, in one forward over n-1 tokens."""
    logits = model(input_ids=tokens_Bn[:, :-1], use_cache=False).logits[:, -num_completion:]
    log_probs: torch.Tensor = logits.log_softmax(dim=-1)
    return log_probs.gather(2, tokens_Bn[:, -num_completion:, None]).squeeze(2)


def policy_loss(log_probs_Bc: torch.Tensor, batch: Batch, ratio_clip: float) -> torch.Tensor:
    """Clipped surrogate of GRPO, a sum scaled so that all ranks and micro-batches add up.

    Args:
        log_probs_Bc: float32 ``[B, c]`` of the model that trains.
        batch: The micro-batch.
        ratio_clip: Range of the probability ratio around 1.

    Returns:
        Scalar.
    """
    ratio = (log_probs_Bc - batch.old_log_probs_Bc).exp()
    advantage = batch.advantages_B[:, None]
    clipped = ratio.clamp(1 - ratio_clip, 1 + ratio_clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).sum() * batch.loss_scale


def run_micro_batches(
    model: Any,
    batch: Batch,
    settings: DemoSettings,
    context: Callable[[int], AbstractContextManager[Any]],
) -> torch.Tensor:
    """Forward and backward of all micro-batches; gradients are left on the parameters.

    Args:
        model: Language model with replayed MoE blocks.
        batch: All samples of this rank.
        settings: Number and size of micro-batches.
        context: Context of the forward of micro-batch m.

    Returns:
        Log-probs of the completion tokens, float32 ``[B, c]``.
    """
    kept = []
    for index in range(settings.num_micro_batches):
        part = batch.micro_batch(index, settings.samples_per_micro_batch)
        with context(index):
            log_probs = completion_log_probs(model, part.tokens_Bn, part.old_log_probs_Bc.shape[1])
            loss = policy_loss(log_probs, part, settings.ratio_clip)
        loss.backward()  # type: ignore[no-untyped-call]
        kept.append(log_probs.detach())
    return torch.cat(kept)


def all_reduce_grads(params: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters over all ranks, in one collective."""
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    totals = torch.split(flat, [grad.numel() for grad in grads])
    for grad, total in zip(grads, totals, strict=True):
        grad.copy_(total.view_as(grad))


def square_norm(params: Iterable[nn.Parameter]) -> torch.Tensor:
    """Sum of the squares of all gradients, float64 scalar."""
    grads = [param.grad for param in params if param.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.stack(norms).square().sum()


def clip_grads(params: Iterable[nn.Parameter], norm: float, clip_norm: float) -> None:
    """Scale gradients in place so that their norm over the whole model is at most ``clip_norm``."""
    scale = min(1.0, clip_norm / (norm + 1e-6))
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale)


@dataclasses.dataclass(frozen=True)
class TrainOutcome:
    """What the forward and backward of one step give to the record.

    Attributes:
        log_probs_Bc: float32 ``[B, c]``, of the training forward.
        gradient_norm: Over all parameters, before clipping.
    """

    log_probs_Bc: torch.Tensor
    gradient_norm: float


class Learner:
    """A model with sharded experts that trains under the plan it is given.

    There are two: the balanced one, and the control, which gets the plan of strategy ``none``.

    Args:
        model: Language model whose experts are :class:`BalancedMoE`.
        runtime: Already attached to ``model``.
        optimizer: Of all parameters of ``model``.
        settings: Sizes.
    """

    def __init__(
        self,
        model: Any,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        settings: DemoSettings,
    ) -> None:
        self.model, self.runtime, self.optimizer = model, runtime, optimizer
        self._settings = settings
        layers = [module for module in model.modules() if isinstance(module, BalancedMoE)]
        self.moe_layers: list[BalancedMoE] = layers
        expert_ids = {id(param) for moe in layers for param in moe.parameters()}
        self.expert_params = [p for p in model.parameters() if id(p) in expert_ids]
        self.dense_params = [p for p in model.parameters() if id(p) not in expert_ids]

    def dispatch_rows(self, batch: Batch) -> list[DispatchRows]:
        """Rows of this rank as it will dispatch them, one entry a micro-batch."""
        settings = self._settings
        rows_each = settings.samples_per_micro_batch * batch.ids_BrLK.shape[1]
        ids_RLK = batch.ids_BrLK.flatten(0, 1).numpy().astype(np.uint8)
        return [
            DispatchRows(
                ids_RLK[first : first + rows_each],
                source_row=np.arange(first, first + rows_each),
                num_experts=settings.num_experts,
            )
            for first in range(0, len(ids_RLK), rows_each)
        ]

    def gradients(self, batch: Batch, plan: StepPlan, rows: list[DispatchRows]) -> TrainOutcome:
        """Forward and backward of all micro-batches under the plan; clipped gradients remain."""
        self.optimizer.zero_grad(set_to_none=True)
        routes = {PASS: rows}
        with self.runtime.step(plan, routes, optimizer_step=0) as step:
            log_probs = run_micro_batches(
                self.model,
                batch,
                self._settings,
                lambda index: step.forward(micro_batch=index, pass_=PASS),
            )
        all_reduce_grads(self.dense_params)
        square = square_norm(self.expert_params)
        dist.all_reduce(square)
        norm = float((square + square_norm(self.dense_params)).sqrt())
        clip_grads(self.expert_params + self.dense_params, norm, self._settings.clip_norm)
        return TrainOutcome(log_probs, norm)
