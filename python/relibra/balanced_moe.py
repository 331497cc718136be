"""The balanced MoE autograd function: dispatch, push, experts, combine, and the way back.

One autograd node holds every collective of one layer, so all ranks meet in the same order whatever
their plans make them compute. Only the received tokens and the first GEMM's output are saved; the
backward pushes the replica weights again, because the replica buffer is shared by all layers.

Letters: T tokens here, K choices, V tokens sent, U tokens received, R rows computed here, D model
dim, F expert dim, H home slots, S replica slots. Source: ReLibra (arXiv 2605.08639), section 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import torch

from relibra.token_exchange import (
    combine_exact,
    combine_reduced,
    dispatch_grads,
    dispatch_tokens,
    return_dscores,
    return_dx,
)
from relibra_kernels import ops  # noqa: F401  registers torch.ops.relibra
from relibra_kernels.checks import check_tensor
from relibra_kernels.reference.combine import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from relibra.rank_tables import LayerTables

COMBINE_MODES = ("reduced", "exact")
GRAD_MODES = ("returned", "main_grad")

_relibra = torch.ops.relibra


class Movers(Protocol):
    """What the autograd function needs from the runtime: transports and replica storage."""

    def exchange(
        self, x: torch.Tensor, send_splits: list[int], recv_splits: list[int], what: str
    ) -> torch.Tensor:
        """All-to-all of rows."""

    def push(
        self, weights: tuple[torch.Tensor, ...], tables: LayerTables, what: str
    ) -> tuple[torch.Tensor, ...]:
        """Home weights -> replica slots; returns the replica buffers ``[S, ...]``."""

    def replica_grads(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Gradient buffers ``[S, ...]`` for the replica slots; contents are undefined."""

    def reduce(
        self,
        replica_grads: tuple[torch.Tensor, ...],
        home_grads: tuple[torch.Tensor, ...],
        tables: LayerTables,
        what: str,
    ) -> None:
        """Adds replica gradients to ``home_grads`` in ascending (rank, slot) order."""

    def enter_backward(self, handle: MoEHandle) -> None:
        """Called first in the backward of a use, on the thread that runs it."""

    def leave_backward(self, handle: MoEHandle) -> None:
        """Called last in the backward of a use."""


@dataclasses.dataclass(frozen=True)
class MoEHandle:
    """One use of one layer: its tables and the objects that move data for it.

    Attributes:
        tables: index tables of this use.
        movers: transports and replica storage.
        what: names the use in errors: ``optimizer step 3, train, micro-batch 0, layer 5``.
        combine: ``"reduced"`` sums a token's rows at each destination; ``"exact"`` returns every
            row and sums at the source in choice order, bitwise independent of the plan.
        grad_mode: ``"returned"`` or ``"main_grad"`` (adds to ``param.main_grad``, fp32).
        block_rows: rows of a GEMM tile.
        key: (model, optimizer step, pass, micro-batch, layer), None outside a training step.
        kernels: ``"auto"`` (Triton on CUDA, references on CPU), ``"triton"`` or ``"reference"``.
    """

    tables: LayerTables
    movers: Movers
    what: str
    combine: str = "reduced"
    grad_mode: str = "returned"
    block_rows: int = 16
    key: tuple[str, int, str, int, int] | None = None
    kernels: str = "auto"

    @property
    def is_exact(self) -> bool:
        """Whether results must not depend on the plan in any bit."""
        return self.combine == "exact"


def balanced_moe(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    w13_H2FD: torch.Tensor,
    w2_HDF: torch.Tensor,
    *,
    handle: MoEHandle,
) -> torch.Tensor:
    """SwiGLU experts over balanced slots: ``y[t] = sum_k scores[t, k] * expert(ids[t, k])(x[t])``.

    Correctness does not depend on the plan behind ``handle``; only the balance does. The expert
    ids are those of ``handle.tables``. Scores are used as given, never renormalised.

    Args:
        x_TD: ``[T, D]`` activations, any float dtype.
        scores_TK: ``[T, K]`` weights of the choices, any float dtype; used, and sent, in fp32
            (fp64 with fp64 activations).
        w13_H2FD: ``[H, 2F, D]`` gate and up weights of the home slots, dtype of ``x_TD``.
        w2_HDF: ``[H, D, F]`` down weights of the home slots, dtype of ``x_TD``.
        handle: the use, from ``step.handle(...)`` or :class:`relibra.BalancedMoE`.

    Returns:
        ``[T, D]`` in the dtype of ``x_TD``.

    Raises:
        TypeError, ValueError: an argument breaks the contract above.
        ReplicaSyncError: a collective failed or timed out.
    """
    _check(x_TD, scores_TK, w13_H2FD, w2_HDF, handle)
    apply: Callable[..., torch.Tensor] = _BalancedMoE.apply
    return apply(x_TD, scores_TK, w13_H2FD, w2_HDF, handle)


def _check(
    x: torch.Tensor, scores: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, handle: MoEHandle
) -> None:
    check_tensor("x_TD", x, ndim=2)
    if not x.is_floating_point():
        raise TypeError(f"x_TD: need a floating-point dtype, got {x.dtype}")
    num_tokens, num_choices = handle.tables.ids_TK.shape
    if x.shape[0] != num_tokens:
        raise ValueError(f"x_TD: need {num_tokens} tokens for {handle.what}, got {x.shape[0]}")
    check_tensor("scores_TK", scores, shape=(num_tokens, num_choices), device=x.device)
    if not scores.is_floating_point():
        raise TypeError(f"scores_TK: need a floating-point dtype, got {scores.dtype}")
    check_tensor("w13_H2FD", w13, dtype=x.dtype, ndim=3, device=x.device)
    num_home, rows13, width = w13.shape
    if rows13 % 2 or width != x.shape[1]:
        raise ValueError(f"w13_H2FD: need [H, 2F, D] with D = {x.shape[1]}, got {list(w13.shape)}")
    check_tensor("w2_HDF", w2, dtype=x.dtype, shape=(num_home, width, rows13 // 2), device=x.device)
    if num_home > handle.tables.slot_rows_n.numel():
        raise ValueError(
            f"w13_H2FD: need at most {handle.tables.slot_rows_n.numel()} home slots for the "
            f"tables of {handle.what}, got {num_home}"
        )


class _BalancedMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        handle: MoEHandle,
    ) -> torch.Tensor:
        tables = handle.tables
        wide_TK = scores_TK.to(accumulation_dtype(x_TD.dtype))
        x_UD, scores_UK = dispatch_tokens(x_TD, wide_TK, handle)
        replica13, replica2 = handle.movers.push((w13, w2), tables, handle.what)
        h_R2F, a_RF = _relibra.expert_up(
            x_UD,
            tables.row_to_token_R,
            [w13],
            None,
            replica13,
            tables.mtile_B4,
            handle.block_rows,
            handle.is_exact,
            backend=handle.kernels,
        )
        y_RD = _gemm(_relibra.grouped_gemm, a_RF, w2, replica2, handle)
        del a_RF  # made again from h in the backward
        combine = combine_exact if handle.is_exact else combine_reduced
        ctx.handle = handle
        ctx.scores_dtype = scores_TK.dtype
        ctx.params = (w13, w2)  # saved tensors lose attributes such as main_grad under recompute
        ctx.save_for_backward(x_UD, h_R2F, scores_UK, w13, w2)
        return combine(y_RD, wide_TK, scores_UK, handle)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle: MoEHandle = ctx.handle
        if torch.is_grad_enabled():  # create_graph=True; its result would silently be a constant
            raise RuntimeError(f"{handle.what}: balanced_moe has no second derivative")
        handle.movers.enter_backward(handle)
        x_UD, h_R2F, scores_UK, w13, w2 = ctx.saved_tensors
        needs_x, needs_scores, needs_w13, needs_w2 = ctx.needs_input_grad[:4]
        tables = handle.tables
        dy_UD = dispatch_grads(dy_TD, handle)
        replica13, replica2 = handle.movers.push((w13, w2), tables, handle.what)
        score_R = _relibra.row_scores(
            scores_UK, tables.row_to_choice_R, tables.token_choice_to_row_UK, handle.kernels
        )
        dh_R2F, scored_RF, dscore_R = _relibra.expert_down_backward(
            dy_UD,
            tables.row_to_token_R,
            [w2],
            None,
            replica2,
            h_R2F,
            score_R,
            tables.mtile_B4,
            handle.block_rows,
            handle.is_exact,
            backend=handle.kernels,
        )
        dx_TD = dscores_TK = None
        if needs_x:
            dx_RD = _gemm(_relibra.grouped_gemm_dgrad, dh_R2F, w13, replica13, handle)
            dx_TD = return_dx(dx_RD, handle)
            del dx_RD
        if needs_scores:
            dscores_TK = return_dscores(dscore_R, handle).to(ctx.scores_dtype)
        grads: tuple[torch.Tensor | None, ...] = (None, None)
        if needs_w13 or needs_w2:
            operands = (x_UD, dy_UD, dh_R2F, scored_RF)
            grads = _weight_grads(ctx.params, operands, (needs_w13, needs_w2), handle)
        handle.movers.leave_backward(handle)
        return dx_TD, dscores_TK, *grads, None


def _gemm(
    op: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    home: torch.Tensor,
    replica: torch.Tensor,
    handle: MoEHandle,
) -> torch.Tensor:
    """One of the two row-wise products, over the tiles of this use."""
    mtile = handle.tables.mtile_B4
    return op(rows, home, replica, mtile, handle.block_rows, handle.is_exact, handle.kernels)


def _weight_grads(
    weights: tuple[torch.Tensor, torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    needs: tuple[bool, bool],
    handle: MoEHandle,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the home weights, those of their replicas included exactly once.

    Args:
        weights: w13 and w2 of the home slots.
        operands: received tokens, their output gradients, gradients of h, score * a.
        needs: which of the weights want a gradient.
        handle: of this use.
    """
    tables, movers = handle.tables, handle.movers
    used = [i for i, needed in enumerate(needs) if needed]
    chosen = tuple(weights[i] for i in used)
    into_main = handle.grad_mode == "main_grad"
    home = tuple(main_grad_of(w) if into_main else _empty_grad(w) for w in chosen)
    num_replica = tables.slot_rows_n.numel() - weights[0].shape[0]  # the runtime may have more
    replica = tuple(slots[:num_replica] for slots in movers.replica_grads(chosen))
    pairs: list[torch.Tensor | None] = [None] * 4
    for i, home_grad, replica_grad in zip(used, home, replica, strict=True):
        pairs[2 * i : 2 * i + 2] = home_grad, replica_grad
    _relibra.expert_wgrad(
        *operands,
        tables.row_to_token_R,
        tables.slot_rows_n,
        handle.block_rows,
        *pairs,
        into_main,
        handle.kernels,
    )
    movers.reduce(replica, home, tables, handle.what)
    out: list[torch.Tensor | None] = [None, None]
    for i, home_grad in zip(used, home, strict=True):
        out[i] = _dummy_grad(weights[i]) if into_main else home_grad.to(weights[i].dtype)
    return tuple(out)


def _empty_grad(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=accumulation_dtype(weight.dtype), device=weight.device)


def main_grad_of(weight: torch.Tensor) -> torch.Tensor:
    """The host's fp32 gradient buffer of a parameter.

    Raises:
        ValueError: there is none, or its shape differs.
        TypeError: it is not fp32 (fp64 for fp64 weights).
    """
    grad = getattr(weight, "main_grad", None)
    need = accumulation_dtype(weight.dtype)
    if not isinstance(grad, torch.Tensor):
        raise ValueError(
            'main_grad: grad_mode="main_grad" needs a tensor param.main_grad on every expert '
            f"parameter, got {grad!r}"
        )
    if grad.dtype != need:
        raise TypeError(f"main_grad: need {need} (accumulation in {grad.dtype} loses rows)")
    if grad.shape != weight.shape or not grad.is_contiguous():
        raise ValueError(
            f"main_grad: need a contiguous {list(weight.shape)} tensor, got {list(grad.shape)}"
        )
    return grad


def _dummy_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets in ``main_grad`` mode.

    Hosts with gradient-accumulation fusion set ``grad_added_to_main_grad`` on the parameter and
    require that ``param.grad`` is not None; it carries no value.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
