"""Planning in pieces gives exactly the plan of one call."""

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.planner import STRATEGIES, PlannerConfig, PlanStream, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

SHAPE = ModelShape(16, 2, (1, 2, 4, 5, 7))
TOPOLOGY = Topology(2, 4)
CONFIG = PlannerConfig(proposals=1000)


def make_loads() -> dict[str, LoadMatrix]:
    """Two passes that differ only in the last layer, so which are equal is decided on all."""
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=(1, 5, 1, 16))), (3, 5, 8, 16)).astype(np.int32)
    other = rows.copy()
    other[:, 4] += 1
    return {"logprob": LoadMatrix(rows), "train": LoadMatrix(other), "again": LoadMatrix(rows)}


@pytest.mark.parametrize("layers_at_once", [1, 2, 9])
@pytest.mark.parametrize(
    "strategy", ["relibra", "reorder_only", "lpt", "eplb_oracle", "force_balanced"]
)
def test_pieces_are_the_plan_of_one_call(strategy: str, layers_at_once: int) -> None:
    loads = make_loads()
    stream = PlanStream(
        loads,
        TOPOLOGY,
        model=SHAPE,
        config=CONFIG,
        strategy=strategy,
        layers_at_once=layers_at_once,
    )
    whole = plan_step(loads, TOPOLOGY, model=SHAPE, config=CONFIG, strategy=strategy)
    pieces = list(stream)
    assert [piece.first_layer for piece in pieces] == list(range(0, 5, layers_at_once))
    assert pieces[-1].planner_ms >= pieces[0].planner_ms > 0
    for piece in pieces:
        layers = slice(piece.first_layer, piece.first_layer + len(piece.layouts))
        assert piece.layouts == whole.layouts[layers]
        for name, one in piece.passes.items():
            assert np.array_equal(one.slot_rows_MLGn, whole.passes[name].slot_rows_MLGn[:, layers])
    plan = stream.finish()
    assert plan.hash == whole.hash
    assert plan.passes["again"] is plan.passes["logprob"]


def test_finish_plans_what_is_left() -> None:
    stream = PlanStream(make_loads(), TOPOLOGY, model=SHAPE, config=CONFIG)
    assert next(iter(stream)).first_layer == 0
    assert (
        stream.finish().hash == plan_step(make_loads(), TOPOLOGY, model=SHAPE, config=CONFIG).hash
    )
    assert list(stream) == []


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(PlanError, match=f"strategy: need one of {next(iter(STRATEGIES))}"):
        PlanStream(make_loads(), TOPOLOGY, model=SHAPE, strategy="best")
    with pytest.raises(ValueError, match="layers_at_once"):
        PlanStream(make_loads(), TOPOLOGY, model=SHAPE, layers_at_once=0)
