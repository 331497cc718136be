"""The grouped GEMM and its gradients; contracts: reference/<op>.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from relibra_kernels.checks import check_int, check_tensor, describe
from relibra_kernels.ops.argument_checks import check_float_matrix, check_output, check_wide
from relibra_kernels.ops.backend import checks_values, use_triton
from relibra_kernels.ops.gemm_launch import (
    check_gemm_sizes,
    clear_other_rows,
    gemm_config,
    tile_count,
    weight_set,
)
from relibra_kernels.reference import grouped_gemm as _grouped_gemm
from relibra_kernels.reference import grouped_gemm_dgrad as _grouped_gemm_dgrad
from relibra_kernels.reference import grouped_gemm_wgrad as _grouped_gemm_wgrad
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.tables import (
    HOME,
    REPLICA,
    STATIC,
    count_padded_rows,
    tile_weights,
    w_tiles,
)
from relibra_kernels.weights import WeightSet

DEVICES = ("cpu", "cuda")
MAX_BLOCK_ROWS = 1 << 16


def _check_gemm(name: str, rows: Tensor, home_w: Tensor, replica_w: Tensor, width_dim: int) -> None:
    check_float_matrix(name, rows)
    check_tensor("home_w_HND", home_w, dtype=rows.dtype, ndim=3)
    if home_w.shape[width_dim] != rows.shape[1]:
        raise ValueError(
            f"{name}: need {home_w.shape[width_dim]} columns to fit home_w_HND "
            f"{list(home_w.shape)}, got {describe(rows)}"
        )
    check_tensor("replica_w_SND", replica_w, dtype=rows.dtype, shape=(None, *home_w.shape[1:]))


def check_tiles(
    mtile_B4: Tensor,
    block_rows: int,
    num_rows: int,
    num_home: int,
    num_replica: int,
    num_static: int = 0,
) -> None:
    """Tiles that stay inside the row buffer and the weights, and share no row.

    On CUDA the values are looked at in debug mode only.
    """
    check_tensor("mtile_B4", mtile_B4, dtype=torch.int32, shape=(None, 4))
    check_int("block_rows", block_rows, minimum=1, maximum=MAX_BLOCK_ROWS)
    if not checks_values(mtile_B4):
        return
    mtile_B4 = mtile_B4.cpu()
    tile = mtile_B4.numpy()
    family, weight = tile_weights(mtile_B4)
    limit = np.select(
        [family == HOME, family == STATIC, family == REPLICA], [num_home, num_static, num_replica]
    )
    first, rows = tile[:, 1], tile[:, 2]
    wrong = (weight >= limit) | (first < 0) | (first % block_rows != 0)
    wrong |= (rows < 1) | (rows > block_rows) | (rows > num_rows - first)
    order = np.argsort(first, kind="stable")
    wrong[order[1:]] |= first[order[1:]] == first[order[:-1]]
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"mtile_B4: need a home weight < {num_home} (family 0), a static weight < "
            f"{num_static} (family 1) or a replica weight < {num_replica} (family 2), a first row "
            f"that is a multiple of {block_rows} and in no other tile, and 1 to {block_rows} rows "
            f"below row {num_rows}, got {tile[place].tolist()} (family {family[place]}, weight "
            f"{weight[place]}) "
            f"at tile {place}"
        )


def _launch(
    rows: Tensor,
    home_w: Tensor,
    replica_w: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    *,
    backward: bool,
) -> Tensor:
    """The Triton body of both products."""
    from relibra_kernels.triton_ops import grouped_gemm as kernels

    width, depth = home_w.shape[1:]
    check_gemm_sizes(rows, N=width, D=depth)
    transposed = home_w.stride(2) != 1 and home_w.stride(1) == 1  # a view of [H, D, N]
    home, replica = (w.transpose(1, 2) if transposed else w for w in (home_w, replica_w))
    out = kernels.grouped_gemm(
        rows,
        weight_set([home], None, replica, 1, transposed=transposed, tiles=mtile_B4),
        mtile_B4,
        tile_count(mtile_B4, rows.device),
        config=gemm_config("grouped_gemm", rows, width, depth, block_rows),
        backward=backward,
    )
    clear_other_rows(mtile_B4, block_rows, out)
    return out


def _launch_wgrad(
    grad: Tensor,
    rows: Tensor,
    slot_rows_n: Tensor,
    block_rows: int,
    home_grad: Tensor,
    replica_grad: Tensor,
    accumulate_home: bool,
) -> None:
    """The Triton body of the weights' gradient: the half of ``expert_wgrad`` that makes dW2."""
    from relibra_kernels.triton_ops import grouped_gemm_wgrad as kernels

    width, depth = home_grad.shape[1:]
    check_gemm_sizes(grad, N=width, D=depth)
    config = gemm_config("grouped_gemm_wgrad", grad, width, depth)
    num_tiles = kernels.count_output_tiles(width, depth, config)
    wtile = w_tiles(slot_rows_n, len(home_grad), 0, block_rows, 0, num_tiles, accumulate_home)
    wtile = wtile.to(grad.device, non_blocking=True)  # no sync of the stream
    replica = replica_grad if len(replica_grad) else None
    kernels.expert_wgrad(
        grad,
        grad,
        rows,
        rows,
        None,
        wtile,
        tile_count(wtile, grad.device),
        None,
        WeightSet(home_grad, replica=replica),
        config=config,
    )


@torch.library.custom_op("relibra::grouped_gemm", mutates_args=(), device_types=DEVICES)
def grouped_gemm(
    rows_RD: Tensor,
    home_w_HND: Tensor,
    replica_w_SND: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    backend: str = "auto",
) -> Tensor:
    """Rows times the weight of their slot."""
    _check_gemm("rows_RD", rows_RD, home_w_HND, replica_w_SND, 2)
    check_tiles(mtile_B4, block_rows, len(rows_RD), len(home_w_HND), len(replica_w_SND))
    weights = (home_w_HND, replica_w_SND)
    if use_triton(backend, rows_RD):
        return _launch(rows_RD, *weights, mtile_B4, block_rows, backward=False)
    return _grouped_gemm.grouped_gemm(rows_RD, *weights, mtile_B4, block_rows, exact)


@grouped_gemm.register_fake
def _(
    rows_RD: Tensor,
    home_w_HND: Tensor,
    replica_w_SND: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    backend: str = "auto",
) -> Tensor:
    return rows_RD.new_empty(rows_RD.shape[0], home_w_HND.shape[1])


@torch.library.custom_op("relibra::grouped_gemm_dgrad", mutates_args=(), device_types=DEVICES)
def grouped_gemm_dgrad(
    grad_RN: Tensor,
    home_w_HND: Tensor,
    replica_w_SND: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    backend: str = "auto",
) -> Tensor:
    """Gradient of the rows."""
    _check_gemm("grad_RN", grad_RN, home_w_HND, replica_w_SND, 1)
    check_tiles(mtile_B4, block_rows, len(grad_RN), len(home_w_HND), len(replica_w_SND))
    weights = (home_w_HND, replica_w_SND)
    if use_triton(backend, grad_RN):
        return _launch(grad_RN, *weights, mtile_B4, block_rows, backward=True)
    return _grouped_gemm_dgrad.grouped_gemm_dgrad(grad_RN, *weights, mtile_B4, block_rows, exact)


@grouped_gemm_dgrad.register_fake
def _(
    grad_RN: Tensor,
    home_w_HND: Tensor,
    replica_w_SND: Tensor,
    mtile_B4: Tensor,
    block_rows: int,
    exact: bool,
    backend: str = "auto",
) -> Tensor:
    return grad_RN.new_empty(grad_RN.shape[0], home_w_HND.shape[2])


@torch.library.custom_op(
    "relibra::grouped_gemm_wgrad",
    mutates_args=("home_grad_HND", "replica_grad_SND"),
    device_types=DEVICES,
)
def grouped_gemm_wgrad(
    grad_RN: Tensor,
    rows_RD: Tensor,
    slot_rows_n: Tensor,
    block_rows: int,
    home_grad_HND: Tensor,
    replica_grad_SND: Tensor,
    accumulate_home: bool,
    backend: str = "auto",
) -> None:
    """Gradient of the weights, into the caller's fp32 buffers."""
    check_float_matrix("grad_RN", grad_RN)
    check_tensor("rows_RD", rows_RD, dtype=grad_RN.dtype, shape=(len(grad_RN), None))
    check_wide("home_grad_HND", home_grad_HND, grad_RN, "other dtypes lose rows in the sum")
    shape = (None, grad_RN.shape[1], rows_RD.shape[1])
    check_tensor("home_grad_HND", home_grad_HND, shape=shape)
    check_tensor("replica_grad_SND", replica_grad_SND, dtype=home_grad_HND.dtype, shape=shape)
    check_output("home_grad_HND", home_grad_HND)
    check_output("replica_grad_SND", replica_grad_SND)
    num_slots = len(home_grad_HND) + len(replica_grad_SND)
    check_tensor("slot_rows_n", slot_rows_n, dtype=(torch.int32, torch.int64), shape=(num_slots,))
    needed = count_padded_rows(slot_rows_n, block_rows)
    if needed > len(grad_RN):
        raise ValueError(
            f"slot_rows_n: need at most {len(grad_RN)} padded rows, the rows of grad_RN, "
            f"got {needed}"
        )
    if use_triton(backend, grad_RN):
        _launch_wgrad(
            grad_RN,
            rows_RD,
            slot_rows_n,
            block_rows,
            home_grad_HND,
            replica_grad_SND,
            accumulate_home,
        )
        return
    _grouped_gemm_wgrad.grouped_gemm_wgrad(
        grad_RN, rows_RD, slot_rows_n, block_rows, home_grad_HND, replica_grad_SND, accumulate_home
    )


@grouped_gemm_wgrad.register_fake
def _(
    grad_RN: Tensor,
    rows_RD: Tensor,
    slot_rows_n: Tensor,
    block_rows: int,
    home_grad_HND: Tensor,
    replica_grad_SND: Tensor,
    accumulate_home: bool,
    backend: str = "auto",
) -> None:
    return None


def _gemm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.block_rows, ctx.exact, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _gemm_backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
    rows, home_w, replica_w, mtile = ctx.saved_tensors
    needs_rows, needs_home, needs_replica = ctx.needs_input_grad[:3]
    d_rows = d_home = d_replica = None
    if needs_rows:
        d_rows = torch.ops.relibra.grouped_gemm_dgrad(
            grad_RN, home_w, replica_w, mtile, ctx.block_rows, ctx.exact, ctx.backend
        )
    if needs_home or needs_replica:
        wide = accumulation_dtype(rows.dtype)
        home, replica = (torch.empty_like(w, dtype=wide) for w in (home_w, replica_w))
        torch.ops.relibra.grouped_gemm_wgrad(
            grad_RN,
            rows,
            _slot_rows(mtile, home_w, replica_w),
            ctx.block_rows,
            home,
            replica,
            False,
            ctx.backend,
        )
        d_home, d_replica = home.to(home_w.dtype), replica.to(replica_w.dtype)
    return d_rows, d_home, d_replica, None, None, None, None


def _slot_rows(mtile_B4: Tensor, home_w: Tensor, replica_w: Tensor) -> Tensor:
    """Rows of each slot, summed over its tiles; in torch ops, since autograd may be traced."""
    word = mtile_B4[:, 0]
    slot = (word & 0xFFFFFF) + torch.where(word >> 24 == REPLICA, home_w.shape[0], 0)
    rows = mtile_B4.new_zeros(home_w.shape[0] + replica_w.shape[0])
    return rows.index_add(0, slot, mtile_B4[:, 2])


grouped_gemm.register_autograd(_gemm_backward, setup_context=_gemm_context)
