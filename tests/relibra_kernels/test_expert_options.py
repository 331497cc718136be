"""All options of the experts' ops: gradients equal dense autograd in fp64, by name."""

import dataclasses

import kernel_cases
import pytest
import torch
from expert_setups import (
    ALPHA,
    FAMILIES,
    LIMIT,
    RAGGED,
    D,
    F,
    Setup,
    apart,
    home_list,
    oracle,
    run,
)
from kernel_cases import KernelCase

from relibra_kernels.testing.compare import MAX_CALC_DIFF, calc_diff

relibra = torch.ops.relibra

SETUPS = [
    Setup(),
    Setup(bias=True, accumulate=True),
    Setup(bias=True, score_at="activation"),
    Setup(RAGGED, "interleaved", 1, bias=True),
    Setup(FAMILIES, "transposed", 1, accumulate=True),
    Setup(FAMILIES, "transposed_pairs", 0, bias=True, accumulate=True),
    Setup(RAGGED, "strided", 3, score_at="activation", gathered=False),
    Setup(FAMILIES, "contiguous", 2, bias=True, gathered=False),
    Setup(FAMILIES, "table", 0, bias=True),
    Setup(RAGGED, "table", 3, accumulate=True),
    Setup(FAMILIES, "apart"),
    Setup(RAGGED, "apart", 1, accumulate=True),
]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_gradients_equal_dense_autograd(setup, backend):
    found, expected = run(setup, backend), oracle(setup)
    real = setup.case.row_to_slot >= 0
    for name, got in found.items():
        need = expected[name]
        if name in ("y", "dx", "dscore"):
            got, need = got[real], need[real]
        assert calc_diff(got, need) < 1e-10, name


def test_a_transposed_or_interleaved_mix_up_is_noticed():
    """The metric sees what the options change: each oracle differs from its neighbour's."""
    base = oracle(Setup(bias=True))
    for other in (Setup(), Setup(bias=True, score_at="activation"), Setup(bias=True, activation=1)):
        found = oracle(other)
        assert any(calc_diff(found[name], base[name]) > 1e-4 for name in ("y", "dscore"))


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[3], SETUPS[10]], ids=str)
def test_the_references_take_fp64(setup):
    found, expected = run(setup, "reference", torch.float64), oracle(setup, torch.float64)
    for name in ("y", "dx", "dw13", "dw2"):
        real = setup.case.row_to_slot >= 0 if name in ("y", "dx") else slice(None)
        assert calc_diff(found[name][real], expected[name][real]) < 1e-24, name


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_bf16_of_both_bodies(backend):
    setup = Setup(FAMILIES, "interleaved", 0, bias=True, score_at="activation")
    found, expected = run(setup, backend, torch.bfloat16), oracle(setup, torch.bfloat16)
    real = setup.case.row_to_slot >= 0
    for name, got in found.items():
        rows = real if name in ("y", "dx", "dscore") else slice(None)
        assert calc_diff(got[rows], expected[name][rows]) < MAX_CALC_DIFF[torch.bfloat16], name


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("which", ["home_w13", "replica_w13", "home_b13"])
def test_one_changed_weight_is_seen(which, backend):
    """A loose tolerance once hid a wrong SwiGLU: the bound must see one row of one weight."""
    setup = Setup(FAMILIES, bias=True)
    arguments = up_arguments()
    names = ("home_b13", "static_b13", "replica_b13")
    biases = dict(zip(names, setup.biases(F, 2, torch.float32), strict=True))
    arguments |= {**biases, "backend": backend}
    before = relibra.expert_up(**arguments)[1]
    one = arguments[which]
    (one[0] if isinstance(one, list) else one)[0, F + 3] *= 1.01
    after = relibra.expert_up(**arguments)[1]
    assert calc_diff(after, before) > 10 * MAX_CALC_DIFF[torch.float32]


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "transposed", "table", "apart"])
def test_exact_references_do_not_depend_on_neighbours(layout):
    """Rows of fixed tiles: a row alone in its slot has the bits it has among others."""
    setup = Setup(KernelCase("eleven", (11,), num_home=1), layout)
    w13 = setup.field(F, D, 2, torch.float32, 3)
    x = setup.case.tokens(D, torch.float32)
    options = (0, ALPHA, LIMIT, w13.interleaved, w13.transposed)

    def up(case, rows):
        return relibra.expert_up(
            rows, None, home_list(w13), None, None, case.mtile, case.block_rows, True, *options,
            halves_apart=w13.halves_apart,
        )  # fmt: skip

    rows = x[torch.arange(16) % len(x)]
    alone = dataclasses.replace(setup.case, slot_rows=(1,))
    kernel_cases.assert_same_bits(
        tuple(one[:1] for one in up(alone, rows)), tuple(one[:1] for one in up(setup.case, rows))
    )


def test_fakes_and_schemas():
    setup = Setup(FAMILIES, bias=True)
    case = setup.case
    w13, w2 = setup.field(F, D, 2, torch.float32, 3), setup.field(D, F, 1, torch.float32, 30)
    b13, b2 = setup.biases(F, 2, torch.float32), setup.biases(D, 1, torch.float32)
    x, score = case.tokens(D, torch.float32), torch.nan_to_num(case.row_score)
    tiles = case.mtile, case.block_rows, False
    check = torch.library.opcheck
    up = (x, None, [w13.home], w13.static, w13.replica, *tiles)
    rows = torch.nan_to_num(case.rows(D, torch.float32))
    check(relibra.expert_up.default, (rows, *up[1:], 1, ALPHA, LIMIT, False, False, "auto", *b13))
    pair = apart(setup.field(F, D, 2, torch.float32, 3))
    up = (x, case.row_to_token, list(pair.home), pair.static, pair.replica, *tiles)
    options = {"score_R": score, "halves_apart": True}
    check(relibra.expert_up.default, up, options)
    h, a = relibra.expert_up(*up, **options)
    down = (a, [w2.home], w2.static, w2.replica, *tiles, False, "auto", *b2)
    check(relibra.expert_down.default, down)
    back = (x, case.row_to_token, [w2.home], w2.static, w2.replica, h, score, *tiles)
    options = dict(zip(("home_b2", "static_b2", "replica_b2"), b2, strict=True))
    check(relibra.expert_down_backward.default, back, options)
    dh, scored, _ = relibra.expert_down_backward(*back, **options)
    check(relibra.expert_up_backward.default, (dh, list(pair.home), *up[3:5], *tiles),
          {"halves_apart": True})  # fmt: skip
    slot_rows = torch.tensor(case.slot_rows)
    lists = [torch.zeros_like(one) for one in pair.home]
    copies = [torch.zeros_like(one) for one in (w13.replica, w13.static)]
    wgrad = (x, x, dh, scored, case.row_to_token, slot_rows, case.block_rows, None, copies[0],
             None, None, False)  # fmt: skip
    options = {"static_grad13": copies[1], "home_grads13": lists, "halves_apart": True}
    check(relibra.expert_wgrad.default, wgrad, options)
    db13, db2 = ([torch.zeros_like(one) for one in bias] for bias in (b13, b2))
    homes = (db13[0], db13[2], db2[0], db2[2])
    bias = (x, dh, case.row_to_token, score, slot_rows, case.block_rows, *homes, True)
    check(
        relibra.expert_bias_grad.default, bias, {"static_grad13": db13[1], "static_grad2": db2[1]}
    )


def up_arguments(**change):
    setup = Setup(FAMILIES)
    w13 = setup.field(F, D, 2, torch.float32, 3)
    case = setup.case
    made = {
        "x_UD": case.tokens(D, torch.float32), "row_to_token_R": case.row_to_token,
        "home_w13": [w13.home], "static_w13": w13.static, "replica_w13": w13.replica,
        "mtile_B4": case.mtile, "block_rows": case.block_rows, "exact": False,
    }  # fmt: skip
    return {**made, **change}


HALF = torch.zeros(2, F, D)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"home_b13": torch.zeros(2, 2 * F)}, ValueError, r"static_b13: need \[1, 256\] like the"),
        ({"static_b13": torch.zeros(1, 2 * F)}, ValueError, r"home_b13: need \[2, 256\] like the"),
        ({"home_b13": torch.zeros(2, F)}, ValueError, r"home_b13: need"),
        ({"home_b13": torch.zeros(2, 2 * F).double()}, TypeError, "home_b13: need"),
        ({"home_b13": torch.zeros(2 * F, 2).t()}, ValueError, "home_b13: need contiguous rows"),
        ({"score_R": torch.zeros(3)}, ValueError, "score_R: need"),
        ({"score_R": torch.zeros(FAMILIES.num_rows).half()}, TypeError, "score_R: need"),
        ({"x_UD": torch.zeros(13, 72)}, ValueError, "x_UD: need 64 columns to fit weights"),
        ({"home_w13": [HALF], "halves_apart": True}, TypeError, "home: need the pair"),
        ({"home_w13": [HALF, HALF[:, 1:]], "halves_apart": True}, ValueError, r"home\[1\]: need"),
        ({"home_w13": [HALF, HALF], "halves_apart": True, "interleaved": True}, ValueError,
         "halves_apart: need halves=2 and interleaved=False"),
        ({"home_w13": [HALF, HALF], "halves_apart": True, "activation": 2}, ValueError,
         "halves_apart: need halves=2"),
    ],
)  # fmt: skip
def test_bad_arguments_of_expert_up(change, error, message):
    with pytest.raises(error, match=message):
        relibra.expert_up(**up_arguments(**change))


def test_bad_arguments_of_the_other_ops():
    case, setup = FAMILIES, Setup(FAMILIES)
    w2 = setup.field(D, F, 1, torch.float32, 30)
    tiles = case.mtile, case.block_rows, False
    a, x = torch.zeros(case.num_rows, F), case.tokens(D, torch.float32)
    families = [w2.home], w2.static, w2.replica
    with pytest.raises(ValueError, match="a_RF: need 128 columns"):
        relibra.expert_down(a[:, :64], *families, *tiles)
    score = torch.zeros(case.num_rows)
    back = (x, case.row_to_token, *families, a, score, *tiles)
    with pytest.raises(ValueError, match="h_R2F: need"):
        relibra.expert_down_backward(*back)
    with pytest.raises(ValueError, match="score_at: need"):
        relibra.expert_down_backward(*back, 3, score_at="input")
    w13 = setup.field(F, D, 2, torch.float32, 3)
    with pytest.raises(ValueError, match="dh_R2F: need 256 columns"):
        relibra.expert_up_backward(a, [w13.home], w13.static, w13.replica, *tiles)
    rows = torch.tensor(case.slot_rows)
    wgrad = (x, x, torch.zeros(case.num_rows, 2 * F), a, case.row_to_token, rows, case.block_rows)
    home, lists = torch.zeros_like(w13.home), list(torch.zeros_like(w13.home))
    with pytest.raises(ValueError, match="home_grads13: need None with home_grad13"):
        relibra.expert_wgrad(*wgrad, home, None, None, None, False, home_grads13=lists)
    with pytest.raises(ValueError, match="slot_rows_n: need 2 slots as in home_grad13"):
        relibra.expert_wgrad(*wgrad, home, None, None, None, False)
    with pytest.raises(ValueError, match="replica_grad13: need None without home_grad13"):
        relibra.expert_wgrad(*wgrad, None, w13.replica, None, None, False)
    with pytest.raises(ValueError, match=r"home_grads13 = \[gate, up\]"):
        relibra.expert_wgrad(*wgrad, home, None, None, None, False, halves_apart=True)
    bias = (x, wgrad[2], case.row_to_token, score, rows, case.block_rows)
    with pytest.raises(TypeError, match="home_grad2: need dtype torch.float32"):
        relibra.expert_bias_grad(*bias, None, None, a[:4, :D].half(), None, False)
    with pytest.raises(ValueError, match="slot_rows_n: need 2 slots as in home_grad2"):
        relibra.expert_bias_grad(*bias, None, None, a[:2, :D], None, False)
    with pytest.raises(ValueError, match="replica_grad13: need None without home_grad13"):
        relibra.expert_bias_grad(*bias, None, a[:2], None, None, False)
