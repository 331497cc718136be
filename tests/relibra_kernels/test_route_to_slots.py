"""`route_to_slots`, and the refusals that all routing ops share."""

import numpy as np
import pytest
import torch

import relibra_kernels  # noqa: F401  registers the ops
from relibra_kernels.testing.virtual_group import random_group, slot_quota

relibra = torch.ops.relibra


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def random_quota_of_a_source(seed, num_experts=9, slots=24, tokens=31, num_choices=3):
    """Ids, slot of each entry, and enough quota for every expert, some of it zero."""
    rng = np.random.default_rng(seed)
    slot_expert = rng.permutation(
        np.append(np.arange(num_experts), rng.integers(-1, num_experts, 15))
    )
    ids = np.argsort(rng.random((tokens, num_experts)), 1)[:, :num_choices].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    quota = np.zeros(slots, np.int64)
    for expert in range(num_experts):
        held = np.flatnonzero(slot_expert == expert)
        quota[held] = rng.multinomial((ids == expert).sum(), np.full(held.size, 1 / held.size))
    return torch.from_numpy(ids), slot_quota(slot_expert, quota, np.arange(slots), num_experts)


def by_hand(ids, quota):
    """One pass over the choices in (token, choice) order, filling slots in ascending id."""
    first, slot, room = (t.tolist() for t in (quota.expert_first, quota.slot_id, quota.slot_quota))
    out = []
    for expert in ids.reshape(-1).tolist():
        entry = next((i for i in range(first[expert], first[expert + 1]) if room[i]), None)
        if expert < 0:
            out.append(-1)
            continue
        room[entry] -= 1
        out.append(slot[entry])
    return int32(out).reshape(ids.shape)


@pytest.mark.parametrize("seed", range(12))
def test_equals_filling_slots_one_choice_at_a_time(seed):
    ids, quota = random_quota_of_a_source(seed)
    expected = by_hand(ids, quota)
    assert torch.equal(relibra.route_to_slots(ids, *quota.tensors()[:3]), expected)
    assert torch.equal(relibra.route_to_slots(ids.long(), *quota.tensors()[:3]), expected)


def test_strided_ids_and_many_experts():
    ids = int32([[40000, 7, 40000], [3, 7, -1]]).t()
    rows = np.zeros(40001, np.int64)
    rows[[3, 7, 40000]] = [1, 2, 2]
    quota = slot_quota(np.arange(40001), rows, rows, 40001)
    assert relibra.route_to_slots(ids, *quota.tensors()[:3]).tolist() == ids.tolist()


def test_no_tokens_no_choices_and_nothing_taking_part():
    lists = int32([0, 1]), int32([0]), int32([0])
    for shape in ((0, 2), (3, 0)):
        empty = torch.empty(shape, dtype=torch.int32)
        assert relibra.route_to_slots(empty, *lists).shape == shape
        assert relibra.count_sends(empty, *lists, 1, 1).tolist() == [0]
    none = int32([[-1, -1]])
    assert relibra.route_to_slots(none, *lists).tolist() == [[-1, -1]]
    assert relibra.count_sends(none, *lists, 1, 1).tolist() == [0]


def test_quota_left_over_is_allowed():
    slots = relibra.route_to_slots(int32([[0], [0]]), int32([0, 2]), int32([0, 4]), int32([1, 9]))
    assert slots.tolist() == [[0], [4]]


CALLS = {
    "route_to_slots": lambda *a: relibra.route_to_slots(*a),
    "count_sends": lambda *a: relibra.count_sends(*a, 4, 2),
    "build_route": lambda *a: relibra.build_route(*a, torch.zeros_like(a[2]), 4, 2, 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"ids": int32([[0, 1], [1, 2]])},
            ValueError,
            "ids_TK: need -1 <= id < 2, got 2 at token 1, choice 1",
        ),
        (
            {"ids": int32([[0, -2]])},
            ValueError,
            "ids_TK: need -1 <= id < 2, got -2 at token 0, choice 1",
        ),
        (
            {"ids": int32([[2**31 - 1, 0]])},
            ValueError,
            "ids_TK: need .* got 2147483647 at token 0, choice 0",
        ),
        (
            {"ids": int32([[1]] * 5)},
            ValueError,
            "slot_quota: need at least 5 rows for expert 1.*quota of 4",
        ),
        ({"ids": torch.zeros(2, 2)}, TypeError, "ids_TK: need dtype torch.int32 or torch.int64"),
        ({"ids": int32([0, 1])}, ValueError, "ids_TK: need 2 dimensions"),
        (
            {"first": int32([0, 2, 4])},
            ValueError,
            "expert_first: need ascending offsets from 0 to 3",
        ),
        ({"first": int32([0, 2, 1, 3])}, ValueError, "expert_first: need ascending offsets"),
        ({"slot": int32([0, 5])}, ValueError, "expert_first|slot_quota: need"),
        ({"rows": int32([2, -1, 4])}, ValueError, "slot_quota: need counts of at least 0, got -1"),
        ({"rows": torch.ones(3)}, TypeError, "slot_quota: need dtype torch.int32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_kernel_11_wrong_ids_and_lists_are_refused(call, change, error, message):
    given = {"ids": int32([[0, 1]]), "first": int32([0, 2, 3]), "slot": int32([0, 5, 1])}
    given |= {"rows": int32([2, 2, 4])} | change
    with pytest.raises(error, match=message):
        call(*given.values())


@pytest.mark.parametrize("name", ["count_sends", "build_route"])
def test_slots_beyond_the_ranks_are_refused(name):
    lists = int32([[0]]), int32([0, 1]), int32([8]), int32([1])
    with pytest.raises(ValueError, match=r"slot_id: need 0 <= id < 8 .* got 8 to 8"):
        CALLS[name](*lists)


def test_any_dispatcher_reaches_the_rows_of_the_plan():
    """Slot ids as expert ids: each slot gets as many rows as its quota says."""
    group = random_group(np.random.default_rng(3), num_ranks=4, tokens_G=(9, 0, 14, 6))
    expert_N = group.slot_expert_Gn.reshape(-1)
    for source, quota_N in zip(group.ranks, group.quota_GN, strict=True):
        quota = slot_quota(expert_N, quota_N, np.zeros_like(quota_N), group.num_experts)
        slots = relibra.route_to_slots(source.ids_TK, *quota.tensors()[:3]).numpy()
        ids = source.ids_TK.numpy()
        assert (np.bincount(slots[slots >= 0], minlength=expert_N.size) == quota_N).all()
        assert (expert_N[slots[ids >= 0]] == ids[ids >= 0]).all()


def test_opcheck():
    ids, quota = random_quota_of_a_source(0)
    torch.library.opcheck(relibra.route_to_slots, (ids, *quota.tensors()[:3]))
