"""Table builders and peer copies in the interpreter: exactly the tables of the NumPy twins."""

import kernel_cases
import kernel_mutants
import numpy as np
import pytest
import torch

from relibra_kernels.ops import backend
from relibra_kernels.reference.build_route import build_route
from relibra_kernels.reference.build_rows import build_rows
from relibra_kernels.reference.count_sends import count_sends
from relibra_kernels.reference.route_to_slots import route_to_slots
from relibra_kernels.testing.virtual_group import slot_quota
from relibra_kernels.triton_ops import build_rows as rows_product
from relibra_kernels.triton_ops import device_errors
from relibra_kernels.triton_ops import dispatch as product

relibra = torch.ops.relibra


def word():
    return torch.zeros(1, dtype=torch.int32)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Plan:
    """Ids of one source, and slots with room for them; sizes, quotas and dtypes are random."""

    def __init__(self, seed, max_choices=4, max_tokens=10):
        rng = np.random.default_rng(seed)
        self.num_ranks = int(rng.integers(1, 6))
        self.slots_per_rank = int(rng.integers(1, 5))
        num_slots = self.num_ranks * self.slots_per_rank
        num_experts = int(rng.integers(1, num_slots + 1))
        choices = min(int(rng.integers(1, max_choices + 1)), num_experts)
        tokens = int(rng.integers(0, max_tokens + 1))
        slot_expert = np.append(
            np.arange(num_experts), rng.integers(-1, num_experts, num_slots - num_experts)
        )
        slot_expert = rng.permutation(slot_expert)
        ids = np.argsort(rng.random((tokens, num_experts)), 1)[:, :choices].astype(np.int32)
        if rng.random() < 0.2:
            ids[:, 0] = ids[:1, 0]  # many tokens to one expert
        ids[rng.random(ids.shape) < rng.choice([0, 0.1, 0.6])] = -1
        quota = np.zeros(num_slots, np.int64)
        for expert in range(num_experts):
            held = np.flatnonzero(slot_expert == expert)
            share = rng.dirichlet(np.full(held.size, 0.5))
            quota[held] = rng.multinomial((ids == expert).sum(), share)
            quota[held[-1]] += rng.integers(0, 2)
        first = rng.integers(0, 1000, num_slots)
        self.lists = slot_quota(slot_expert, quota, first, num_experts).tensors()
        self.ids = torch.from_numpy(ids).to(torch.int64 if rng.random() < 0.5 else torch.int32)
        self.block = int(rng.choice([16, 32]))
        self.ranks = self.slots_per_rank, self.num_ranks


def assert_equal_tables(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


def check_route(kernels, plan):
    """The source's tables, and how often each rank is sent to."""
    num_sent = int(count_sends(plan.ids, *plan.lists[:3], *plan.ranks).sum())
    error, sizes = word(), (*plan.ranks, num_sent)
    with kernel_cases.guarded_allocations():
        found = kernels.build_route(plan.ids, *plan.lists, *sizes, error, block=plan.block)
    assert_equal_tables(found, build_route(plan.ids, *plan.lists, *sizes))
    assert error.item() == 0
    return found


def check_counts(kernels, plan):
    error = word()
    with kernel_cases.guarded_allocations():
        slots = kernels.route_to_slots(plan.ids, *plan.lists[:3], error, block=plan.block)
        sent = kernels.count_sends(plan.ids, *plan.lists[:3], *plan.ranks, error, block=plan.block)
    assert_equal_tables((slots,), (route_to_slots(plan.ids, *plan.lists[:3]),))
    assert_equal_tables((sent,), (count_sends(plan.ids, *plan.lists[:3], *plan.ranks),))
    assert error.item() == 0


@pytest.mark.parametrize("tens", range(20))
def test_twins_200_random_plans(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        check_route(product, Plan(seed))


@pytest.mark.parametrize("seed", range(10))
def test_twins_of_the_counts(seed):
    check_counts(product, Plan(seed))


@pytest.mark.parametrize("tens", range(4))
def test_twins_of_the_rows_200_random_tables(tens):
    for seed in range(50 * tens, 50 * tens + 50):
        rng = np.random.default_rng(seed)
        shape = tuple(rng.integers(0, 9, 2).tolist())
        num_rows = int(np.prod(shape)) + int(rng.integers(0, 9))
        table = rng.permutation(num_rows)[: int(np.prod(shape))].reshape(shape)
        table[rng.random(shape) < 0.4] = -1
        check_rows(rows_product, torch.from_numpy(table.astype(np.int32)), num_rows)


def check_rows(kernels, table, num_rows):
    error = word()
    with kernel_cases.guarded_allocations():
        found = kernels.build_rows(table, num_rows, error)
    assert_equal_tables(found, build_rows(table, num_rows))
    assert error.item() == 0


def test_many_choices_and_several_programs_of_every_kernel(monkeypatch):
    """K = 8, and more blocks of choices, and more experts, than the scan takes at once."""
    monkeypatch.setattr(product, "SCAN_ROWS", 2)
    monkeypatch.setattr(product, "SCAN_COLUMNS", 4)
    plan = eight_choices()
    assert plan.ids.numel() > 2 * 2 * plan.block
    check_route(product, plan)


def eight_choices():
    """15 tokens with 8 choices of 10 experts; expert 3 has a slot on all five ranks."""
    plan, rng = Plan(0), np.random.default_rng(0)
    ids = np.argsort(rng.random((15, 10)), 1)[:, :8].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    slot_expert = np.array([[0, 1, 3], [2, 3, 5], [3, 4, 6], [7, 8, 3], [3, 9, -1]]).reshape(-1)
    quota = np.bincount(ids[ids >= 0], minlength=10)[slot_expert.clip(0)]
    quota[slot_expert == 3] = 3
    plan.lists = slot_quota(slot_expert, quota, np.arange(15) * 100, 10).tensors()
    plan.ids, plan.block, plan.ranks = torch.from_numpy(ids), 16, (3, 5)
    return plan


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_programs(seed):
    plan = next(plan for plan in map(Plan, range(99)) if plan.ids.numel() > 32)
    plan.block = 16
    with kernel_cases.shuffled_programs(seed):
        check_route(product, plan)


def test_all_choices_of_a_token_on_one_rank_and_no_tokens():
    lists = int32([0, 1, 2, 3]), int32([0, 1, 2]), int32([2, 2, 2]), int32([0, 4, 8])
    sizes = 3, 1, 2
    ids = int32([[2, 0, 1], [-1, 1, -1]])
    found = product.build_route(ids, *lists, *sizes, word())
    assert_equal_tables(found, build_route(ids, *lists, *sizes))
    for shape in ((0, 3), (3, 0)):
        empty, error = torch.empty(shape, dtype=torch.int32), word()
        found = product.build_route(empty, *lists, 3, 1, 0, error)
        assert_equal_tables(found, build_route(empty, *lists, 3, 1, 0))
        assert product.count_sends(empty, *lists[:3], 3, 1, error).tolist() == [0]
        assert product.route_to_slots(empty, *lists[:3], error).shape == shape
        assert error.item() == 0
        product.build_route(empty, *lists, 3, 1, 2, error)
        assert error.item() == device_errors.WRONG_NUM_SENT.value


# ---- wrong values --------------------------------------------------------------------------------
LISTS = int32([0, 2, 3]), int32([0, 5, 1]), int32([2, 2, 4]), int32([0, 8, 4])


@pytest.mark.parametrize("bad", [2, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernel_11_wrong_ids_take_no_part_and_set_the_error_word(bad, dtype):
    if dtype == torch.int64:
        bad *= 2**20 + 1  # its low 32 bits alone may look like an id
    ids = torch.tensor([[0, 1], [bad, 0], [1, -1]], dtype=dtype)
    without, error = ids.masked_fill(ids == bad, -1), word()
    with kernel_cases.guarded_allocations():
        found = product.build_route(ids, *LISTS, 4, 2, 3, error, block=16)
    assert error.item() == device_errors.BAD_ID.value
    assert_equal_tables(found, build_route(without, *LISTS, 4, 2, 3))


def test_an_id_whose_low_half_is_an_expert_is_wrong():
    ids, error = torch.tensor([[2**32 + 1, 1]]), word()
    slots = product.route_to_slots(ids, *LISTS[:3], error)
    assert slots.tolist() == [[-1, 1]]
    assert error.item() == device_errors.BAD_ID.value


def test_kernel_11_rows_beyond_the_quota_take_no_part():
    ids, error = int32([[0]] * 6), word()
    with kernel_cases.guarded_allocations():
        rows, token, send_rows, back = product.build_route(ids, *LISTS, 4, 2, 4, error, block=16)
    assert rows[:, 0].tolist() == [0, 1, 8, 9, -1, -1]
    assert token.tolist() == [0, 1, 2, 3]
    assert send_rows[:, 0].tolist() == [0, 1, 8, 9]
    assert back[:, 0].tolist() == [0, 1, 2, 3, -1, -1]
    assert error.item() == device_errors.OVER_QUOTA.value


@pytest.mark.parametrize(("num_sent", "token"), [(1, [0]), (4, [0, 1, -1, -1])])
def test_a_wrong_number_of_sent_tokens_stays_inside_the_buffers(num_sent, token):
    error = word()
    with kernel_cases.guarded_allocations():
        found = product.build_route(int32([[0, -1], [1, -1]]), *LISTS, 4, 2, num_sent, error)
    assert found[1].tolist() == token
    assert found[3].tolist() == [[0, -1], [1 if num_sent > 1 else -1, -1]]
    assert error.item() == device_errors.WRONG_NUM_SENT.value


@pytest.mark.parametrize("bad", [8, -1, 2**31 - 1])
def test_slots_of_no_rank_take_no_part(bad):
    lists, error = (LISTS[0], int32([0, 5, bad]), *LISTS[2:]), word()
    with kernel_cases.guarded_allocations():
        rows = product.build_route(int32([[0, 1]]), *lists, 4, 2, 1, error)[0]
    assert rows.tolist() == [[0, -1]]
    assert error.item() == device_errors.BAD_SLOT.value


def test_offsets_outside_of_the_lists_stay_inside():
    error = word()
    first = int32([-5, 2**31 - 1, 2**31 - 1])
    slots = product.route_to_slots(int32([[0, 1]]), first, *LISTS[1:3], error)
    assert slots[0, 1] == -1
    assert error.item() == device_errors.OVER_QUOTA.value


@pytest.mark.parametrize("bad", [6, 2**31 - 1, -2])
def test_kernel_11_wrong_rows_are_left_out(bad):
    table, error = int32([[4, bad], [-1, 1]]), word()
    with kernel_cases.guarded_allocations():
        found = rows_product.build_rows(table, 6, error)
    assert_equal_tables(found, build_rows(table.masked_fill(table == bad, -1), 6))
    assert error.item() == device_errors.BAD_ROW.value
    rows_product.build_rows(int32([[4, 1], [4, -1]]), 6, error)
    assert error.item() == device_errors.BAD_ROW.value | device_errors.ROW_TWICE.value


# ---- through the ops -----------------------------------------------------------------------------
CALLS = {
    "route_to_slots": lambda ids, *lists: relibra.route_to_slots(ids, *lists, "triton"),
    "count_sends": lambda ids, *lists: relibra.count_sends(ids, *lists, 4, 2, "triton"),
    "build_route": lambda ids, *lists: relibra.build_route(
        ids, *lists, LISTS[3], 4, 2, 2, "triton"
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [1, 2]], "ids_TK: need -1 <= id < 2, got 2 at token 1, choice 1"),
        ([[2**31 - 1, 0]], "ids_TK: need -1 <= id < 2, got 2147483647 at token 0, choice 0"),
        ([[1]] * 5, "slot_quota: need at least 5 rows for expert 1"),
    ],
    ids=["E", "largest", "over_quota"],
)
def test_kernel_11_the_ops_name_place_and_id(call, ids, message):
    for _ in range(2):  # nothing is left over from the first call
        with pytest.raises(ValueError, match=message):
            call(int32(ids), *LISTS[:3])
    backend.raise_device_errors("cpu")


def test_the_ops_equal_the_reference():
    plan = Plan(3)
    for name, arguments in {
        "route_to_slots": plan.lists[:3],
        "count_sends": (*plan.lists[:3], *plan.ranks),
    }.items():
        op = getattr(relibra, name)
        ours, theirs = op(plan.ids, *arguments, "triton"), op(plan.ids, *arguments, "reference")
        assert_equal_tables((ours,), (theirs,))
    sizes = (*plan.ranks, int(theirs.sum()))
    routes = [relibra.build_route(plan.ids, *plan.lists, *sizes, b) for b in ("triton", "auto")]
    assert_equal_tables(*routes)
    num_rows = 1 + int(routes[0][2].max())
    for rank in range(plan.num_ranks):
        first = int(theirs[:rank].sum())
        table = routes[0][2][first : first + int(theirs[rank])]
        ours = relibra.build_rows(table, num_rows, "triton")
        assert_equal_tables(ours, relibra.build_rows(table, num_rows))
    with pytest.raises(ValueError, match=r"token_choice_to_row_UK: .* got 7 at token 0, choice 1"):
        relibra.build_rows(int32([[0, 7]]), 6, "triton")
    with pytest.raises(ValueError, match="num_sent: need 2, the distinct"):
        relibra.build_route(int32([[0, -1], [1, -1]]), *LISTS, 4, 2, 1, "triton")


def test_errors_of_a_device_are_raised_once():
    backend.error_word(word()).fill_(device_errors.BAD_ID.value | device_errors.ROW_TWICE.value)
    with pytest.raises(ValueError, match=r"ids_TK: .*outside.*; token_choice.* two choices claim"):
        backend.raise_device_errors("cpu")
    backend.raise_device_errors("cpu")
    backend.error_word(word()).fill_(device_errors.BAD_SLOT.value)
    with pytest.raises(ValueError, match="slot_id: a slot of no rank"):  # of an earlier op
        relibra.route_to_slots(int32([[0]]), *LISTS[:3], "triton")
    assert backend.error_word(word()).item() == 0


def test_opcheck():
    ids = int32([[0, 1], [1, -1]])
    torch.library.opcheck(relibra.build_route, (ids, *LISTS, 4, 2, 2, "triton"))
    torch.library.opcheck(relibra.build_rows, (int32([[1, -1], [-1, 2]]), 4, "triton"))


# ---- mutants -------------------------------------------------------------------------------------
MUTANTS = {
    "ordinal_counts_itself": (
        "other_lane[None, :] < lane[:, None]",
        "other_lane[None, :] <= lane[:, None]",
    ),
    "blocks_not_scanned": ("tl.cumsum(count, axis=0) - count", "count - count"),
    "scan_forgets_the_rows_before": ("- count + carry[None, :]", "- count"),
    "scan_includes_the_block": ("tl.cumsum(count, axis=0) - count", "tl.cumsum(count, axis=0)"),
    "quota_filled_one_too_far": ("other=0) <= position", "other=0) < position"),
    "row_off_by_one": ("first_row + position - before", "first_row + position - before + 1"),
    "token_sent_twice": (
        "choice[None, None, :] < choice[None, :, None]",
        "choice[None, None, :] < 0",
    ),
    "rows_of_other_ranks_travel": (
        "here = dest[:, None, :] == leader[:, :, None]",
        "here = (dest[:, None, :] >= 0) & (leader[:, :, None] >= 0)",
    ),
    "return_in_choice_order": (
        "(leader[:, None, :] < leader[:, :, None])",
        "(choice[None, None, :] < choice[None, :, None])",
    ),
    "rank_begins_off": (
        "sent_end_ptr + rank - 1, mask=leads & (rank > 0)",
        "sent_end_ptr + rank, mask=leads & (rank > 0)",
    ),
    "unused_columns_left": (
        "mask=rest & (choice < J)[None, :])",
        "mask=rest & (choice < 0)[None, :])",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(tmp_path, name):
    mutant = kernel_mutants.mutated("dispatch", *MUTANTS[name], tmp_path)
    mutant.SCAN_ROWS = 2
    with kernel_mutants.killed(name, (AssertionError, IndexError)):  # some plan finds it
        check_route(mutant, eight_choices())
        for seed in range(20):
            check_route(mutant, Plan(seed))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "atomic_max(row_to_choice_ptr + row, entry,",
            "atomic_max(row_to_choice_ptr + row, entry + 1,",
        ),
        ("entry // num_choices", "entry % num_choices"),
        (
            "row_to_choice_R = table.new_empty(num_rows).fill_(-1)",
            "row_to_choice_R = table.new_empty(num_rows).fill_(0)",
        ),
    ],
    ids=["row_to_choice_off_by_one", "choice_for_token", "padding_not_marked"],
)
def test_mutant_of_build_rows_is_killed(tmp_path, before, after):
    mutant = kernel_mutants.mutated("build_rows", before, after, tmp_path)
    with kernel_mutants.killed(f"{before} -> {after}"):
        check_rows(mutant, int32([[4, 0], [-1, 1], [6, 2]]), 8)


@pytest.mark.gpu
def test_gpu_twins_200_random_plans():
    for seed in range(200):
        plan = Plan(seed, max_choices=8, max_tokens=400)
        on_gpu = [one.cuda() for one in (plan.ids, *plan.lists)]
        sent = count_sends(plan.ids, *plan.lists[:3], *plan.ranks)
        found = relibra.count_sends(*on_gpu[:4], *plan.ranks)
        assert torch.equal(found.cpu(), sent)
        found = relibra.build_route(*on_gpu, *plan.ranks, int(sent.sum()))
        expected = build_route(plan.ids, *plan.lists, *plan.ranks, int(sent.sum()))
        assert_equal_tables([one.cpu() for one in found], expected)
        table = expected[2][: int(sent[0])]
        num_rows = 1 + max([-1, *table.flatten().tolist()])
        found = relibra.build_rows(table.cuda(), num_rows)
        assert_equal_tables([one.cpu() for one in found], build_rows(table, num_rows))
    backend.raise_device_errors("cuda")
