"""What a `BalancedMoE` is inside a compiled graph: two ops that find it by number when they run.

The eager autograd node and the ops run the same code (`relibra.balanced_moe`). Its saved tensors
stay here, under the number on the ticket that the graph keeps, exactly as long as the graph keeps
it: a graph that is dropped, recomputed or never differentiated lets go of them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relibra.balanced_moe import _BalancedMoE, _check
from relibra_kernels.registry import register

if TYPE_CHECKING:
    from relibra.balanced_moe import MoEHandle
    from relibra.module import BalancedMoE

_numbers = itertools.count()  # never used twice, so a ticket of a copied layer fits no other


class _Kept:
    """Stands for the context of the autograd node: what one forward left for its backward."""

    handle: MoEHandle
    params: tuple[torch.Tensor, ...]

    def __init__(self) -> None:
        self.saved_tensors: tuple[torch.Tensor, ...] = ()
        self.needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keeps all but the weights (the last two), which the graph saves itself."""
        self.saved_tensors = tensors[:-2]


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
        self.kept: dict[int, _Kept] = {}
        self.layer_id = torch.tensor([register(self)], dtype=torch.int64, device="cpu")

    def run_forward(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        expert_ids_TK: torch.Tensor | None,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the use that is current now, and the ticket; keeps nothing without ``keep``."""
        moe, kept = self._module(), _Kept()
        handle = moe._handle(expert_ids_TK, x_TD.shape[0])
        _check(x_TD, scores_TK, *weights, handle)
        with torch.no_grad():
            y_TD = _BalancedMoE.forward(kept, x_TD, scores_TK, *weights, handle)
        kept.params = (moe.w13, moe.w2)
        return y_TD, self._ticket(kept if keep else None)

    def run_backward(
        self,
        ticket: torch.Tensor,
        dy_TD: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        needs: tuple[bool, ...],
        into_main: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, scores, w13, w2 in the use of the forward that wrote the ticket.

        Raises:
            RuntimeError: nothing is kept for the ticket, or the layer was compiled under another
                ``grad_mode`` than its runtime has.
        """
        kept = self.kept.get(int(ticket[1]))
        if kept is None:
            raise RuntimeError(
                f"ticket: layer {self._module().layer} keeps nothing for number {int(ticket[1])}; "
                "tensors that a compiled graph saves must not be copied, as by some hooks of "
                "torch.autograd.graph.saved_tensors_hooks"
            )
        if into_main != (kept.handle.grad_mode == "main_grad"):
            raise RuntimeError(
                f"{kept.handle.what}: compiled for weight gradients "
                f"{'in main_grad' if into_main else 'to autograd'}, got "
                f"grad_mode={kept.handle.grad_mode!r}; attach before the first forward"
            )
        context: Any = _Kept()
        context.__dict__.update(kept.__dict__)  # a retained graph may come back
        context.saved_tensors = (*kept.saved_tensors, *weights)
        context.needs_input_grad = needs
        with torch.no_grad():
            grads = _BalancedMoE.backward(context, dy_TD)[:4]
        return (*grads[:2], None, None) if into_main else grads

    def _module(self) -> BalancedMoE:
        moe = self._moe()
        if moe is None:
            raise RuntimeError("layer_id: the BalancedMoE module of this layer is gone")
        return moe

    def _ticket(self, kept: _Kept | None) -> torch.Tensor:
        """``[layer_id, number]``; its memory goes back when the last user of its storage does."""
        number = -1 if kept is None else next(_numbers)
        cells = np.array([int(self.layer_id[0]), number], dtype=np.int64)
        if kept is not None:
            self.kept[number] = kept
            weakref.finalize(cells, self.kept.pop, number, None).atexit = False
        return torch.from_numpy(cells)
