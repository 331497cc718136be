"""Split of rows by source: the native code equals its NumPy twin, and both keep the rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.source_split import split_rows, split_rows_reference


@st.composite
def uses(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Counts, slots, rows of slots and rails of one use with any number of copies."""
    ranks = draw(st.integers(1, 9))
    experts = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([1, 3, 50, 10**6, 2**31 - 1]))
    rows = rng.integers(0, largest, (ranks, experts), endpoint=True).astype(np.int32)
    if draw(st.booleans()):
        rows[rng.random(rows.shape) < 0.6] = 0
    slots = np.full((ranks, 4), -1, np.int32)
    slot_rows = np.zeros((ranks, 4), np.int64)
    for expert in range(experts):
        hosts = rng.permutation(ranks)[: rng.integers(1, ranks, endpoint=True)]
        free = [(rank, int(np.argmin(slots[rank]))) for rank in hosts if (slots[rank] < 0).any()]
        if not free:
            rows[:, expert] = 0
            continue
        cuts = np.sort(rng.integers(0, int(rows[:, expert].sum()) + 1, len(free) - 1))
        share = np.diff([0, *cuts, int(rows[:, expert].sum())])
        for (rank, slot), part in zip(free, share, strict=True):
            slots[rank, slot] = expert
            slot_rows[rank, slot] = part
    rails = rng.integers(0, draw(st.integers(1, 4)), ranks).astype(np.int32)
    return rows, slots, slot_rows, rails


@given(uses())
@settings(max_examples=150)
def test_native_equals_the_twin_and_both_marginals_are_exact(
    use: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    rows, slots, slot_rows, rails = use
    quota = split_rows(rows, slots, slot_rows, rails)
    assert quota.dtype == np.int32
    assert np.array_equal(quota, split_rows_reference(rows, slots, slot_rows, rails))
    assert (quota >= 0).all()
    assert np.array_equal(quota.sum(0, dtype=np.int64), slot_rows.reshape(-1))
    for expert in range(rows.shape[1]):
        held = slots.reshape(-1) == expert
        assert np.array_equal(quota[:, held].sum(1, dtype=np.int64), rows[:, expert])


@given(uses())
@settings(max_examples=100)
def test_as_many_rows_as_possible_stay_on_their_rank_then_on_their_rail(
    use: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    rows, slots, slot_rows, rails = use
    quota = split_rows(rows, slots, slot_rows, rails).astype(np.int64)
    slot_rank = np.repeat(np.arange(len(rows)), slots.shape[1])
    for expert in range(rows.shape[1]):
        held = np.flatnonzero(slots.reshape(-1) == expert)
        ranks, room = slot_rank[held], slot_rows.reshape(-1)[held]
        count = rows[:, expert].astype(np.int64)
        local = np.minimum(count[ranks], room)
        assert np.array_equal(quota[ranks, held], local)
        on_rail = sum(
            min(count[rails == rail].sum(), room[rails[ranks] == rail].sum())
            for rail in np.unique(rails)
        )
        same_rail = rails[:, None] == rails[ranks][None]
        assert quota[:, held][same_rail].sum() == on_rail


def test_worked_example() -> None:
    """2 nodes x 2 rails; expert 0 at home on rank 0 with a copy on rank 1.

    Local: rank 0 keeps its 5 rows, rank 1 its 3. Rail 0: slot 0 has room for 1, source 2 has 5 and
    gives 1. Rail 1: slot 2 has room for 5, source 3 gives its only one. The rest: source 2 gives 4.
    """
    rows = np.array([[5], [3], [5], [1]], np.int32)
    slots = np.array([[0, -1], [0, -1], [-1, -1], [-1, -1]], np.int32)
    slot_rows = np.array([[6, 0], [8, 0], [0, 0], [0, 0]], np.int64)
    quota = split_rows(rows, slots, slot_rows, np.array([0, 1, 0, 1], np.int32))
    assert quota[:, [0, 2]].tolist() == [[5, 0], [0, 3], [1, 4], [0, 1]]


def test_largest_remainder_gives_ties_to_the_lower_rank() -> None:
    rows = np.array([[0], [1], [1], [1]], np.int32)
    slots = np.array([[0], [0], [-1], [-1]], np.int32)
    slot_rows = np.array([[1], [2], [0], [0]], np.int64)
    quota = split_rows(rows, slots, slot_rows, np.array([0, 1, 2, 3], np.int32))
    assert quota[:, :2].tolist() == [[0, 0], [0, 1], [1, 0], [0, 1]]


def test_rows_that_do_not_add_up_are_refused() -> None:
    rows = np.array([[2, 1]], np.int32)
    slots = np.array([[0, 1]], np.int32)
    with pytest.raises(ValueError, match="slot_rows: need 2 rows of expert 0, got 3"):
        split_rows(rows, slots, np.array([[3, 1]], np.int64), np.zeros(1, np.int32))


def test_wrong_arrays_are_refused_and_not_converted() -> None:
    rows = np.array([[2, 1]], np.int32)
    slots = np.array([[0, 1]], np.int32)
    slot_rows = np.array([[2, 1]], np.int64)
    rail = np.zeros(1, np.int32)
    with pytest.raises(TypeError, match=r"rows_GE: need .*int32 \[\?, \?\], got int64 \[1, 2\]"):
        split_rows(rows.astype(np.int64), slots, slot_rows, rail)
    with pytest.raises(TypeError, match="slot_rows_Gn: need"):
        split_rows(rows, slots, slot_rows[:, :1], rail)
    with pytest.raises(ValueError, match=r"slot_expert_Gn: need values in -1\.\.1, got 2"):
        split_rows(rows, slots + 1, slot_rows, rail)
    with pytest.raises(TypeError, match="rows_GE: need a C-contiguous"):
        split_rows(np.asfortranarray(np.ones((3, 2), np.int32)), slots, slot_rows, rail)
