"""Tables, buffers and numbers that would make the experts' ops touch foreign memory are refused."""

import pytest
import torch

from relibra_kernels.ops import direct_ops
from relibra_kernels.ops.backend import debug
from relibra_kernels.tables import m_tiles

H, S, D, F, BLOCK, R = 2, 1, 8, 6, 4, 12
ROWS = torch.tensor([3, 0, 5], dtype=torch.int32)
TOKEN = torch.tensor([0, 1, 2, -1, 3, 4, 5, 6, 0, -1, -1, -1], dtype=torch.int32)


def token(value):
    """Row 1 belongs to another token."""
    changed = TOKEN.clone()
    changed[1] = value
    return changed


def up(home=None, block=BLOCK, **change):
    given = {
        "x_UD": torch.ones(7, D), "row_to_token_R": TOKEN, "replica_w13": torch.ones(S, 2 * F, D),
        "mtile_B4": m_tiles(ROWS, H, BLOCK), "static_w13": None, "exact": False,
    } | change  # fmt: skip
    home = [torch.ones(H, 2 * F, D)] if home is None else home
    return direct_ops.expert_up(home_w13=home, block_rows=block, **given)


def down_backward(row_to_token):
    return direct_ops.expert_down_backward(
        torch.ones(7, D), row_to_token, [torch.ones(H, D, F)], None, torch.ones(S, D, F),
        torch.ones(R, 2 * F), torch.ones(R), m_tiles(ROWS, H, BLOCK), BLOCK, False,
    )  # fmt: skip


def weights(row_to_token=TOKEN, rows=ROWS, block=BLOCK, slots2=(H, S), **change):
    given = {
        "home_grad13": torch.zeros(H, 2 * F, D), "replica_grad13": torch.zeros(S, 2 * F, D),
        "home_grad2": torch.zeros(slots2[0], D, F), "replica_grad2": torch.zeros(slots2[1], D, F),
    } | change  # fmt: skip
    operands = torch.ones(7, D), torch.ones(7, D), torch.ones(R, 2 * F), torch.ones(R, F)
    direct_ops.expert_wgrad(*operands, row_to_token, rows, block, accumulate_home=False, **given)


def biases(row_to_token=TOKEN, rows=ROWS, block=BLOCK, slots2=(H, S), score=None, **change):
    given = {
        "home_grad13": torch.zeros(H, 2 * F), "replica_grad13": torch.zeros(S, 2 * F),
        "home_grad2": torch.zeros(slots2[0], D), "replica_grad2": torch.zeros(slots2[1], D),
        "static_grad13": None, "static_grad2": None,
    } | change  # fmt: skip
    operands = torch.ones(7, D), torch.ones(R, 2 * F), row_to_token, score
    direct_ops.expert_bias_grad(*operands, rows, block, accumulate_home=False, **given)


def grouped(home):
    rows = torch.ones(R, D), torch.ones(R, D), ROWS, BLOCK
    torch.ops.relibra.grouped_gemm_wgrad(*rows, home, torch.zeros(S, D, D), False)


OPS = {
    "up": lambda table: up(row_to_token_R=table),
    "down_backward": down_backward,
    "weights": weights,
    "biases": biases,
}


@pytest.mark.parametrize("value", [7, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("name", OPS)
def test_rows_of_tokens_that_are_not_there(name, value):
    with debug(), pytest.raises(ValueError, match=rf"row_to_token_R: .* < 7, got {value} at \[1\]"):
        OPS[name](token(value))


HUGE = torch.full((3,), 2**62)  # three of them are 2^62 again, modulo 2^64
MIXED = "one device, that of home_w13, cpu, got meta"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: weights(slots2=(1, 2)), ValueError, r"\(2, 0, 1\) as in .*, got \(1, 0, 2\)"),
        (lambda: biases(slots2=(1, 2)), ValueError, r"\(2, 0, 1\) as in .*, got \(1, 0, 2\)"),
        (lambda: weights(rows=HUGE), ValueError, "slot_rows_n: need values in 0..2147483647"),
        (lambda: biases(rows=HUGE), ValueError, "slot_rows_n: need values in 0..2147483647"),
        (lambda: biases(block=1 << 62), ValueError, "block_rows: need 1 to 2147483647"),
        (lambda: up(block=1 << 40), ValueError, "block_rows: need 1 to 65536"),
        (lambda: up(home=torch.ones(H, 2 * F, D)), TypeError, "home_w13: need a list of tensors"),
        (lambda: up(replica_w13=torch.ones(S, 2 * F, D, device="meta")), ValueError, MIXED),
        (lambda: up(score_R=torch.ones(R, device="meta")), ValueError, MIXED),
        (lambda: up(activation=1, limit=-1.0), ValueError, "limit: need a positive finite"),
        (lambda: up(activation=1, alpha=float("nan")), ValueError, "alpha: need a finite"),
    ],
)  # fmt: skip
def test_numbers_and_devices(call, error, message):
    with pytest.raises(error, match=message):
        call()


def spread(*shape):
    """One slot's memory for all slots."""
    return torch.zeros(1, *shape[1:]).expand(*shape)


@pytest.mark.parametrize(
    "call",
    [
        lambda: weights(home_grad13=spread(H, 2 * F, D)),
        lambda: weights(home_grad13=None, home_grads13=[spread(2 * F, D)] * H),
        lambda: weights(home_grad2=spread(H, D, F)),
        lambda: weights(slots2=(1, 2), home_grad13=None, replica_grad13=None,
                        replica_grad2=spread(2, D, F)),
        lambda: biases(home_grad13=spread(H, 2 * F)),
        lambda: biases(home_grad2=spread(H, D)),
        lambda: grouped(spread(H, D, D)),
    ],
)  # fmt: skip
def test_gradients_that_share_memory(call):
    with pytest.raises(ValueError, match=r"grad.*: need memory of its own for every element"):
        call()
