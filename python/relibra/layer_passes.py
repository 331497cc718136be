"""The stages of one layer, forward and backward, in the order in which all ranks meet.

Kept between them: the received tokens and the first GEMM's output (or less, see `LayerOptions`).
The backward pushes the replica weights again, because all layers share the replica buffers. The
gradients of x start on their way before the weight gradients are computed, which hide them.

Letters: T tokens here, K choices, U tokens received, R rows computed here, D model dim, F expert
dim. Source: ReLibra (arXiv 2605.08639), section 4.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from relibra.expert_ops import Experts
from relibra.token_exchange import (
    dispatch_again,
    dispatch_grads,
    start_dscores,
    start_dx,
    start_output,
    start_tokens,
)
from relibra.weight_grads import Operands, weight_grads
from relibra_kernels.ops import direct_ops
from relibra_kernels.reference.combine import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from relibra.balanced_moe import MoEHandle
    from relibra.expert_weights import ExpertWeights
    from relibra.layer_options import LayerOptions
    from relibra.token_exchange import PendingTokens
    from relibra_kernels.transport.dispatch import Arrival


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """What a layer is called with besides activations.

    Attributes:
        handle: of this use.
        options: of the layer.
        weights: of the home slots; the parameters themselves, with attributes such as
            ``main_grad``.
    """

    handle: MoEHandle
    options: LayerOptions
    weights: ExpertWeights

    def described(self) -> str:
        """What decides which collectives the layer calls, and the sizes of their rows."""
        layout = []
        for name, field in self.weights.fields().items():
            one = (
                (field[0].shape, field[0]) if isinstance(field, tuple) else (field.shape[1:], field)
            )
            layout.append((name, one[0], one[1].dtype))
        return _described(self.options, tuple(layout))


@functools.lru_cache(maxsize=64)
def _described(options: LayerOptions, layout: tuple[Any, ...]) -> str:
    return f"{options} {[(name, tuple(shape), dtype) for name, shape, dtype in layout]}"


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a forward leaves for its backward.

    Attributes:
        tokens: ``[U, D]`` received, or with ``save="redispatch"`` the layer's input ``[T, D]``.
        h_R2F: the first product; None with ``recompute_h``.
        scores_UK: of the received tokens, in the accumulation dtype.
        scores_dtype: of the layer's scores.
    """

    tokens: torch.Tensor
    h_R2F: torch.Tensor | None
    scores_UK: torch.Tensor
    scores_dtype: torch.dtype


def run_forward(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    call: LayerCall,
    dispatched: PendingTokens | None = None,
) -> tuple[Arrival, Kept]:
    """Outputs of the layer on their way back, and what the backward needs.

    Args:
        x_TD: ``[T, D]``.
        scores_TK: ``[T, K]``.
        call: of this use.
        dispatched: the tokens on their way, None to send them here.
    """
    handle, options = call.handle, call.options
    if handle.virtual is not None:
        return handle.virtual.forward(x_TD, scores_TK, call, dispatched)
    handle.movers.enter_experts(handle, call.described())
    wide_TK = scores_TK.to(accumulation_dtype(x_TD.dtype))
    x_UD, scores_UK = (dispatched or start_tokens(x_TD, wide_TK, handle)).wait()
    experts = Experts.pushed(call, call.weights)
    score_R = None if options.scales_output else _row_scores(scores_UK, handle)
    h_R2F, a_RF = experts.up(x_UD, score_R)
    y_RD = experts.down(a_RF)
    handle.movers.release_weights()
    del a_RF  # made again from h in the backward
    kept = Kept(
        x_UD if options.save == "copy" else x_TD,
        None if options.recompute_h else h_R2F,
        scores_UK,
        scores_TK.dtype,
    )
    if not options.scales_output:
        return start_output(y_RD, None, None, handle), kept
    return start_output(y_RD, wide_TK, scores_UK, handle), kept


def run_backward(
    dy_TD: torch.Tensor,
    kept: Kept,
    call: LayerCall,
    weights: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, scores and every tensor of the weights.

    Args:
        dy_TD: ``[T, D]``.
        kept: by the forward.
        call: of the forward.
        weights: the values of ``call.weights.flatten()`` in the forward.
        needs: which gradients are wanted: x, scores, then one a tensor.

    Returns:
        One a need; None where not wanted, or added to ``main_grad``.
    """
    handle, options = call.handle, call.options
    if handle.virtual is not None:
        return handle.virtual.backward(dy_TD, kept, call, weights, needs)
    needs_x, needs_scores, *needs_weights = needs
    wanted = call.weights.regroup(needs_weights, any)
    handle.movers.enter_backward(handle, f"{needs_x} {needs_scores} {wanted}")
    dy_UD = dispatch_grads(dy_TD, handle)
    x_UD = kept.tokens if options.save == "copy" else dispatch_again(kept.tokens, handle)
    experts = Experts.pushed(call, call.weights.unflatten(weights))
    score_R = _row_scores(kept.scores_UK, handle)
    h_R2F = kept.h_R2F
    if h_R2F is None:
        h_R2F = experts.up(x_UD, None if options.scales_output else score_R)[0]
    dh_R2F, scored_RF, dscore_R = experts.down_backward(dy_UD, h_R2F, score_R)
    del h_R2F
    dscores = start_dscores(dscore_R, handle) if needs_scores else None
    dx_UD = experts.up_backward(dh_R2F) if needs_x else None
    handle.movers.release_weights()
    dx = None if dx_UD is None else start_dx(dx_UD, handle)
    del dx_UD
    grads: tuple[torch.Tensor | None, ...] = (None,) * len(needs_weights)
    if any(needs_weights):
        operands = Operands(x_UD, dy_UD, dh_R2F, scored_RF, score_R)
        grads = weight_grads(call, needs_weights, operands)
    dscores_TK = None if dscores is None else dscores.wait().to(kept.scores_dtype)
    dx_TD = None if dx is None else dx.wait()
    handle.movers.leave_backward(handle)
    return dx_TD, dscores_TK, *grads


def _row_scores(scores_UK: torch.Tensor, handle: MoEHandle) -> torch.Tensor:
    """Score of every row, ``[R]``."""
    tables = handle.tables
    out: torch.Tensor = direct_ops.row_scores(
        scores_UK, tables.row_to_choice_R, tables.token_choice_to_row_UK, handle.kernels
    )
    return out
