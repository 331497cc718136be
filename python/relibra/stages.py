"""Handles of the stages of one layer, for hosts that compute something else in between.

The tokens leave with :func:`dispatch`, the outputs arrive in ``PendingOutput.wait``; between the
two lie the experts (`relibra.balanced_moe`). One autograd node still holds all collectives of the
backward, which overlaps on its own. Every rank calls the stages of its layers in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relibra.token_exchange import start_tokens
from relibra_kernels.checks import check_tensor, describe
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.thread_state import graph_task_id

if TYPE_CHECKING:
    from relibra.balanced_moe import MoEHandle
    from relibra.token_exchange import PendingTokens
    from relibra_kernels.transport.dispatch import Arrival


def check_tokens(x: torch.Tensor, scores: torch.Tensor, handle: MoEHandle) -> None:
    """Raise unless activations and scores fit the tables of a use.

    Args:
        x: ``[T, D]``.
        scores: ``[T, K]``.
        handle: of the use.

    Raises:
        TypeError, ValueError: what does not fit.
    """
    if getattr(handle, "tables", None) is None:
        need = "a MoEHandle, as step.handle(...) gives it"
        raise TypeError(f"handle: need {need}, got {describe(handle)}")
    check_tensor("x_TD", x, ndim=2)
    if not x.is_floating_point():
        raise TypeError(f"x_TD: need a floating-point dtype, got {x.dtype}")
    num_tokens, num_choices = handle.tables.ids_TK.shape
    if x.shape[0] != num_tokens:
        raise ValueError(f"x_TD: need {num_tokens} tokens for {handle.what}, got {x.shape[0]}")
    check_tensor("scores_TK", scores, shape=(num_tokens, num_choices), device=x.device)
    if not scores.is_floating_point():
        raise TypeError(f"scores_TK: need a floating-point dtype, got {scores.dtype}")


class DispatchedTokens:
    """Tokens of one use on their way to their destinations; made by :func:`dispatch`.

    Attributes:
        x_TD, scores_TK, handle: what was dispatched.
    """

    def __init__(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        handle: MoEHandle,
        rows: PendingTokens,
    ) -> None:
        self.x_TD, self.scores_TK, self.handle = x_TD, scores_TK, handle
        self._versions = [_version(part) for part in (x_TD, scores_TK)]
        self._rows: PendingTokens | None = rows
        _note_made(handle, self._stage)

    @property
    def _stage(self) -> str:
        return f"{self.handle.what}: tokens were dispatched, no balanced_moe took them"

    def check(self, x_TD: torch.Tensor, scores_TK: torch.Tensor, handle: MoEHandle) -> None:
        """Raise unless these are what was dispatched, and nobody took it yet.

        Args:
            x_TD: the very tensor.
            scores_TK: the very tensor.
            handle: the same.

        Raises:
            ValueError: another tensor, or one that changed since.
            RuntimeError: the second use.
        """
        what = self.handle.what
        if handle is not self.handle:
            raise ValueError(f"dispatched: need the tokens of {handle.what}, got those of {what}")
        given, held = (x_TD, scores_TK), (self.x_TD, self.scores_TK)
        names = ("x_TD", "scores_TK")
        for name, a, b, version in zip(names, given, held, self._versions, strict=True):
            if a is not b:
                raise ValueError(f"{name}: need the tensor that was dispatched for {what}")
            if _version(a) != version:
                raise ValueError(
                    f"{name}: need it as dispatched for {what}, got it changed in place since"
                )
        if self._rows is None:
            raise RuntimeError(f"dispatched: need unused tokens, got those of {what} again")

    def take(self) -> PendingTokens:
        """The exchange in flight, once."""
        rows, self._rows = self._rows, None
        assert rows is not None
        self.handle.movers.note_stage(self._stage, is_open=False)
        return rows


def dispatch(x_TD: torch.Tensor, scores_TK: torch.Tensor, *, handle: MoEHandle) -> DispatchedTokens:
    """Starts to send the tokens of a use; :func:`relibra.balanced_moe` takes them.

    Not differentiated: gradients flow through the node of ``balanced_moe``, which is given the same
    tensors. Whatever is computed between the two overlaps with the exchange, and what is computed
    before ``wait`` with the way back.

    Args:
        x_TD: ``[T, D]`` activations.
        scores_TK: ``[T, K]`` weights of the choices.
        handle: the use.

    Returns:
        To be used exactly once; a step that ends with one left over raises.

    Raises:
        TypeError, ValueError: tensors that do not fit the use.
        ReplicaSyncError: the exchange could not start.

    Example:
        A shared expert runs while tokens and outputs travel:

        >>> import relibra
        >>> moe = relibra.BalancedMoE(4, 8, 16, layer=0)
        >>> x, scores = torch.randn(3, 8), torch.full((3, 2), 0.5)
        >>> ids, shared = torch.tensor([[0, 2], [3, 1], [2, 0]]), torch.nn.Linear(8, 8)
        >>> started = moe.start(x, scores, ids)  # relibra.dispatch, with the handle of the layer
        >>> first = shared(x[:1])
        >>> pending = started.compute()  # relibra.balanced_moe(..., dispatched=, wait=False)
        >>> rest = shared(x[1:])
        >>> y = pending.wait() + torch.cat([first, rest])
        >>> torch.equal(y, moe(x, scores, ids) + torch.cat([first, rest]))
        True
    """
    check_tokens(x_TD, scores_TK, handle)
    with torch.no_grad():
        wide_TK = scores_TK.to(accumulation_dtype(x_TD.dtype))
        rows = start_tokens(x_TD, wide_TK, handle)
    return DispatchedTokens(x_TD, scores_TK, handle, rows)


def check_dispatched(value: object) -> None:
    """Raise unless :func:`dispatch` made this.

    Raises:
        TypeError: something else.
    """
    if not isinstance(value, DispatchedTokens):
        raise TypeError(f"dispatched: need what relibra.dispatch gave, got {describe(value)}")


class Stages:
    """What one call of the autograd node takes from, and leaves for, its stages.

    Args:
        dispatched: tokens on their way, None to dispatch inside the node.
        wait: wait for the outputs inside the node.

    Attributes:
        rows: the outputs on their way, without ``wait``.
    """

    def __init__(self, dispatched: DispatchedTokens | None, wait: bool) -> None:
        self.dispatched, self.wait = dispatched, wait
        self.rows: Arrival | None = None

    def output(self, rows: Arrival, x_TD: torch.Tensor) -> torch.Tensor:
        """``[T, D]``: the sums, or memory that `PendingOutput` fills."""
        if self.wait:
            return rows.wait()
        self.rows = rows
        return torch.empty_like(x_TD, memory_format=torch.contiguous_format)


class PendingOutput:
    """Outputs of a layer on their way back; ``balanced_moe(..., wait=False)`` makes it.

    They are summed into the output of the autograd node when they are waited for, which costs one
    more copy of ``[T, D]`` than waiting inside.
    """

    def __init__(self, y_TD: torch.Tensor, rows: Arrival, handle: MoEHandle) -> None:
        self._y_TD, self._rows, self._handle = y_TD, rows, handle
        self._is_done = False
        _note_made(handle, self._stage)

    @property
    def _stage(self) -> str:
        return f"{self._handle.what}: outputs were never waited for"

    def wait(self) -> torch.Tensor:
        """``[T, D]``, with the autograd node of the layer; a second call gives it again.

        Raises:
            ReplicaSyncError: a collective failed or timed out.
        """
        if not self._is_done:
            with torch.no_grad():
                self._y_TD.copy_(self._rows.wait())
            self._is_done = True
            del self._rows
            self._handle.movers.note_stage(self._stage, is_open=False)
        return self._y_TD


def _note_made(handle: MoEHandle, stage: str) -> None:
    """Notes a handle, but for recomputed layers: a checkpoint stops before the last is used."""
    if graph_task_id() < 0:
        handle.movers.note_stage(stage, is_open=True)


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version
