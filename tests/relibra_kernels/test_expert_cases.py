"""Hard cases of the experts' ops: reported problems by id, odd gradients, several micro-batches."""

import dataclasses
import hashlib
import subprocess
import sys

import pytest
import torch
from expert_setups import FAMILIES, RAGGED, D, F, Setup, home_list, oracle, run
from kernel_cases import KernelCase, assert_same_bits

from relibra_kernels.tables import m_tiles
from relibra_kernels.testing.compare import calc_diff

relibra = torch.ops.relibra
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def backward_of(setup, backend, x, dy, h=None):
    """h, a, y, dh, score * a, dscore, dx of rows that lie by row."""
    case = setup.case
    w13, w2 = (setup.field(*shape, torch.float32, seed) for *shape, seed in
               ((F, D, 2, 3), (D, F, 1, 30)))  # fmt: skip
    score = torch.nan_to_num(case.row_score)
    tiles = case.mtile, case.block_rows, False
    up = home_list(w13), w13.static, w13.replica
    down = home_list(w2), w2.static, w2.replica
    h, a = relibra.expert_up(x, None, *up, *tiles, backend=backend)
    y = relibra.expert_down(a, *down, *tiles, backend=backend)
    back = relibra.expert_down_backward(dy, None, *down, h, score, *tiles, backend=backend)
    return h, a, y, *back, relibra.expert_up_backward(back[0], *up, *tiles, backend=backend)


@BACKENDS
def test_kernel_04_rows_after_the_last_one_do_not_leak(backend):
    """kernel-04 (torchtitan#1237): a buffer of 96 rows, 70 used, the tail inf or zero."""
    case = KernelCase("kernel_04", (40, 30), num_home=1, spare_rows=16)
    setup = Setup(case)
    assert case.num_rows == 96
    used = case.row_to_slot >= 0
    assert int(used.sum()) == 70
    x, dy = (torch.randn(96, D, generator=torch.Generator().manual_seed(s)) for s in (4, 5))
    found = []
    for tail in (0.0, torch.inf):
        rows = [one.masked_fill(~used[:, None], tail) for one in (x, dy)]
        found.append([one[used] for one in backward_of(setup, backend, *rows)])
    assert_same_bits(*found)
    assert all(bool(one.isfinite().all()) for one in found[0])


PROGRAM = """
import hashlib, torch
import relibra_kernels
from relibra_kernels.testing import bf16_interpreter
bf16_interpreter.install()
from relibra_kernels.tables import m_tiles
gen = torch.Generator().manual_seed(10)
rows, w = (torch.randn(*s, generator=gen).bfloat16() for s in ((32, 64), (2, 64, 64)))
tiles = m_tiles([5, 9], 1, 16)
out = torch.ops.relibra.grouped_gemm(rows, w[:1], w[1:], tiles, 16, False, "triton")
print(hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest())
"""


def test_kernel_10_a_fresh_process_has_the_same_bits():
    """kernel-10 (qwen3-moe-fused#21): no tuning at run time, so no process differs."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    gen = torch.Generator().manual_seed(10)
    rows, w = (torch.randn(*s, generator=gen).bfloat16() for s in ((32, D), (2, D, D)))
    tiles = m_tiles([5, 9], 1, 16)
    out = relibra.grouped_gemm(rows, w[:1], w[1:], tiles, 16, False, "triton")
    here = hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert done.stdout.strip() == here


@pytest.mark.gpu
def test_kernel_14_gradients_beside_another_stream():
    """kernel-14 (Megatron-LM#7400): 50 runs beside copies and sums on a second stream."""
    hidden, expert = 4096, 2048
    rows_n = torch.tensor([2304, 2048, 2560, 1792, 1792, 2304, 1536, 2304])
    gen = torch.Generator(device="cuda").manual_seed(14)

    def values(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=gen) * scale).bfloat16()

    num_rows = 65536
    used = int(rows_n.sum())
    table = torch.full((num_rows,), -1, dtype=torch.int32, device="cuda")
    table[:used] = torch.arange(used, device="cuda", dtype=torch.int32)  # all multiples of 128
    x, dy = (values(num_rows, hidden) for _ in range(2))
    dh, a = values(num_rows, 2 * expert), values(num_rows, expert)
    for one in (x, dy, dh, a):
        one[used:] = 2.0**100
    buffer, replica = torch.zeros(2, 64 << 20, device="cuda").unbind()
    side, first = torch.cuda.Stream(), None
    for _ in range(50):
        grads = [torch.full(shape, torch.nan, device="cuda") for shape in
                 ((8, 2 * expert, hidden), (8, hidden, expert))]  # fmt: skip
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a push and a reduce do
            replica.copy_(buffer)
            buffer.add_(replica)
        relibra.expert_wgrad(
            x, dy, dh, a, table, rows_n, 128, grads[0], None, grads[1], None, False
        )
        torch.cuda.synchronize()
        first = first or grads
        assert all(bool(one.isfinite().all()) for one in grads)
        assert all(torch.equal(one, other) for one, other in zip(grads, first, strict=True))


@BACKENDS
@pytest.mark.parametrize("strides", ["both", "rows"])
def test_kernel_05_expanded_gradients_of_the_outputs(backend, strides):
    """Gradients of a sum have strides (0, 0); of a sum over rows (0, 1)."""
    setup = Setup(RAGGED)
    x = torch.nan_to_num(RAGGED.rows(D, torch.float32))
    one = torch.ones(()) if strides == "both" else torch.linspace(0.5, 2, D)
    expanded = one.expand(RAGGED.num_rows, D)
    assert expanded.stride() == (0, 0 if strides == "both" else 1)
    found = backward_of(setup, backend, x, expanded)
    assert_same_bits(found, backward_of(setup, backend, x, expanded.contiguous()))


@BACKENDS
@pytest.mark.parametrize("num_choices", [1, 2, 8])
def test_kernel_07_the_weight_gradient_holds_the_score(num_choices, backend):
    """Also K = E: eight slots and eight choices, every token in every slot."""
    rows = (3,) * 8 if num_choices == 8 else (9, 4, 11)
    case = KernelCase(f"k{num_choices}", rows, num_home=2, num_choices=num_choices, spare_tokens=0)
    setup = Setup(case)
    found, expected = run(setup, backend), oracle(setup)
    for name in ("dw13", "dw2", "dscore"):
        real = case.row_to_slot >= 0 if name == "dscore" else slice(None)
        assert calc_diff(found[name][real], expected[name][real]) < 1e-10, name


def wgrad_operands(case, seed):
    return (
        case.tokens(D, torch.float32, seed), case.tokens(D, torch.float32, seed + 1),
        torch.nan_to_num(case.rows(2 * F, torch.float32, seed + 2)),
        torch.nan_to_num(case.rows(F, torch.float32, seed + 3)), case.row_to_token,
        torch.tensor(case.slot_rows), case.block_rows,
    )  # fmt: skip


@BACKENDS
def test_two_micro_batches_accumulate_into_reversed_gradients_of_experts(backend):
    """One main_grad an expert, laid out in reverse in one buffer, as Megatron's TEGroupedMLP."""
    case, num_home = KernelCase("reversed", (9, 0, 20, 6), num_home=3), 3
    shapes = (2 * F, D), (D, F)
    buffers = [torch.full((num_home, *shape), 0.5) for shape in shapes]
    experts = [[buffer[num_home - 1 - i] for i in range(num_home)] for buffer in buffers]
    replicas = [torch.full((1, *shape), torch.nan) for shape in shapes]
    expected = [torch.full((num_home, *shape), 0.5, dtype=torch.float64) for shape in shapes]
    for batch in range(2):
        operands = wgrad_operands(case, 50 + 10 * batch)
        relibra.expert_wgrad(
            *operands, None, replicas[0], None, replicas[1], True, backend,
            home_grads13=experts[0], home_grads2=experts[1],
        )  # fmt: skip
        x, dy, dh, scored = (one.double() for one in operands[:4])
        for slot in range(len(case.slot_rows)):
            rows = torch.nonzero(case.row_to_slot == slot).flatten()
            source = case.row_to_token[rows].long()
            sums = dh[rows].T @ x[source], dy[source].T @ scored[rows]
            for need, copy, one in zip(expected, replicas, sums, strict=True):
                if slot < num_home:
                    need[num_home - 1 - slot] += one
                else:  # always overwritten, so that of the second micro-batch alone
                    assert calc_diff(copy[0], one) < 1e-10
    for buffer, need in zip(buffers, expected, strict=True):
        assert calc_diff(buffer, need) < 1e-10
        assert bool((buffer[num_home - 2] == 0.5).all()), "an empty slot lost its bits"


@BACKENDS
def test_kernel_01_empty_slots_after_a_dirty_allocator(backend):
    """Gradients made with `empty`: busy slots first, then the same memory with empty ones."""
    busy, idle = (KernelCase(f"n{n}", rows, num_home=3) for n, rows in
                  enumerate(((20, 9, 17, 4), (0, 9, 0, 0))))  # fmt: skip
    for case in (busy, idle):
        home13, home2 = torch.empty(3, 2 * F, D), torch.empty(3, D, F)
        replica13, replica2 = torch.empty(1, 2 * F, D), torch.empty(1, D, F)
        grads = home13, replica13, home2, replica2
        relibra.expert_wgrad(*wgrad_operands(case, 7), *grads, False, backend)
        assert all(bool(one.isfinite().all()) for one in grads)
    assert not any(bool(one.any()) for one in (home13[0], home13[2], home2[0], home2[2]))
    assert not replica13.any()
    assert bool(home13[1].any())


@BACKENDS
def test_kernel_13_no_tokens_give_empty_outputs_and_zero_gradients(backend):
    case = KernelCase("nothing", (0, 0, 0), num_home=2)
    setup = Setup(case)
    empty = torch.zeros(0, D)
    found = backward_of(setup, backend, empty, empty)
    assert [tuple(one.shape) for one in found] == [
        (0, 2 * F), (0, F), (0, D), (0, 2 * F), (0, F), (0,), (0, D),
    ]  # fmt: skip
    grads = [torch.full(shape, torch.nan) for shape in
             ((2, 2 * F, D), (1, 2 * F, D), (2, D, F), (1, D, F))]  # fmt: skip
    none = torch.zeros(0, dtype=torch.int32)
    rows = torch.zeros(3, dtype=torch.int32)
    operands = empty, empty, found[3], found[4], none, rows, 16
    relibra.expert_wgrad(*operands, *grads, False, backend)
    db = [torch.full((n, w), torch.nan) for w in (2 * F, D) for n in (2, 1)]
    relibra.expert_bias_grad(
        empty, found[3], none, found[5], rows, 16, *db, False, backend,
    )  # fmt: skip
    assert not any(bool(one.any()) for one in (*grads, *db))


@BACKENDS
def test_one_home_slot_and_no_replica(backend):
    setup = Setup(KernelCase("one", (21,), num_home=1), bias=True)
    found, expected = run(setup, backend), oracle(setup)
    for name in ("dw13", "dw2", "db13", "db2"):
        assert calc_diff(found[name], expected[name]) < 1e-10, name


def test_transposed_views_through_the_stand_alone_op():
    """`grouped_gemm` takes `w.transpose(1, 2)` of a transposed storage without a copy."""
    case = dataclasses.replace(FAMILIES, num_static=0, num_home=3)
    fields = (case.weights(F, D, torch.float32, layout=how) for how in ("contiguous", "transposed"))
    plain, stored = fields
    rows = case.rows(D, torch.float32)
    tables = case.mtile, case.block_rows, False, "triton"
    need = relibra.grouped_gemm(rows, plain.home, plain.replica, *tables)
    views = stored.home.transpose(1, 2), stored.replica.transpose(1, 2)
    assert calc_diff(relibra.grouped_gemm(rows, *views, *tables), need) < 1e-12
    grad = case.rows(F, torch.float32)
    need = relibra.grouped_gemm_dgrad(grad, plain.home, plain.replica, *tables)
    assert calc_diff(relibra.grouped_gemm_dgrad(grad, *views, *tables), need) < 1e-12
