"""Every number of the demo in one frozen object."""

from __future__ import annotations

import dataclasses

INJECTIONS = ("drop-replica-grad", "stale-replica", "moments-not-moved", "export-by-position")
FULL_RUN_STEPS = 80
QUICK_RUN_STEPS = 10


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """Sizes and hyper-parameters of the reinforcement learning demo.

    Adam's eps is 1e-6: with 1e-8 rounding errors of parameters with tiny gradients are amplified
    beyond what the comparison with the control allows.

    Attributes:
        steps: Rollout batches, one optimizer step each.
        seed: Seed of weights, prompts and sampling.
        inject: Name of a fault to inject, None for a healthy run.
        num_prompts: Prompts a step, over all ranks.
        samples_per_prompt: Completions of one prompt; their mean reward is the baseline.
        num_micro_batches: M, micro-batches a step on every rank.
        num_nodes: N of the topology that the processes are laid out as.
        ranks_per_node: P.
        replica_slots: S.
        num_layers: Decoder layers, all with experts.
        hidden_size: D.
        expert_size: F.
        num_experts: E.
        top_k: K.
        learning_rate: Of Adam.
        adam_eps: Of Adam.
        clip_norm: Largest norm of the gradient of all parameters.
        ratio_clip: GRPO's clip range of the probability ratio.

    Example:
        >>> settings = DemoSettings(steps=10)
        >>> settings.num_ranks, settings.samples_per_rank, settings.samples_per_micro_batch
        (4, 128, 32)
        >>> DemoSettings(steps=0)
        Traceback (most recent call last):
        ...
        ValueError: steps: need an integer >= 1, got 0
    """

    steps: int = FULL_RUN_STEPS
    seed: int = 0
    inject: str | None = None
    num_prompts: int = 64
    samples_per_prompt: int = 8
    num_micro_batches: int = 4
    num_nodes: int = 2
    ranks_per_node: int = 2
    replica_slots: int = 1
    num_layers: int = 2
    hidden_size: int = 64
    expert_size: int = 64
    num_experts: int = 16
    top_k: int = 2
    learning_rate: float = 1e-3
    adam_eps: float = 1e-6
    clip_norm: float = 1.0
    ratio_clip: float = 0.2

    def __post_init__(self) -> None:
        """Check the numbers that a user can set, and that the samples can be dealt evenly."""
        if self.steps < 1:
            raise ValueError(f"steps: need an integer >= 1, got {self.steps}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed: need an integer in [0, 2**31), got {self.seed}")
        if self.inject is not None and self.inject not in INJECTIONS:
            raise ValueError(f"inject: need one of {', '.join(INJECTIONS)}, got {self.inject!r}")
        if self.num_prompts % (self.num_ranks * self.num_micro_batches):
            raise ValueError(
                f"num_prompts: need a multiple of ranks x micro-batches = "
                f"{self.num_ranks} x {self.num_micro_batches}, got {self.num_prompts}"
            )

    @property
    def num_ranks(self) -> int:
        """G, the number of processes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def prompts_per_rank(self) -> int:
        """Prompts that one rank samples from in a step."""
        return self.num_prompts // self.num_ranks

    @property
    def samples_per_rank(self) -> int:
        """Completions that one rank makes in a step."""
        return self.prompts_per_rank * self.samples_per_prompt

    @property
    def samples_per_micro_batch(self) -> int:
        """Completions of one rank in one micro-batch."""
        return self.samples_per_rank // self.num_micro_batches
