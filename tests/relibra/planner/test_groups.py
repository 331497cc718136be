"""EP groups that share a layout, and optimizer steps that share a plan."""

import numpy as np
import pytest
import torch

import relibra_kernels  # noqa: F401
from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_groups, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

SHAPE = ModelShape(32, 4, (0, 1))
TOPOLOGY = Topology(4, 2)


def group_loads(seed: int, scale: float = 1.0) -> dict[str, LoadMatrix]:
    rng = np.random.default_rng(seed)
    popularity = scale * 40 * np.exp(0.9 * rng.normal(size=(6, 2, 1, 32)))
    rows = rng.poisson(np.broadcast_to(popularity, (6, 2, 8, 32)))
    return {"train": LoadMatrix(rows.astype(np.int32))}


@pytest.mark.parametrize("settings", [{}, {"static_copies": 2}])
def test_groups_share_layouts_and_the_slowest_counts(settings: dict[str, int]) -> None:
    groups = [group_loads(1), group_loads(2), group_loads(3, 1.02)]
    config = PlannerConfig(proposals=5000, **settings)
    slowest = {}
    for rounds in (1, 3):
        plans = plan_groups(groups, TOPOLOGY, model=SHAPE, config=config, rounds=rounds)
        assert len({plan.layouts for plan in plans}) == 1
        for plan, loads in zip(plans, groups, strict=True):
            assert plan.loads["train"] is loads["train"]
        cost = [plan.passes["train"].slot_rows_MLGn.sum(3).max(2).sum() for plan in plans]
        slowest[rounds] = max(cost)
    # Static copies leave little between the groups.
    assert slowest[3] <= slowest[1] * (1 if settings else 0.99)
    own = plan_step(groups[0], TOPOLOGY, model=SHAPE, config=config).layouts
    foreign = plan_step(
        groups[2], TOPOLOGY, model=SHAPE, config=config, layout=own, strategy="replicate_only"
    )
    assert slowest[3] < foreign.passes["train"].slot_rows_MLGn.sum(3).max(2).sum()


def test_one_group_is_planned_as_alone_and_equal_groups_alike() -> None:
    loads = group_loads(4)
    config = PlannerConfig(proposals=3000)
    alone = plan_step(loads, TOPOLOGY, model=SHAPE, config=config)
    (single,) = plan_groups([loads], TOPOLOGY, model=SHAPE, config=config)
    assert single.hash == alone.hash
    twice = plan_groups([loads, group_loads(4)], TOPOLOGY, model=SHAPE, config=config)
    assert [plan.hash for plan in twice] == [alone.hash] * 2


def test_groups_with_several_passes_and_modelled_time() -> None:
    shape = ModelShape(32, 4, (0, 1), hidden_size=2048, expert_size=768)
    groups = [
        {"train": group_loads(1, 50)["train"], "logprob": group_loads(7, 50)["train"]},
        {"train": group_loads(2, 50)["train"], "logprob": group_loads(2, 50)["train"]},
    ]
    config = PlannerConfig(cost="time", proposals=2000)
    plans = plan_groups(groups, TOPOLOGY, model=shape, config=config)
    assert plans[0].layouts == plans[1].layouts
    assert set(plans[0].passes) == {"train", "logprob"}
    for plan in plans:
        assert plan.report.imbalance_mean < 1.3


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="loads: need at least one EP group, got none"):
        plan_groups([], TOPOLOGY, model=SHAPE)
    with pytest.raises(PlanError, match=r"loads\[1\]: need the passes \['train'\] of group 0"):
        plan_groups([group_loads(1), {"x": group_loads(1)["train"]}], TOPOLOGY, model=SHAPE)


@pytest.mark.parametrize(
    ("loads", "error", "message"),
    [
        ({"train": 1}, TypeError, "loads: need a sequence of EP groups, got dict"),
        ([3], TypeError, r"loads\[0\]: need loads by pass, got int"),
        ([], PlanError, "loads: need at least one EP group"),
    ],
)
def test_what_is_no_loads_of_groups(loads: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_groups(loads, Topology(2, 2), model=ModelShape(8, 1, (0,)))


def test_a_cap_that_one_group_breaks_names_the_group() -> None:
    sizes = [(1, 1, 4, 8), (1, 1, 4, 8)]
    loads = [{"train": LoadMatrix(np.full(size, 1 + 8 * i))} for i, size in enumerate(sizes)]
    config = PlannerConfig(max_rows_per_rank=20)
    with pytest.raises(PlanError, match="of pass 'train' of group 1, got 20"):
        plan_groups(loads, Topology(2, 2), model=ModelShape(8, 1, (0,)), config=config)
    with pytest.raises(ValueError, match="rounds: need 1 to 1024"):
        plan_groups(loads, Topology(2, 2), model=ModelShape(8, 1, (0,)), rounds=10**9)


@pytest.mark.parametrize("cost", ["rows", "time"])
def test_three_optimizer_steps_and_an_epoch_keep_the_plan_exact(cost: str) -> None:
    """Replayed ids do not change when weights do: every source finds quota for every row."""
    rng = np.random.default_rng(0)
    top_k, experts, ranks, tokens, micro_batches = 4, 32, 8, 96, 6
    noise = rng.gumbel(size=(micro_batches, 2, ranks, tokens, experts))
    hot = 1.5 * rng.normal(size=(micro_batches, 2, 1, 1, experts))
    ids = np.argsort(-(noise + hot), axis=-1)[..., :top_k].astype(np.int32)
    rows = np.stack(
        [np.bincount(one.ravel(), minlength=experts) for one in ids.reshape(-1, tokens * top_k)]
    )
    rows = rows.reshape(micro_batches, 2, ranks, experts).astype(np.int32)
    shape = ModelShape(experts, top_k, (0, 1), hidden_size=64, expert_size=64)
    loads = LoadMatrix(rows, optimizer_step_M=np.array([0, 0, 1, 1, 2, 2], np.int32))
    config = PlannerConfig(
        cost=cost, proposals=2000, row_multiple=16, min_rows_per_replica=16, replica_slots=2
    )
    plan = plan_step({"train": loads}, Topology(2, 4), model=shape, config=config)
    assert cost == "time" or plan.report.replicas > 0
    slots = plan.slots_per_rank
    for _epoch in range(2):
        for step in range(3):
            for m in np.flatnonzero(loads.optimizer_step_M == step):
                for layer in range(2):
                    quota = plan.source_quota("train", int(m), layer)
                    served = np.zeros(ranks * slots, np.int64)
                    experts_of = plan.replica_plan("train", int(m), layer).slot_expert_Gn.ravel()
                    for source in range(ranks):
                        served += replayed(
                            ids[m, layer, source], quota[source], experts_of, experts
                        )
                    planned = plan.passes["train"].slot_rows_MLGn[m, layer].ravel()
                    assert np.array_equal(served, planned)


def replayed(
    ids_TK: np.ndarray, quota_slots: np.ndarray, expert_of_slot: np.ndarray, experts: int
) -> np.ndarray:
    """Rows of each slot when the op routes the replayed ids of one source."""
    used = np.flatnonzero(quota_slots > 0)
    order = used[np.argsort(expert_of_slot[used], kind="stable")]
    first = np.searchsorted(expert_of_slot[order], np.arange(experts + 1))
    slot_ids = torch.ops.relibra.route_to_slots(
        torch.from_numpy(ids_TK),
        torch.from_numpy(first.astype(np.int32)),
        torch.from_numpy(order.astype(np.int32)),
        torch.from_numpy(quota_slots[order].astype(np.int32)),
    )
    return np.bincount(slot_ids.numpy().ravel(), minlength=len(quota_slots))
