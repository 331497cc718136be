import pytest
import torch

from relibra.demo.replay_layers import ReplaySettings, ReplayStack
from relibra.shape import ModelShape


def test_the_stack_is_the_same_for_every_number_of_ranks():
    shape = ModelShape(4, 2, (1, 3), 8, 8, "float32")
    whole = ReplayStack(shape, 1, 0, seed=3)
    parts = [ReplayStack(shape, 2, rank, seed=3) for rank in range(2)]
    for place, block in enumerate(whole.blocks):
        shards = [part.blocks[place].experts.w13 for part in parts]
        assert torch.equal(torch.cat(shards), block.experts.w13)
        assert torch.equal(parts[1].blocks[place].gate.weight, block.gate.weight)


@pytest.mark.parametrize("name", ["hidden_size", "expert_size", "micro_batch_sequences"])
def test_wrong_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: need an integer >= 1, got 0"):
        ReplaySettings(**{name: 0})
