import gc

import pytest
import torch

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.op_checks import GemmCase, check_grouped_gemm_wgrad

relibra = torch.ops.relibra


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values(dtype, accumulate):
    check_grouped_gemm_wgrad(GemmCase(dtype), accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("slot_rows", [(0, 0, 0), (1, 0, 0), (0, 0, 33), (4, 4, 4)], ids=str)
def test_kernel_13_slots_without_rows_and_no_tail(slot_rows, accumulate):
    case = GemmCase(slot_rows=slot_rows, num_home=2, spare=0)
    check_grouped_gemm_wgrad(case, accumulate=accumulate)


def store(case, home):
    replica = torch.empty(case.replica.shape)
    slot_rows = torch.tensor(case.slot_rows)
    relibra.grouped_gemm_wgrad(
        case.grad, case.rows, slot_rows, case.block_rows, home, replica, False
    )
    return home, replica


def test_kernel_01_empty_experts_after_a_dirty_allocator():
    """256 experts all busy, then freed, then rows for odd experts only, in recycled memory."""
    sizes = (16, 8)
    busy = GemmCase(sizes=sizes, slot_rows=(8,) * 256, num_home=256, block_rows=8)
    home, _ = store(busy, torch.empty(busy.home.shape))
    assert (home != 0).any(2).any(1).all()
    home.fill_(float("inf"))
    del home
    gc.collect()
    odd = GemmCase(sizes=sizes, slot_rows=(0, 8) * 128, num_home=256, block_rows=8)
    home, _ = store(odd, torch.empty(odd.home.shape))
    assert_equal_bits("even experts", home[::2], torch.zeros_like(home[::2]))
    assert home.isfinite().all()
    assert (home[1::2] != 0).any(2).any(1).all()


def test_two_micro_batches_accumulate_and_the_other_buffers_keep_their_bits():
    first, second = GemmCase(seed=1), GemmCase(seed=2)
    main_grad = torch.zeros(first.home.shape)
    canary = main_grad.new_full(main_grad.shape, 7.0)
    padded = torch.stack([canary, main_grad, canary])
    for case in (first, second):
        relibra.grouped_gemm_wgrad(
            case.grad,
            case.rows,
            torch.tensor(case.slot_rows),
            case.block_rows,
            padded[1],
            torch.empty(case.replica.shape),
            True,
        )
    total = (
        store(first, torch.empty_like(main_grad))[0] + store(second, torch.empty_like(main_grad))[0]
    )
    torch.testing.assert_close(padded[1], total, rtol=1e-5, atol=1e-5)
    assert_equal_bits("neighbours", padded[[0, 2]], torch.stack([canary, canary]))


def test_kernel_06_gradients_into_one_half_of_a_packed_buffer():
    case = GemmCase()
    num_home, height, width = case.home.shape
    packed = torch.full((num_home, 2 * height, width), 7.0)
    expected, _ = store(case, torch.empty(case.home.shape))
    store(case, packed[:, height:])
    assert_equal_bits("up half", packed[:, height:], expected)
    assert_equal_bits("gate half", packed[:, :height], torch.full(case.home.shape, 7.0))


def test_two_runs_have_equal_bits():
    case = GemmCase()
    for one, two in zip(
        store(case, torch.empty(case.home.shape)),
        store(case, torch.empty(case.home.shape)),
        strict=True,
    ):
        assert_equal_bits("gradient", one, two)


def arguments(**change):
    given = {
        "grad": torch.ones(8, 5),
        "rows": torch.ones(8, 3),
        "slot_rows": torch.tensor([3, 1], dtype=torch.int32),
        "block_rows": 4,
        "home": torch.zeros(1, 5, 3),
        "replica": torch.zeros(1, 5, 3),
    } | change
    return (*given.values(), False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"home": torch.zeros(1, 5, 3).bfloat16()},
            TypeError,
            "home_grad_HND: need dtype torch.float32 .other dtypes lose rows.*got torch.bfloat16",
        ),
        ({"replica": torch.zeros(1, 5, 3).double()}, TypeError, "replica_grad_SND: need dtype"),
        ({"home": torch.zeros(1, 3, 5)}, ValueError, r"home_grad_HND: need shape \[any, 5, 3\]"),
        ({"rows": torch.ones(7, 3)}, ValueError, r"rows_RD: need shape \[8, any\]"),
        ({"slot_rows": torch.tensor([3])}, ValueError, r"slot_rows_n: need shape \[2\]"),
        (
            {"slot_rows": torch.tensor([5, 1])},
            ValueError,
            "slot_rows_n: need at most 8 padded rows.* got 12",
        ),
        ({"slot_rows": torch.tensor([-1, 1])}, ValueError, "slot_rows_n: need values in 0"),
        ({"slot_rows": torch.ones(2)}, TypeError, "slot_rows_n: need dtype"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        relibra.grouped_gemm_wgrad(*arguments(**change))


def test_opcheck():
    torch.library.opcheck(relibra.grouped_gemm_wgrad, arguments())
