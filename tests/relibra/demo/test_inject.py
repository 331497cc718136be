from types import SimpleNamespace

import pytest
import torch
from torch import nn

from relibra.demo.inject import FAULTS, ExportByPosition, Fault, StaleReplica, make_fault
from relibra.demo.settings import INJECTIONS
from relibra.layout import ExpertLayout
from relibra.module import BalancedMoE

LAYOUT = ExpertLayout([[2, 0], [3, 1]])


def stand_in(rank=0):
    """A model with one layer, and a runtime that holds LAYOUT, as far as faults look."""
    model = nn.Module()
    model.experts = BalancedMoE(4, 8, 8, layer=5, num_ranks=2, rank=rank)
    whole = {
        name: torch.arange(4.0).view(4, 1, 1).expand(4, *param.shape[1:])
        for name, param in model.experts.named_parameters()
    }
    attachment = SimpleNamespace(layouts_by_layer=lambda: {5: LAYOUT})
    runtime = SimpleNamespace(
        group=None,
        rank=rank,
        attachment=lambda: attachment,
        logical_state_dict=lambda _model: {f"experts.{n}": t.clone() for n, t in whole.items()},
    )
    return model, runtime


def test_the_command_line_offers_every_fault():
    assert tuple(FAULTS) == INJECTIONS
    assert {name: type(make_fault(name)) for name in INJECTIONS} == FAULTS
    assert type(make_fault(None)) is Fault
    with pytest.raises(ValueError, match="inject: need one of drop-replica-grad"):
        make_fault("gremlin")


def test_export_by_position_numbers_experts_by_slot():
    model, runtime = stand_in()
    balanced = SimpleNamespace(runtime=runtime, model=model)
    healthy, faulty = Fault().export(balanced), ExportByPosition().export(balanced)
    assert healthy["experts.w13"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert faulty["experts.w13"][:, 0, 0].tolist() == [2, 0, 3, 1]
    assert faulty["experts.w2"][:, 0, 0].tolist() == [2, 0, 3, 1]


def test_a_stale_replica_gets_last_steps_weights_of_the_same_expert():
    model, runtime = stand_in(rank=1)
    fault = StaleReplica()
    fault.install(runtime, model)
    home = model.experts.w13.data
    fault.remember({"experts.w13": torch.arange(4.0).view(4, 1, 1)})
    assert fault.stale(home, runtime) is home  # nothing older is known in the first step
    fault.remember({"experts.w13": torch.arange(10.0, 14.0).view(4, 1, 1)})
    assert fault.stale(home, runtime).flatten().tolist() == [3, 1]


def test_only_one_fault_leaves_the_moments_behind():
    assert [name for name in INJECTIONS if not FAULTS[name].moves_moments] == ["moments-not-moved"]
