"""plan_step: what every strategy must keep on any loads and topology."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.planner import STRATEGIES, PlannerConfig, plan_step
from relibra.shape import ModelShape
from relibra.topology import Topology

FAST = PlannerConfig(proposals=1000)
EXECUTABLE = ("none", "lpt", "reorder_only", "replicate_only", "relibra")
WITH_COPIES = ("history", "donor_only", "split_only", "place_only")


def plan_rows(
    rows: np.ndarray, topology: Topology, strategy: str = "relibra", **settings: object
) -> StepPlan:
    """Plans rows `[M, L, G, E]`."""
    shape = ModelShape(rows.shape[3], 1, range(rows.shape[1]))
    layout = settings.pop("layout", None)
    config = PlannerConfig(**({"proposals": 1000} | settings))  # type: ignore[arg-type]
    loads = {"train": LoadMatrix(rows.astype(np.int32))}
    return plan_step(
        loads,
        topology,
        model=shape,
        layout=layout,  # type: ignore[arg-type]
        config=config,
        strategy=strategy,
        previous=loads,
    )


def from_totals(totals: list[int] | np.ndarray, ranks: int, micro_batches: int = 1) -> np.ndarray:
    """Rows `[M, 1, G, E]` of experts, spread over the sources as evenly as integers allow."""
    total = np.asarray(totals)
    share = total // ranks + (np.arange(ranks)[:, None] < total % ranks)
    return np.broadcast_to(share, (micro_batches, 1, ranks, len(total)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, Topology, int]:
    """Rows, topology (also uneven and interleaved nodes) and replica slots."""
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    nodes = np.repeat(np.arange(len(sizes)), sizes)
    topology = Topology(rank_to_node=rng.permutation(nodes).tolist())
    experts = draw(st.integers(1, 24))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 2)), len(nodes), experts)
    scale = draw(st.sampled_from([0, 3, 100, 10**6]))
    skew = np.exp(draw(st.sampled_from([0.0, 1.0, 3.0])) * rng.normal(size=(1, *shape[1:])))
    rows = rng.poisson(np.minimum(scale * skew, 2**29)) if scale else np.zeros(shape, np.int64)
    rows = np.broadcast_to(rows, shape).copy()
    if draw(st.booleans()):
        rows[rng.random(shape[0]) < 0.5] = 0
    return np.minimum(rows, 2**31 - 1), topology, draw(st.integers(0, 3))


@given(problems())
@settings(max_examples=60)
def test_every_plan_keeps_the_rules_and_the_bounds(
    problem: tuple[np.ndarray, Topology, int],
) -> None:
    """StepPlan checks conservation, hosts, nodes and slots; here the figures are checked."""
    rows, topology, slots = problem
    totals = rows.sum(2, dtype=np.int64)
    sums = totals.sum(2)
    none = plan_rows(rows, topology, "none", replica_slots=slots)
    for strategy in STRATEGIES:
        plan = plan_rows(rows, topology, strategy, replica_slots=slots)
        assert plan.hash == plan_rows(rows, topology, strategy, replica_slots=slots).hash
        load = plan.passes["train"].slot_rows_MLGn.sum(3)
        assert (load.max(2) >= -(-sums // topology.num_ranks)).all()
        if not plan.is_executable:
            continue
        assert np.array_equal(load.sum(2), sums)
        if strategy in ("relibra", "reorder_only"):
            best = none.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0)
            assert (load.max(2).sum(0) <= best).all(), "worse than none"
        if strategy in ("relibra", "replicate_only"):
            check_replicas(plan, totals, slots)
        elif strategy not in WITH_COPIES:
            assert plan.report.replicas == 0
        empty = ~totals.any((0, 2))
        if strategy != "lpt":
            assert all(plan.layouts[i] == plan.base_layouts[i] for i in np.flatnonzero(empty))
        assert (plan.passes["train"].replica_slot_expert_MLGS[sums == 0] == -1).all()


def check_replicas(plan: StepPlan, totals: np.ndarray, slots: int) -> None:
    """C is at least the bound of the layout, and equals it with S >= H."""
    one = plan.passes["train"]
    assert one.replica_slots == slots
    load = one.slot_rows_MLGn.sum(3)
    bound = np.zeros(load.shape[:2], np.int64)
    for node in range(plan.topology.num_nodes):
        ranks = np.array(plan.topology.ranks_of_node(node))
        for index, layout in enumerate(plan.layouts):
            here = np.isin(layout.home_rank_E, ranks)
            share = -(-totals[:, index, here].sum(1) // len(ranks))
            bound[:, index] = np.maximum(bound[:, index], share)
    assert (load.max(2) >= bound).all()
    if slots >= plan.layouts[0].slots_per_rank:
        assert np.array_equal(load.max(2), bound)
    used = one.replica_slot_expert_MLGS >= 0
    assert (one.slot_rows_MLGn[..., -slots:][used] > 0).all() if slots else not used.any()


@given(problems())
@settings(max_examples=40)
def test_the_same_loads_again_move_nothing(problem: tuple[np.ndarray, Topology, int]) -> None:
    rows, topology, slots = problem
    for strategy in ("relibra", "reorder_only"):
        first = plan_rows(rows, topology, strategy, replica_slots=slots)
        again = plan_rows(rows, topology, strategy, replica_slots=slots, layout=first.layouts)
        assert again.layouts == first.layouts
        assert again.report.moved_experts == 0


@given(problems(), st.integers(0, 2**32))
@settings(max_examples=40)
def test_any_base_layout_is_a_start_and_never_makes_it_worse_than_none(
    problem: tuple[np.ndarray, Topology, int], seed: int
) -> None:
    rows, topology, slots = problem
    rng = np.random.default_rng(seed)
    width = -(-rows.shape[3] // topology.num_ranks)
    base = []
    for _ in range(rows.shape[1]):
        table = np.full(topology.num_ranks * width, -1)
        table[: rows.shape[3]] = np.arange(rows.shape[3])
        base.append(ExpertLayout(rng.permutation(table).reshape(-1, width)))
    none = plan_rows(rows, topology, "none", layout=base)
    least = none.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0)
    before = plan_rows(rows, topology, "replicate_only", replica_slots=slots, layout=base)
    kept = before.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0)
    assert before.layouts == tuple(base)
    for strategy in ("relibra", "reorder_only"):
        plan = plan_rows(rows, topology, strategy, replica_slots=slots, layout=base)
        load = plan.passes["train"].slot_rows_MLGn.sum(3).max(2).sum(0)
        assert (load <= least).all(), "worse than none"
        moved = np.array([new != old for new, old in zip(plan.layouts, base, strict=True)])
        if strategy == "relibra":
            assert (load[moved] < kept[moved]).all(), "moved without a gain"
            assert (load[~moved] == kept[~moved]).all()


@given(problems(), st.integers(0, 2**32))
@settings(max_examples=30)
def test_layouts_and_replicas_do_not_depend_on_which_rank_sends(
    problem: tuple[np.ndarray, Topology, int], seed: int
) -> None:
    rows, topology, slots = problem
    order = np.random.default_rng(seed).permutation(rows.shape[2])
    one = plan_rows(rows, topology, replica_slots=slots)
    other = plan_rows(rows[:, :, order], topology, replica_slots=slots)
    assert one.layouts == other.layouts
    for name in ("replica_slot_expert_MLGS", "slot_rows_MLGn"):
        assert np.array_equal(
            getattr(one.passes["train"], name), getattr(other.passes["train"], name)
        )


@pytest.mark.parametrize("strategy", ["relibra", "reorder_only", "replicate_only"])
def test_any_number_of_threads_gives_the_same_plan(strategy: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=(1, 6, 1, 32))), (4, 6, 8, 32))
    hashes = {
        plan_rows(rows, Topology(2, 4), strategy, num_threads=threads).hash for threads in (1, 2, 5)
    }
    assert len(hashes) == 1


def test_the_seed_matters_and_is_part_of_the_input() -> None:
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=(1, 1, 1, 64))), (8, 1, 8, 64))
    hashes = [plan_rows(rows, Topology(4, 2), seed=seed).hash for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_identical_passes_are_planned_once_and_others_apart() -> None:
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=(1, 2, 1, 16))), (3, 2, 4, 16)).astype(np.int32)
    shape, topology = ModelShape(16, 2, (0, 1)), Topology(2, 2)
    train, other = LoadMatrix(rows), LoadMatrix(rows[::-1].copy())
    same_totals = LoadMatrix(rows[:, :, ::-1].copy())
    alone = plan_step({"train": train}, topology, model=shape, config=FAST)
    both = plan_step({"logprob": same_totals, "train": train}, topology, model=shape, config=FAST)
    assert both.layouts == alone.layouts
    assert both.passes["logprob"] is both.passes["train"]
    assert np.array_equal(both.passes["train"].slot_rows_MLGn, alone.passes["train"].slot_rows_MLGn)
    assert np.array_equal(both.source_quota("logprob", 0, 0).sum(1), rows[0, 0, ::-1].sum(1))
    two = plan_step({"logprob": other, "train": train}, topology, model=shape, config=FAST)
    assert two.passes["logprob"] is not two.passes["train"]
    assert two.hash != both.hash


def test_a_pass_with_more_weight_decides_the_layout() -> None:
    """Two passes that each want another pair of experts together; 2 nodes of one rank, no slots."""
    shape, topology = ModelShape(4, 1, (0,)), Topology(2, 1)
    loads = {
        "a": LoadMatrix(from_totals([60, 60, 0, 0], 2).astype(np.int32)),
        "b": LoadMatrix(from_totals([60, 0, 60, 0], 2).astype(np.int32)),
        "c": LoadMatrix(from_totals([0, 60, 60, 0], 2).astype(np.int32)),
    }
    apart = {"a": (0, 1), "b": (0, 2), "c": (1, 2)}
    for heavy in loads:
        others = [name for name in loads if name != heavy]
        config = PlannerConfig(proposals=500, pass_weight={heavy: 9, others[0]: 8, others[1]: 1})
        plan = plan_step(loads, topology, model=shape, config=config)
        home = plan.layouts[0].home_rank_E
        for name in (heavy, others[0]):
            first, second = apart[name]
            assert home[first] != home[second]
