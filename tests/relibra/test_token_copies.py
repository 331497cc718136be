"""Copies of tokens: the native counts against NumPy twins, brute force and known cases."""

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.plan import StepPlan
from relibra.plan_config import PlannerConfig
from relibra.planner import plan_step
from relibra.shape import ModelShape
from relibra.token_copies import (
    PassTokens,
    TokenCopies,
    count_token_copies,
    even_copies,
    expected_copies,
    plan_copies,
    travel,
)
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

LINKS = ("rdma_out_G", "rdma_in_G", "nvlink_out_G", "nvlink_in_G", "received_G")
UNEVEN = Topology(rank_to_node=[0, 1, 0, 1, 1])


def random_plan(topology: Topology, seed: int = 0) -> tuple[StepPlan, PassTokens]:
    """A plan with replicas and the ids it was made for: 2 micro-batches, 2 layers, E 10, K 3."""
    rng = np.random.default_rng(seed)
    ranks, experts, top_k = topology.num_ranks, 10, 3
    count_MG = rng.integers(3, 30, (2, ranks))
    heat = np.linspace(3, 0, experts) + rng.gumbel(size=(int(count_MG.sum()), 2, experts))
    ids = np.argsort(-heat, axis=2)[:, :, :top_k].astype(np.int16)
    first = np.concatenate([[0], np.cumsum(count_MG)])
    first_MG = np.stack([first[m * ranks : (m + 1) * ranks + 1] for m in range(2)])
    rows = np.zeros((2, 2, ranks, experts), np.int32)
    for m in range(2):
        for g in range(ranks):
            for layer in range(2):
                part = ids[first_MG[m, g] : first_MG[m, g + 1], layer]
                rows[m, layer, g] = np.bincount(part.ravel(), minlength=experts)
    shape = ModelShape(experts, top_k, (0, 1), 64, 64)
    config = PlannerConfig(proposals=500, num_threads=1)
    plan = plan_step({"train": LoadMatrix(rows)}, topology, model=shape, config=config)
    assert plan.report.replicas > 0
    return plan, PassTokens(ids, first_MG)


def ids_of(tokens: PassTokens, m: int, layer: int) -> list[np.ndarray]:
    first = tokens.first_MG[m]
    return [tokens.ids_TLK[a:b, layer] for a, b in zip(first[:-1], first[1:], strict=True)]


@pytest.mark.parametrize("dispatch", ["flat", "two_hop"])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 3), UNEVEN], ids=str)
class TestAgainstTwins:
    def test_exact(self, topology: Topology, dispatch: str) -> None:
        plan, tokens = random_plan(topology)
        native = plan_copies(plan, "train", dispatch=dispatch, tokens=tokens)
        for m, layer in np.ndindex(2, 2):
            view = plan.replica_plan("train", m, layer)
            quota = plan.source_quota("train", m, layer)
            twin = count_token_copies(
                ids_of(tokens, m, layer), quota, view.slot_expert_Gn, topology, dispatch=dispatch
            )
            for name in LINKS:
                np.testing.assert_array_equal(
                    getattr(native, name)[m, layer], getattr(twin, name), name
                )

    @pytest.mark.parametrize("distinct", [True, False])
    def test_expected(self, topology: Topology, dispatch: str, distinct: bool) -> None:
        plan, _ = random_plan(topology)
        native = plan_copies(plan, "train", dispatch=dispatch, distinct=distinct)
        for m, layer in np.ndindex(2, 2):
            view = plan.replica_plan("train", m, layer)
            quota = plan.source_quota("train", m, layer)
            tokens_G = plan.loads["train"].rows_MLGE[m, layer].sum(1) / 3
            twin = expected_copies(
                quota,
                view.slot_expert_Gn,
                tokens_G,
                topology,
                dispatch=dispatch,
                distinct=distinct,
            )
            for name in LINKS:
                np.testing.assert_allclose(
                    getattr(native, name)[m, layer], getattr(twin, name), rtol=1e-12, atol=1e-12
                )


def test_repeated_tokens_equal_tokens_written_out() -> None:
    """Runs of equal tokens are counted at once; slots change inside a run."""
    small, tokens = random_plan(Topology(2, 2), seed=5)
    rows = small.loads["train"].rows_MLGE * 7
    config = PlannerConfig(proposals=500, num_threads=1)
    plan = plan_step({"train": LoadMatrix(rows)}, Topology(2, 2), model=small.shape, config=config)
    short = PassTokens(tokens.ids_TLK, tokens.first_MG, repeat=7)
    long = PassTokens(np.repeat(tokens.ids_TLK, 7, axis=0), tokens.first_MG * 7)
    for dispatch in ("flat", "two_hop"):
        once = plan_copies(plan, "train", dispatch=dispatch, tokens=short)
        written = plan_copies(plan, "train", dispatch=dispatch, tokens=long)
        for name in LINKS:
            np.testing.assert_array_equal(getattr(once, name), getattr(written, name))


def test_exact_copies_by_brute_force() -> None:
    topology = Topology(2, 2)
    plan, tokens = random_plan(topology, seed=3)
    copies = plan_copies(plan, "train", tokens=tokens)
    view = plan.replica_plan("train", 1, 0)
    left = plan.source_quota("train", 1, 0).copy()
    slot_expert = view.slot_expert_Gn.reshape(-1)
    far = np.zeros(4)
    for source, ids in enumerate(ids_of(tokens, 1, 0)):
        for token in ids:
            ranks = set()
            for expert in token:
                slot = next(
                    s
                    for s in range(len(slot_expert))
                    if slot_expert[s] == expert and left[source, s]
                )
                left[source, slot] -= 1
                ranks.add(slot // view.slot_expert_Gn.shape[1])
            far[source] += sum(rank // 2 != source // 2 for rank in ranks)
    assert not left.any()
    np.testing.assert_array_equal(copies.rdma_out_G[1, 0], far)


def test_expected_copies_are_exact_for_independent_choices() -> None:
    """Tokens drawn with independent choices agree with the formula within sampling noise."""
    rng = np.random.default_rng(0)
    count, ranks = 200_000, 4
    chosen = rng.random((count, 4)) < np.array([0.7, 0.5, 0.4, 0.4])
    quota = np.zeros((ranks, ranks), np.int64)
    quota[0] = chosen.sum(0)
    slots = np.arange(4, dtype=np.int32)[:, None]
    copies = expected_copies(quota, slots, np.array([count, 0, 0, 0]), Topology(2, 2))
    np.testing.assert_allclose(copies.received_G, chosen.sum(0), rtol=1e-9)
    two_hop = expected_copies(
        quota, slots, np.array([count, 0, 0, 0]), Topology(2, 2), dispatch="two_hop"
    )
    reached = (chosen[:, 2] | chosen[:, 3]).sum()
    assert two_hop.rdma_out_G[0] == pytest.approx(reached, rel=0.01)


def test_two_hop_sends_once_a_node_and_forwards_inside() -> None:
    """A token of rank 0 that needs ranks 2 and 3 of the other node: one RDMA copy, one forward."""
    by_rank, by_node = np.zeros((4, 4)), np.zeros((4, 2))
    by_rank[0, [2, 3]] = 1
    by_node[0, 1] = 1
    flat = travel(by_rank, by_node, Topology(2, 2), "flat")
    hop = travel(by_rank, by_node, Topology(2, 2), "two_hop")
    assert flat.rdma_out_G.tolist() == [2, 0, 0, 0]
    assert hop.rdma_out_G.tolist() == [1, 0, 0, 0]
    assert hop.rdma_in_G.tolist() == [0, 0, 1, 0]  # the rail of rank 0
    assert hop.nvlink_out_G.tolist() == [0, 0, 1, 0]
    assert hop.nvlink_in_G.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("ranks", "ratio"), [(16, 3.24), (32, 2.0), (64, 1.44)])
def test_flat_against_node_copies_of_uniform_top_8(ranks: int, ratio: float) -> None:
    """The design's figures: flat costs 3.24x, 2.0x, 1.44x the node-deduplicated rows."""
    topology = Topology(ranks // 8, 8)
    rows, tokens = np.full(ranks, 8000), np.full(ranks, 1000)
    flat = even_copies(rows, tokens, 8, topology)
    hop = even_copies(rows, tokens, 8, topology, dispatch="two_hop")
    assert flat.rdma_out_G.sum() / hop.rdma_out_G.sum() == pytest.approx(ratio, rel=0.02)


def test_rdma_of_two_hop_does_not_depend_on_the_rank_inside_a_node() -> None:
    """Fact (i) of the design: with two hops only the node of an expert matters for RDMA."""
    topology = Topology(2, 2)
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 40, (4, 8))
    outs = []
    for order in (np.arange(8), np.array([2, 3, 0, 1, 6, 7, 4, 5])):
        quota, slots = rows[:, order], order.reshape(4, 2).astype(np.int32)
        copies = expected_copies(quota, slots, np.full(4, 90), topology, dispatch="two_hop")
        outs.append(copies.rdma_out_G)
    np.testing.assert_allclose(outs[0], outs[1])


def test_reports_only_strategies_have_copies_too() -> None:
    rows = np.full((1, 1, 4, 8), 10, np.int32)
    plan = plan_step(
        {"train": LoadMatrix(rows)}, Topology(2, 2), model=ModelShape(8, 2, (0,)), strategy="ideal"
    )
    copies = plan_copies(plan, "train")
    assert isinstance(copies, TokenCopies)
    # 40 tokens a rank, each on rank g with 1 - (3/4)^2
    np.testing.assert_allclose(copies.received_G, np.full((1, 1, 4), 160 * 7 / 16))


class TestBadInput:
    def test_unknown_dispatch(self) -> None:
        plan, _ = random_plan(Topology(1, 4))
        with pytest.raises(ValueError, match="dispatch: need one of .*'bogus'"):
            plan_copies(plan, "train", dispatch="bogus")

    def test_no_loads(self) -> None:
        plan, _ = random_plan(Topology(1, 4))
        with pytest.raises(PlanError, match="loads: need those of pass 'logprob'"):
            plan_copies(plan, "logprob")

    def test_other_ids(self) -> None:
        plan, tokens = random_plan(Topology(1, 4))
        other = PassTokens(np.zeros_like(tokens.ids_TLK), tokens.first_MG)
        with pytest.raises(ValueError, match="ids: need the ids that the rows were counted from"):
            plan_copies(plan, "train", tokens=other)
        view, quota = plan.replica_plan("train", 0, 0), plan.source_quota("train", 0, 0)
        ids = ids_of(other, 0, 0)
        with pytest.raises(PlanError, match="ids_GTK: need the ids"):
            count_token_copies(ids, quota, view.slot_expert_Gn, plan.topology)
