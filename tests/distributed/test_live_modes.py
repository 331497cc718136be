"""Rows that follow the live router: every mode equals the reference, no row is lost."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_world import Model, Result, World, collect_weight_grads, compare, reference
from torch.utils.checkpoint import checkpoint

import relibra
from relibra.live_routes import LIVE_MODES, live_source
from relibra.planner.online import share_as_planned
from relibra_kernels.testing.launch import run_ranks


@dataclasses.dataclass(frozen=True)
class HalfKnown(World):
    """Micro-batch 0 is recorded; in micro-batch 1 a third of rank 1's rows follow the router."""

    def routes(self, rank):
        rows = []
        for m in range(self.micro_batches):
            ids = self.ids(rank, m)
            kind = np.zeros(len(ids), np.uint8)
            if m == 1 and rank == 1:
                kind[::3] = relibra.DispatchRows.KIND_UNKNOWN
            rows.append(relibra.DispatchRows(ids, kind, num_experts=self.num_experts))
        return rows


WORLD = HalfKnown(2, 2, num_experts=16, top_k=2, num_layers=2, micro_batches=2, replica_slots=2)


def plan_of(world, strategy="relibra"):
    config = relibra.PlannerConfig(replica_slots=2, proposals=500)
    return relibra.plan_step(
        {"train": world.loads()}, world.topology, model=world.shape, config=config,
        strategy=strategy,
    )  # fmt: skip


def run_mode(rank, num_ranks, mode, recompute):
    world, result = WORLD, Result([], [], [], [], [])
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, replica_slots=2)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    wrap = None
    if recompute:

        def wrap(moe, *arguments):
            return checkpoint(moe, *arguments, use_reentrant=False)

    plan, routes = plan_of(world), {"train": world.routes(rank)}
    with runtime.step(plan, routes, unknown_rows=mode) as step:
        for m in range(2):
            x, scores, dy = world.batch(rank, m)
            x.requires_grad_(), scores.requires_grad_()
            live = torch.from_numpy(world.ids(rank, m)).long()
            with step.forward(micro_batch=m) as use:
                assert use.mode == ("exact" if m == 0 else mode)
                replayed = torch.stack([moe.replayed_ids() for moe in model.layers], 1)
                assert bool((replayed < 0).any()) == (m == 1 and rank == 1)
                ids = torch.where(replayed < 0, live, replayed)
                y = model(x, scores, ids, wrap=wrap)
            y.backward(dy)
            result.y.append(y.detach()), result.dx.append(x.grad)
            result.dscores.append(scores.grad)
    collect_weight_grads(world, runtime, model, result)
    compare(result, reference(world, rank), mode)
    return True


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("mode", LIVE_MODES)
def test_micro_batches_with_unknown_rows_equal_the_reference(mode, recompute):
    assert all(run_ranks(4, run_mode, mode, recompute))


def run_live_pass(rank, num_ranks, mode):
    """A pass without recorded routing beside a replayed one, forward only."""
    world = dataclasses.replace(WORLD, num_layers=1)
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, replica_slots=2)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    expected = reference(world, rank)
    with (
        runtime.step(
            plan_of(world), {"train": world.routes(rank)}, live_passes={"ref": mode}
        ) as step,
        torch.no_grad(),
    ):
        for m in range(2):
            x, scores, _ = world.batch(rank, m)
            with step.forward(micro_batch=m + 7, pass_="ref"):
                assert model.layers[0].replayed_ids() is None
                y = model(x, scores, torch.from_numpy(world.ids(rank, m)).long())
                with pytest.raises(ValueError, match="need the ids of all rows of .* ref"):
                    model.layers[0](x, scores[0])
            assert torch.allclose(y.double(), expected.y[m], rtol=0, atol=1e-4)
    return True


@pytest.mark.parametrize("mode", ["online", "home"])
def test_a_pass_without_routes(mode):
    assert all(run_ranks(4, run_live_pass, mode))


def run_refusals(rank, num_ranks):
    world = WORLD
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, replica_slots=2, timeout_s=60.0)
    model = Model(world, rank, num_ranks)
    runtime.attach(model)
    plan, routes = plan_of(world), {"train": world.routes(rank)}

    def refuse(message, **options):
        step = runtime.step(plan, routes, **options)
        with pytest.raises((ValueError, relibra.PlanError), match=message), step:
            pass

    refuse("unknown_rows", unknown_rows="drop")
    refuse("passes without routes", live_passes={"train": "online"})
    refuse("need a pass of the plan for mode 'fraction'", live_passes={"ref": "fraction"})
    refuse("modes of live passes", unknown_rows="home" if rank == 2 else "online")
    with runtime.step(plan, routes) as step, step.forward(micro_batch=1):
        x, scores, _ = world.batch(rank, 1)
        wrong = torch.from_numpy(world.ids(rank, 1)).long()
        with pytest.raises(ValueError, match="need the ids of all rows"):
            model.layers[0](x, scores[0])
        wrong[1, 0, 0] = (wrong[1, 0, 0] + 1) % 16
        with pytest.raises(ValueError, match="instead of .* at token 1, choice 0"):
            model.layers[0](x, scores[0], wrong[:, 0])
    return True


def test_bad_modes_and_ids_are_refused():
    assert all(run_ranks(4, run_refusals))


def test_online_copies_balance_live_counts():
    """The fullest rank of the online mode is at the planner's own bound, far below home."""
    world = dataclasses.replace(WORLD, tokens=400, skew=2.0)
    runtime = relibra.Runtime(topology=None)
    runtime.num_ranks, runtime.topology, runtime.replica_slots = 4, world.topology, 2
    layout = relibra.ExpertLayout.identity(16, 4)
    counts = world.loads().rows_MLGE[0, 0].astype(np.int64)
    fullest = {}
    for mode in ("online", "home"):
        rows = []
        for rank in range(4):
            runtime.rank = rank
            rows.append(int(live_source(runtime, mode, counts, layout).slot_rows_n.sum()))
        assert sum(rows) == counts.sum()
        fullest[mode] = max(rows)
    node = [counts[:, :8].sum(), counts[:, 8:].sum()]
    assert fullest["online"] <= -(-max(node) // 2) + 1
    assert fullest["online"] < 0.9 * fullest["home"]


@pytest.mark.parametrize("seed", range(20))
def test_fraction_keeps_all_rows_and_the_planned_shares(seed):
    plan = WORLD.random_plan().replica_plan("train", 0, 0)
    rng = np.random.default_rng(seed)
    live = rng.integers(0, 200, 16) * (rng.random(16) < 0.8)
    rows = share_as_planned(live.astype(np.int64), plan)
    flat, expert = rows.reshape(-1), plan.slot_expert_Gn.reshape(-1)
    planned = plan.slot_rows_Gn.reshape(-1)
    for e in range(16):
        mine = expert == e
        assert flat[mine].sum() == live[e]
        if planned[mine].sum():
            exact = live[e] * planned[mine] / planned[mine].sum()
            assert (abs(flat[mine] - exact) < 1).all()
    assert (flat[expert < 0] == 0).all()
