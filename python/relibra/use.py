"""A pass of one micro-batch, as the layers see it while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relibra.balanced_moe import MoEHandle
from relibra.local_use import narrow_ids
from relibra_kernels.checks import check_tensor
from relibra_kernels.ops.backend import checks_values, note_other_ids

if TYPE_CHECKING:
    from relibra.step import TrainingStep


class Use:
    """One execution of a pass on a micro-batch; made by ``step.forward``.

    Attributes:
        step: the training step.
        pass_: name of the pass.
        micro_batch: number within the rollout batch.
        mode: ``exact`` where every row is replayed, else a mode of `relibra.live_routes`.
        key: (optimizer step, pass, micro-batch).
        text: such as ``optimizer step 1, train, micro-batch 2``.
    """

    def __init__(self, step: TrainingStep, pass_: str, micro_batch: int) -> None:
        self.step, self.pass_, self.micro_batch = step, pass_, micro_batch
        self.mode = step.mode_of(pass_, micro_batch)
        self.key = (step.optimizer_step, pass_, micro_batch)
        self.text = f"optimizer step {step.optimizer_step}, {pass_}, micro-batch {micro_batch}"

    def __str__(self) -> str:
        """Its text."""
        return self.text

    def expert_ids(self, layer: int) -> torch.Tensor | None:
        """Replayed ids of decoder layer ``layer``.

        Returns:
            int32 ``[T, K]``, -1 in rows that follow the live router; None for a pass without
            routes.
        """
        return self.step.ids(self, self.step.attachment.layer_index(layer))

    def handle(self, layer: int, expert_ids: torch.Tensor | None, num_tokens: int) -> MoEHandle:
        """The handle of one layer in this use; checks what the host passes against the plan.

        Args:
            layer: decoder layer number.
            expert_ids: ``[T, K]`` as the host will use them; None takes the replayed ones, which
                is an error where rows follow the live router.
            num_tokens: T as the host sees it.

        Raises:
            ValueError: another token count, or ids that differ from the replayed ones.
            RuntimeError: the step has ended.
        """
        step, attachment = self.step, self.step.attachment
        step.require_open(self.text)
        index = attachment.layer_index(layer)
        what = f"{self.text}, layer {layer}"
        planned = step.planned_ids(self, index, expert_ids)
        ids = self._checked_ids(planned, expert_ids, num_tokens, what)
        attachment.note_recompute(self, layer)
        step.note("forward", self, layer)
        runtime, tables = step.runtime, step.tables(self, index, ids)
        return MoEHandle(
            tables=tables,
            movers=attachment.movers(self, index),
            what=what,
            combine=runtime.combine,
            grad_mode=runtime.grad_mode,
            block_rows=runtime.block_rows,
            kernels=runtime.kernels,
            key=(attachment.name, *self.key, layer),
            **(attachment.static.of(index, tables.num_static) if tables.num_static else {}),
        )

    def _checked_ids(
        self,
        planned: torch.Tensor | None,
        expert_ids: torch.Tensor | None,
        num_tokens: int,
        what: str,
    ) -> torch.Tensor:
        """The ids to execute, int32 ``[T, K]``."""
        if planned is not None and num_tokens != planned.shape[0]:
            raise ValueError(
                f"x: need {planned.shape[0]} tokens, as routed for {what}, got {num_tokens}"
            )
        if expert_ids is not None and planned is not None:
            check_same_ids(expert_ids, planned, what, only_known=self.mode != "exact")
        if self.mode == "exact" and planned is not None:
            return planned
        if expert_ids is None:
            raise ValueError(
                f"expert_ids: need the ids of all rows of {what}, since some follow the live "
                "router (replayed_ids() is -1 there), got None"
            )
        narrow: torch.Tensor = narrow_ids(expert_ids)
        return narrow


def check_same_ids(
    expert_ids: torch.Tensor, planned: torch.Tensor, what: str, *, only_known: bool = False
) -> None:
    """Refuses ids that differ from the replayed ones.

    Args:
        expert_ids: ``[T, K]``, what the host passes.
        planned: int32 ``[T, K]``.
        what: names the use.
        only_known: accept anything where ``planned`` is -1.

    Raises:
        TypeError: no integers.
        ValueError: another shape or id; names the first place. Ids on CUDA are compared there, and
            an error comes at the end of the step.
    """
    check_tensor("expert_ids", expert_ids)
    if expert_ids.is_floating_point() or expert_ids.dtype == torch.bool:
        raise TypeError(f"expert_ids: need an integer dtype for {what}, got {expert_ids.dtype}")
    if expert_ids.shape != planned.shape:
        raise ValueError(
            f"expert_ids: need {list(planned.shape)} for {what}, got {list(expert_ids.shape)}"
        )
    planned = planned.to(expert_ids.device, non_blocking=True)
    different = narrow_ids(expert_ids) != planned
    if only_known:
        different &= planned >= 0
    if not checks_values(expert_ids):
        note_other_ids(different)  # told at the end of the step: no device sync here
        return
    if different.any():
        token, choice = torch.nonzero(different)[0].tolist()
        raise ValueError(
            f"expert_ids: need the replayed ids of {what}, got {int(expert_ids[token, choice])} "
            f"instead of {int(planned[token, choice])} at token {token}, choice {choice}"
        )
