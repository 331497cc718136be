import pytest
import torch

from relibra.demo.task import SortTask

TASK = SortTask()


def codes(digits):
    return set((digits * 8 ** torch.arange(4)).sum(dim=1).tolist())


def test_prompt_is_framed_by_its_own_tokens():
    tokens = TASK.prompt_tokens(torch.tensor([[7, 0, 3, 3], [1, 2, 3, 4]]))
    assert tokens.tolist() == [[8, 7, 0, 3, 3, 9], [8, 1, 2, 3, 4, 9]]
    assert TASK.prompt_length == tokens.shape[1]
    assert TASK.sample_length == 10
    assert TASK.vocab_size == 10


@pytest.mark.parametrize(
    ("completion", "reward"),
    [([0, 3, 3, 7], 1.0), ([0, 3, 7, 3], 0.5), ([7, 0, 3, 3], 0.25), ([9, 9, 9, 9], 0.0)],
)
def test_reward_is_the_fraction_of_positions_right(completion, reward):
    digits = torch.tensor([[7, 0, 3, 3]])
    assert TASK.fraction_right(digits, torch.tensor([completion])).tolist() == [reward]


def test_training_never_draws_a_held_out_prompt():
    held_out = codes(TASK.held_out())
    assert len(held_out) == 256
    drawn = codes(TASK.draw(20_000, torch.Generator().manual_seed(0)))
    assert not held_out & drawn
    assert len(drawn) > 3700  # nearly all of the 3840 others


def test_same_generator_same_prompts():
    first, second = (TASK.draw(64, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.min() >= 0
    assert first.max() < 8


def test_a_task_without_training_prompts_is_refused():
    with pytest.raises(ValueError, match="num_held_out: need 1 to 15, got 16"):
        SortTask(num_symbols=4, num_digits=2, num_held_out=16)
