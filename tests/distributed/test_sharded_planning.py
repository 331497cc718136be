"""Planning by several ranks together: the plan of one call on every rank, or an error on every."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from late_rank import Told
from moe_world import Model, World

import relibra
from relibra import sharded_planning
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.problem import make_problem
from relibra.sharded_planning import plan_sharded, planning_ranks
from relibra_kernels.testing.launch import run_ranks

TOPOLOGY = relibra.Topology(2, 2)
SHAPE = relibra.ModelShape(16, 2, (1, 2, 4, 5, 7), hidden_size=64, expert_size=32)
CONFIG = PlannerConfig(proposals=500)
WORLD = World(2, 2, num_experts=8, top_k=2, micro_batches=2)


def make_loads(change=0):
    """Three passes, two of them equal."""
    rng = np.random.default_rng(0)
    rows = rng.poisson(30 * np.exp(rng.normal(size=(1, 5, 1, 16))), (3, 5, 4, 16)).astype(np.int32)
    rows[0, 0, 0, 0] += change
    loads = {name: relibra.LoadMatrix(rows) for name in ("logprob", "again")}
    return loads | {"train": relibra.LoadMatrix(rows[:2] + 1)}


def plan_on_group(rank, num_ranks, settings):
    """Plan together; returns the plan's hash, report and the layers that this rank planned."""
    planned = []
    original = sharded_planning.plan_layers

    def counted(problem, strategy, layers, num_threads):
        planned.append((layers, num_threads))
        return original(problem, strategy, layers, num_threads)

    sharded_planning.plan_layers = counted
    sharded_planning.os.sched_getaffinity = lambda _: set(range(8))
    strategy = settings.get("strategy", "relibra")
    config = replace(CONFIG, **settings.get("config", {}))
    plan = plan_sharded(
        lambda: make_problem(make_loads(), TOPOLOGY, SHAPE, None, config),
        dist.group.WORLD,
        strategy=strategy,
        planners=settings.get("planners", "node"),
        timeout_s=20.0,
    )
    assert plan.config == config
    assert plan.report.planner_ms > 0
    return plan.hash, plan.report.as_dict(), plan.passes["train"].slot_rows_MLGn, planned


CASES = {
    "node": {},
    "rank": {"planners": "rank"},
    "static": {"planners": "rank", "config": {"static_copies": 2}},
    "time": {"config": {"cost": "time", "min_rows_per_replica": 1, "row_multiple": 1}},
    "threads": {"config": {"num_threads": 3}},
    "for-reports": {"planners": "rank", "strategy": "eplb_oracle"},
    "ideal": {"strategy": "ideal"},
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_plan_of_one_call(name):
    settings = CASES[name]
    config = replace(CONFIG, **settings.get("config", {}))
    strategy = settings.get("strategy", "relibra")
    whole = plan_step(make_loads(), TOPOLOGY, model=SHAPE, config=config, strategy=strategy)
    results = run_ranks(4, plan_on_group, settings)
    for hash_, report, rows, _ in results:
        assert hash_ == whole.hash
        assert np.array_equal(rows, whole.passes["train"].slot_rows_MLGn)
        report["planner_ms"] = whole.report.planner_ms
        assert report == whole.report.as_dict()
    by_rank = settings.get("planners") == "rank"
    shares = [[layers for layers, _ in planned] for *_, planned in results]
    if by_rank:
        assert shares == [[range(2)], [range(2, 3)], [range(3, 4)], [range(4, 5)]]
    else:
        assert shares == [[range(3)], [], [range(3, 5)], []]
    threads = {count for *_, planned in results for _, count in planned}
    # Eight cores in the test: shared by the planners of the host, unless the settings say more.
    assert threads == {config.num_threads or (2 if by_rank else 4)}


def test_more_planners_than_layers_and_one_rank_alone():
    one_layer = relibra.ModelShape(16, 2, (3,))
    loads = {name: one.only_layers(0, 1) for name, one in make_loads().items()}
    whole = plan_step(loads, TOPOLOGY, model=one_layer, config=CONFIG).hash

    def plan(rank, num_ranks):
        return plan_sharded(
            lambda: make_problem(loads, TOPOLOGY, one_layer, None, CONFIG),
            dist.group.WORLD,
            planners="rank",
            timeout_s=20.0,
        ).hash

    assert run_ranks(4, plan) == [whole] * 4
    with pytest.raises(relibra.PlanError, match="topology: need 1 ranks .*, got 2 nodes x 2"):
        plan_sharded(lambda: make_problem(loads, TOPOLOGY, one_layer, None, CONFIG), None)
    rows = loads["train"].rows_MLGE.sum(2, keepdims=True)
    own, single = {"train": relibra.LoadMatrix(rows)}, relibra.Topology(1, 1)
    alone = plan_sharded(lambda: make_problem(own, single, one_layer, None, CONFIG), None)
    assert alone.hash == plan_step(own, single, model=one_layer, config=CONFIG).hash


def test_the_planners_are_the_first_ranks_of_the_nodes():
    uneven = relibra.Topology(rank_to_node=[1, 0, 0, 1, 2])
    assert planning_ranks(uneven, "node") == (0, 1, 4)
    assert planning_ranks(uneven, "rank") == (0, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="planners: need one of .*'node', 'rank'.*got 'all'"):
        planning_ranks(uneven, "all")


PLENTY_S = 60.0  # where nobody waits in vain, however busy the machine is
TIMEOUT_S = 4.0  # where somebody does


def failed(rank, fault, timeout_s=PLENTY_S, told=None):
    """Plan together with a fault on rank 2; returns the error and the seconds it took."""
    make = {"loads": make_loads(), "config": CONFIG, "told": told}
    if rank == 2:
        fault(make)
    start = time.perf_counter()
    try:
        plan_sharded(
            lambda: make_problem(make["loads"], TOPOLOGY, SHAPE, None, make["config"]),
            dist.group.WORLD,
            timeout_s=timeout_s,
        )
    except Exception as error:
        if told is not None:
            told.say()
        return f"{type(error).__name__}: {error}", time.perf_counter() - start
    return "planned", 0.0


def other_counts(make):
    make["loads"] = make_loads(change=1)


def other_settings(make):
    make["config"] = replace(CONFIG, seed=1)


def other_sources(make):
    """The same totals from other ranks: only the finished plans differ."""
    make["loads"] = {
        name: relibra.LoadMatrix(one.rows_MLGE[:, :, ::-1].copy())
        for name, one in make["loads"].items()
    }


def wrong_input(make):
    make["loads"] = {}


def broken_planner(make):
    def broken(*args):
        raise MemoryError("no room for layer 5")

    sharded_planning.plan_layers = broken


def late_planner(make):
    original = sharded_planning.plan_layers

    def late(*args):
        make["told"].wait_for(3)
        return original(*args)

    sharded_planning.plan_layers = late


OWN, PEERS = "on rank 2", "elsewhere"
FAULTS = {
    "counts": (other_counts, {}, r"need the same counts \(digest\) on all ranks, got rank 0: "),
    "settings": (other_settings, {}, r"need the same settings \(digest\) on all ranks"),
    "sources": (other_sources, {}, "need the same plan on all ranks, got rank 0: "),
    "input": (
        wrong_input,
        {OWN: "PlanError: loads: need at least one pass, got none"},
        r"PlanError: plan_step: refused by rank\(s\) \[2\]; rank 2: PlanError: loads: need",
    ),
    "planner": (
        broken_planner,
        {OWN: "MemoryError: no room for layer 5"},
        r"PlanError: planning layers 1..4 on rank 0, layers 5..7 on rank 2: refused by rank\(s\) "
        r"\[2\]; rank 2: MemoryError: no room for layer 5",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_an_error_on_every_rank(name):
    import re

    fault, special, message = FAULTS[name]
    results = run_ranks(4, lambda rank, num_ranks: failed(rank, fault))
    for rank, (text, seconds) in enumerate(results):
        assert re.search(special.get(OWN, message) if rank == 2 else message, text), text
        assert seconds < PLENTY_S / 2


def test_a_planner_that_takes_too_long_is_named():
    told = Told()
    results = run_ranks(4, lambda rank, _: failed(rank, late_planner, TIMEOUT_S, told))
    for rank, (text, seconds) in enumerate(results):
        assert text.startswith("ReplicaSyncError: planning layers 1..4 on rank 0, layers 5..7"), (
            text
        )
        assert f"rank {rank} of 4 waited in vain" in text
        assert rank == 2 or seconds < 2 * TIMEOUT_S
    assert "2" in results[0][0].split("waited in vain")[1]


def plan_with_runtime(rank, num_ranks):
    """Two batches: the second starts from the layout that the first step left."""
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, timeout_s=20.0)
    runtime.attach(Model(WORLD, rank, num_ranks))
    loads = runtime.gather_loads(relibra.LoadMatrix.from_rows(WORLD.routes(rank)))
    shape = relibra.ModelShape(8, 2, runtime.attachment().moe_layers)
    hashes = []
    for _ in range(2):
        base = runtime.layout
        plan = runtime.plan_step({"train": loads}, shape, config=CONFIG, planners="rank")
        whole = plan_step({"train": loads}, WORLD.topology, model=shape, layout=base, config=CONFIG)
        assert plan.hash == whole.hash
        assert plan.base_layouts == base
        with runtime.step(plan, {"train": WORLD.routes(rank)}):
            pass
        assert runtime.layout == plan.layouts
        hashes.append(plan.hash)
    runtime.close()
    return hashes


def test_a_runtime_plans_from_its_layout_and_the_step_takes_the_plan():
    results = run_ranks(4, plan_with_runtime)
    assert all(one == results[0] for one in results)


def other_model_with_runtime(rank, num_ranks):
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, timeout_s=PLENTY_S)
    runtime.attach(Model(WORLD, rank, num_ranks))
    shape = relibra.ModelShape(8, 2, runtime.attachment().moe_layers)
    loads = {"train": WORLD.loads()}
    name = "critic" if rank == 1 else "actor"
    error = ValueError if rank == 1 else relibra.PlanError
    with pytest.raises(error, match=r"model: need one of the attached \['actor'\], got 'critic'"):
        runtime.plan_step(loads, shape, model=name)
    return runtime.plan_step(loads, shape).hash  # nothing collective was left half done


def test_a_rank_with_another_model_is_an_error_everywhere_and_planning_goes_on():
    assert len(set(run_ranks(4, other_model_with_runtime))) == 1


def late_with_runtime(rank, num_ranks, told):
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, timeout_s=TIMEOUT_S)
    runtime.attach(Model(WORLD, rank, num_ranks))
    shape = relibra.ModelShape(8, 2, runtime.attachment().moe_layers)
    if rank == 3:
        told.wait_for(3)
    with pytest.raises(relibra.ReplicaSyncError):
        runtime.plan_step({"train": WORLD.loads()}, shape)
    told.say()
    with pytest.raises(RuntimeError, match="the runtime failed before"):
        runtime.plan_step({"train": WORLD.loads()}, shape)
    return True


def test_after_a_time_out_the_runtime_refuses_to_go_on():
    assert all(run_ranks(4, late_with_runtime, Told()))
