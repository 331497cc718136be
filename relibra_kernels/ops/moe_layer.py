"""The whole MoE layer as two opaque ops, for ``torch.compile``.

A layer under a plan looks up the current micro-batch and moves as many rows as its tables say.
Traced, both would become constants of the graph. So the graph sees one forward op, whose
``layer_id`` is the number of a live object in `relibra_kernels.registry`, and one backward op,
whose ``ticket`` says which forward it belongs to; the object finds the current use **when they
run**.

Both numbers are CPU tensors and not integers: an integer is a guard, so that every layer would
compile anew. Received tokens and the first GEMM's output have sizes that only the plan knows; they
stay with the object for as long as the graph keeps the ticket. A layer that dispatches its input
once more in the backward gets it from the graph (``saves_x``). Biases are inputs, None where the
layer has none; every other option stays with the object. Replica buffers and ``main_grad``
never enter the graph, which would clone them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from relibra_kernels.checks import check_choice, check_tensor, describe
from relibra_kernels.registry import lookup

DEVICES = ("cpu", "cuda")
# Where weight gradients go: to autograd, to param.main_grad, or there with a dummy for autograd.
WEIGHT_GRADS = ("returned", "main_grad", "dummy")


@runtime_checkable
class OpaqueLayer(Protocol):
    """What the two ops call: a layer that knows its current use."""

    def run_forward(
        self,
        x_TD: Tensor,
        scores_TK: Tensor,
        weights: tuple[Tensor | None, ...],
        expert_ids_TK: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        """The output ``[T, D]`` and the ticket, int64 ``[2]`` on the CPU; weights as the op's."""

    def run_backward(
        self,
        ticket: Tensor,
        dy_TD: Tensor,
        weights: tuple[Tensor | None, ...],
        x_TD: Tensor | None,
        needs: tuple[bool, ...],
        into_main: bool,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, scores, w13, w2, b13, b2; None for those that autograd does not get."""


def _layer(id_tensor: Tensor, name: str) -> OpaqueLayer:
    check_tensor(name, id_tensor, dtype=torch.int64, device=torch.device("cpu"))
    layer_id = int(id_tensor[0])
    try:
        found = lookup(layer_id)
    except ValueError:
        raise RuntimeError(
            f"{name}: need the id of a live BalancedMoE of this process, got {layer_id}; "
            "its module is gone, so compile the model that holds the new one"
        ) from None
    if not isinstance(found, OpaqueLayer):
        raise TypeError(f"{name}: need the id of a BalancedMoE layer, got {describe(found)}")
    return found


@torch.library.custom_op("relibra::moe_forward", mutates_args=(), device_types=DEVICES)
def moe_forward(
    x_TD: Tensor,
    scores_TK: Tensor,
    w13_H2FD: Tensor,
    w2_HDF: Tensor,
    expert_ids_TK: Tensor | None,
    layer_id: Tensor,
    keep: bool,
    weight_grads: str,
    b13_H2F: Tensor | None = None,
    b2_HD: Tensor | None = None,
    saves_x: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output of the layer in its current use, and the ticket for its backward."""
    check_choice("weight_grads", weight_grads, WEIGHT_GRADS)
    layer = _layer(layer_id, "layer_id")
    weights = (w13_H2FD, w2_HDF, b13_H2F, b2_HD)
    return layer.run_forward(x_TD, scores_TK, weights, expert_ids_TK, keep)


@moe_forward.register_fake
def _(
    x_TD: Tensor,
    scores_TK: Tensor,
    w13_H2FD: Tensor,
    w2_HDF: Tensor,
    expert_ids_TK: Tensor | None,
    layer_id: Tensor,
    keep: bool,
    weight_grads: str,
    b13_H2F: Tensor | None = None,
    b2_HD: Tensor | None = None,
    saves_x: bool = False,
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("relibra::moe_backward", mutates_args=(), device_types=DEVICES)
def moe_backward(
    dy_TD: Tensor,
    w13_H2FD: Tensor,
    w2_HDF: Tensor,
    ticket: Tensor,
    num_choices: int,
    scores_dtype: torch.dtype,
    needs: list[bool],
    weight_grads: str,
    b13_H2F: Tensor | None = None,
    b2_HD: Tensor | None = None,
    x_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, scores, w13, w2, b13, b2; empty where not needed or in ``main_grad``."""
    check_choice("weight_grads", weight_grads, WEIGHT_GRADS)
    layer, into_main = _layer(ticket, "ticket"), weight_grads != "returned"
    weights = (w13_H2FD, w2_HDF, b13_H2F, b2_HD)
    grads = layer.run_backward(ticket, dy_TD, weights, x_TD, tuple(needs), into_main)
    dtypes = (dy_TD.dtype, scores_dtype, *(w13_H2FD.dtype,) * 4)
    dx, dscores, dw13, dw2, db13, db2 = (
        dy_TD.new_empty(0, dtype=dtype) if grad is None else grad
        for grad, dtype in zip(grads, dtypes, strict=True)
    )
    return dx, dscores, dw13, dw2, db13, db2


@moe_backward.register_fake
def _(
    dy_TD: Tensor,
    w13_H2FD: Tensor,
    w2_HDF: Tensor,
    ticket: Tensor,
    num_choices: int,
    scores_dtype: torch.dtype,
    needs: list[bool],
    weight_grads: str,
    b13_H2F: Tensor | None = None,
    b2_HD: Tensor | None = None,
    x_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx = dy_TD.new_empty(dy_TD.shape if needs[0] else (0,))
    shape = (dy_TD.shape[0], num_choices) if needs[1] else (0,)
    dscores = dy_TD.new_empty(shape, dtype=scores_dtype)
    dw13, dw2, db13, db2 = (
        w13_H2FD.new_empty(
            weight.shape if weight is not None and need and weight_grads == "returned" else (0,)
        )
        for weight, need in zip((w13_H2FD, w2_HDF, b13_H2F, b2_HD), needs[2:], strict=True)
    )
    return dx, dscores, dw13, dw2, db13, db2


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, scores, w13, w2, *_, weight_grads, b13, b2, saves_x = inputs
    ctx.save_for_backward(w13, w2, b13, b2, x if saves_x else None, output[1])
    ctx.num_choices, ctx.scores_dtype = scores.shape[1], scores.dtype
    ctx.weight_grads = weight_grads


def _backward(ctx: Any, dy_TD: Tensor, _ticket_grad: Tensor | None) -> tuple[Any, ...]:
    *weights, x, ticket = ctx.saved_tensors
    # Trailing arguments that were left at their defaults are missing.
    mode, asked = ctx.weight_grads, (*ctx.needs_input_grad, False, False, False)
    needs = [*asked[:4], *asked[8:10]]  # x, scores, w13, w2 and b13, b2
    grads: list[Tensor | None] = list(
        torch.ops.relibra.moe_backward(
            dy_TD, *weights[:2], ticket, ctx.num_choices, ctx.scores_dtype, needs, mode,
            *weights[2:], x,
        )
    )  # fmt: skip
    # An op none of whose outputs is used is removed from the graph, and main_grad would miss it.
    if mode == "dummy" or (mode == "main_grad" and not any(needs[:2])):
        for i, weight in enumerate(weights, 2):
            grad = grads[i]
            if grad is not None and weight is not None:  # of nothing: exact zeros
                grads[i] = grad.sum().to(weight.dtype).expand(weight.shape)
    elif mode == "main_grad":
        grads[2:] = [None] * 4
    used = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return (*used[:4], None, None, None, None, *used[4:], None)


moe_forward.register_autograd(_backward, setup_context=_context)
