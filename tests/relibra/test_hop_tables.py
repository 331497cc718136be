"""Tables of both hops of every rank, built in lockstep in one process, against the flat tables."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from relibra.dispatcher import Dispatcher, hop_ranks
from relibra.hop_splits import HopRanks, Splits, count_tokens, cross_node_tokens
from relibra.hop_tables import HopTables
from relibra.layout import ExpertLayout
from relibra.rank_tables import LayerTables, SourceRoute
from relibra.topology import Topology
from relibra_kernels.errors import PlanError
from relibra_kernels.testing.virtual_group import random_quota

BLOCK, HOME = 4, 3
TOPOLOGIES = {
    "2x2": Topology(2, 2),
    "2x3-shuffled": Topology(rank_to_node=[1, 0, 0, 1, 1, 0], rank_to_rail=[2, 1, 0, 0, 1, 2]),
    "3x2-equal-rails": Topology(rank_to_node=[2, 0, 1, 1, 2, 0], rank_to_rail=[5] * 6),
    "4x1": Topology(4, 1),
    "1x4": Topology(1, 4),
}


class Lockstep:
    """All-to-all between threads; every rank calls the same exchanges in the same order.

    One thread computes at a time (Triton's interpreter has global state): the one with the turn.
    """

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks, timeout=60.0)
        self.turn = threading.Lock()
        self.posted = [None] * num_ranks

    def pause(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def over(self, rank, members):
        def exchange(x, send, recv):
            members_list = list(members)
            self.posted[rank] = dict(zip(members_list, torch.split(x, send), strict=True))
            self.pause()
            parts = [self.posted[member][rank] for member in members_list]
            self.pause()
            assert [len(part) for part in parts] == list(recv)
            return torch.cat(parts)

        return exchange


class Group:
    """Ids with -1, random homes, random replicas on any rank, a random split of every expert."""

    def __init__(self, topology, seed, tokens=17, num_choices=4):
        self.topology, self.num_ranks = topology, topology.num_ranks
        rng = np.random.default_rng(seed)
        experts = HOME * self.num_ranks
        order = rng.permutation(experts).astype(np.int32)
        self.layout = ExpertLayout(order.reshape(self.num_ranks, HOME))
        self.replicas = rng.integers(-1, experts, (self.num_ranks, 1)).astype(np.int32)
        for home, replica in zip(self.layout.home_slot_expert_GH, self.replicas, strict=True):
            replica[np.isin(replica, home)] = -1
        self.ids = []
        for rank in range(self.num_ranks):
            rows = 0 if rank == 1 else tokens + 3 * rank
            ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :num_choices]
            self.ids.append(np.where(rng.random(ids.shape) < 0.2, -1, ids).astype(np.int32))
        slots = np.concatenate([self.layout.home_slot_expert_GH, self.replicas], 1)
        self.quota = random_quota(rng, self.ids, slots.reshape(-1)).astype(np.int32)

    def run(self, exact=True, backend="auto", guard=contextlib.nullcontext):
        """Per rank: flat tables, two-hop tables, and rows sent through every path of both."""
        lockstep = Lockstep(self.num_ranks)
        places = [HopRanks.of(self.topology, rank) for rank in range(self.num_ranks)]
        ids = [torch.from_numpy(part) for part in self.ids]
        sources = [
            SourceRoute.build(self.layout, self.replicas, self.quota, place.rank, BLOCK, place)
            for place in places
        ]
        self.counts = np.stack(
            [
                count_tokens(source, part, self.num_ranks, place, backend).numpy()
                for source, part, place in zip(sources, ids, places, strict=True)
            ]
        )

        def of_rank(rank):
            ranks, source = places[rank], sources[rank]
            splits = Splits.of(self.counts, rank, source, ranks)
            over_all = lockstep.over(rank, range(self.num_ranks))
            hops = (
                lockstep.over(rank, ranks.rail_ranks.tolist()),
                lockstep.over(rank, ranks.node_ranks.tolist()),
            )
            with guard():
                tables = HopTables.build(
                    ids[rank], source, splits.hops, ranks, hops, exact=exact, backend=backend
                )
            sizes = {"num_home": HOME, "block_rows": BLOCK, "backend": backend}
            flat, two_hop = (
                LayerTables.build(
                    ids[rank], source, splits.send, splits.recv, over_all, **sizes, hops=one
                )
                for one in (None, tables)
            )
            return flat, two_hop, self.travel(rank, flat, two_hop, over_all, hops)

        def in_turn(rank):
            with lockstep.turn:
                try:
                    return of_rank(rank)
                except BaseException:
                    lockstep.barrier.abort()
                    raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(in_turn, range(self.num_ranks)))

    @staticmethod
    def travel(rank, flat, two_hop, over_all, hops):
        """Rows that say who they are, sent both ways over both transports."""
        relays = two_hop.hops

        def relay(x, path):
            first, second = hops if path.rail_first else hops[::-1]
            arrived = first(x, path.send_first, path.recv_first)
            return second(path.pass_on(arrived), path.send_second, path.recv_second)

        x = 1000.0 * rank + torch.arange(float(flat.num_tokens))[:, None].repeat(1, 2)
        flat_out = over_all(x[flat.send_token_V.long()], flat.send_splits, flat.recv_splits)
        out = relay(x[two_hop.send_token_V.long()], relays.out)
        row_value = 1e5 * rank + torch.arange(float(flat.num_rows))[:, None]
        rows, pairs = [], []
        if relays.exact is not None:
            sent = row_value[two_hop.return_row_N.long()]
            back = relay(sent, relays.exact.rows)
            sent = row_value[flat.return_row_N.long()]
            rows = [over_all(sent, flat.recv_rows_G, flat.send_rows_G), back]
            named = torch.full_like(out, 1.0 + rank)
            pairs = [
                over_all(torch.full_like(flat_out, 1.0 + rank), flat.recv_splits, flat.send_splits),
                relay(named, relays.exact.pairs),
            ]
        parts = torch.full_like(out, 2.0**rank)
        return flat_out, out, rows, pairs, relay(parts, relays.back)


def token_of_row(tables, arrived):
    """Name of the token of each row, -1 for padding."""
    named = torch.cat([arrived[:, 0], torch.tensor([-1.0])])
    return named[tables.row_to_token_R.long()]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_path_brings_what_the_flat_one_brings(name, seed):
    group = Group(TOPOLOGIES[name], seed)
    for flat, two_hop, (flat_out, out, rows, pairs, sums) in group.run():
        # A row computes the same choice of the same token, whatever the order of arrival.
        assert torch.equal(token_of_row(flat, flat_out), token_of_row(two_hop, out))
        choices = flat.token_choice_to_row_UK.shape[1]
        assert torch.equal(flat.row_to_choice_R % choices, two_hop.row_to_choice_R % choices)
        # Rows and pairs return to the choice, and in the order of ranks, of the flat tables.
        for (a, b), index, other in (
            (rows, flat.choice_to_return_TK, two_hop.choice_to_return_TK),
            (pairs, flat.token_to_return_TJ, two_hop.hops.exact.pair_to_return_TJ),
        ):
            assert torch.equal(index >= 0, other >= 0)
            used = (index >= 0).reshape(-1)
            assert torch.equal(a[index.reshape(-1)[used].long()], b[other.reshape(-1)[used].long()])
        # The sums of all nodes of a token are over exactly its ranks, each once.
        total = torch.ops.relibra.combine(sums, two_hop.token_to_return_TJ, None)[:, 0]
        if len(total):
            ranks = torch.ops.relibra.combine(
                2.0 ** (pairs[0] - 1.0), flat.token_to_return_TJ, None
            )[:, 0]
            assert torch.equal(total, ranks)


def test_a_token_crosses_the_network_once_a_node():
    topology = TOPOLOGIES["2x3-shuffled"]
    group = Group(topology, 7)
    tables = group.run(exact=False)
    nodes, slots = topology.rank_to_node_G, HOME + 1
    flat = two_hop = 0
    for rank, (one, two, _) in enumerate(tables):
        assert two.hops.exact is None
        quota = SourceRoute.build(group.layout, group.replicas, group.quota, rank, BLOCK).quota
        route = torch.ops.relibra.route_to_slots(one.ids_TK, *quota.tensors()[:3])
        for chosen in route:
            ranks = {int(slot) // slots for slot in chosen if slot >= 0}
            flat += sum(nodes[to] != nodes[rank] for to in ranks)
            two_hop += len({int(nodes[to]) for to in ranks} - {int(nodes[rank])})
    assert cross_node_tokens(group.counts, topology) == (flat, two_hop)
    assert two_hop < flat


def test_triton_builds_the_same_tables():
    group = Group(Topology(2, 1), 5, tokens=3)
    fields = ("send_token_V", "send_rows_VK", "token_to_return_TJ", "token_choice_to_row_UK")
    for (_, ours, _), (_, triton, _) in zip(group.run(), group.run(backend="triton"), strict=True):
        for name in fields:
            assert torch.equal(getattr(ours, name), getattr(triton, name)), name
        for way in ("rows", "pairs"):
            assert torch.equal(
                getattr(ours.hops.exact, way).index, getattr(triton.hops.exact, way).index
            )


class NoHostSync(TorchDispatchMode):
    """Fails on operators whose result, or the size of it, the host would have to wait for."""

    SYNCING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.SYNCING, func
        masks = [x for x in args if isinstance(x, list)]
        assert not any(getattr(x, "dtype", None) == torch.bool for part in masks for x in part)
        return func(*args, **(kwargs or {}))  # inside our own ops the mode is off


def test_tables_are_built_without_a_host_sync():
    Group(TOPOLOGIES["2x2"], 2).run(guard=NoHostSync)
    ids = torch.ones(2)
    with pytest.raises(AssertionError, match="nonzero"), NoHostSync():
        torch.nonzero(ids)


def test_places_in_the_grid():
    ranks = HopRanks.of(TOPOLOGIES["2x3-shuffled"], 4)
    assert ranks.grid_NP.tolist() == [[2, 1, 5], [3, 4, 0]]
    assert (ranks.node, ranks.local) == (1, 1)
    for rank in range(6):
        assert ranks.grid_NP[ranks.node_G[rank], ranks.local_G[rank]] == rank


def test_bad_topologies_and_modes():
    uneven = Topology(rank_to_node=[0, 1, 0])
    with pytest.raises(PlanError, match=r'"two_hop" needs nodes of one size, got \[2, 1\] ranks'):
        hop_ranks("two_hop", uneven, 0)
    assert hop_ranks("flat", uneven, 0) is None
    need = "dispatch: need one of 'flat', 'two_hop', 'peer', got 'deepep'"
    with pytest.raises(ValueError, match=need):
        hop_ranks("deepep", uneven, 0)
    with pytest.raises(RuntimeError, match="a runtime whose tokens take one hop"):
        _ = Dispatcher(None, None, None).two_hop
