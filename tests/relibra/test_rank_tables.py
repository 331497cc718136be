"""Tables follow from plan, counts and ids: splits match on both ends, every choice is served."""

import numpy as np
import pytest
import torch
from moe_world import World

import relibra
from relibra.rank_tables import LayerTables, SourceRoute
from relibra.testing.plans import make_plan, one_row_split, random_split


def sources_of(world, plan, m=0, layer=0, block_rows=4):
    replica = plan.replica_plan("train", m, layer)
    quota = plan.source_quota("train", m, layer)
    return [
        SourceRoute.build(replica.layout, replica.replica_slot_expert_GS, quota, rank, block_rows)
        for rank in range(world.num_ranks)
    ]


def exchange_all(parts, splits):
    """All-to-all of one tensor a rank by the split matrix [source, destination]."""
    cut = [torch.split(part, row) for part, row in zip(parts, splits, strict=True)]
    return [torch.cat([cut[src][dst] for src in range(len(parts))]) for dst in range(len(parts))]


def tables_of(world, plan, m=0, layer=0, block_rows=4):
    """Tables of all ranks, built in lockstep in one process."""
    sources = sources_of(world, plan, m, layer, block_rows)
    ids = [torch.from_numpy(world.ids(rank, m)[:, layer].copy()) for rank in range(world.num_ranks)]
    splits = [s.count_sends(i, world.num_ranks).tolist() for s, i in zip(sources, ids, strict=True)]
    received = {}

    def build(rank, exchange):
        recv = [row[rank] for row in splits]
        return LayerTables.build(
            ids[rank], sources[rank], splits[rank], recv, exchange,
            num_home=plan.layouts[layer].slots_per_rank, block_rows=block_rows,
        )  # fmt: skip

    sent = []
    for rank in range(world.num_ranks):

        def grab(x, send, recv):
            sent.append(x)
            raise StopIteration

        with pytest.raises(StopIteration):
            build(rank, grab)
    for rank, part in enumerate(exchange_all(sent, splits)):
        received[rank] = part
    return [build(rank, lambda x, s, r, rank=rank: received[rank]) for rank in range(len(sent))]


WORLD = World(2, 2, num_experts=16, top_k=3, tokens=30, replica_slots=2, seed=4)


@pytest.mark.parametrize("split", [random_split, one_row_split])
@pytest.mark.parametrize("seed", range(5))
def test_every_choice_is_served_by_a_slot_of_its_expert(seed, split):
    plan = make_plan(
        np.random.default_rng(seed), {"train": WORLD.loads()}, WORLD.topology, WORLD.shape,
        replica_slots=2, split=split,
    )  # fmt: skip
    tables = tables_of(WORLD, plan)
    view = plan.replica_plan("train", 0, 0)
    seen = 0
    for rank, table in enumerate(tables):
        rows = view.slot_rows_Gn[rank]
        assert table.slot_rows_n.tolist() == rows.tolist()
        assert int((table.row_to_token_R >= 0).sum()) == int(rows.sum())
        base = np.concatenate([[0], np.cumsum(-(-rows // 4) * 4)])
        source_of_u = np.repeat(np.arange(4), table.recv_splits)
        token_of_u = np.concatenate(
            [
                tables[src].send_token_V.split(tables[src].send_splits)[rank].numpy()
                for src in range(4)
            ]
        )
        for u, k in zip(*np.nonzero(table.token_choice_to_row_UK.numpy() >= 0), strict=True):
            row = int(table.token_choice_to_row_UK[u, k])
            slot = int(np.searchsorted(base, row, side="right")) - 1
            expert = tables[source_of_u[u]].ids_TK[token_of_u[u], k]
            assert view.slot_expert_Gn[rank, slot] == expert
            assert table.row_to_choice_R[row] == u * 3 + k
            seen += 1
    assert seen == sum(table.ids_TK.numel() for table in tables)


@pytest.mark.parametrize("strategy", ["identity", "replicas"])
def test_replay_20_both_ends_know_the_splits_without_a_message(strategy):
    """replay-20 (miles#1002): rows src sends to dst equal rows dst expects, for all 64 pairs."""
    ids = np.argsort(np.random.default_rng(20).random((8, 64, 32)), axis=-1)[..., :4]
    rows = [relibra.DispatchRows(part[:, None].astype(np.int32), num_experts=32) for part in ids]
    loads = relibra.LoadMatrix.stack([relibra.LoadMatrix.from_rows([part]) for part in rows])
    topology, shape = relibra.Topology(1, 8), relibra.ModelShape(32, 4, (0,))
    plan = make_plan(
        np.random.default_rng(1), {"train": loads}, topology, shape, replica_slots=1,
        fill=0.0 if strategy == "identity" else 1.0, reorder=False,
    )  # fmt: skip
    replica, quota = plan.replica_plan("train", 0, 0), plan.source_quota("train", 0, 0)
    sources = [
        SourceRoute.build(replica.layout, replica.replica_slot_expert_GS, quota, rank, 16)
        for rank in range(8)
    ]
    for src in range(8):
        slots = torch.ops.relibra.route_to_slots(
            torch.from_numpy(ids[src].astype(np.int32)), *sources[src].quota.tensors()[:3]
        )
        counted = np.bincount(slots.numpy().reshape(-1) // (quota.shape[1] // 8), minlength=8)
        assert counted.tolist() == sources[src].send_rows_G
        assert sum(sources[src].send_rows_G) == 256
        for dst in range(8):
            assert sources[src].send_rows_G[dst] == sources[dst].recv_rows_G[src]


def test_copy_lists_match_on_both_ends():
    plan = WORLD.random_plan(replica_slots=2, fill=1.0)
    sources = sources_of(WORLD, plan)
    pushes = [(r, *entry) for r, s in enumerate(sources) for entry in s.push_list.tolist()]
    pulls = [(r, *entry) for r, s in enumerate(sources) for entry in s.pull_list.tolist()]
    assert sorted((home, slot, dst, place) for home, slot, dst, place in pushes) == sorted(
        (home, home_slot, rank, slot) for rank, slot, home, home_slot in pulls
    )
    assert pushes
