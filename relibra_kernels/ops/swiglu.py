"""The gated activation; contract: reference/swiglu.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relibra_kernels.checks import check_tensor, describe
from relibra_kernels.ops.argument_checks import check_float_matrix
from relibra_kernels.reference import swiglu as _swiglu


def _check(h_R2F: Tensor) -> None:
    check_float_matrix("h_R2F", h_R2F)
    if h_R2F.shape[1] % 2:
        raise ValueError(f"h_R2F: need 2F columns, gate | up, got {describe(h_R2F)}")


@torch.library.custom_op("relibra::swiglu", mutates_args=(), device_types="cpu")
def swiglu(h_R2F: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    _check(h_R2F)
    return _swiglu.swiglu(h_R2F)


@swiglu.register_fake
def _(h_R2F: Tensor) -> Tensor:
    return h_R2F.new_empty(h_R2F.shape[0], h_R2F.shape[1] // 2)


@torch.library.custom_op("relibra::swiglu_backward", mutates_args=(), device_types="cpu")
def swiglu_backward(da_RF: Tensor, h_R2F: Tensor) -> Tensor:
    """Gradient of ``swiglu``."""
    _check(h_R2F)
    shape = (h_R2F.shape[0], h_R2F.shape[1] // 2)
    check_tensor("da_RF", da_RF, dtype=h_R2F.dtype, shape=shape)
    return _swiglu.swiglu_backward(da_RF, h_R2F)


@swiglu_backward.register_fake
def _(da_RF: Tensor, h_R2F: Tensor) -> Tensor:
    return h_R2F.new_empty(h_R2F.shape)


def _swiglu_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, da_RF: Tensor) -> Tensor:
    (h_R2F,) = ctx.saved_tensors
    dh: Tensor = torch.ops.relibra.swiglu_backward(da_RF, h_R2F)
    return dh


swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_context)
