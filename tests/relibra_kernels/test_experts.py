"""Fused ops of the experts: every body of an op gives the general reference's numbers."""

import pytest
import torch
from kernel_cases import CASE

from relibra_kernels.reference import activation as activation_reference
from relibra_kernels.reference import expert_down_backward as down_reference
from relibra_kernels.reference import expert_up as up_reference
from relibra_kernels.reference import expert_wgrad as wgrad_reference
from relibra_kernels.testing.compare import calc_diff
from relibra_kernels.weights import WeightSet

relibra = torch.ops.relibra
D, F = 64, 128
BACKENDS = ("reference", "triton")
RAGGED, FAMILIES = CASE["ragged_with_empty_slots"], CASE["three_families"]
PLAIN = CASE["one_expert"]


def listed(weights: WeightSet) -> list[torch.Tensor]:
    return list(weights.home) if weights.is_table else [weights.home]


def close(got, need):
    assert got.shape == need.shape
    assert got.dtype == need.dtype
    assert calc_diff(got, need) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "layout", "activation"),
    [
        (RAGGED, "contiguous", 0),
        (FAMILIES, "contiguous", 0),
        (RAGGED, "interleaved", 1),
        (RAGGED, "transposed", 0),
        (FAMILIES, "table", 3),
    ],
    ids=str,
)
def test_expert_up(case, layout, activation, backend):
    halves = 2 if activation <= 1 else 1
    w13 = case.weights(F, D, torch.float32, halves=halves, layout=layout)
    x = case.tokens(D, torch.float32)
    h, a = relibra.expert_up(
        x, case.row_to_token, listed(w13), w13.static, w13.replica, case.mtile, case.block_rows,
        False, activation, 1.702, 1.0, w13.interleaved, w13.transposed, backend,
    )  # fmt: skip
    options = {"activation": activation, "alpha": 1.702, "limit": 1.0}
    expected = up_reference.expert_up(
        x, case.row_to_token, w13, case.mtile, case.block_rows, **options
    )
    close(h, expected[0])
    close(a, expected[1])
    assert not h[case.row_to_slot < 0].any()
    assert not a[case.row_to_slot < 0].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "layout", "activation"),
    [(RAGGED, "contiguous", 0), (FAMILIES, "contiguous", 1), (RAGGED, "transposed", 2)],
    ids=str,
)
def test_expert_down_backward(case, layout, activation, backend):
    w2 = case.weights(D, F, torch.float32, layout=layout)
    h = case.rows((2 if activation <= 1 else 1) * F, torch.float32)
    dy = case.tokens(D, torch.float32, seed=9)
    got = relibra.expert_down_backward(
        dy, case.row_to_token, listed(w2), w2.static, w2.replica, torch.nan_to_num(h),
        torch.nan_to_num(case.row_score), case.mtile, case.block_rows, False, activation, 1.702,
        1.0, w2.transposed, backend,
    )  # fmt: skip
    expected = down_reference.expert_down_backward(
        dy, case.row_to_token, w2, h, case.row_score, case.mtile, case.block_rows,
        activation=activation, alpha=1.702, limit=1.0,
    )  # fmt: skip
    for one, other in zip(got, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wanted", ["both", "w13", "w2"])
def test_expert_wgrad(wanted, accumulate, backend):
    case = RAGGED
    num_slots = (case.num_home, case.num_replica)
    start = [
        torch.full((slots, *shape), 3.0)
        for shape in ((2 * F, D), (D, F))
        for slots in num_slots
    ]  # fmt: skip
    if wanted != "both":
        start[2 * (wanted == "w13") : 2 * (wanted == "w13") + 2] = [None, None]
    operands = (
        case.tokens(D, torch.float32), case.tokens(D, torch.float32, seed=9),
        torch.nan_to_num(case.rows(2 * F, torch.float32)),
        torch.nan_to_num(case.rows(F, torch.float32, seed=4)), case.row_to_token,
    )  # fmt: skip
    got = [None if x is None else x.clone() for x in start]
    rows = torch.tensor(case.slot_rows, dtype=torch.int32)
    relibra.expert_wgrad(*operands, rows, case.block_rows, *got, accumulate, backend)
    need = [None if x is None else x.clone() for x in start]
    sets = [
        None if need[i] is None else WeightSet(need[i], replica=need[i + 1], halves=halves)
        for i, halves in ((0, 2), (2, 1))
    ]
    wgrad_reference.expert_wgrad(*operands, rows, case.block_rows, *sets, accumulate)
    for one, other in zip(got, need, strict=True):
        if one is not None:
            close(one, other)


def test_fakes_and_schemas():
    case, w13 = PLAIN, PLAIN.weights(F, D, torch.float32, halves=2)
    w2 = PLAIN.weights(D, F, torch.float32)
    x = case.tokens(D, torch.float32)
    tables = (case.mtile, case.block_rows, False)
    up = (x, case.row_to_token, [w13.home], None, w13.replica, *tables)
    torch.library.opcheck(relibra.expert_up.default, up)
    h, _ = relibra.expert_up(*up)
    score = torch.nan_to_num(case.row_score)
    down = (x, case.row_to_token, [w2.home], None, w2.replica, h, score, *tables)
    torch.library.opcheck(relibra.expert_down_backward.default, down)
    dh, scored, _ = relibra.expert_down_backward(*down)
    grads = [torch.zeros_like(one) for one in (w13.home, w13.replica, w2.home, w2.replica)]
    rows = torch.tensor(case.slot_rows, dtype=torch.int32)
    wgrad = (x, x, dh, scored, case.row_to_token, rows, case.block_rows, *grads, True)
    torch.library.opcheck(relibra.expert_wgrad.default, wgrad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_no_rows(backend):
    case = CASE["no_rows"]
    w13 = case.weights(F, D, torch.float32, halves=2)
    x = torch.zeros(0, D)
    nothing = torch.zeros(0, dtype=torch.int32)
    h, a = relibra.expert_up(
        x, nothing, [w13.home], None, w13.replica, case.mtile, case.block_rows, False,
        backend=backend,
    )  # fmt: skip
    assert h.shape == (0, 2 * F)
    assert a.shape == (0, F)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"home": []}, ValueError, r"home_w13: need at least one tensor, got none"),
        ({"home": [torch.zeros(2, 8, 8).double()]}, TypeError, r"home_w13\[0\]: need"),
        ({"activation": 7}, ValueError, "activation: need"),
        ({"backend": "cuda"}, ValueError, "backend: need"),
        ({"x": torch.zeros(53, 72), "home": [torch.zeros(3, 256, 72)], "replica": None,
          "backend": "triton"}, ValueError, "hidden_size: need a multiple of 64, got 72"),
    ],
    ids=["no-weights", "dtype", "activation", "backend", "width"],
)  # fmt: skip
def test_bad_arguments_are_named(change, error, message):
    case = PLAIN
    w13 = case.weights(F, D, torch.float32, halves=2)
    x = change.get("x", case.tokens(D, torch.float32))
    home, replica = change.get("home", [w13.home]), change.get("replica", w13.replica)
    with pytest.raises(error, match=message):
        relibra.expert_up(
            x, case.row_to_token, home, None, replica, case.mtile, case.block_rows, False,
            change.get("activation", 0), backend=change.get("backend", "auto"),
        )  # fmt: skip


@pytest.mark.parametrize("activation", range(4))
def test_the_reference_gradient_is_that_of_autograd(activation):
    width = 2 * F if activation <= 1 else F
    h = torch.randn(9, width, dtype=torch.float64, requires_grad=True)
    da = torch.randn(9, F, dtype=torch.float64)
    options = (activation, 1.702, 1.0)
    (need,) = torch.autograd.grad(activation_reference.activate(h, *options), h, da)
    got = activation_reference.activate_grad(da, h.detach(), *options)
    assert calc_diff(got, need) < 1e-24
