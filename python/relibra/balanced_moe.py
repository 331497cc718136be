"""The balanced MoE autograd function: dispatch, push, experts, combine, and the way back.

One autograd node holds every collective of one layer, so all ranks meet in the same order whatever
their plans make them compute. Its stages are in `relibra.layer_passes`.

Letters: T tokens here, K choices, D model dim, F expert dim, H home slots, S replica slots.
Source: ReLibra (arXiv 2605.08639), section 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch

from relibra.expert_weights import ExpertWeights, Field, check_weights
from relibra.layer_options import LayerOptions, check_options
from relibra.layer_passes import Kept, LayerCall, run_backward, run_forward
from relibra.stages import (
    DispatchedTokens,
    PendingOutput,
    Stages,
    check_dispatched,
    check_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relibra.rank_tables import LayerTables
    from relibra.static_slots import LayerCopies
    from relibra.token_exchange import PendingTokens
    from relibra_kernels.transport.dispatch import Arrival
    from relibra_kernels.transport.two_hop import Relay

COMBINE_MODES = ("reduced", "exact")
GRAD_MODES = ("returned", "main_grad")

_DEFAULTS = LayerOptions()


class Movers(Protocol):
    """What the autograd function needs from the runtime: transports and replica storage."""

    def exchange(
        self, x: torch.Tensor, send_splits: list[int], recv_splits: list[int], what: str
    ) -> torch.Tensor:
        """All-to-all of rows."""

    def start_exchange(
        self,
        x: torch.Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        what: str,
        channel: str = "",
    ) -> Arrival:
        """`exchange` without waiting; ``x`` stays unchanged until the rows are waited for.

        Args:
            x: ``[V, ...]``, rows by destination rank.
            send_splits: rows to each rank.
            recv_splits: rows from each rank.
            what: names the exchange.
            channel: of `relibra_kernels.transport.row_arena`, "" for rows of no channel.
        """

    def start_relay(self, x: torch.Tensor, relay: Relay, what: str) -> Arrival:
        """Rows over the two hops of a `relibra.hop_tables.HopPaths`, without waiting."""

    def push(
        self, weights: Mapping[str, torch.Tensor], tables: LayerTables, what: str
    ) -> dict[str, torch.Tensor]:
        """Weights of home and static slots -> replica slots.

        Args:
            weights: ``[H + X, ...]`` by field.
            tables: of this use.
            what: names the use.

        Returns:
            The replica buffers ``[S, ...]`` by field.
        """

    def release_weights(self) -> None:
        """The replica buffers of the last push were read for the last time."""

    def replica_grads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradient buffers ``[S, ...]`` for the replica slots; contents are undefined.

        Args:
            weights: all fields of the home slots, so that every call gives the same buffers.
        """

    def reduce(
        self,
        replica_grads: Mapping[str, torch.Tensor],
        home_grads: Mapping[str, torch.Tensor],
        tables: LayerTables,
        what: str,
    ) -> None:
        """Adds replica gradients to ``home_grads`` in ascending (rank, slot) order, by field."""

    def note_stage(self, stage: str, *, is_open: bool) -> None:
        """A stage handle was made, or used; one that is left over is named at the step's end."""

    def enter_experts(self, handle: MoEHandle, detail: str) -> None:
        """Called first in the forward of a use; ``detail`` must be the same on all ranks."""

    def enter_backward(self, handle: MoEHandle, detail: str) -> None:
        """Called first in the backward of a use, on the thread that runs it.

        Args:
            handle: of the use.
            detail: which gradients are wanted, the same on all ranks.
        """

    def leave_backward(self, handle: MoEHandle) -> None:
        """Called last in the backward of a use."""


class VirtualLayer(Protocol):
    """All ranks of a layer in one process, behind the handle of their joined tokens."""

    def start_tokens(self, x_TD: torch.Tensor, scores_TK: torch.Tensor) -> PendingTokens:
        """As `relibra.token_exchange.start_tokens`."""

    def forward(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        call: LayerCall,
        dispatched: PendingTokens | None,
    ) -> tuple[Arrival, Kept]:
        """As `relibra.layer_passes.run_forward`."""

    def backward(
        self,
        dy_TD: torch.Tensor,
        kept: Kept,
        call: LayerCall,
        weights: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """As `relibra.layer_passes.run_backward`."""


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
        static, static_grads: field name -> ``[X, ...]`` weights of the static slots, and where
            their gradients go; None without static slots.
        static_copies: sums these gradients over the optimizer step, and knows the parameters that
            the static slots are copies of; None outside a training step.
        virtual: the ranks whose joined use this is, None for a use of one rank.
    """

    tables: LayerTables
    movers: Movers
    what: str
    combine: str = "reduced"
    grad_mode: str = "returned"
    block_rows: int = 16
    key: tuple[str, int, str, int, int] | None = None
    kernels: str = "auto"
    static: Mapping[str, torch.Tensor] | None = None
    static_grads: Mapping[str, torch.Tensor] | None = None
    static_copies: LayerCopies | None = None
    virtual: VirtualLayer | None = None

    @property
    def num_static(self) -> int:
        """X, static slots in the tables."""
        return 0 if self.static is None else len(next(iter(self.static.values())))

    @property
    def is_exact(self) -> bool:
        """Whether results must not depend on the plan in any bit."""
        return self.combine == "exact"


@overload
def balanced_moe(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    w13_H2FD: Field,
    w2_HDF: Field,
    *,
    handle: MoEHandle,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    options: LayerOptions = _DEFAULTS,
    dispatched: DispatchedTokens | None = None,
    wait: Literal[True] = True,
) -> torch.Tensor: ...


@overload
def balanced_moe(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    w13_H2FD: Field,
    w2_HDF: Field,
    *,
    handle: MoEHandle,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    options: LayerOptions = _DEFAULTS,
    dispatched: DispatchedTokens | None = None,
    wait: Literal[False],
) -> PendingOutput: ...


def balanced_moe(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    w13_H2FD: Field,
    w2_HDF: Field,
    *,
    handle: MoEHandle,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    options: LayerOptions = _DEFAULTS,
    dispatched: DispatchedTokens | None = None,
    wait: bool = True,
) -> torch.Tensor | PendingOutput:
    """Experts over balanced slots: ``y[t] = sum_k scores[t, k] * expert(ids[t, k])(x[t])``.

    With ``expert(x) = w2 @ activation(w13 @ x + b13) + b2``; see `LayerOptions` for its forms.
    Correctness does not depend on the plan behind ``handle``; only the balance does. The expert
    ids are those of ``handle.tables``. Scores are used as given, never renormalised.

    Args:
        x_TD: ``[T, D]`` activations, any float dtype.
        scores_TK: ``[T, K]`` weights of the choices, any float dtype; used, and sent, in fp32
            (fp64 with fp64 activations).
        w13_H2FD: ``[H, 2F, D]`` gate and up weights of the home slots, dtype of ``x_TD``; or a
            tuple of H tensors ``[2F, D]``, one parameter an expert.
        w2_HDF: ``[H, D, F]`` down weights of the home slots, dtype of ``x_TD``; or a tuple.
        handle: the use, from ``step.handle(...)`` or :class:`relibra.BalancedMoE`.
        b13: ``[H, 2F]`` biases in the order of the rows of ``w13``; None without.
        b2: ``[H, D]`` biases of the outputs; None without.
        options: activation, storage, and what is kept for the backward.
        dispatched: these tokens on their way, from :func:`relibra.dispatch`; None sends them here.
        wait: False returns while the outputs are on their way back.

    Returns:
        ``[T, D]`` in the dtype of ``x_TD``; without ``wait`` a `relibra.stages.PendingOutput`,
        whose ``wait()`` gives it.

    Raises:
        TypeError, ValueError: an argument breaks the contract above.
        RuntimeError: ``dispatched`` was used before.
        ReplicaSyncError: a collective failed or timed out.
    """
    call = LayerCall(handle, options, ExpertWeights(w13_H2FD, w2_HDF, b13, b2))
    check_call(x_TD, scores_TK, call)
    if dispatched is not None:
        check_dispatched(dispatched)
        dispatched.check(x_TD, scores_TK, handle)
    stages = Stages(dispatched, wait)
    apply: Callable[..., torch.Tensor] = _BalancedMoE.apply
    y_TD = apply(x_TD, scores_TK, call, stages, *call.weights.flatten())
    return y_TD if stages.rows is None else PendingOutput(y_TD, stages.rows, handle)


def check_call(x: torch.Tensor, scores: torch.Tensor, call: LayerCall) -> None:
    """Raise unless the arguments of a layer keep the contract of :func:`balanced_moe`.

    Args:
        x: ``[T, D]``.
        scores: ``[T, K]``.
        call: of the use.

    Raises:
        TypeError, ValueError: an argument that does not.
    """
    handle = call.handle
    check_options(call.options)
    check_tokens(x, scores, handle)
    check_weights(call.weights, x, call.options)
    if call.weights.num_slots != handle.tables.num_home:
        raise ValueError(
            f"w13_H2FD: need {handle.tables.num_home} home slots for the tables of {handle.what}, "
            f"got {call.weights.num_slots}"
        )
    if handle.static_copies is not None:
        handle.static_copies.check_home(call.weights, handle.what)


class _BalancedMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        call: LayerCall,
        stages: Stages,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        tokens = None if stages.dispatched is None else stages.dispatched.take()
        rows, kept = run_forward(x_TD, scores_TK, call, tokens)
        ctx.call = call  # saved tensors lose attributes such as main_grad under recompute
        ctx.scores_dtype = kept.scores_dtype
        ctx.save_for_backward(kept.tokens, kept.h_R2F, kept.scores_UK, *weights)
        return stages.output(rows, x_TD)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; its result would silently be a constant
            raise RuntimeError(f"{ctx.call.handle.what}: balanced_moe has no second derivative")
        tokens, h_R2F, scores_UK, *weights = ctx.saved_tensors
        kept = Kept(tokens, h_R2F, scores_UK, ctx.scores_dtype)
        needs_x, needs_scores, _, _, *needs = ctx.needs_input_grad
        dx, dscores, *grads = run_backward(
            dy_TD, kept, ctx.call, weights, (needs_x, needs_scores, *needs)
        )
        return dx, dscores, None, None, *grads
