"""The op of both weight gradients; contract: reference/expert_wgrad.py."""

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
from relibra_kernels.ops.expert_arguments import Weights, check_same_slots
from relibra_kernels.ops.gemm_launch import check_gemm_sizes, gemm_config
from relibra_kernels.ops.launch_data import WgradShape, launch_data, make_wtile
from relibra_kernels.reference import expert_wgrad as _expert_wgrad
from relibra_kernels.tables import count_padded_rows

if TYPE_CHECKING:
    from relibra_kernels.weights import WeightSet

DEVICES = ("cpu", "cuda")


SCHEMA = """(
    Tensor x_UD, Tensor dy_UD, Tensor dh_R2F, Tensor scored_a_RF, Tensor row_to_token_R,
    Tensor slot_rows_n, int block_rows, Tensor(a!)? home_grad13, Tensor(b!)? replica_grad13,
    Tensor(c!)? home_grad2, Tensor(d!)? replica_grad2, bool accumulate_home, str backend="auto",
    Tensor(e!)? static_grad13=None, Tensor(f!)? static_grad2=None, bool interleaved=False,
    bool transposed=False, Tensor(g!)[]? home_grads13=None, Tensor(h!)[]? home_grads2=None,
    bool halves_apart=False
) -> ()"""
MUTATED = (
    *("home_grad13", "replica_grad13", "home_grad2", "replica_grad2"),
    *("static_grad13", "static_grad2", "home_grads13", "home_grads2"),
)


@torch.library.custom_op(
    "relibra::expert_wgrad", mutates_args=MUTATED, device_types=DEVICES, schema=SCHEMA
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
    static_grad13: Tensor | None = None,
    static_grad2: Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    home_grads13: list[Tensor] | None = None,
    home_grads2: list[Tensor] | None = None,
    halves_apart: bool = False,
) -> None:
    """Gradients of both weights, into the caller's fp32 buffers; None where not wanted."""
    slot_rows = slot_rows_n
    _check_rows(x_UD, dy_UD, dh_R2F, scored_a_RF, row_to_token_R, slot_rows, block_rows)
    width = scored_a_RF.shape[1]
    if width == 0 or dh_R2F.shape[1] not in (width, 2 * width):
        raise ValueError(f"dh_R2F: need {width} or {2 * width} columns, got {dh_R2F.shape[1]}")
    fields = (
        _gradients("13", home_grad13, home_grads13, static_grad13, replica_grad13, halves_apart),
        _gradients("2", home_grad2, home_grads2, static_grad2, replica_grad2),
    )
    shapes = ((dh_R2F.shape[1], x_UD.shape[1]), (x_UD.shape[1], width))
    for name, field, shape in zip(("13", "2"), fields, shapes, strict=True):
        if field is not None:
            _check_gradients(name, field, x_UD, shape, transposed, slot_rows)
    check_same_slots(*(None if field is None else field.counts() for field in fields))
    # Gradients that return to autograd are new buffers: to remember them would keep them alive.
    table = slot_rows if accumulate_home else None
    halves = dh_R2F.shape[1] // width
    grad13, grad2 = (
        None if field is None else field.field(n, interleaved and n == 2, transposed, table)
        for field, n in zip(fields, (halves, 1), strict=True)
    )
    operands = (x_UD, dy_UD, dh_R2F, scored_a_RF, row_to_token_R, slot_rows, block_rows)
    if use_triton(backend, x_UD):
        _launch_wgrad(*operands, grad13, grad2, accumulate_home)
    else:
        _expert_wgrad.expert_wgrad(*operands, grad13, grad2, accumulate_home)


def _gradients(
    name: str,
    home: Tensor | None,
    experts: list[Tensor] | None,
    static: Tensor | None,
    replica: Tensor | None,
    apart: bool = False,
) -> Weights | None:
    """One field's outputs; None where they are not wanted."""
    if home is not None and experts is not None:
        raise ValueError(f"home_grads{name}: need None with home_grad{name}, got a list")
    if home is None and not experts:
        if static is not None or replica is not None:
            raise ValueError(f"replica_grad{name}: need None without home_grad{name}, got a tensor")
        return None
    if home is not None:
        check_tensor(f"home_grad{name}", home, ndim=3)
        if apart:
            raise ValueError(
                f"home_grad{name}: need home_grads{name} = [gate, up] with halves_apart, got "
                "a tensor"
            )
    return Weights([home] if home is not None else experts or [], static, replica, apart)


def _check_gradients(
    name: str,
    field: Weights,
    rows: Tensor,
    shape: tuple[int, ...],
    transposed: bool,
    slot_rows: Tensor,
) -> None:
    shape = shape[::-1] if transposed else shape
    for i, grad in enumerate(field.home):
        whole = field.is_whole and not field.apart
        what = f"home_grad{name}" if whole else f"home_grads{name}[{i}]"
        check_wide(what, grad, rows, "other dtypes lose rows in the sum")
        check_output(what, grad)
        if field.apart:
            rows_of_half = (shape[0], shape[1] // 2) if transposed else (shape[0] // 2, shape[1])
            check_tensor(what, grad, shape=(None, *rows_of_half))
        else:
            check_tensor(what, grad, shape=(None, *shape) if whole else shape)
    dtype = field.home[0].dtype
    for family, copies in (("static", field.static), ("replica", field.replica)):
        if copies is not None:
            check_tensor(f"{family}_grad{name}", copies, dtype=dtype, shape=(None, *shape))
            check_output(f"{family}_grad{name}", copies)
    if sum(field.counts()) != slot_rows.shape[0]:
        raise ValueError(
            f"slot_rows_n: need {sum(field.counts())} slots as in home_grad{name}, "
            f"static_grad{name} and replica_grad{name}, got {len(slot_rows)}"
        )


def _check_rows(
    x: Tensor,
    dy: Tensor,
    dh: Tensor,
    scored: Tensor,
    row_to_token: Tensor,
    slot_rows: Tensor,
    block_rows: int,
) -> None:
    check_float_matrix("x_UD", x)
    check_tensor("dy_UD", dy, dtype=x.dtype, shape=tuple(x.shape))
    check_tensor("row_to_token_R", row_to_token, device=x.device)
    check_table("row_to_token_R", row_to_token, (None,), x.shape[0])
    num_rows = row_to_token.shape[0]
    check_tensor("dh_R2F", dh, dtype=x.dtype, shape=(num_rows, None))
    check_tensor("scored_a_RF", scored, dtype=x.dtype, shape=(num_rows, None))
    check_tensor("slot_rows_n", slot_rows, dtype=(torch.int32, torch.int64), ndim=1, device="cpu")
    data = launch_data(slot_rows)
    if data is not None:
        needed = data.padded_rows(slot_rows, block_rows)
    else:
        needed = count_padded_rows(slot_rows, block_rows)
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
    grad13: WeightSet | None,
    grad2: WeightSet | None,
    accumulate_home: bool,
) -> None:
    """The Triton body: both gradients in one launch."""
    from relibra_kernels.triton_ops import grouped_gemm_wgrad as kernels

    hidden, expert = x.shape[1], scored.shape[1]
    check_gemm_sizes(x, hidden_size=hidden, expert_size=expert)
    config = gemm_config("grouped_gemm_wgrad", x, hidden, expert)
    data = launch_data(slot_rows)
    some = grad13 if grad13 is not None else grad2
    if some is None:
        return
    per_half = kernels.count_output_tiles(hidden, expert, config)
    shape = WgradShape(
        some.num_home,
        0 if some.static is None else some.static.shape[0],
        block_rows,
        0 if grad13 is None else grad13.halves * per_half,
        0 if grad2 is None else per_half,
        accumulate_home,
    )
    if data is not None and data.num_tiles.device == x.device:
        wtile, num_tiles = data.wtile(slot_rows, shape)
    else:
        wtile, num_tiles = make_wtile(slot_rows, shape, x.device)
    kernels.expert_wgrad(
        x if x.stride(1) == 1 else x.contiguous(),
        dy if dy.stride(1) == 1 else dy.contiguous(),
        dh,
        scored,
        row_to_token,
        wtile,
        num_tiles,
        grad13,
        grad2,
        config=config,
        counter=None if data is None else data.counter,
    )


@expert_wgrad.register_fake
def _(*_: object, **__: object) -> None:
    return None
