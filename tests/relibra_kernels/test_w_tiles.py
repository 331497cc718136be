"""Tiles of the weight gradients: every output tile once, in the promised order, with its flags."""

import numpy as np
import pytest
import torch

from relibra_kernels.tables import HOME, REPLICA, SIGNAL, STATIC, STORE, slot_bases, w_tiles

ROWS = [7, 0, 12, 4, 0, 9, 0]  # three home, one static, three replica slots


def parts(tiles):
    """(family, index, first, end, matrix, output, store, signal) of every tile."""
    return [
        (word >> 24, word & 0xFFFFFF, first, end, flags >> 22 & 1, flags & 0x3FFFFF,
         bool(flags & STORE), bool(flags & SIGNAL))
        for word, first, end, flags in tiles.tolist()
    ]  # fmt: skip


@pytest.mark.parametrize("accumulate", [False, True])
def test_order_rows_and_flags(accumulate):
    """Replicas by slot, then longest first; 3 + 2 output tiles a slot."""
    base = slot_bases(ROWS, 8).tolist()
    slots = [(REPLICA, 0, 4), (REPLICA, 1, 5), (REPLICA, 2, 6)]
    slots += [(HOME, 2, 2), (HOME, 0, 0), (STATIC, 0, 3)]
    if not accumulate:
        slots.append((HOME, 1, 1))
    outputs = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    expected = [
        (family, index, base[slot], base[slot] + ROWS[slot], matrix, output,
         family != HOME or not accumulate, family == REPLICA and (matrix, output) == (1, 1))
        for family, index, slot in slots
        for matrix, output in outputs
    ]  # fmt: skip
    assert parts(w_tiles(ROWS, 3, 1, 8, 3, 2, accumulate)) == expected


def test_one_matrix_alone_signals_with_its_last_tile():
    only13 = parts(w_tiles([2, 3], 1, 0, 4, 2, 0, False))
    only2 = parts(w_tiles([2, 3], 1, 0, 4, 0, 2, False))
    assert [(tile[4], tile[7]) for tile in only13] == [
        (0, False),
        (0, True),
        (0, False),
        (0, False),
    ]
    assert [(tile[4], tile[7]) for tile in only2] == [(1, False), (1, True), (1, False), (1, False)]


def test_nothing_to_do_is_an_empty_table():
    for tiles in (w_tiles([], 0, 0, 4, 2, 2, True), w_tiles([3, 1], 1, 0, 4, 0, 0, False)):
        assert tiles.shape == (0, 4)
        assert tiles.dtype == torch.int32


def test_equal_lengths_stay_in_slot_order():
    tiles = parts(w_tiles([5] * 40, 40, 0, 8, 1, 0, True))
    assert [tile[1] for tile in tiles] == list(range(40))


def test_random_slots_are_covered_once():
    rng = np.random.default_rng(5)
    for _ in range(50):
        num_home, num_static, num_replica = rng.integers(0, 5, 3).tolist()
        rows = rng.integers(0, 4, num_home + num_static + num_replica) * rng.integers(0, 30)
        accumulate = bool(rng.integers(2))
        found = parts(w_tiles(rows, num_home, num_static, 16, 3, 4, accumulate))
        first = [0, num_home, num_home + num_static]
        slots = [first[family] + index for family, index, *_ in found]
        kept = [j for j in range(len(rows)) if rows[j] or not accumulate or j >= num_home]
        assert sorted(slots) == sorted(kept * 7)
        assert len(set(zip(slots, [t[4:6] for t in found], strict=True))) == len(found)
        own = [rows[slot] for slot, tile in zip(slots, found, strict=True) if tile[0] != REPLICA]
        assert own == sorted(own, reverse=True)
        assert sum(tile[7] for tile in found) == num_replica


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_home": 4}, "num_home: need"),
        ({"num_static": 2}, "num_static: need"),
        ({"tiles13": 1 << 22}, "tiles13: need"),
        ({"tiles2": -1}, "tiles2: need"),
        ({"block_rows": 0}, "block_rows: need"),
        ({"slot_rows_n": [1, -1, 2]}, "slot_rows_n"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {
        "slot_rows_n": [1, 1, 2], "num_home": 2, "num_static": 0, "block_rows": 4, "tiles13": 1,
        "tiles2": 1, "accumulate_home": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        w_tiles(**{**arguments, **changes})
