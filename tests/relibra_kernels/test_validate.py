"""The debug checks find each broken table by name; sound tables of random groups pass."""

import dataclasses

import numpy as np
import pytest
import torch

from relibra_kernels.testing.virtual_group import random_group
from relibra_kernels.validate import validate_group


@pytest.mark.parametrize("seed", range(10))
def test_random_groups_pass(seed):
    rng = np.random.default_rng(seed)
    num_ranks = [1, 2, 4, 3][seed % 4]
    group = random_group(
        rng,
        num_ranks=num_ranks,
        num_home=4,
        num_replica=seed % 3,
        num_choices=[1, 2, 4][seed % 3],
        tokens_G=rng.integers(0, 30, num_ranks),
        block_rows=[1, 4, 16][seed % 3],
    )
    validate_group(group.ranks, group.num_home, group.block_rows)


def swapped(table, first, second):
    table = table.clone()
    table[[first, second]] = table[[second, first]]
    return table


def shifted(table):
    return torch.where(table >= 0, table + 1, table)


def last_row_lost(table):
    table = table.clone()
    row = int(torch.nonzero((table >= 0).any(1))[-1])
    table[row] = -1
    return table


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("send_rows_VK", last_row_lost, "send_rows_VK: need every .token, choice. .* 0 times"),
        ("send_token_V", lambda t: swapped(t, 0, 1), "send_token_V: need ascending tokens"),
        ("send_token_V", lambda t: t + 1000, "send_token_V: need 0 <= token < 20"),
        ("send_splits", lambda s: [s[0] + 1, s[1]], "send_splits: need a sum of"),
        ("recv_splits", lambda s: [s[0] + 1, s[1]], "recv_splits: need a sum of"),
        ("token_to_return_TJ", shifted, "token_to_return_TJ: need every sent row"),
        ("row_to_choice_R", shifted, "row_to_choice_R: need"),
        ("row_to_token_R", shifted, "row_to_token_R: need row_to_choice_R // K"),
        ("row_to_token_R", lambda t: t[:-1], "row_to_token_R: need .* rows, the last slot base"),
        ("token_choice_to_row_UK", lambda t: swapped(t, 0, 1), "row_to_choice_R: need the inverse"),
        ("token_choice_to_row_UK", last_row_lost, "token_choice_to_row_UK: need every row"),
        ("slot_rows_n", lambda t: t + 1, "row_to_"),
        ("mtile_B4", lambda t: swapped(t, 0, 1), "mtile_B4: need the tiles of slot_rows_n"),
    ],
)
def test_a_broken_table_is_named(field, change, message):
    group = random_group(np.random.default_rng(7))
    rank = group.ranks[0]
    broken = dataclasses.replace(rank, **{field: change(getattr(rank, field))})
    with pytest.raises(ValueError, match=f"rank 0: {message}"):
        validate_group((broken, *group.ranks[1:]), group.num_home, group.block_rows)


def test_ranks_that_disagree_are_found():
    one, other = (random_group(np.random.default_rng(seed), skip=0.0) for seed in (1, 2))
    with pytest.raises(ValueError, match="rank 0: recv_splits"):
        validate_group((one.ranks[0], other.ranks[1]), one.num_home, one.block_rows)
