"""Healthy steps for the judge, the table and the picture."""

import dataclasses

import pytest
from torch import nn

from relibra.demo.model import replace_experts
from relibra.demo.records import StepRecord
from relibra_kernels.reference.moe import dense_moe


class DenseExperts(nn.Module):
    """All experts of a layer in this process, one after the other, on given ids."""

    def __init__(self, w13, w2):
        super().__init__()
        self.w13, self.w2 = nn.Parameter(w13.clone()), nn.Parameter(w2.clone())
        self.ids_TK = None

    def replayed_ids(self):
        return self.ids_TK

    def forward(self, x_TD, scores_TK, ids_TK):
        return dense_moe(x_TD, ids_TK, scores_TK, self.w13, self.w2)


HEALTHY = StepRecord(
    step=0,
    reward=0.2,
    rank_imbalance_none=1.6,
    rank_imbalance=1.05,
    node_imbalance_none=1.2,
    node_imbalance=1.01,
    replicas=16,
    moves=12,
    cross_node_moves=5,
    push_bytes=786_432,
    gradient_norm=0.5,
    gradient_difference=3e-8,
    parameter_difference=2e-8,
    log_prob_difference=8e-7,
    times={"planner_ms": 1.5},
)


@pytest.fixture
def healthy():
    return HEALTHY


@pytest.fixture
def run_of():
    """Healthy steps whose reward grows from 0.1 towards 0.9."""

    def make(count, **changes):
        return [
            dataclasses.replace(HEALTHY, step=i, **{"reward": 0.1 + 0.8 * i / count, **changes})
            for i in range(count)
        ]

    return make


@pytest.fixture
def with_dense_experts():
    """Replace the experts of a language model by loops over experts that replay given ids."""
    return lambda model: replace_experts(model, lambda _, w13, w2: DenseExperts(w13, w2))
