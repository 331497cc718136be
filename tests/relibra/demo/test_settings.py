import pytest

from relibra.demo.settings import DemoSettings


def test_defaults_are_those_of_the_full_demo():
    settings = DemoSettings()
    assert (settings.steps, settings.num_ranks, settings.num_micro_batches) == (80, 4, 4)
    assert (settings.hidden_size, settings.expert_size) == (64, 64)
    assert (settings.num_experts, settings.top_k, settings.replica_slots) == (16, 2, 1)
    assert (settings.learning_rate, settings.adam_eps, settings.clip_norm) == (1e-3, 1e-6, 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps: need an integer >= 1, got 0"),
        ({"seed": -1}, "seed: need an integer in"),
        ({"inject": "gremlin"}, "inject: need one of drop-replica-grad, .* got 'gremlin'"),
        ({"num_prompts": 60}, "num_prompts: need a multiple of ranks x micro-batches = 4 x 4"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        DemoSettings(**wrong)
