"""Ops of the experts as a layer runs them; contracts: reference/<op>.py.

Where everything is as `BalancedMoE` has it (one tensor of gate and up rows a family, SwiGLU, no
bias) the CPU bodies are made of the references of the single steps, which are fast; any other
storage or activation takes the general reference, which is readable and slow.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003  custom_op reads the annotations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relibra_kernels.checks import check_int, check_tensor
from relibra_kernels.ops.argument_checks import check_float_matrix, check_wide
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.ops.gemm_launch import (
    check_gemm_sizes,
    clear_other_rows,
    gemm_config,
    tile_count,
    weight_set,
)
from relibra_kernels.ops.grouped_gemm import check_tiles
from relibra_kernels.reference import expert_down_backward as _expert_down_backward
from relibra_kernels.reference import expert_up as _expert_up
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.grouped_gemm import multiply
from relibra_kernels.reference.swiglu import swiglu, swiglu_backward
from relibra_kernels.reference.token_permute import take_rows

if TYPE_CHECKING:
    from relibra_kernels.weights import WeightSet

DEVICES = ("cpu", "cuda")
SWIGLU, CLAMPED_SWIGLU, GELU, SQUARED_RELU = 0, 1, 2, 3


def _check_weights(
    name: str, rows: Tensor, home: Sequence[Tensor], static: Tensor | None, replica: Tensor | None
) -> None:
    """Families of one dtype and shape; the numbers of slots are free."""
    if not home:
        raise ValueError(f"home_{name}: need at least one tensor, got none")
    whole = len(home) == 1 and home[0].dim() == 3
    first = check_tensor(f"home_{name}[0]", home[0], dtype=rows.dtype, ndim=3 if whole else 2)
    shape = tuple(first.shape[1:] if whole else first.shape)
    for i, expert in enumerate(home[1:], 1):
        check_tensor(f"home_{name}[{i}]", expert, dtype=rows.dtype, shape=shape)
    for family, tensor in (("static", static), ("replica", replica)):
        if tensor is not None:
            check_tensor(f"{family}_{name}", tensor, dtype=rows.dtype, shape=(None, *shape))


def _num_slots(
    home: Sequence[Tensor], static: Tensor | None, replica: Tensor | None
) -> tuple[int, int, int]:
    """(home, replica, static) slots, in the order of `check_tiles`."""
    num_home = len(home[0]) if home[0].dim() == 3 else len(home)
    sizes = [0 if one is None else len(one) for one in (replica, static)]
    return num_home, sizes[0], sizes[1]


def _is_plain(home: Sequence[Tensor], static: Tensor | None) -> bool:
    return len(home) == 1 and home[0].dim() == 3 and static is None


def _pair(home: Sequence[Tensor], replica: Tensor | None) -> tuple[Tensor, Tensor]:
    return home[0], home[0][:0] if replica is None else replica


@torch.library.custom_op("relibra::expert_up", mutates_args=(), device_types=DEVICES)
def expert_up(
    x_UD: Tensor,
    row_to_token_R: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Received tokens -> inner rows of the experts, before and after the activation."""
    check_float_matrix("x_UD", x_UD)
    check_tensor("row_to_token_R", row_to_token_R, dtype=torch.int32, ndim=1, device=x_UD.device)
    check_int("activation", activation, minimum=SWIGLU, maximum=SQUARED_RELU)
    families = (home_w13, static_w13, replica_w13)
    _check_weights("w13", x_UD, *families)
    check_tiles(mtile_B4, block_rows, len(row_to_token_R), *_num_slots(*families))
    halves = 2 if activation <= CLAMPED_SWIGLU else 1
    if use_triton(backend, x_UD):
        w13 = weight_set(*families, halves, interleaved, transposed)
        return _launch_up(x_UD, row_to_token_R, w13, mtile_B4, block_rows, activation, alpha, limit)
    if _is_plain(home_w13, static_w13) and activation == SWIGLU and not (interleaved or transposed):
        rows = take_rows(x_UD, row_to_token_R)
        home, replica = _pair(home_w13, replica_w13)
        weights = (home.transpose(1, 2), replica.transpose(1, 2))
        h = multiply(rows, weights, mtile_B4, block_rows, exact)
        return h, swiglu(h)
    w13 = weight_set(*families, halves, interleaved, transposed)
    return _expert_up.expert_up(
        x_UD, row_to_token_R, w13, mtile_B4, activation=activation, alpha=alpha, limit=limit
    )


def _launch_up(
    x: Tensor,
    row_to_token: Tensor,
    w13: WeightSet,
    mtile_B4: Tensor,
    block_rows: int,
    activation: int,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """The Triton body of ``expert_up``."""
    from relibra_kernels.triton_ops import expert_up as kernels

    sizes = (w13.num_columns, w13.num_rows)
    check_gemm_sizes(x, hidden_size=sizes[0], expert_size=sizes[1])
    h, a = kernels.expert_up(
        x,
        row_to_token,
        w13,
        mtile_B4,
        tile_count(mtile_B4, x.device),
        config=gemm_config("expert_up", x, *sizes, block_rows),
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
    clear_other_rows(mtile_B4, block_rows, h, a)
    return h, a


@expert_up.register_fake
def _(
    x_UD: Tensor,
    row_to_token_R: Tensor,
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
) -> tuple[Tensor, Tensor]:
    num_rows = row_to_token_R.shape[0]
    width = home_w13[0].shape[-1 if transposed else -2]
    inner = width // 2 if activation <= CLAMPED_SWIGLU else width
    return x_UD.new_empty(num_rows, width), x_UD.new_empty(num_rows, inner)


@torch.library.custom_op("relibra::expert_down_backward", mutates_args=(), device_types=DEVICES)
def expert_down_backward(
    dy_UD: Tensor,
    row_to_token_R: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Output gradients -> gradients of h and of the scores, and score * a."""
    check_float_matrix("dy_UD", dy_UD)
    num_rows = len(row_to_token_R)
    check_tensor("row_to_token_R", row_to_token_R, dtype=torch.int32, ndim=1, device=dy_UD.device)
    check_tensor("h_R2F", h_R2F, dtype=dy_UD.dtype, shape=(num_rows, None))
    check_tensor("score_R", score_R, shape=(num_rows,))
    check_wide("score_R", score_R, dy_UD, f"dy_UD is {dy_UD.dtype}")
    check_int("activation", activation, minimum=SWIGLU, maximum=SQUARED_RELU)
    families = (home_w2, static_w2, replica_w2)
    _check_weights("w2", dy_UD, *families)
    check_tiles(mtile_B4, block_rows, num_rows, *_num_slots(*families))
    if use_triton(backend, dy_UD):
        return _launch_down_backward(
            dy_UD,
            row_to_token_R,
            weight_set(*families, 1, False, transposed),
            h_R2F,
            score_R,
            mtile_B4,
            block_rows,
            activation,
            alpha,
            limit,
        )
    if _is_plain(home_w2, static_w2) and activation == SWIGLU and not transposed:
        dy_RD = take_rows(dy_UD, row_to_token_R)
        g = multiply(dy_RD, _pair(home_w2, replica_w2), mtile_B4, block_rows, exact)
        return _down_backward_of(g, h_R2F, score_R)
    w2 = weight_set(*families, 1, False, transposed)
    return _expert_down_backward.expert_down_backward(
        dy_UD,
        row_to_token_R,
        w2,
        h_R2F,
        score_R,
        mtile_B4,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )


def _launch_down_backward(
    dy: Tensor,
    row_to_token: Tensor,
    w2: WeightSet,
    h: Tensor,
    score: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    activation: int,
    alpha: float,
    limit: float,
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
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
    clear_other_rows(mtile_B4, block_rows, *found)
    return found


def _down_backward_of(
    g_RF: Tensor, h_R2F: Tensor, score_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From ``w2.T @ dy`` by row; every product in the accumulation dtype, one rounding each."""
    wide = accumulation_dtype(h_R2F.dtype)
    a_RF = swiglu(h_R2F)
    dh = swiglu_backward((g_RF.to(wide) * score_R[:, None]).to(h_R2F.dtype), h_R2F)
    scored = (a_RF.to(wide) * score_R[:, None]).to(h_R2F.dtype)
    return dh, scored, (g_RF.to(wide) * a_RF.to(wide)).sum(1)


@expert_down_backward.register_fake
def _(
    dy_UD: Tensor,
    row_to_token_R: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    width = home_w2[0].shape[-2 if transposed else -1]
    scored = h_R2F.new_empty(h_R2F.shape[0], width)
    return h_R2F.new_empty(h_R2F.shape), scored, score_R.new_empty(score_R.shape)
