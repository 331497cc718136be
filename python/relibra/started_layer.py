"""The stages of a `relibra.BalancedMoE` module."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from relibra.balanced_moe import balanced_moe

if TYPE_CHECKING:
    import torch

    from relibra.module import BalancedMoE
    from relibra.stages import DispatchedTokens, PendingOutput


@dataclasses.dataclass(frozen=True)
class StartedLayer:
    """A layer whose tokens are on their way; ``BalancedMoE.start`` makes it.

    Attributes:
        moe: the module.
        dispatched: its tokens.
        shape: of the module's input.
    """

    moe: BalancedMoE
    dispatched: DispatchedTokens
    shape: torch.Size

    def compute(self) -> PendingLayer:
        """Runs the experts and sends their outputs back; once.

        Raises:
            ValueError: activations or scores changed in place since the start.
            RuntimeError: the second call.
            ReplicaSyncError: a collective failed or timed out.
        """
        moe, sent = self.moe, self.dispatched
        pending = balanced_moe(
            sent.x_TD,
            sent.scores_TK,
            moe.w13,
            moe.w2,
            handle=sent.handle,
            b13=moe.b13,
            b2=moe.b2,
            options=moe.options,
            dispatched=sent,
            wait=False,
        )
        return PendingLayer(pending, self.shape)


@dataclasses.dataclass(frozen=True)
class PendingLayer:
    """Outputs of a module on their way back.

    Attributes:
        output: the outputs.
        shape: of the module's input.
    """

    output: PendingOutput
    shape: torch.Size

    def wait(self) -> torch.Tensor:
        """The outputs in the shape of the module's input; a second call gives them again.

        Raises:
            ReplicaSyncError: a collective failed or timed out.
        """
        return self.output.wait().view(self.shape)
