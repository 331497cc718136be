"""Forward and backward of the experts' inner part as a layer runs it.

``expert_up``, ``expert_down_backward`` and their neighbours `expert_rows`; contracts:
reference/<op>.py.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003  custom_op reads the annotations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relibra_kernels.checks import check_choice, check_tensor
from relibra_kernels.ops.argument_checks import check_float_matrix, check_table, check_wide
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.ops.expert_arguments import (
    SCORE_AT,
    Activation,
    Weights,
    bias_field,
    check_width,
)
from relibra_kernels.ops.gemm_launch import (
    check_gemm_sizes,
    clear_other_rows,
    gemm_config,
    tile_count,
)
from relibra_kernels.ops.grouped_gemm import check_tiles
from relibra_kernels.reference import expert_down_backward as _expert_down_backward
from relibra_kernels.reference import expert_up as _expert_up

if TYPE_CHECKING:
    from relibra_kernels.weights import WeightSet

DEVICES = ("cpu", "cuda")


def _check_rows(name: str, rows: Tensor, row_to_token: Tensor | None) -> int:
    """A float matrix, gathered or not; the number of rows."""
    check_float_matrix(name, rows)
    if row_to_token is None:
        return rows.shape[0]
    check_tensor("row_to_token_R", row_to_token, device=rows.device)
    check_table("row_to_token_R", row_to_token, (None,), rows.shape[0])
    return row_to_token.shape[0]


def _check_score(score: Tensor, num_rows: int, rows: Tensor, name: str) -> None:
    check_tensor("score_R", score, shape=(num_rows,), device=rows.device)
    check_wide("score_R", score, rows, f"{name} is {rows.dtype}")


@torch.library.custom_op("relibra::expert_up", mutates_args=(), device_types=DEVICES)
def expert_up(
    x_UD: Tensor,
    row_to_token_R: Tensor | None,
    home_w13: Sequence[Tensor],
    static_w13: Tensor | None,
    replica_w13: Tensor | None,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    activation: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    transposed: bool = False,
    backend: str = "auto",
    home_b13: Tensor | None = None,
    static_b13: Tensor | None = None,
    replica_b13: Tensor | None = None,
    score_R: Tensor | None = None,
    halves_apart: bool = False,
) -> tuple[Tensor, Tensor]:
    """Received tokens -> inner rows of the experts, before and after the activation."""
    num_rows = _check_rows("x_UD", x_UD, row_to_token_R)
    chosen = Activation(activation, alpha, limit)
    weights = Weights(home_w13, static_w13, replica_w13, halves_apart)
    chosen.check()
    weights.check("w13", x_UD)
    check_tiles(mtile_B4, block_rows, num_rows, *weights.tile_limits())
    w13 = weights.field(chosen.halves, interleaved, transposed, mtile_B4)
    check_width("x_UD", x_UD, w13)
    bias = bias_field("b13", (home_b13, static_b13, replica_b13), w13, x_UD.dtype)
    if score_R is not None:
        _check_score(score_R, num_rows, x_UD, "x_UD")
    operands = (x_UD, row_to_token_R, w13, mtile_B4, block_rows)
    if use_triton(backend, x_UD):
        return _launch_up(*operands, chosen, bias=bias, score=score_R)
    return _expert_up.expert_up(
        *operands,
        exact=exact,
        bias=bias,
        score_R=score_R,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )


def _launch_up(
    x: Tensor,
    row_to_token: Tensor | None,
    w13: WeightSet,
    mtile_B4: Tensor,
    block_rows: int,
    activation: Activation,
    *,
    bias: WeightSet | None,
    score: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The Triton body of ``expert_up``."""
    from relibra_kernels.triton_ops import expert_up as kernels

    sizes = (w13.num_columns, w13.num_rows)
    check_gemm_sizes(x, hidden_size=sizes[0], expert_size=sizes[1])
    h, a = kernels.expert_up(
        x if x.stride(1) == 1 else x.contiguous(),
        row_to_token,
        w13,
        mtile_B4,
        tile_count(mtile_B4, x.device),
        config=gemm_config("expert_up", x, *sizes, block_rows),
        bias=bias,
        score_R=score,
        activation=activation.kind,
        alpha=activation.alpha,
        limit=activation.limit,
    )
    clear_other_rows(mtile_B4, block_rows, h, a)
    return h, a


@expert_up.register_fake
def _(
    x_UD: Tensor,
    row_to_token_R: Tensor | None,
    home_w13: Sequence[Tensor],
    static_w13: Tensor | None,
    replica_w13: Tensor | None,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    activation: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    transposed: bool = False,
    backend: str = "auto",
    home_b13: Tensor | None = None,
    static_b13: Tensor | None = None,
    replica_b13: Tensor | None = None,
    score_R: Tensor | None = None,
    halves_apart: bool = False,
) -> tuple[Tensor, Tensor]:
    num_rows = x_UD.shape[0] if row_to_token_R is None else row_to_token_R.shape[0]
    width = home_w13[0].shape[-1 if transposed else -2]
    width = 2 * width if halves_apart else width
    inner = width // Activation(activation, alpha, limit).halves
    return x_UD.new_empty(num_rows, width), x_UD.new_empty(num_rows, inner)


@torch.library.custom_op("relibra::expert_down_backward", mutates_args=(), device_types=DEVICES)
def expert_down_backward(
    dy_UD: Tensor,
    row_to_token_R: Tensor | None,
    home_w2: Sequence[Tensor],
    static_w2: Tensor | None,
    replica_w2: Tensor | None,
    h_R2F: Tensor,
    score_R: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    activation: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
    transposed: bool = False,
    backend: str = "auto",
    home_b2: Tensor | None = None,
    static_b2: Tensor | None = None,
    replica_b2: Tensor | None = None,
    score_at: str = "output",
) -> tuple[Tensor, Tensor, Tensor]:
    """Output gradients -> gradients of h and of the scores, and score * a."""
    num_rows = _check_rows("dy_UD", dy_UD, row_to_token_R)
    _check_score(score_R, num_rows, dy_UD, "dy_UD")
    check_choice("score_at", score_at, SCORE_AT)
    chosen = Activation(activation, alpha, limit)
    weights = Weights(home_w2, static_w2, replica_w2)
    chosen.check()
    weights.check("w2", dy_UD)
    check_tiles(mtile_B4, block_rows, num_rows, *weights.tile_limits())
    w2 = weights.field(1, False, transposed, mtile_B4)
    check_width("dy_UD", dy_UD, w2, backward=True)
    h_shape = (num_rows, chosen.halves * w2.num_columns)
    check_tensor("h_R2F", h_R2F, dtype=dy_UD.dtype, shape=h_shape)
    bias = bias_field("b2", (home_b2, static_b2, replica_b2), w2, dy_UD.dtype)
    operands = (dy_UD, row_to_token_R, w2, h_R2F, score_R, mtile_B4, block_rows)
    if use_triton(backend, dy_UD):
        return _launch_down_backward(*operands, chosen, bias=bias, score_at=score_at)
    return _expert_down_backward.expert_down_backward(
        *operands,
        exact=exact,
        bias=bias,
        score_at=score_at,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )


def _launch_down_backward(
    dy: Tensor,
    row_to_token: Tensor | None,
    w2: WeightSet,
    h: Tensor,
    score: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    activation: Activation,
    *,
    bias: WeightSet | None,
    score_at: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton body of ``expert_down_backward``."""
    from relibra_kernels.triton_ops import expert_down_backward as kernels

    sizes = (w2.num_rows, w2.num_columns)
    check_gemm_sizes(dy, hidden_size=sizes[0], expert_size=sizes[1])
    found = kernels.expert_down_backward(
        dy if dy.stride(1) == 1 else dy.contiguous(),
        row_to_token,
        w2,
        h,
        score,
        None,
        mtile_B4,
        tile_count(mtile_B4, dy.device),
        config=gemm_config("expert_down_backward", dy, *sizes, block_rows),
        bias=bias,
        score_at=score_at,
        activation=activation.kind,
        alpha=activation.alpha,
        limit=activation.limit,
    )
    clear_other_rows(mtile_B4, block_rows, *found)
    return found


@expert_down_backward.register_fake
def _(
    dy_UD: Tensor,
    row_to_token_R: Tensor | None,
    home_w2: Sequence[Tensor],
    static_w2: Tensor | None,
    replica_w2: Tensor | None,
    h_R2F: Tensor,
    score_R: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    activation: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
    transposed: bool = False,
    backend: str = "auto",
    home_b2: Tensor | None = None,
    static_b2: Tensor | None = None,
    replica_b2: Tensor | None = None,
    score_at: str = "output",
) -> tuple[Tensor, Tensor, Tensor]:
    width = home_w2[0].shape[-2 if transposed else -1]
    scored = h_R2F.new_empty(h_R2F.shape[0], width)
    return h_R2F.new_empty(h_R2F.shape), scored, score_R.new_empty(score_R.shape)
