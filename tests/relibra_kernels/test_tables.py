import numpy as np
import pytest
import torch

from relibra_kernels.tables import REPLICA, SlotQuota, m_tiles, slot_bases, tile_weights


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def quota(first=(0, 2, 3), slot=(0, 3, 2), rows=(1, 3, 4), place=(2, 8, 1)):
    return SlotQuota(int32(first), int32(slot), int32(rows), int32(place))


def test_slot_bases_are_whole_tiles():
    rng = np.random.default_rng(0)
    for block_rows in (1, 4, 16, 128):
        rows = rng.integers(0, 300, 17)
        base = slot_bases(rows, block_rows).numpy()
        assert base[0] == 0
        assert (base % block_rows == 0).all()
        room = np.diff(base)
        assert (room >= rows).all()
        assert (room - rows < block_rows).all()


def test_tables_of_no_slots_and_of_empty_slots():
    assert slot_bases([], 4).tolist() == [0]
    assert m_tiles([0, 0], 1, 4).shape == (0, 4)
    assert slot_bases(torch.tensor([3, 0]), 4).tolist() == [0, 4, 4]


def test_tiles_cover_every_row_once_and_name_its_weight():
    rng = np.random.default_rng(1)
    for _ in range(50):
        num_home, num_static, num_replica = rng.integers(0, 4, 3)
        rows = rng.integers(0, 40, num_home + num_static + num_replica)
        block_rows = int(rng.integers(1, 18))
        tiles = m_tiles(rows, int(num_home), block_rows, int(num_static))
        family, weight = tile_weights(tiles)
        base = slot_bases(rows, block_rows).numpy()
        slot_of_row = np.full(base[-1], -1)
        for f, w, first, count in zip(
            family, weight, tiles[:, 1].tolist(), tiles[:, 2].tolist(), strict=True
        ):
            assert first % block_rows == 0
            assert (slot_of_row[first : first + count] == -1).all()
            slot_of_row[first : first + count] = w + [0, num_home, num_home + num_static][f]
        expected = np.full(base[-1], -1)
        for slot, count in enumerate(rows):
            expected[base[slot] : base[slot] + count] = slot
        assert (slot_of_row == expected).all()
        assert (np.diff(family) >= 0).all(), "home tiles first, replica tiles last"


def test_replica_tiles_count_from_zero():
    family, weight = tile_weights(m_tiles([4, 4, 4, 4], 2, 4))
    assert family.tolist() == [0, 0, REPLICA, REPLICA]
    assert weight.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: slot_bases([3, -1], 4),
            ValueError,
            r"slot_rows_n: need values in 0\..*-1 at \[1\]",
        ),
        (lambda: slot_bases([3], 0), ValueError, "block_rows: need 1 to 2147483647, got 0"),
        (lambda: slot_bases([1.5], 4), TypeError, "slot_rows_n: need integers"),
        (lambda: slot_bases([2**31 - 1, 9], 4), ValueError, "need at most 2147483647 padded rows"),
        (lambda: m_tiles([1, 2], 3, 4), ValueError, "num_home: need 0 to 2, got 3"),
        (lambda: m_tiles([1, 2], 1, 4, 2), ValueError, "num_static: need 0 to 1, got 2"),
        (lambda: quota(first=(0, 2, 4)), ValueError, "expert_first: need ascending offsets"),
        (lambda: quota(first=(0, 3, 2, 3)), ValueError, "expert_first: need ascending offsets"),
        (lambda: quota(first=()), ValueError, "expert_first: need ascending offsets"),
        (
            lambda: quota(slot=(3, 0, 2)),
            ValueError,
            r"slot_id: need ascending.* 0 after 3 at \[1\]",
        ),
        (lambda: quota(slot=(0, 3, -2)), ValueError, "slot_id: need values in 0"),
        (lambda: quota(rows=(1, -3, 4)), ValueError, r"slot_quota: need values .*-3 at \[1\]"),
        (lambda: quota(place=(1, 3)), ValueError, r"slot_first_row: need shape \[3\]"),
        (
            lambda: SlotQuota(*(torch.zeros(1) for _ in range(4))),
            TypeError,
            "expert_first: need dtype torch.int32",
        ),
    ],
)
def test_wrong_tables_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_slot_ids_may_descend_between_experts():
    assert quota(slot=(5, 7, 2)).rows_E.tolist() == [4, 4]
    assert quota(first=(0, 0, 3, 3), slot=(1, 2, 3)).rows_E.tolist() == [0, 8, 0]
