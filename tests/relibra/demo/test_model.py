import copy

import pytest
import torch

from relibra.demo.model import (
    DemoSetupError,
    build_language_model,
    import_demo_library,
    to_language_model_names,
)
from relibra.demo.settings import DemoSettings
from relibra.demo.task import SortTask


@pytest.fixture(scope="module")
def language_model():
    torch.manual_seed(0)
    return build_language_model(DemoSettings(), SortTask())


def test_block_with_replayed_live_choices_equals_the_original(language_model, with_dense_experts):
    original = language_model.model.layers[0].mlp
    replaced = with_dense_experts(copy.deepcopy(language_model))
    block = replaced.model.layers[0].mlp
    x = torch.randn(3, 5, 64, requires_grad=True)
    block.experts.ids_TK = original.gate(x.flatten(0, 1))[2]
    expected, got = original(x), block(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(block.gate.weight.grad, original.gate.weight.grad)


def test_other_replayed_choices_change_the_result(language_model, with_dense_experts):
    replaced = with_dense_experts(copy.deepcopy(language_model))
    block, x = replaced.model.layers[0].mlp, torch.randn(4, 64)
    block.experts.ids_TK = torch.tensor([[0, 1]] * 4)
    first = block(x)
    block.experts.ids_TK = torch.tensor([[0, 2]] * 4)
    assert not torch.allclose(first, block(x))


def test_a_block_without_replayed_ids_refuses_to_run(language_model, with_dense_experts):
    replaced = with_dense_experts(copy.deepcopy(language_model))
    with pytest.raises(RuntimeError, match="outside a training step"):
        replaced.model.layers[0].mlp(torch.randn(4, 64))


def test_logical_names_load_into_the_full_model(language_model, with_dense_experts):
    replaced = with_dense_experts(copy.deepcopy(language_model))
    state = {name: torch.ones_like(tensor) for name, tensor in replaced.state_dict().items()}
    target = copy.deepcopy(language_model)
    target.load_state_dict(to_language_model_names(state), strict=True)
    assert all(bool((param == 1).all()) for param in target.parameters())


def test_a_missing_library_names_the_remedy():
    with pytest.raises(DemoSetupError, match=r"needs no_such_lib.*pip install .*\[demo\]"):
        import_demo_library("no_such_lib.sub")
