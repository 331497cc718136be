"""Gates of co-activation on the GPT-OSS trace: copies of tokens between four nodes, recounted.

One sequence a rank at EP32 (two micro-batches). 2,500 tokens are shown to the planner; the copies
are counted on all others, each routed by the quotas of the plan, by code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from planner_inputs import SEEDS, generator_rows, shared_tool
from planner_times import all_quotas, least_seconds

from relibra.load_matrix import LoadMatrix
from relibra.planner import PlannerConfig, plan_step
from relibra.planner.sample_places import place_samples, sample_costs
from relibra.shape import ModelShape
from relibra.token_sample import TokenSample
from relibra.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relibra.plan import StepPlan

NODES, RANKS = 4, 32
SAMPLED = 2500
ROUNDS = 2  # of placing samples and planning again
TOPOLOGY = Topology(NODES, RANKS // NODES)


@dataclass(frozen=True)
class Batch:
    """Sequences on ranks: ids `[M][G]` of uint8 `[tokens, L, K]`, and which tokens are sampled."""

    ids: list[list[np.ndarray]]
    sampled: list[list[np.ndarray]]

    @property
    def loads(self) -> dict[str, LoadMatrix]:
        """Rows of the pass."""
        count = shared_tool("trace_loads").count_rows
        rows = [np.stack([count(part) for part in ranks], axis=1) for ranks in self.ids]
        return {"train": LoadMatrix(np.stack(rows))}

    @property
    def sample(self) -> TokenSample:
        """What the planner sees."""
        parts, ranks = [], []
        for by_rank, chosen in zip(self.ids, self.sampled, strict=True):
            for rank, (part, taken) in enumerate(zip(by_rank, chosen, strict=True)):
                parts.append(part[taken])
                ranks.append(np.full(int(taken.sum()), rank))
        return TokenSample(np.concatenate(parts), np.concatenate(ranks))


def make_batch(seed: int, layers: slice) -> Batch:
    """The trace in file order, with a sample drawn by `seed`."""
    tool = shared_tool("trace_loads")
    trace = tool.load_trace()
    trace = tool.Trace(trace.ids[:, layers], trace.begin)
    ids = tool.cut(trace, ep=RANKS, sequences_per_micro_batch=RANKS).ids
    rng = np.random.default_rng(seed)
    total = sum(len(part) for ranks in ids for part in ranks)
    return Batch(ids, [[rng.random(len(part)) < SAMPLED / total for part in r] for r in ids])


def make_plan(
    batch: Batch, *, layout: Any = None, sample: bool = True, **settings: Any
) -> StepPlan:
    layers = batch.ids[0][0].shape[1]
    return plan_step(
        batch.loads,
        TOPOLOGY,
        model=ModelShape(32, 4, range(layers)),
        layout=layout,
        config=PlannerConfig(num_threads=1, **settings),
        token_sample=batch.sample if sample else None,
    )


def copies_a_token(plan: StepPlan, batch: Batch) -> float:
    """Nodes other than its own that a token that was not sampled visits, mean over layers."""
    pairs = tokens = 0
    for m, layer in np.ndindex(len(batch.ids), batch.ids[0][0].shape[1]):
        view = plan.replica_plan("train", m, layer)
        quota = plan.source_quota("train", m, layer)
        slot_expert = view.slot_expert_Gn.reshape(-1)
        slot_node = np.repeat(TOPOLOGY.rank_to_node_G, view.slot_expert_Gn.shape[1])
        for rank in range(RANKS):
            ids = batch.ids[m][rank][:, layer].astype(np.int64)
            node = np.empty(ids.shape, np.int64)
            for expert in np.unique(ids):
                slots = np.flatnonzero(slot_expert == expert)
                order = np.repeat(slots, quota[rank, slots])  # rows in token order, slots ascending
                node[ids == expert] = slot_node[order]
            visited = (node[:, :, None] == np.arange(NODES)).any(1)
            visited[:, TOPOLOGY.rank_to_node_G[rank]] = False
            held_out = ~batch.sampled[m][rank]
            pairs += int(visited[held_out].sum())
            tokens += int(held_out.sum())
    return pairs / tokens


def placed(batch: Batch, plan: StepPlan) -> Batch:
    """The batch with its sequences on other ranks of their micro-batch."""
    parts = [part for ranks in batch.ids for part in ranks]
    taken = [part for ranks in batch.sampled for part in ranks]
    costs = sample_costs(
        [part[chosen] for part, chosen in zip(parts, taken, strict=True)],
        plan.layouts,
        TOPOLOGY,
        plan.static_slot_expert_LGX,
    )
    micro_batch = np.repeat(np.arange(len(batch.ids)), RANKS)
    ranks = place_samples(
        costs,
        np.tile(np.arange(RANKS), len(batch.ids)),
        TOPOLOGY,
        tokens_S=np.array([len(part) for part in parts]),
        micro_batch_S=micro_batch,
    )
    order = np.lexsort((ranks, micro_batch)).reshape(len(batch.ids), RANKS)
    return replace(
        batch,
        ids=[[parts[i] for i in row] for row in order],
        sampled=[[taken[i] for i in row] for row in order],
    )


def ratios(seed: int, layers: slice) -> tuple[dict[str, float], float]:
    """Copies against the plan by loads alone, and the largest excess of imbalance over it."""
    start = make_batch(seed, layers)
    plain = make_plan(start, sample=False)
    before = copies_a_token(plain, start)
    found, excess = {}, 0.0
    for copies in (0, 1, 2):
        batch, plan = start, make_plan(start, static_copies=copies)
        for round_number in range(ROUNDS + 1):
            if round_number:
                batch = placed(batch, plan)
                plan = make_plan(batch, layout=plan.layouts, static_copies=copies)
            if round_number in (0, ROUNDS):
                name = f"X={copies}" + (", sample->node" if round_number else "")
                found[name] = copies_a_token(plan, batch) / before
                gain = plan.report.imbalance_mean / plain.report.imbalance_mean
                excess = max(excess, gain)
    return found, excess


def with_coactivation_seconds() -> float:
    """48 layers, 32 micro-batches, E128, EP64: as `whole_batch_seconds`, with 2,500 tokens."""
    rows = generator_rows("medium", ep=64, layers=48)
    work = shared_tool("workloads").make_workload("medium", ep=64, layers=48)
    tokens = work.token_ids(SAMPLED)
    sample = TokenSample(tokens.ids.astype(np.int32), (tokens.bin % 64).astype(np.int32))
    topology, shape = Topology(8, 8), ModelShape(128, 8, range(48))
    config = PlannerConfig(num_threads=1)

    def run() -> None:
        loads = {"train": LoadMatrix(rows)}
        all_quotas(
            plan_step(loads, topology, model=shape, config=config, token_sample=sample), rows
        )

    return least_seconds(run, 3)


def coactivation_gates(*, smoke: bool) -> Iterator[tuple[Any, ...]]:
    """Worst of the seeds of the sample."""
    layers = slice(0, 24, 8) if smoke else slice(None)
    found = [ratios(seed, layers) for seed in (SEEDS[:1] if smoke else SEEDS)]
    area = "remote copies a token, GPT-OSS, 4 nodes"
    for key, text, must, stretch in (
        ("X=0", "grouping", 0.82, None),
        ("X=0, sample->node", "grouping + sample->node", None, None),
        ("X=1, sample->node", "grouping + X=1 + sample->node", 0.73, None),
        ("X=2", "grouping + X=2", None, None),
        ("X=2, sample->node", "grouping + X=2 + sample->node", None, 0.66),
    ):
        worst = max(one[key] for one, _ in found)
        yield area, f"{text} / load only", "simulated", worst, must, stretch, False, None
    worst = max(excess for _, excess in found)
    yield area, "imbalance / load only", "simulated", worst, 1.025, None, False, None
    if not smoke:
        area = "whole batch 48x32xE128 EP64, with split"
        seconds = with_coactivation_seconds()
        yield area, "s, with co-activation", "measured", seconds, 2, 1, False, None


if __name__ == "__main__":
    for gate in coactivation_gates(smoke=False):
        print(*gate[:6], sep="  ")  # noqa: T201
