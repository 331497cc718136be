"""The op of both bias gradients; contract: reference/expert_bias_grad.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relibra_kernels.checks import check_tensor
from relibra_kernels.ops.argument_checks import (
    check_float_matrix,
    check_output,
    check_table,
    check_wide,
)
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.ops.expert_arguments import check_same_slots
from relibra_kernels.ops.launch_data import on_device
from relibra_kernels.reference import expert_bias_grad as _expert_bias_grad
from relibra_kernels.tables import count_padded_rows, w_tiles
from relibra_kernels.weights import WeightSet

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICES = ("cpu", "cuda")
MUTATED = (
    *("home_grad13", "replica_grad13", "home_grad2", "replica_grad2"),
    *("static_grad13", "static_grad2"),
)


@torch.library.custom_op("relibra::expert_bias_grad", mutates_args=MUTATED, device_types=DEVICES)
def expert_bias_grad(
    dy_UD: Tensor,
    dh_R2F: Tensor,
    row_to_token_R: Tensor | None,
    score_R: Tensor | None,
    slot_rows_n: Tensor,
    block_rows: int,
    home_grad13: Tensor | None,
    replica_grad13: Tensor | None,
    home_grad2: Tensor | None,
    replica_grad2: Tensor | None,
    accumulate_home: bool,
    backend: str = "auto",
    static_grad13: Tensor | None = None,
    static_grad2: Tensor | None = None,
    interleaved: bool = False,
    gated: bool = True,
) -> None:
    """Gradients of both biases, into the caller's fp32 buffers; None where not wanted."""
    check_float_matrix("dy_UD", dy_UD)
    check_tensor("dh_R2F", dh_R2F, dtype=dy_UD.dtype, shape=(None, None))
    num_rows = len(dh_R2F)
    if row_to_token_R is not None:
        shape = (num_rows,)
        check_tensor("row_to_token_R", row_to_token_R, shape=shape, device=dy_UD.device)
        check_table("row_to_token_R", row_to_token_R, shape, len(dy_UD))
    elif len(dy_UD) != num_rows:
        raise ValueError(f"dy_UD: need {num_rows} rows as dh_R2F, got {len(dy_UD)}")
    if score_R is not None:
        check_tensor("score_R", score_R, shape=(num_rows,), device=dy_UD.device)
        check_wide("score_R", score_R, dy_UD, f"dy_UD is {dy_UD.dtype}")
    check_tensor("slot_rows_n", slot_rows_n, dtype=(torch.int32, torch.int64), ndim=1, device="cpu")
    needed = count_padded_rows(slot_rows_n, block_rows)
    if needed > num_rows:
        raise ValueError(f"slot_rows_n: need at most {num_rows} padded rows, got {needed}")
    halves = 2 if gated else 1
    families13 = (home_grad13, static_grad13, replica_grad13)
    families2 = (home_grad2, static_grad2, replica_grad2)
    check = (dy_UD, slot_rows_n)
    grads = (
        _gradient_field("13", families13, dh_R2F.shape[1], halves, interleaved, *check),
        _gradient_field("2", families2, dy_UD.shape[1], 1, False, *check),
    )
    check_same_slots(
        *(None if home is None else _counts(home, *rest) for home, *rest in (families13, families2))
    )
    operands = (dy_UD, dh_R2F, row_to_token_R, score_R, slot_rows_n, block_rows)
    if use_triton(backend, dy_UD):
        _launch(*operands, grads[0], grads[1], accumulate_home, halves)
    else:
        _expert_bias_grad.expert_bias_grad(*operands, grads[0], grads[1], accumulate_home)


def _counts(home: Tensor, *copies: Tensor | None) -> tuple[int, int, int]:
    """H, X, S."""
    static, replica = (0 if one is None else len(one) for one in copies)
    return len(home), static, replica


def _gradient_field(
    name: str,
    families: Sequence[Tensor | None],
    width: int,
    halves: int,
    interleaved: bool,
    rows: Tensor,
    slot_rows: Tensor,
) -> WeightSet | None:
    """One bias's outputs; None where they are not wanted."""
    home, *copies = families
    if home is None:
        if any(one is not None for one in copies):
            raise ValueError(f"replica_grad{name}: need None without home_grad{name}, got a tensor")
        return None
    check_wide(f"home_grad{name}", home, rows, "other dtypes lose rows in the sum")
    for family, grad in zip(("home", "static", "replica"), families, strict=True):
        if grad is None:
            continue
        check_tensor(f"{family}_grad{name}", grad, dtype=home.dtype, shape=(None, width))
        check_output(f"{family}_grad{name}", grad)
        if len(grad) and grad.stride(1) != 1:
            raise ValueError(
                f"{family}_grad{name}: need contiguous rows, got strides {grad.stride()}"
            )
    slots = sum(len(one) for one in families if one is not None)
    if slots != len(slot_rows):
        raise ValueError(
            f"slot_rows_n: need {slots} slots as in home_grad{name}, static_grad{name} and "
            f"replica_grad{name}, got {len(slot_rows)}"
        )
    static, replica = (None if x is None or not len(x) else x[:, :, None] for x in copies)
    return WeightSet(home[:, :, None], static, replica, halves=halves, interleaved=interleaved)


def _launch(
    dy: Tensor,
    dh: Tensor,
    row_to_token: Tensor | None,
    score: Tensor | None,
    slot_rows: Tensor,
    block_rows: int,
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    accumulate_home: bool,
    halves: int,
) -> None:
    """The Triton body: both gradients in one launch."""
    from relibra_kernels.triton_ops import bias_grad as kernels

    some = grad13 if grad13 is not None else grad2
    if some is None:
        return
    step = kernels.bias_columns(dy.device)
    counts = (
        0 if grad13 is None else -(-dh.shape[1] // step),
        0 if grad2 is None else -(-dy.shape[1] // step),
    )
    num_static = 0 if some.static is None else len(some.static)
    tiles = w_tiles(slot_rows, some.num_home, num_static, block_rows, *counts, accumulate_home)
    btile, num_tiles = on_device(tiles, dy.device)
    kernels.expert_bias_grad(
        dh,
        dy if dy.stride(1) == 1 else dy.contiguous(),
        row_to_token,
        score,
        None,
        btile,
        num_tiles,
        grad13,
        grad2,
        expert_size=dh.shape[1] // halves,
    )


@expert_bias_grad.register_fake
def _(*_: object, **__: object) -> None:
    return None
