import numpy as np
import pytest
import torch

import relibra_kernels  # noqa: F401  registers the ops
from relibra_kernels.testing.virtual_group import random_group, slot_quota

relibra = torch.ops.relibra


@pytest.mark.parametrize("seed", range(6))
def test_every_choice_reaches_a_row_of_its_expert(seed):
    rng = np.random.default_rng(seed)
    group = random_group(rng, num_ranks=3, num_home=4, tokens_G=(25, 0, 17), num_choices=3)
    for source in group.ranks:
        sent = torch.split(source.send_rows_VK, source.send_splits)
        tokens = torch.split(source.send_token_V, source.send_splits)
        for rank, (rows_VK, token_V) in enumerate(zip(sent, tokens, strict=True)):
            destination = group.ranks[rank]
            tile_of_row = {
                int(first) + i: slot
                for (_, first, rows, _), slot in zip(
                    destination.mtile_B4.tolist(), slots_of_tiles(destination), strict=True
                )
                for i in range(rows)
            }
            for v, k in torch.nonzero(rows_VK >= 0).tolist():
                slot = tile_of_row[int(rows_VK[v, k])]
                expert = group.slot_expert_Gn[rank, slot]
                assert expert == source.ids_TK[token_V[v], k]


def slots_of_tiles(rank):
    """Slot of each tile, from the rows of the slots alone."""
    tiles = -(-rank.slot_rows_n // 4)
    return torch.repeat_interleave(torch.arange(len(tiles)), tiles).tolist()


def test_rows_of_one_expert_stay_in_token_order():
    group = random_group(np.random.default_rng(5), num_replica=0, skip=0.0)
    for source in group.ranks:
        for expert in range(group.num_experts):
            rows = source.choice_to_dest_row_TK[source.ids_TK == expert]
            assert (torch.diff(rows) == 1).all()


def test_no_tokens():
    quota = slot_quota(np.arange(4), np.zeros(4, np.int64), np.zeros(4, np.int64), 4).tensors()
    tables = relibra.build_route(torch.empty(0, 3, dtype=torch.int32), *quota, 2, 2, 0)
    assert [tuple(table.shape) for table in tables] == [(0, 3), (0,), (0, 3), (0, 2)]
    assert {table.dtype for table in tables} == {torch.int32}


def test_more_choices_than_ranks_and_all_tokens_to_one_expert():
    quota = slot_quota(np.arange(2), np.array([3, 0]), np.zeros(2, np.int64), 2).tensors()
    ids = torch.tensor([[0, -1], [-1, 0], [0, -1]], dtype=torch.int32)
    rows, token, send_rows, to_return = relibra.build_route(ids, *quota, 2, 1, 3)
    assert rows.tolist() == [[0, -1], [-1, 1], [2, -1]]
    assert token.tolist() == [0, 1, 2]
    assert send_rows.tolist() == rows.tolist()
    assert to_return.tolist() == [[0], [1], [2]]


def test_a_wrong_number_of_sent_tokens_is_refused():
    quota = slot_quota(np.arange(2), np.ones(2, np.int64), np.zeros(2, np.int64), 2).tensors()
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"num_sent: need 2, the distinct .* got 1"):
        relibra.build_route(ids, *quota, 1, 2, 1)


def test_opcheck():
    quota = slot_quota(np.arange(4), np.ones(4, np.int64), np.arange(4), 4).tensors()
    ids = torch.tensor([[0, 3], [1, -1]], dtype=torch.int32)
    torch.library.opcheck(relibra.build_route, (ids, *quota, 2, 2, 3))
