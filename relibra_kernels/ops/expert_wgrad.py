"""The op of both weight gradients; contract: reference/expert_wgrad.py."""

from __future__ import annotations

import torch
from torch import Tensor

from relibra_kernels.checks import check_tensor
from relibra_kernels.ops.argument_checks import check_float_matrix, check_wide
from relibra_kernels.ops.backend import use_triton
from relibra_kernels.ops.gemm_launch import check_gemm_sizes, gemm_config, tile_count, weight_set
from relibra_kernels.reference.grouped_gemm_wgrad import grouped_gemm_wgrad
from relibra_kernels.reference.token_permute import take_rows
from relibra_kernels.tables import slot_bases, w_tiles

DEVICES = ("cpu", "cuda")


@torch.library.custom_op(
    "relibra::expert_wgrad",
    mutates_args=("home_grad13", "replica_grad13", "home_grad2", "replica_grad2"),
    device_types=DEVICES,
)
def expert_wgrad(
    x_UD: Tensor,
    dy_UD: Tensor,
    dh_R2F: Tensor,
    scored_a_RF: Tensor,
    row_to_token_R: Tensor,
    slot_rows_n: Tensor,
    block_rows: int,
    home_grad13: Tensor | None,
    replica_grad13: Tensor | None,
    home_grad2: Tensor | None,
    replica_grad2: Tensor | None,
    accumulate_home: bool,
    backend: str = "auto",
) -> None:
    """Gradients of both weights, into the caller's fp32 buffers; None where not wanted."""
    pairs = ((home_grad13, replica_grad13), (home_grad2, replica_grad2))
    _check_wgrad(x_UD, dy_UD, dh_R2F, scored_a_RF, row_to_token_R, slot_rows_n, block_rows, pairs)
    if use_triton(backend, x_UD):
        _launch_wgrad(
            x_UD,
            dy_UD,
            dh_R2F,
            scored_a_RF,
            row_to_token_R,
            slot_rows_n,
            block_rows,
            pairs,
            accumulate_home,
        )
        return
    for (home, replica), left, right in (
        (pairs[0], dh_R2F, x_UD),
        (pairs[1], dy_UD, scored_a_RF),
    ):
        if home is None or replica is None:
            continue
        left = take_rows(left, row_to_token_R) if left is dy_UD else left
        right = take_rows(right, row_to_token_R) if right is x_UD else right
        grouped_gemm_wgrad(left, right, slot_rows_n, block_rows, home, replica, accumulate_home)


def _check_wgrad(
    x: Tensor,
    dy: Tensor,
    dh: Tensor,
    scored: Tensor,
    row_to_token: Tensor,
    slot_rows: Tensor,
    block_rows: int,
    pairs: tuple[tuple[Tensor | None, Tensor | None], ...],
) -> None:
    check_float_matrix("x_UD", x)
    check_tensor("dy_UD", dy, dtype=x.dtype, shape=tuple(x.shape))
    check_tensor("row_to_token_R", row_to_token, dtype=torch.int32, ndim=1, device=x.device)
    num_rows = len(row_to_token)
    check_tensor("dh_R2F", dh, dtype=x.dtype, shape=(num_rows, None))
    check_tensor("scored_a_RF", scored, dtype=x.dtype, shape=(num_rows, None))
    check_tensor("slot_rows_n", slot_rows, dtype=(torch.int32, torch.int64), ndim=1, device="cpu")
    shapes = ((dh.shape[1], x.shape[1]), (x.shape[1], scored.shape[1]))
    for name, (home, replica), shape in zip(("13", "2"), pairs, shapes, strict=True):
        if (home is None) != (replica is None):
            raise ValueError(f"replica_grad{name}: need a tensor if, and only if, home_grad{name}")
        if home is None or replica is None:
            continue
        check_wide(f"home_grad{name}", home, x, "other dtypes lose rows in the sum")
        check_tensor(f"home_grad{name}", home, shape=(None, *shape))
        check_tensor(f"replica_grad{name}", replica, dtype=home.dtype, shape=(None, *shape))
        if len(home) + len(replica) != len(slot_rows):
            raise ValueError(
                f"slot_rows_n: need {len(home) + len(replica)} slots as in home_grad{name} and "
                f"replica_grad{name}, got {len(slot_rows)}"
            )
    needed = int(slot_bases(slot_rows, block_rows)[-1])
    if needed > num_rows:
        raise ValueError(f"slot_rows_n: need at most {num_rows} padded rows, got {needed}")


def _launch_wgrad(
    x: Tensor,
    dy: Tensor,
    dh: Tensor,
    scored: Tensor,
    row_to_token: Tensor,
    slot_rows: Tensor,
    block_rows: int,
    pairs: tuple[tuple[Tensor | None, Tensor | None], ...],
    accumulate_home: bool,
) -> None:
    """The Triton body: both gradients in one launch."""
    from relibra_kernels.triton_ops import grouped_gemm_wgrad as kernels

    hidden, expert = x.shape[1], scored.shape[1]
    halves = dh.shape[1] // expert
    check_gemm_sizes(x, hidden_size=hidden, expert_size=expert)
    config = gemm_config("grouped_gemm_wgrad", x, hidden, expert)
    grads = [
        None if home is None else weight_set([home], None, replica, count)
        for (home, replica), count in zip(pairs, (halves, 1), strict=True)
    ]
    if grads[0] is None and grads[1] is None:
        return
    per_half = kernels.count_output_tiles(hidden, expert, config)
    wtile = w_tiles(
        slot_rows,
        _num_home(pairs),
        0,
        block_rows,
        halves * per_half if grads[0] is not None else 0,
        per_half if grads[1] is not None else 0,
        accumulate_home,
    ).to(x.device, non_blocking=True)  # no sync of the stream
    kernels.expert_wgrad(
        x,
        dy if dy.stride(1) == 1 else dy.contiguous(),
        dh,
        scored,
        row_to_token,
        wtile,
        tile_count(wtile, x.device),
        *grads,
        config=config,
    )


def _num_home(pairs: tuple[tuple[Tensor | None, Tensor | None], ...]) -> int:
    return next(len(home) for home, _ in pairs if home is not None)


@expert_wgrad.register_fake
def _(
    x_UD: Tensor,
    dy_UD: Tensor,
    dh_R2F: Tensor,
    scored_a_RF: Tensor,
    row_to_token_R: Tensor,
    slot_rows_n: Tensor,
    block_rows: int,
    home_grad13: Tensor | None,
    replica_grad13: Tensor | None,
    home_grad2: Tensor | None,
    replica_grad2: Tensor | None,
    accumulate_home: bool,
    backend: str = "auto",
) -> None:
    return None
