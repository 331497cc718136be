import pytest
import torch

from relibra.demo.model import build_language_model
from relibra.demo.rollout import Rollout, RolloutEngine
from relibra.demo.settings import DemoSettings
from relibra.demo.task import SortTask
from relibra.demo.train import completion_log_probs

TASK, SETTINGS = SortTask(), DemoSettings()


def model():
    torch.manual_seed(1)
    return build_language_model(SETTINGS, TASK)


@pytest.fixture(scope="module")
def rollout():
    digits = TASK.draw(6, torch.Generator().manual_seed(0))
    return RolloutEngine(model(), TASK).sample(digits, torch.Generator().manual_seed(0))


def test_a_sample_of_n_tokens_has_n_minus_1_rows(rollout):
    assert rollout.tokens_Bn.shape == (6, 10)
    assert rollout.log_probs_Bc.shape == (6, 4)
    assert rollout.ids_BrLK.shape == (6, 9, 2, 2)


def test_recorded_routing_is_that_of_one_forward_over_the_whole_sample(rollout):
    full, seen = model(), []
    for layer in full.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, outputs: seen.append(outputs[2]))
    with torch.no_grad():
        full(input_ids=rollout.tokens_Bn[:, :-1], use_cache=False)
    for place, ids in enumerate(seen):
        assert torch.equal(rollout.ids_BrLK[:, :, place], ids.view(6, 9, 2))


def test_training_forward_on_replayed_ids_gives_the_same_log_probs(rollout, with_dense_experts):
    trained = with_dense_experts(model())
    for place, layer in enumerate(trained.model.layers):
        layer.mlp.experts.ids_TK = rollout.ids_BrLK[:, :, place].flatten(0, 1)
    got = completion_log_probs(trained, rollout.tokens_Bn, 4)
    torch.testing.assert_close(got, rollout.log_probs_Bc, rtol=0, atol=1e-5)


def test_a_second_rollout_does_not_mix_with_the_first():
    engine, digits = RolloutEngine(model(), TASK), TASK.draw(3, torch.Generator())
    first, second = (engine.sample(digits, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first.tokens_Bn, second.tokens_Bn)
    assert torch.equal(first.ids_BrLK, second.ids_BrLK)


def test_greedy_takes_the_most_likely_token():
    engine, digits = RolloutEngine(model(), TASK), TASK.draw(3, torch.Generator())
    assert torch.equal(engine.sample(digits, None).tokens_Bn, engine.sample(digits, None).tokens_Bn)


def test_a_row_for_the_last_token_is_refused():
    with pytest.raises(ValueError, match=r"ids_BrLK: need \[B, n-1\] = \[2, 9\] in front"):
        Rollout(torch.zeros(2, 10), torch.zeros(2, 4), torch.zeros(2, 10, 2, 2))
