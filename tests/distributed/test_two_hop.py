"""Two hops give what one hop gives: bit for bit in `exact`, within rounding in `reduced`."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_world import Model, Result, World, balanced, collect_weight_grads, compare, reference
from torch.utils.checkpoint import checkpoint

import relibra
from relibra.movers import GroupMovers
from relibra.testing.plans import random_split, replica_only_split
from relibra_kernels.testing.compare import MAX_CALC_DIFF, calc_diff
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.dispatch import FlatDispatch
from relibra_kernels.transport.two_hop import Relay


@dataclasses.dataclass(frozen=True)
class Grid(World):
    """Ranks on nodes and rails in any order, ranks without tokens, rows of the live router."""

    rank_to_node: tuple = ()
    rank_to_rail: tuple = ()
    empty: tuple = ()

    @property
    def topology(self):
        if not self.rank_to_node:
            return super().topology
        rails = self.rank_to_rail or None
        return relibra.Topology(rank_to_node=self.rank_to_node, rank_to_rail=rails)

    def tokens_of(self, rank, m):
        return 0 if rank in self.empty else super().tokens_of(rank, m)

    def half_known(self, rank):
        """Routes in which a third of the rows of rank 1 follow the live router."""
        rows = []
        for m in range(self.micro_batches):
            ids = self.ids(rank, m)
            kind = np.zeros(len(ids), np.uint8)
            if rank == 1:
                kind[::3] = relibra.DispatchRows.KIND_UNKNOWN
            rows.append(relibra.DispatchRows(ids, kind, num_experts=self.num_experts))
        return rows

    def live_ids(self, rank, m):
        """[T, L, K] as the live router chose them; some choices take no part."""
        ids = torch.from_numpy(self.ids(rank, m)).long()
        if rank == 1:
            ids[::6, :, 1:] = -1
        return ids


WORLDS = {
    "2x2": Grid(2, 2, num_experts=12, top_k=4, replica_slots=2, micro_batches=2),
    "2x3-in-any-order": Grid(
        2, 3, num_experts=18, top_k=4, replica_slots=2, empty=(4,),
        rank_to_node=(1, 0, 0, 1, 1, 0), rank_to_rail=(2, 1, 0, 0, 1, 2),
    ),
    "2x2-a-node-without-tokens": Grid(
        2, 2, num_experts=8, top_k=2, empty=(0, 2), rank_to_node=(1, 0, 1, 0)
    ),
    "2x2-no-tokens": Grid(2, 2, num_experts=8, top_k=2, tokens=0),
    "4x1": Grid(4, 1, num_experts=8, top_k=2),
}  # fmt: skip
NAMES = ("y", "dx", "dscores", "dw13", "dw2")


def pairs(first, second):
    for name in NAMES:
        yield from (
            (name, a, b) for a, b in zip(getattr(first, name), getattr(second, name), strict=True)
        )


def run_both(rank, num_ranks, world):
    torch.set_num_threads(1)
    plan = world.random_plan(split=random_split)
    flat, two_hop = (
        balanced(world, rank, plan, combine="exact", dispatch=mode) for mode in ("flat", "two_hop")
    )
    for name, a, b in pairs(flat, two_hop):
        assert torch.equal(a, b), name
    absurd = world.random_plan(split=replica_only_split, fill=1.0)
    for case in (absurd, None):
        result = balanced(world, rank, case, dispatch="two_hop", grad_mode="main_grad")
        compare(result, reference(world, rank), "reduced:")
    return True


@pytest.mark.parametrize("name", WORLDS)
def test_equals_flat(name):
    world = WORLDS[name]
    assert all(run_ranks(world.num_ranks, run_both, world))


def run_half_known(world, rank, mode, dispatch):
    """A step in which some rows follow the live router, with recomputed layers."""
    result = Result([], [], [], [], [])
    runtime = relibra.Runtime(
        dist.group.WORLD, world.topology, replica_slots=2, combine="exact", dispatch=dispatch
    )
    model = Model(world, rank, world.num_ranks)
    runtime.attach(model)

    def wrap(moe, *arguments):
        return checkpoint(moe, *arguments, use_reentrant=False)

    routes = {"train": world.half_known(rank)}
    loads = relibra.LoadMatrix.stack(
        [relibra.LoadMatrix.from_rows(world.half_known(r)) for r in range(world.num_ranks)]
    )
    with runtime.step(world.random_plan(loads), routes, unknown_rows=mode) as step:
        x, scores, dy = world.batch(rank, 0)
        x.requires_grad_(), scores.requires_grad_()
        with step.forward(micro_batch=0) as use:
            assert use.mode == mode
            replayed = torch.stack([moe.replayed_ids() for moe in model.layers], 1)
            ids = torch.where(replayed < 0, world.live_ids(rank, 0), replayed)
            y = model(x, scores, ids, wrap=wrap)
        y.backward(dy)
    assert len(runtime.dispatcher.groups()) == (2 if dispatch == "two_hop" else 0)
    result.y.append(y.detach()), result.dx.append(x.grad), result.dscores.append(scores.grad)
    collect_weight_grads(world, runtime, model, result)
    runtime.close()
    return result


def run_live(rank, num_ranks, world):
    torch.set_num_threads(1)
    for mode in ("online", "fraction"):
        flat, two_hop = (
            run_half_known(world, rank, mode, dispatch) for dispatch in ("flat", "two_hop")
        )
        for name, a, b in pairs(flat, two_hop):
            assert torch.equal(a, b), f"{mode}: {name}"
    return True


def test_rows_of_the_live_router_and_choices_that_take_no_part():
    world = dataclasses.replace(WORLDS["2x2"], micro_batches=1)
    assert all(run_ranks(4, run_live, world))


def run_bf16(rank, num_ranks, world):
    torch.set_num_threads(1)
    result = balanced(world, rank, world.random_plan(), dispatch="two_hop")
    for name, got, need in pairs(result, reference(world, rank)):
        assert got.dtype == torch.bfloat16
        diff = calc_diff(got, need)
        assert diff < MAX_CALC_DIFF[torch.bfloat16], f"{name}: {diff}"
    return True


def test_bf16_rounds_no_more_than_its_factor_allows():
    world = dataclasses.replace(WORLDS["2x2"], micro_batches=1, dtype=torch.bfloat16)
    assert all(run_ranks(4, run_bf16, world))


def run_count(rank, num_ranks, world):
    """Rows that leave the node of this rank when tokens are dispatched, flat and over the rail."""
    node = world.topology.rank_to_node[rank]
    counted, start = {}, FlatDispatch.start

    def counting(self, x, send, recv, *, what):
        members = dist.get_process_group_ranks(self.ranks.group)
        if "tokens" in what and "counts" not in what:
            away = [n for n, to in zip(send, members, strict=True)
                    if world.topology.rank_to_node[to] != node]  # fmt: skip
            counted[what] = sum(away)
        return start(self, x, send, recv, what=what)

    FlatDispatch.start = counting
    x, scores, _ = world.batch(rank, 0)
    for dispatch in ("flat", "two_hop"):
        runtime = relibra.Runtime(
            dist.group.WORLD, world.topology, replica_slots=2, dispatch=dispatch
        )
        model = Model(world, rank, num_ranks)
        runtime.attach(model)
        step = runtime.step(world.random_plan(), {"train": world.routes(rank)})
        with torch.no_grad(), step, step.forward(micro_batch=0):
            model(x, scores)
    return [counted[name] for name in sorted(counted)], step.cross_node_tokens


def test_fewer_rows_cross_between_nodes():
    world = dataclasses.replace(WORLDS["2x3-in-any-order"], micro_batches=1)
    counted, told = zip(*run_ranks(6, run_count, world), strict=True)
    flat, inside_node, over_rail = np.sum(counted, 0)
    assert inside_node == 0
    assert 0 < over_rail < 0.9 * flat
    assert told == ((flat, over_rail),) * 6


def run_lost_peer(rank, num_ranks, world):
    """Only rank 0 waits for rows, flat and over two hops: the runtime notes the failure."""
    runtime = relibra.Runtime(dist.group.WORLD, world.topology, dispatch="two_hop", timeout_s=3.0)
    movers = GroupMovers(runtime, None, None)
    _, node = movers.hop_exchanges("rows")
    index = torch.zeros(1, dtype=torch.int32)
    relay = Relay(True, [1, 0], [1, 0], index, [0, 1], [0, 1])
    waits = (
        lambda x: movers.start_relay(x, relay, "layer 3").wait(),
        lambda x: movers.start_exchange(x, [0, 0, 1, 0], [0, 0, 0, 0], "layer 3").wait(),
        lambda x: node(x, [0, 1], [0, 1]),
    )
    if rank:
        return True
    for wait in waits:
        runtime.failure = None
        with pytest.raises(relibra.ReplicaSyncError):
            wait(torch.ones(1, 2))
        assert isinstance(runtime.failure, relibra.ReplicaSyncError)
    return True


def test_a_lost_peer_fails_the_runtime():
    assert all(run_ranks(4, run_lost_peer, WORLDS["2x2"]))


def run_opaque(rank, num_ranks, world):
    torch.set_num_threads(1)
    results = []
    for opaque in (False, True):
        runtime = relibra.Runtime(
            dist.group.WORLD, world.topology, replica_slots=2, dispatch="two_hop", combine="exact"
        )
        model = Model(world, rank, num_ranks)
        runtime.attach(model)
        layer = model.layers[0]
        run = layer._traced if opaque else layer  # the op that a compiled graph calls
        x, scores, dy = world.batch(rank, 0)
        x.requires_grad_()
        with runtime.step(world.random_plan(), {"train": world.routes(rank)}) as step:
            with step.forward(micro_batch=0):
                y = run(x, scores[0], None)
            y.backward(dy)
        results.append((y.detach(), x.grad, layer.w13.grad, layer.w2.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_layer_as_an_opaque_op():
    world = dataclasses.replace(WORLDS["2x2"], micro_batches=1)
    assert all(run_ranks(4, run_opaque, world))
