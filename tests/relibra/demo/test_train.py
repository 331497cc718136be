import numpy as np
import pytest
import torch
from torch import nn

from relibra.demo.settings import DemoSettings
from relibra.demo.train import Batch, Learner, clip_grads, grpo_advantages, policy_loss, square_norm


def batch(log_probs, advantages):
    count = log_probs.shape[0]
    ids = torch.arange(count * 9 * 4).view(count, 9, 2, 2) % 16
    return Batch(torch.zeros(count, 10, dtype=torch.int64), log_probs, advantages, ids, 0.125)


def test_advantages_compare_samples_of_one_prompt_only():
    rewards = torch.tensor([0.0, 1.0, 0.9, 1.0])
    low, high, lower, higher = grpo_advantages(rewards, 2).tolist()
    assert low == pytest.approx(-high)
    assert lower == pytest.approx(-higher)
    assert high == pytest.approx(0.7071, abs=1e-3)


def test_equal_rewards_teach_nothing():
    assert grpo_advantages(torch.full((8,), 0.75), 4).tolist() == [0.0] * 8


def test_gradient_of_the_loss_at_the_rollout_policy_is_the_policy_gradient():
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    part = batch(log_probs.detach().clone(), torch.tensor([1.5, -0.5]))
    policy_loss(log_probs, part, 0.2).backward()
    assert log_probs.grad.tolist() == [[-0.1875, -0.1875], [0.0625, 0.0625]]


def test_a_ratio_beyond_the_clip_range_gives_no_gradient():
    log_probs = torch.tensor([[0.0]], requires_grad=True)
    policy_loss(log_probs, batch(torch.tensor([[-1.0]]), torch.tensor([1.0])), 0.2).backward()
    assert log_probs.grad.item() == 0.0


def test_micro_batches_are_cut_in_order():
    whole = batch(torch.arange(8.0).view(4, 2), torch.arange(4.0))
    second = whole.micro_batch(1, 2)
    assert second.old_log_probs_Bc.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert second.advantages_B.tolist() == [2.0, 3.0]
    assert torch.equal(second.ids_BrLK, whole.ids_BrLK[2:])


def test_dispatch_rows_follow_the_samples_of_each_micro_batch():
    settings = DemoSettings()
    whole = batch(torch.zeros(128, 4), torch.zeros(128))
    model = nn.Linear(1, 1)
    learner = Learner(model, None, None, settings)
    rows = learner.dispatch_rows(whole)
    assert [part.num_rows for part in rows] == [32 * 9] * 4
    assert np.array_equal(rows[2].ids, whole.ids_BrLK[64:96].flatten(0, 1).numpy())
    assert rows[2].source_row[0] == 64 * 9


def test_clipping_scales_to_the_norm_of_the_whole_model():
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    for param, grad in zip(params, (3.0, 4.0), strict=True):
        param.grad = torch.tensor([grad])
    assert square_norm(params).item() == 25.0
    clip_grads(params, 5.0, 1.0)
    assert params[0].grad.item() == pytest.approx(0.6, abs=1e-5)
    clip_grads(params, 1.0, 1.0)
    assert params[1].grad.item() == pytest.approx(0.8, abs=1e-5)
