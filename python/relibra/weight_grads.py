"""Gradients of the experts' weights and biases, those of their replicas included exactly once.

Letters: U tokens received, R rows computed here, D model dim, F expert dim, H home and S replica
slots. Source: ReLibra (arXiv 2605.08639), section 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from relibra.expert_weights import Field, SlotList, as_list, joined_slots
from relibra_kernels.ops import direct_ops
from relibra_kernels.reference.combine import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relibra.balanced_moe import MoEHandle
    from relibra.expert_weights import ExpertWeights
    from relibra.layer_options import LayerOptions
    from relibra.layer_passes import LayerCall


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the gradients are sums of products of.

    Attributes:
        x_UD: received tokens.
        dy_UD: gradients of their outputs.
        dh_R2F: gradients of the first product.
        scored_RF: score * a.
        score_R: score of every row.
    """

    x_UD: torch.Tensor
    dy_UD: torch.Tensor
    dh_R2F: torch.Tensor
    scored_RF: torch.Tensor
    score_R: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Grads:
    """Buffers of one field's gradients, fp32 (fp64 for fp64).

    Attributes:
        home: ``[H, ...]``, or H tensors where hosts keep one ``main_grad`` an expert.
        replica: ``[S, ...]``.
    """

    home: Field
    replica: torch.Tensor

    @property
    def slots(self) -> Any:
        """``home`` by slot, as transports take it."""
        return SlotList(self.home) if isinstance(self.home, tuple) else self.home


def weight_grads(
    call: LayerCall, needs: Sequence[bool], operands: Operands
) -> tuple[torch.Tensor | None, ...]:
    """One gradient a tensor of the weights; collective.

    Args:
        call: of the forward.
        needs: one a tensor of ``call.weights.flatten()``.
        operands: of the use.

    Returns:
        What autograd gets: the gradient, None where not wanted, or in ``main_grad`` mode what
        hosts expect.
    """
    weights, handle = call.weights, call.handle
    into_main = handle.grad_mode == "main_grad"
    wanted = weights.regroup(needs, any)
    home = _main_grads(weights, needs) if into_main else _new_grads(weights, wanted)
    # The runtime may have more replica slots than the tables of this use.
    num_replica = handle.tables.slot_rows_n.numel() - weights.num_slots - handle.num_static
    replica = handle.movers.replica_grads(weights.slots())
    grads = {
        name: _Grads(home[name], replica[name][:num_replica])
        for name, is_wanted in wanted.items()
        if is_wanted
    }
    _compute(grads, operands, handle, call.options, accumulate_home=into_main)
    # Sums of the optimizer step first: replicas of static copies add to them, maybe later.
    static = {} if handle.static_copies is None else handle.static_copies.add(grads)
    handle.movers.reduce(
        {name: one.replica for name, one in grads.items()},
        {name: joined_slots(one.slots, static.get(name)) for name, one in grads.items()},
        handle.tables,
        handle.what,
    )
    if into_main:
        flat = zip(weights.flatten(), needs, strict=True)
        return tuple(dummy_grad(weight) if needed else None for weight, needed in flat)
    return _returned(weights, needs, grads)


def _main_grads(weights: ExpertWeights, needs: Sequence[bool]) -> dict[str, Any]:
    """Where the hosts want the gradients; a throw-away buffer for a frozen expert among others."""
    flat = [
        main_grad_of(weight) if needed else _empty_grad(weight)
        for weight, needed in zip(weights.flatten(), needs, strict=True)
    ]
    return weights.regroup(flat, tuple)


def _new_grads(weights: ExpertWeights, wanted: Mapping[str, bool]) -> dict[str, torch.Tensor]:
    """New buffers ``[H, ...]``, whatever the storage of the weights."""
    return {name: _empty_grad(slots) for name, slots in weights.slots().items() if wanted[name]}


def _returned(
    weights: ExpertWeights, needs: Sequence[bool], grads: Mapping[str, _Grads]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients in the structure and dtype of the weights."""
    flat: list[torch.Tensor | None] = []
    for name, field in weights.fields().items():
        grad = grads[name].home if name in grads else None
        if isinstance(grad, torch.Tensor) and isinstance(field, tuple):
            flat += grad.to(field[0].dtype).unbind()
        elif isinstance(grad, torch.Tensor) and isinstance(field, torch.Tensor):
            flat.append(grad.to(field.dtype))
        else:
            flat += [None] * len(as_list(field))
    return tuple(grad if needed else None for grad, needed in zip(flat, needs, strict=True))


def _compute(
    grads: Mapping[str, _Grads],
    operands: Operands,
    handle: MoEHandle,
    options: LayerOptions,
    *,
    accumulate_home: bool,
) -> None:
    """Fills the buffers from this rank's rows."""
    if "w13" in grads or "w2" in grads:
        _compute_weights(grads, operands, handle, options, accumulate_home)
    if "b13" in grads or "b2" in grads:
        _compute_biases(grads, operands, handle, options, accumulate_home)


def _compute_weights(
    grads: Mapping[str, _Grads],
    operands: Operands,
    handle: MoEHandle,
    options: LayerOptions,
    accumulate_home: bool,
) -> None:
    found: dict[str, Any] = {}
    for name in ("13", "2"):
        one = grads.get(f"w{name}")
        home = None if one is None else one.home
        found[f"replica_grad{name}"] = None if one is None else one.replica
        found[f"home_grad{name}"] = None if isinstance(home, tuple) else home
        found[f"static_grad{name}"] = None if one is None else _static(handle, f"w{name}")
        if isinstance(home, tuple):
            found[f"home_grads{name}"] = list(home)
    direct_ops.expert_wgrad(
        operands.x_UD,
        operands.dy_UD,
        operands.dh_R2F,
        operands.scored_RF,
        handle.tables.row_to_token_R,
        handle.tables.slot_rows_n,
        handle.block_rows,
        **found,
        accumulate_home=accumulate_home,
        backend=handle.kernels,
        interleaved=options.interleaved,
        transposed=options.transposed,
    )


def _compute_biases(
    grads: Mapping[str, _Grads],
    operands: Operands,
    handle: MoEHandle,
    options: LayerOptions,
    accumulate_home: bool,
) -> None:
    found: dict[str, Any] = {}
    for name in ("13", "2"):
        one = grads.get(f"b{name}")
        found[f"home_grad{name}"] = None if one is None else one.home
        found[f"static_grad{name}"] = None if one is None else _static(handle, f"b{name}")
        found[f"replica_grad{name}"] = None if one is None else one.replica
    direct_ops.expert_bias_grad(
        operands.dy_UD,
        operands.dh_R2F,
        handle.tables.row_to_token_R,
        operands.score_R if options.scales_output else None,
        handle.tables.slot_rows_n,
        handle.block_rows,
        **found,
        accumulate_home=accumulate_home,
        gated=options.is_gated,
        interleaved=options.interleaved,
        backend=handle.kernels,
    )


def _static(handle: MoEHandle, name: str) -> torch.Tensor | None:
    return None if handle.static_grads is None else handle.static_grads[name]


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
        raise TypeError(f"main_grad: need {need}, got {grad.dtype}, in which sums lose rows")
    if grad.shape != weight.shape or not grad.is_contiguous():
        raise ValueError(
            f"main_grad: need a contiguous {list(weight.shape)} tensor, got {list(grad.shape)} "
            f"with strides {grad.stride()}"
        )
    return grad


def dummy_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets in ``main_grad`` mode.

    Hosts with gradient-accumulation fusion set ``grad_added_to_main_grad`` on the parameter and
    require that ``param.grad`` is not None; it carries no value.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
