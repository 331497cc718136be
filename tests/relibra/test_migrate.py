"""Moving experts: every field arrives at its new slot, and what cannot move is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import relibra
from relibra.migrate import expert_fields, move_fields, move_lists
from relibra.testing.plans import random_layout


def move_in_lockstep(old, new, fields_by_rank):
    """Runs `move_fields` of all ranks in one process; fields of one dtype."""
    num_ranks = old.num_ranks
    lists = [move_lists(old, new, rank) for rank in range(num_ranks)]
    sent = {}

    class Posted(Exception):
        pass

    for rank in range(num_ranks):

        def post(x, send, recv, rank=rank):
            sent[rank] = torch.split(x, send)
            raise Posted

        with pytest.raises(Posted):
            move_fields(fields_by_rank[rank], lists[rank], post)
    for rank in range(num_ranks):
        arrived = torch.cat([sent[source][rank] for source in range(num_ranks)])

        def receive(x, send, recv, arrived=arrived):
            assert len(arrived) == sum(recv)
            return arrived

        move_fields(fields_by_rank[rank], lists[rank], receive)


@given(
    num_experts=st.integers(1, 24),
    num_ranks=st.sampled_from([1, 2, 3, 4, 8]),
    seed=st.integers(0, 2**20),
)
def test_every_expert_arrives_with_all_its_fields(num_experts, num_ranks, seed):
    rng = np.random.default_rng(seed)
    old, new = (random_layout(rng, num_experts, num_ranks) for _ in range(2))
    home = torch.from_numpy(old.home_slot_expert_GH.astype(np.float32))
    fields = [
        [home[rank][:, None].repeat(1, 3), home[rank][:, None, None].repeat(1, 2, 2) + 0.5]
        for rank in range(num_ranks)
    ]
    move_in_lockstep(old, new, fields)
    for rank in range(num_ranks):
        need = torch.from_numpy(new.home_slot_expert_GH[rank].astype(np.float32))
        filler = need < 0
        for field, shift in zip(fields[rank], (0.0, 0.5), strict=True):
            assert (field[filler] == 0).all()
            kept = field[~filler]
            assert (kept == (need[~filler] + shift).view(-1, *[1] * (kept.dim() - 1))).all()


def test_a_number_for_each_expert_moves_too():
    old, new = relibra.ExpertLayout([[0, 1], [2, 3]]), relibra.ExpertLayout([[0, 3], [2, 1]])
    fields = [[torch.tensor([0.0, 1.0])], [torch.tensor([2.0, 3.0])]]
    move_in_lockstep(old, new, fields)
    assert [one.tolist() for (one,) in fields] == [[0, 3], [2, 1]]


def test_equal_layouts_move_nothing():
    layout = relibra.ExpertLayout.identity(8, 4)
    for rank in range(4):
        lists = move_lists(layout, layout, rank)
        assert lists.send_from == lists.recv_to == []
        assert lists.stay_to == lists.stay_from == [0, 1]


def test_layouts_of_other_sizes_are_refused():
    layout = relibra.ExpertLayout.identity(8, 4)
    with pytest.raises(ValueError, match="new: need home slots"):
        move_lists(layout, relibra.ExpertLayout.identity(8, 2), 0)
    with pytest.raises(ValueError, match="new: need 8 experts, got 7"):
        move_lists(layout, relibra.ExpertLayout.identity(7, 4), 0)


def test_fields_are_weights_pending_gradients_and_moments():
    moe = relibra.BalancedMoE(4, 8, 8, layer=3)
    optimizer = torch.optim.Adam(moe.parameters(), amsgrad=True)
    moe(torch.randn(5, 8), torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moe.w2.main_grad = torch.zeros_like(moe.w2)
    names = set(expert_fields(moe, optimizer))
    moments = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    need = {f"{name}.{part}" for name in ("w13", "w2") for part in {*moments, "grad"}}
    assert names == need | {"w13", "w2", "w2.main_grad"}


def test_moments_of_the_smallest_weights_are_no_scalars():
    moe = relibra.BalancedMoE(1, 1, 1, layer=0)
    optimizer = torch.optim.Adam(moe.parameters())
    moe(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert {"w2.exp_avg", "w2.exp_avg_sq"} <= set(expert_fields(moe, optimizer))


def test_state_without_an_expert_axis_is_refused():
    moe = relibra.BalancedMoE(4, 8, 8, layer=3)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    optimizer.state[moe.w13]["flat"] = torch.zeros(7)
    with pytest.raises(ValueError, match="state 'flat' of layer 3 w13 must be a scalar or have"):
        expert_fields(moe, optimizer)
