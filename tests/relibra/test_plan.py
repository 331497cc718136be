"""StepPlan: every rule of a plan is checked, everything else is accepted."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.plan import PassPlan, StepPlan
from relibra.planner import PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

RANKS, EXPERTS, LAYERS, MICRO_BATCHES, SLOTS = 4, 7, 2, 3, 2
TOPOLOGY = Topology(rank_to_node=[0, 1, 0, 1])
SHAPE = ModelShape(EXPERTS, 2, (1, 3))


def random_plan(seed: int, *, one_row: bool = False) -> StepPlan:
    """A valid plan that balances nothing: random homes, replicas and rows.

    Args:
        seed: of everything.
        one_row: replicas execute one row each, as far as there are rows.
    """
    rng = np.random.default_rng(seed)
    layouts, base = [], []
    for group in (layouts, base):
        for _ in range(LAYERS):
            slots = np.append(rng.permutation(EXPERTS), -1)
            group.append(ExpertLayout(rng.permutation(slots).reshape(RANKS, 2)))
    shape = (MICRO_BATCHES, LAYERS, RANKS, EXPERTS)
    loads = LoadMatrix(rng.integers(0, 20, shape).astype(np.int32))
    replicas = np.full((*shape[:3], SLOTS), -1, np.int32)
    rows = np.zeros((*shape[:3], 2 + SLOTS), np.int64)
    for m, layer in np.ndindex(MICRO_BATCHES, LAYERS):
        layout = layouts[layer]
        rows[m, layer, :, :2] = np.where(
            layout.home_slot_expert_GH >= 0,
            loads.totals_MLE[m, layer][layout.home_slot_expert_GH],
            0,
        )
        for rank, slot in np.ndindex(RANKS, SLOTS):
            node = TOPOLOGY.rank_to_node_G
            allowed = [
                expert
                for expert in range(EXPERTS)
                if layout.home_rank_E[expert] != rank
                and node[layout.home_rank_E[expert]] == node[rank]
                and expert not in replicas[m, layer, rank]
            ]
            if not allowed or (not one_row and rng.random() < 0.3):
                continue
            expert = int(rng.choice(allowed))
            home = divmod(int(layout.expert_to_slot[expert]), 2)
            moved = int(rng.integers(0, rows[m, layer][home] + 1))
            moved = min(1, int(rows[m, layer][home])) if one_row else moved
            replicas[m, layer, rank, slot] = expert
            rows[m, layer, rank, 2 + slot] += moved
            rows[m, layer][home] -= moved
    return StepPlan.from_arrays(
        TOPOLOGY,
        SHAPE,
        layouts,
        {"train": PassPlan(replicas, rows)},
        {"train": loads},
        base_layouts=base,
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("one_row", [False, True])
def test_any_plan_that_keeps_the_rules_is_accepted_and_splits(seed: int, one_row: bool) -> None:
    plan = random_plan(seed, one_row=one_row)
    for m, layer in np.ndindex(MICRO_BATCHES, LAYERS):
        view = plan.replica_plan("train", m, layer)
        quota = plan.source_quota("train", m, layer)
        assert quota.shape == (RANKS, RANKS * 4)
        assert np.array_equal(quota.sum(0), view.slot_rows_Gn.reshape(-1))
        assert quota.sum() == plan.loads["train"].rows_MLGE[m, layer].sum()
        assert view.num_replicas == (view.replica_slot_expert_GS >= 0).sum()
    assert plan.base_layout == plan.base_layouts != plan.layouts


def changed(plan: StepPlan, change: Callable[[np.ndarray, np.ndarray, StepPlan], None]) -> StepPlan:
    one = plan.passes["train"]
    replicas, rows = one.replica_slot_expert_MLGS.copy(), one.slot_rows_MLGn.copy()
    change(replicas, rows, plan)
    return dataclasses.replace(plan, passes={"train": PassPlan(replicas, rows)})


def put(expert_of: Callable[[StepPlan, int], bool]) -> Callable[..., None]:
    """Puts an expert for which the rule is broken into slot 0 of rank 0."""

    def change(replicas: np.ndarray, rows: np.ndarray, plan: StepPlan) -> None:
        expert = next(e for e in range(EXPERTS) if expert_of(plan, e))
        rows[0, 0, 0, 3] = rows[0, 0, 0, 2] = 0
        replicas[0, 0, 0] = [expert, -1]

    return change


def twice(replicas: np.ndarray, rows: np.ndarray, plan: StepPlan) -> None:
    home = plan.layouts[0].home_rank_E
    replicas[0, 0, 0] = next(e for e in range(EXPERTS) if home[e] == 2)


def lose_a_row(replicas: np.ndarray, rows: np.ndarray, plan: StepPlan) -> None:
    rows[0, 0][tuple(np.argwhere(rows[0, 0] > 0)[0])] -= 1


def row_in_filler(replicas: np.ndarray, rows: np.ndarray, plan: StepPlan) -> None:
    slot = np.argwhere(plan.layouts[1].home_slot_expert_GH < 0)[0]
    rows[2, 1][tuple(slot)] = 1


def row_in_free_slot(replicas: np.ndarray, rows: np.ndarray, plan: StepPlan) -> None:
    replicas[...] = -1


def too_large(replicas: np.ndarray, rows: np.ndarray, plan: StepPlan) -> None:
    replicas[1, 0, 3, 1] = EXPERTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(lambda p, e: p.layouts[0].home_rank_E[e] == 0), "a replica at its home rank"),
        (put(lambda p, e: p.layouts[0].home_rank_E[e] in (1, 3)), "a replica in another node"),
        (twice, "twice on one rank at micro-batch 0, layer 0, rank 0"),
        (lose_a_row, r"need the \d+ rows of expert \d at micro-batch 0, layer 0, got"),
        (row_in_filler, "1 rows in an empty slot at micro-batch 2, layer 1"),
        (row_in_free_slot, "rows in an empty slot"),
        (too_large, "need experts 0..6 or -1, got 7 at micro-batch 1, layer 0, rank 3, slot 1"),
    ],
)
def test_a_broken_rule_is_refused(change: Callable[..., None], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        changed(random_plan(3), change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layouts": ()}, "layouts: need one a layer, 2, got 0"),
        ({"passes": {}, "loads": {}}, "passes: need at least one"),
        ({"shape": ModelShape(EXPERTS, 2, (1,))}, "layouts: need one a layer, 1, got 2"),
        ({"shape": ModelShape(6, 2, (1, 3))}, r"layouts\[0\]: need .* = \(6, 4, 2\), got \(7, 4"),
        ({"topology": Topology(1, 2)}, r"layouts\[0\]: need .* = \(7, 2, 2\)"),
        (
            {"loads": {"train": LoadMatrix(np.zeros((1, 2, 4, 7), np.int32))}},
            r"loads\['train'\]: need a gathered matrix .*\[3, 2, 4, 7\], got \[1, 2, 4, 7\]",
        ),
        (
            {"loads": {"logprob": LoadMatrix(np.zeros((3, 2, 4, 7), np.int32))}},
            r"loads: need only passes \['train'\], got also \['logprob'\]",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(random_plan(0), **change)  # type: ignore[arg-type]


def test_negative_rows_and_floats_are_refused() -> None:
    one = random_plan(0).passes["train"]
    with pytest.raises(PlanError, match="slot_rows_MLGn: need values in 0.."):
        PassPlan(one.replica_slot_expert_MLGS, one.slot_rows_MLGn - 1)
    with pytest.raises(TypeError, match="slot_rows_MLGn: need integers"):
        PassPlan(one.replica_slot_expert_MLGS, one.slot_rows_MLGn * 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("other", 0, 0), r"pass_: need one of \['train'\], got 'other'"),
        (("train", 3, 0), "micro_batch: need 0..2, got 3"),
        (("train", -1, 0), "micro_batch: need 0..2, got -1"),
        (("train", 0, 2), "layer_index: need 0..1, got 2"),
    ],
)
def test_a_place_that_is_not_there_is_refused(place: tuple[str, int, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        random_plan(0).source_quota(*place)


def test_the_hash_sees_everything_that_decides_execution() -> None:
    plan = random_plan(1)
    rows = plan.loads["train"].rows_MLGE.copy()
    other_source = rows.copy()
    other_source[0, 0, 0, 0] += 1
    other_source[0, 0, 1, 0] -= 1
    others = {
        "moved source": dataclasses.replace(plan, loads={"train": LoadMatrix(other_source)}),
        "optimizer steps": dataclasses.replace(
            plan, loads={"train": LoadMatrix(rows, np.array([0, 0, 1]))}
        ),
        "rails": dataclasses.replace(
            plan, topology=Topology(rank_to_node=[0, 1, 0, 1], rank_to_rail=[1, 0, 0, 1])
        ),
        "base": dataclasses.replace(plan, base_layouts=plan.layouts),
        "layers": dataclasses.replace(plan, shape=ModelShape(EXPERTS, 2, (1, 2))),
        "pass": dataclasses.replace(
            plan, passes={"other": plan.passes["train"]}, loads={"other": plan.loads["train"]}
        ),
        "replicas": random_plan(2),
    }
    hashes = {name: one.hash for name, one in others.items()} | {"plan": plan.hash}
    assert len(set(hashes.values())) == len(hashes), hashes
    same = dataclasses.replace(plan, strategy="x", planner_ms=7.0)
    assert same.hash == plan.hash == random_plan(1).hash
    assert len(plan.hash) == 64


def test_a_plan_for_reports_does_not_execute() -> None:
    loads = LoadMatrix(np.ones((1, 1, 2, 4), np.int32))
    plan = plan_step(
        {"train": loads}, Topology(1, 2), model=ModelShape(4, 1, (0,)), strategy="ideal"
    )
    assert not plan.is_executable
    with pytest.raises(PlanError, match="strategy: need one that can be executed, got 'ideal'"):
        plan.source_quota("train", 0, 0)
    with pytest.raises(PlanError, match="need one that can be executed to save"):
        plan.save("never-written.npz")


def test_passes_may_have_other_numbers_of_micro_batches() -> None:
    few = LoadMatrix(np.ones((1, 1, 2, 4), np.int32))
    many = LoadMatrix(np.full((3, 1, 2, 4), 2, np.int32))
    plan = plan_step(
        {"logprob": few, "train": many},
        Topology(1, 2),
        model=ModelShape(4, 1, (0,)),
        config=PlannerConfig(proposals=100),
    )
    assert plan.passes["logprob"].num_micro_batches == 1
    assert plan.passes["train"].num_micro_batches == 3
    with pytest.raises(PlanError, match="need equal passes, got {'logprob': 1, 'train': 3}"):
        _ = plan.num_micro_batches
