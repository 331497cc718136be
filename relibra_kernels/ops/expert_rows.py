"""The experts' row-wise products as a layer runs them; contracts: reference/<op>.py."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003  custom_op reads the annotations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relibra_kernels.ops.argument_checks import check_float_matrix
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.ops.expert_arguments import Weights, bias_field, check_width
from relibra_kernels.ops.gemm_launch import (
    check_gemm_sizes,
    clear_other_rows,
    gemm_config,
    tile_count,
)
from relibra_kernels.ops.grouped_gemm import check_tiles
from relibra_kernels.reference import expert_down as _expert_down
from relibra_kernels.reference import expert_up_backward as _expert_up_backward

if TYPE_CHECKING:
    from relibra_kernels.weights import WeightSet

DEVICES = ("cpu", "cuda")


def _launch(
    rows: Tensor,
    field: WeightSet,
    mtile_B4: Tensor,
    block_rows: int,
    *,
    backward: bool,
    bias: WeightSet | None = None,
) -> Tensor:
    """The Triton body of both products."""
    from relibra_kernels.triton_ops import grouped_gemm as kernels

    sizes = (field.num_rows, field.num_columns)
    hidden, expert = sizes[::-1] if backward else sizes
    check_gemm_sizes(rows, hidden_size=hidden, expert_size=expert)
    out = kernels.grouped_gemm(
        rows if rows.stride(1) == 1 else rows.contiguous(),
        field,
        mtile_B4,
        tile_count(mtile_B4, rows.device),
        config=gemm_config("grouped_gemm", rows, *sizes, block_rows),
        backward=backward,
        bias=bias,
    )
    clear_other_rows(mtile_B4, block_rows, out)
    return out


@torch.library.custom_op("relibra::expert_down", mutates_args=(), device_types=DEVICES)
def expert_down(
    a_RF: Tensor,
    home_w2: Sequence[Tensor],
    static_w2: Tensor | None,
    replica_w2: Tensor | None,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    transposed: bool = False,
    backend: str = "auto",
    home_b2: Tensor | None = None,
    static_b2: Tensor | None = None,
    replica_b2: Tensor | None = None,
) -> Tensor:
    """Inner rows of the experts -> their outputs."""
    check_float_matrix("a_RF", a_RF)
    weights = Weights(home_w2, static_w2, replica_w2)
    weights.check("w2", a_RF)
    check_tiles(mtile_B4, block_rows, a_RF.shape[0], *weights.tile_limits())
    w2 = weights.field(1, False, transposed, mtile_B4)
    check_width("a_RF", a_RF, w2)
    bias = bias_field("b2", (home_b2, static_b2, replica_b2), w2, a_RF.dtype)
    if use_triton(backend, a_RF):
        return _launch(a_RF, w2, mtile_B4, block_rows, backward=False, bias=bias)
    return _expert_down.expert_down(a_RF, w2, mtile_B4, block_rows, exact=exact, bias=bias)


@expert_down.register_fake
def _(
    a_RF: Tensor,
    home_w2: Sequence[Tensor],
    static_w2: Tensor | None,
    replica_w2: Tensor | None,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    transposed: bool = False,
    backend: str = "auto",
    home_b2: Tensor | None = None,
    static_b2: Tensor | None = None,
    replica_b2: Tensor | None = None,
) -> Tensor:
    return a_RF.new_empty(a_RF.shape[0], home_w2[0].shape[-1 if transposed else -2])


@torch.library.custom_op("relibra::expert_up_backward", mutates_args=(), device_types=DEVICES)
def expert_up_backward(
    dh_R2F: Tensor,
    home_w13: Sequence[Tensor],
    static_w13: Tensor | None,
    replica_w13: Tensor | None,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    backend: str = "auto",
    halves_apart: bool = False,
) -> Tensor:
    """Gradients of h -> those of the rows that went in."""
    check_float_matrix("dh_R2F", dh_R2F)
    weights = Weights(home_w13, static_w13, replica_w13, halves_apart)
    weights.check("w13", dh_R2F)
    check_tiles(mtile_B4, block_rows, dh_R2F.shape[0], *weights.tile_limits())
    w13 = weights.field(2 if gated else 1, interleaved, transposed, mtile_B4)
    check_width("dh_R2F", dh_R2F, w13, backward=True)
    if use_triton(backend, dh_R2F):
        return _launch(dh_R2F, w13, mtile_B4, block_rows, backward=True)
    return _expert_up_backward.expert_up_backward(dh_R2F, w13, mtile_B4, block_rows, exact=exact)


@expert_up_backward.register_fake
def _(
    dh_R2F: Tensor,
    home_w13: Sequence[Tensor],
    static_w13: Tensor | None,
    replica_w13: Tensor | None,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    backend: str = "auto",
    halves_apart: bool = False,
) -> Tensor:
    return dh_R2F.new_empty(dh_R2F.shape[0], home_w13[0].shape[-2 if transposed else -1])
