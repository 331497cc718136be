"""All ranks in one process: equal to the dense reference, and bit for bit to processes."""

import dataclasses

import pytest
import torch
from local_world import (
    all_routes,
    joined_batch,
    make_local,
    run_local_step,
    train_local,
    weight_grads,
)
from moe_world import Result, World, compare, references
from replica_training import train

import relibra
from relibra.testing.plans import one_row_split, replica_only_split
from relibra_kernels.testing.launch import run_ranks

WORLD = World(
    1, 4, num_experts=8, top_k=2, num_layers=4, micro_batches=3, tokens=9, replica_slots=2,
    dtype=torch.float64,
)  # fmt: skip
NARROW = dataclasses.replace(WORLD, dtype=torch.float32)
TWO_NODES = dataclasses.replace(WORLD, num_nodes=2, ranks_per_node=2, micro_batches=2)
EIGHT = World(
    1, 8, num_experts=16, top_k=3, num_layers=4, micro_batches=2, tokens=7, replica_slots=2,
    dtype=torch.float64,
)  # fmt: skip
CASES = {  # world, order, recompute, grad_mode, combine, static slots
    "fp32": (NARROW, "in-turn", "off", "returned", "reduced", 0),
    "1f1b-main_grad": (WORLD, "1f1b", "off", "main_grad", "exact", 0),
    "recompute-main_grad": (WORLD, "in-turn", "non-reentrant", "main_grad", "reduced", 0),
    "1f1b-recompute": (NARROW, "1f1b", "non-reentrant", "returned", "exact", 0),
    "1f1b-reentrant": (WORLD, "1f1b", "reentrant", "returned", "reduced", 0),
    "two-nodes": (TWO_NODES, "in-turn", "off", "returned", "exact", 0),
    "static-copies": (TWO_NODES, "1f1b", "off", "main_grad", "reduced", 1),
    "static-returned": (NARROW, "in-turn", "non-reentrant", "returned", "exact", 1),
}
EIGHTS = {
    "in-turn": ("in-turn", "off", "returned", "reduced", 0),
    "1f1b-recompute-main_grad": ("1f1b", "non-reentrant", "main_grad", "exact", 0),
}


def options_of(order, recompute, grad_mode, combine, static_slots):
    return {
        "order": order, "recompute": recompute, "grad_mode": grad_mode, "combine": combine,
        "static_slots": static_slots,
    }  # fmt: skip


def run_processes(rank, num_ranks, cases):
    torch.set_num_threads(1)
    found = {}
    for name, (world, *rest) in cases.items():
        for transport in ("dist", "cpu_shm"):
            result, log = train(
                world, rank, transport=transport, timeout_s=20.0, **options_of(*rest)
            )
            found[name, transport] = dataclasses.asdict(result)
            found[name, transport, "log"] = log
    return found


def assert_equal(results, processes, name, transport):
    for rank, (mine, theirs) in enumerate(zip(results, processes, strict=True)):
        for field in dataclasses.fields(Result):
            pairs = zip(getattr(mine, field.name), theirs[name, transport][field.name], strict=True)
            for place, (a, b) in enumerate(pairs):
                what = f"{name}, rank {rank}, {field.name}[{place}] against {transport}"
                assert torch.equal(a, b), what


def compare_all(results, world, what):
    for rank, (result, need) in enumerate(zip(results, references(world), strict=True)):
        compare(result, need, f"{what}, rank {rank}:")


def check_against_processes(cases):
    processes = run_ranks(next(iter(cases.values()))[0].num_ranks, run_processes, cases)
    for name, (world, *rest) in cases.items():
        logs = []
        results = train_local(world, logs=logs, **options_of(*rest))
        for transport in ("dist", "cpu_shm"):
            assert_equal(results, processes, name, transport)
        for rank, log in enumerate(logs):  # the same pushes ahead, and everything else
            assert log == processes[rank][name, "cpu_shm", "log"], f"{name}, rank {rank}"
            assert len(log) > 8 * world.micro_batches
        if world.dtype == torch.float64:  # fp32 rounding grows over four layers
            compare_all(results, world, name)


QUICK = ("1f1b-recompute", "static-copies")


def test_equals_the_dense_reference_and_processes_bit_for_bit():
    check_against_processes({name: CASES[name] for name in QUICK})


@pytest.mark.slow
def test_all_modes_equal_the_dense_reference_and_processes_bit_for_bit():
    check_against_processes(CASES)


@pytest.mark.slow
def test_eight_ranks_equal_eight_processes_bit_for_bit():
    check_against_processes({name: (EIGHT, *case) for name, case in EIGHTS.items()})


@pytest.mark.parametrize("name", EIGHTS)
def test_eight_ranks_equal_the_dense_reference(name):
    compare_all(train_local(EIGHT, **options_of(*EIGHTS[name])), EIGHT, name)


SMALL = World(
    1, 4, num_experts=8, top_k=2, num_layers=2, tokens=9, replica_slots=2, dtype=torch.float64
)
ODD_WORLDS = {
    "one-empty-rank": dataclasses.replace(SMALL, empty_rank=2),
    "no-tokens-at-all": dataclasses.replace(SMALL, tokens=0),
    "one-expert-a-rank-very-hot": World(1, 4, 4, 1, replica_slots=2, skew=8.0, dtype=torch.float64),
    "no-replica-slots": dataclasses.replace(SMALL, replica_slots=0),
    "one-rank": dataclasses.replace(SMALL, ranks_per_node=1),
    "one-rank-a-node": dataclasses.replace(SMALL, num_nodes=4, ranks_per_node=1),
}


def plans(world):
    """The planner's, and plans that no planner would make."""
    config = relibra.PlannerConfig(replica_slots=world.replica_slots, proposals=100)
    loads = {"train": world.loads()}
    yield "relibra", relibra.plan_step(loads, world.topology, model=world.shape, config=config)
    yield "one row a replica", world.random_plan(split=one_row_split, fill=1.0)
    yield "replicas take everything", world.random_plan(split=replica_only_split, fill=1.0)


@pytest.mark.parametrize("name", ODD_WORLDS)
def test_absurd_plans_and_worlds(name):
    world, exact = ODD_WORLDS[name], []
    expected = references(world)
    for what, plan in plans(world):
        for combine in ("reduced", "exact"):
            results = train_local(world, plan=plan, combine=combine)
            for rank, result in enumerate(results):
                compare(result, expected[rank], f"{what}, {combine}, rank {rank}:")
        exact.append([y for result in results for y in result.y])
    for other in exact[1:]:
        assert all(torch.equal(a, b) for a, b in zip(exact[0], other, strict=True))


def test_without_a_plan_tokens_are_shared_evenly():
    runtime, model = make_local(SMALL)
    x, scores, dy = joined_batch(SMALL, 0)
    ids = torch.cat([torch.from_numpy(SMALL.ids(rank, 0)) for rank in range(4)]).long()
    model(x, scores, ids).backward(dy)
    need = references(SMALL)
    assert torch.allclose(x.grad, torch.cat([one.dx[0] for one in need]))
    results = [Result([], [], [], [], [])]
    weight_grads(runtime, model, results)
    for field in ("dw13", "dw2"):
        for got, expected in zip(getattr(results[0], field), getattr(need[0], field), strict=True):
            assert torch.allclose(got, expected)
    runtime.close()


def test_loads_plan_and_steps_with_an_optimizer_equal_dense_training():
    """Three steps with new plans: experts and moments move between the ranks' rows."""
    made = []

    def adam(model):
        made.append(torch.optim.Adam(model.parameters(), lr=1e-2))
        return made[0]

    runtime, model = make_local(SMALL, adam)
    (optimizer,) = made
    dense = [[w.clone().requires_grad_() for w in SMALL.weights(n)] for n in SMALL.shape.moe_layers]
    control = torch.optim.Adam([w for pair in dense for w in pair], lr=1e-2)
    for number in range(3):
        world = dataclasses.replace(SMALL, seed=number)
        loads = runtime.gather_loads(
            [relibra.LoadMatrix.from_rows(world.routes(rank)) for rank in range(4)]
        )
        config = relibra.PlannerConfig(replica_slots=2, proposals=200)
        plan = runtime.plan_step({"train": loads}, world.shape, config=config)
        if number == 1:
            plan = world.random_plan(base=runtime.layout, fill=1.0)
        optimizer.zero_grad()
        run_local_step(world, runtime, model, plan)
        optimizer.step()
        need = references(world, weights=dense)[0]
        for pair, dw13, dw2 in zip(dense, need.dw13, need.dw2, strict=True):
            pair[0].grad, pair[1].grad = dw13, dw2
        control.step()
    assert runtime.layout[0] != relibra.ExpertLayout.identity(8, 4)
    for moe, pair in zip(model.layers, dense, strict=True):
        for name, whole in zip(("w13", "w2"), pair, strict=True):
            param = getattr(moe, name)
            for key in ("exp_avg", "exp_avg_sq"):
                got = runtime.gather_experts(optimizer.state[param][key], moe.layer)
                assert torch.allclose(got, control.state[whole][key], rtol=1e-9, atol=1e-12)
            assert torch.allclose(runtime.gather_experts(param, moe.layer), whole.detach())
    assert [layout.home_slot_expert_GH.tolist() for layout in runtime.layout] == [
        moe.home_slot_expert.reshape(4, -1).tolist() for moe in model.layers
    ]
    runtime.close()


def test_weights_may_move_in_memory_between_steps():
    """As when a host takes them off the device; static copies are sent from where they are now."""
    runtime, model = make_local(SMALL)
    for scale in (1.0, 1.5):
        for param in model.parameters():
            param.data, param.grad = scale * param.detach().clone(), None
        weights = [
            [runtime.gather_experts(w, moe.layer) for w in (moe.w13, moe.w2)]
            for moe in model.layers
        ]
        plan = SMALL.random_plan(fill=1.0, static_slots=1, base=runtime.layout)
        results = run_local_step(SMALL, runtime, model, plan)
        weight_grads(runtime, model, results)
        for rank, need in enumerate(references(SMALL, weights=weights)):
            compare(results[rank], need, f"scale {scale}, rank {rank}:")
    runtime.close()


def test_gradients_of_static_copies_come_although_a_host_took_the_others():
    runtime, model = make_local(SMALL)
    plan = SMALL.random_plan(fill=1.0, static_slots=1)
    taken = []
    with runtime.step(plan, {"train": all_routes(SMALL)}) as step:
        x, scores, dy = joined_batch(SMALL, 0)
        with step.forward(micro_batch=0):
            y = model(x, scores)
        y.backward(dy)
        for param in model.parameters():
            taken.append(param.grad)
            param.grad = None
    for before, param in zip(taken, model.parameters(), strict=True):
        assert param.grad.any()
        param.grad += before
    results = [Result([], [], [], [], [])]
    weight_grads(runtime, model, results)
    need = references(SMALL)[0]
    for field in ("dw13", "dw2"):
        for got, expected in zip(getattr(results[0], field), getattr(need, field), strict=True):
            assert torch.allclose(got, expected)
    runtime.close()


def test_state_in_expert_order_survives_a_move():
    runtime, model = make_local(SMALL)
    before = runtime.logical_state_dict()
    run_local_step(SMALL, runtime, model, SMALL.random_plan(fill=1.0))
    after = runtime.logical_state_dict()
    assert runtime.layout[0].home_slot_expert_GH.reshape(-1).tolist() != list(range(8))
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    runtime.load_logical_state_dict(None, before)
    again = runtime.logical_state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)
    assert [expert for expert, _ in runtime.export_experts(1)] == list(range(8))
    runtime.close()


def test_figures_of_a_step_are_sums_over_the_ranks():
    runtime, model = make_local(SMALL)
    plan = SMALL.random_plan(fill=1.0)
    with runtime.step(plan, {"train": all_routes(SMALL)}) as step:
        x, scores, dy = joined_batch(SMALL, 0)
        with step.forward(micro_batch=0):
            model(x, scores).backward(dy)
    report = step.report()
    slot = sum(w[0].nbytes for w in SMALL.weights(1))
    used = (plan.passes["train"].replica_slot_expert_MLGS >= 0).sum()
    assert used == 16
    pushed = [report[f"layer_{layer}/replica_pushed_bytes"] for layer in (1, 2)]
    assert sum(pushed) <= 2 * used * slot
    assert min(pushed) > 0
    runtime.close()
