"""Maps for EPLB-style tools: exact inverses, any integer type, no floats."""

import numpy as np
import pytest
import torch

from relibra.load_matrix import LoadMatrix
from relibra.placement_maps import PlacementMaps
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError


def zipf_loads(seed: int, *, experts: int, ranks: int, micro_batches: int = 2) -> LoadMatrix:
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, experts + 1)
    rows = [
        rng.multinomial(4000, rng.permutation(share / share.sum()), size=ranks)
        for _ in range(micro_batches)
    ]
    return LoadMatrix(np.stack(rows)[:, None].astype(np.int32))


@pytest.mark.parametrize("seed", range(20))
def test_plan_06_maps_are_exact_inverses(seed: int) -> None:
    loads = zipf_loads(seed, experts=128, ranks=2)
    plan = plan_step(
        {"train": loads},
        Topology(1, 2),
        model=ModelShape(128, 8, (0,)),
        config=PlannerConfig(proposals=2000),
    )
    for micro_batch in range(2):
        maps = plan.placement_maps("train", micro_batch)
        physical, logical = maps.physical_to_logical_map, maps.logical_to_physical_map
        assert physical.shape == (1, 2 * (64 + 1))
        assert physical.min() >= -1
        assert physical.max() <= 127
        assert (maps.expert_count >= 1).all()
        assert np.array_equal((logical >= 0).sum(2), maps.expert_count)
        assert maps.expert_count.sum() == (physical >= 0).sum()
        for expert in range(128):
            slots = logical[0, expert][logical[0, expert] >= 0]
            assert slots.tolist() == np.flatnonzero(physical[0] == expert).tolist()


@pytest.mark.parametrize(
    "convert",
    [
        lambda array: array.tolist(),
        lambda array: array.astype(np.int64),
        lambda array: torch.from_numpy(array.copy()),
    ],
    ids=["list", "int64", "torch_int32"],
)
def test_plan_09_round_trip_through_other_integers(convert: object) -> None:
    loads = zipf_loads(1, experts=16, ranks=4)
    plan = plan_step({"train": loads}, Topology(2, 2), model=ModelShape(16, 2, (0,)), layout=None)
    maps = plan.placement_maps("train", 0)
    again = PlacementMaps(convert(maps.physical_to_logical_map), 16)  # type: ignore[operator]
    assert again == maps
    assert np.array_equal(again.logical_to_physical_map, maps.logical_to_physical_map)
    assert np.array_equal(again.expert_count, maps.expert_count)


@pytest.mark.parametrize(
    ("experts", "error", "message"),
    [
        ([[0.0, 1.0]], TypeError, "physical_to_logical_map: need integers"),
        (torch.tensor([[0.0, 1.0]]), TypeError, "physical_to_logical_map: need integers"),
        ([[0, 2]], PlanError, "need values in -1..1, got 2"),
        ([[0, 0]], PlanError, "need a slot for expert 1 of layer 0"),
    ],
)
def test_plan_09_what_is_refused(experts: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PlacementMaps(experts, 2)  # type: ignore[arg-type]
