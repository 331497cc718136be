"""What a `BalancedMoE` is inside a compiled graph: two ops that find it by number when they run.

The eager autograd node and the ops run the same code (`relibra.balanced_moe`). Its saved tensors
stay here, under the number on the ticket that the graph keeps, exactly as long as the graph keeps
it: a graph that is dropped, recomputed or never differentiated lets go of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra.balanced_moe import check_call
from relibra.expert_weights import ExpertWeights
from relibra.layer_passes import Kept, LayerCall, run_backward, run_forward
from relibra_kernels.registry import register

if TYPE_CHECKING:
    from relibra.module import BalancedMoE


class CompiledLayer:
    """The object behind the ``layer_id`` of one module; see `relibra_kernels.ops.moe_layer`.

    Args:
        moe: the module; it holds this object, not the other way round.

    Attributes:
        layer_id: int64 ``[1]`` on the CPU.
        kept: number on the ticket -> what the forward kept.
    """

    def __init__(self, moe: BalancedMoE) -> None:
        self._moe = weakref.ref(moe)
        self._numbers = itertools.count()  # of tickets; never used twice
        self.kept: dict[int, tuple[LayerCall, Kept]] = {}
        self.layer_id = torch.tensor([register(self)], dtype=torch.int64, device="cpu")

    def run_forward(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        weights: tuple[torch.Tensor | None, ...],
        expert_ids_TK: torch.Tensor | None,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the use that is current now, and the ticket; keeps nothing without ``keep``."""
        moe = self._module()
        handle = moe._handle(expert_ids_TK, x_TD.shape[0])
        call = LayerCall(handle, moe.options, _weights(weights))
        check_call(x_TD, scores_TK, call)
        with torch.no_grad():
            rows, kept = run_forward(x_TD, scores_TK, call)
            y_TD = rows.wait()
        if not keep:
            return y_TD, self._ticket(None)
        if moe.options.save == "redispatch":  # the graph keeps its own tensor, and may reuse ours
            kept = dataclasses.replace(kept, tokens=x_TD.new_empty(0))
        return y_TD, self._ticket((dataclasses.replace(call, weights=moe.expert_weights), kept))

    def run_backward(
        self,
        ticket: torch.Tensor,
        dy_TD: torch.Tensor,
        weights: tuple[torch.Tensor | None, ...],
        x_TD: torch.Tensor | None,
        needs: tuple[bool, ...],
        into_main: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, scores, w13, w2, b13, b2 in the use of the forward that wrote the ticket.

        Raises:
            RuntimeError: nothing is kept for the ticket, or the layer was compiled under another
                ``grad_mode`` than its runtime has.
        """
        found = self.kept.get(int(ticket[1]))
        if found is None:
            raise RuntimeError(
                f"ticket: layer {self._module().layer} keeps nothing for number {int(ticket[1])}; "
                "tensors that a compiled graph saves must not be copied, as by some hooks of "
                "torch.autograd.graph.saved_tensors_hooks"
            )
        call, kept = found
        if into_main != (call.handle.grad_mode == "main_grad"):
            raise RuntimeError(
                f"{call.handle.what}: compiled for weight gradients "
                f"{'in main_grad' if into_main else 'to autograd'}, got "
                f"grad_mode={call.handle.grad_mode!r}; attach before the first forward"
            )
        if call.options.save == "redispatch":
            if x_TD is None:
                raise RuntimeError(
                    f'{call.handle.what}: compiled for save="copy", got options.save="redispatch"'
                )
            kept = dataclasses.replace(kept, tokens=x_TD)
        given = [i for i, weight in enumerate(weights) if weight is not None]
        flat_needs = (*needs[:2], *(needs[2 + i] for i in given))
        with torch.no_grad():
            dx, dscores, *grads = run_backward(
                dy_TD, kept, call, _weights(weights).flatten(), flat_needs
            )
        spread: list[torch.Tensor | None] = [None] * len(weights)
        for i, grad in zip(given, grads, strict=True):
            spread[i] = None if into_main else grad
        return dx, dscores, *spread

    def _module(self) -> BalancedMoE:
        moe = self._moe()
        if moe is None:
            raise RuntimeError("layer_id: the BalancedMoE module of this layer is gone")
        return moe

    def _ticket(self, kept: tuple[LayerCall, Kept] | None) -> torch.Tensor:
        """``[layer_id, number]``; its memory goes back when the last user of its storage does."""
        number = -1 if kept is None else next(self._numbers)
        cells = np.array([int(self.layer_id[0]), number], dtype=np.int64)
        if kept is not None:
            self.kept[number] = kept
            weakref.finalize(cells, self.kept.pop, number, None).atexit = False
        return torch.from_numpy(cells)


def _weights(tensors: tuple[torch.Tensor | None, ...]) -> ExpertWeights:
    """From the inputs of the ops: w13, w2, b13, b2."""
    w13, w2, b13, b2 = tensors
    assert w13 is not None
    assert w2 is not None
    return ExpertWeights(w13, w2, b13, b2)
