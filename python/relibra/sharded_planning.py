"""Planning one batch with few processes: planners take layers each, and every rank gets the plan.

Eight ranks of a node that each plan everything with all cores are eight times too many threads for
one answer. Here some ranks plan a share of the layers each and send it to all others, so the whole
EP group makes the plan once. Layers are planned apart, so the plan is that of `plan_step`.

Letters: G ranks, L MoE layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from relibra.agreement import agree, gather_tensor, sync_error, wire_device
from relibra.planner.outcome import join_layers
from relibra.planner.shares import layer_shares, pack_outcome, plan_layers, unpack_outcome
from relibra.planner.strategies import check_strategy, finish_plan
from relibra_kernels.checks import check_choice
from relibra_kernels.errors import PlanError
from relibra_kernels.transport.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from relibra.plan import StepPlan
    from relibra.planner.problem import Problem
    from relibra.topology import Topology

PLANNERS = ("node", "rank")
_FACTS = tuple(
    f"{what} (digest)"
    for what in (
        *("strategy", "planners", "topology", "model", "pass names and shapes", "counts"),
        *("base layouts", "settings", "cost model", "token sample"),
    )
)
_MOST_SHOWN = 8  # planners that a message lists


def planning_ranks(topology: Topology, planners: str) -> tuple[int, ...]:
    """Ranks that plan.

    Args:
        topology: of the group.
        planners: `"node"`, the first rank of every node, or `"rank"`, all of them.

    Raises:
        ValueError: another word.

    Example:
        >>> from relibra.topology import Topology
        >>> planning_ranks(Topology(rank_to_node=[0, 1, 0, 1]), "node")
        (0, 1)
    """
    check_choice("planners", planners, PLANNERS)
    if planners == "rank":
        return tuple(range(topology.num_ranks))
    return tuple(sorted(topology.ranks_of_node(node)[0] for node in range(topology.num_nodes)))


def plan_sharded(
    make_problem: Callable[[], Problem],
    group: dist.ProcessGroup | None,
    *,
    strategy: str = "relibra",
    planners: str = "node",
    timeout_s: float | None = None,
) -> StepPlan:
    """`plan_step` by several ranks together; collective, every rank gets the whole plan.

    Args:
        make_problem: returns the checked input, the same on all ranks, or raises.
        group: of the ranks of the topology, None for one rank.
        strategy: one of `STRATEGIES`.
        planners: as in `planning_ranks`.
        timeout_s: seconds that a rank waits for its peers, planning included; None for the
            group's own time-out.

    Returns:
        The plan, with the hash that `plan_step` gives.

    Raises:
        PlanError: the input of the ranks differs, or another rank could not plan; names it.
        ReplicaSyncError: a rank did not take part in time; names the layers it plans.
        Exception: what planning raised, on the rank that planned.
    """
    start = time.perf_counter()
    problem = _agree_on_input(make_problem, group, strategy, planners, timeout_s)
    ranks = Ranks.of(group)
    places = planning_ranks(problem.topology, planners)
    shares = layer_shares(problem.shape.num_layers, len(places))
    work = [(rank, share) for rank, share in zip(places, shares, strict=True) if len(share)]
    cores = _cores(group, places)
    num_threads = problem.config.num_threads or cores
    mine, fault = b"", None
    for rank, share in work:
        if rank == ranks.rank:
            try:
                mine = pack_outcome(plan_layers(problem, strategy, share, num_threads))
            except Exception as error:  # everybody must hear of it
                fault = error
    what = f"planning {_who_plans(work, problem.shape.moe_layers)}"
    agree(group, {}, what=what, fault=fault, timeout_s=timeout_s)
    parts = _send_to_all(mine, [rank for rank, _ in work], group, what)
    plan = None
    try:
        outcome = join_layers([unpack_outcome(part) for part in parts])
        plan = finish_plan(problem, outcome, strategy, (time.perf_counter() - start) * 1e3)
    except Exception as error:
        fault = error
    facts = {"plan": 0 if plan is None else int(plan.hash[:15], 16)}
    agree(group, facts, what="plan_step", fault=fault, timeout_s=timeout_s)
    assert plan is not None
    return plan


def _agree_on_input(
    make_problem: Callable[[], Problem],
    group: dist.ProcessGroup | None,
    strategy: str,
    planners: str,
    timeout_s: float | None,
) -> Problem:
    """The input, after all ranks have said that theirs is sound and the same."""
    problem, fault, facts = None, None, dict.fromkeys(_FACTS, 0)
    try:
        check_strategy(strategy)
        check_choice("planners", planners, PLANNERS)
        problem = make_problem()
        if problem.topology.num_ranks != Ranks.of(group).size:
            raise PlanError(
                f"topology: need {Ranks.of(group).size} ranks as in the group, got "
                f"{problem.topology}"
            )
        facts = _facts(problem, strategy, planners)
    except Exception as error:  # everybody must hear of it
        fault = error
    agree(group, facts, what="plan_step", fault=fault, timeout_s=timeout_s)
    assert problem is not None
    return problem


def _facts(problem: Problem, strategy: str, planners: str) -> dict[str, int]:
    """What must be equal on all ranks, as numbers; the plan's hash covers counts by source."""
    loads, sample = problem.loads, problem.token_sample
    topology, shape = problem.topology, problem.shape
    sampled = [] if sample is None else [sample.ids_TLK, sample.source_rank_T]
    counts = [part for one in loads.values() for part in (one.totals_MLE, one.optimizer_step_M)]
    values = (
        _number(strategy),
        _number(planners),
        _number([topology.rank_to_node, topology.rank_to_rail]),
        _number(repr(shape)),
        _number([(name, one.rows_MLGE.shape) for name, one in loads.items()]),
        _number("", counts),
        _number("", [layout.home_slot_expert_GH for layout in problem.base_layouts]),
        _number(problem.config.as_dict() | {"num_threads": 0}),
        _number(repr(problem.cost_model)),
        _number("", sampled),
    )
    return dict(zip(_FACTS, values, strict=True))


def _number(value: object, arrays: Sequence[npt.NDArray[np.signedinteger]] = ()) -> int:
    """A 56-bit digest."""
    digest = hashlib.sha256(json.dumps(value, default=str).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest()[:7], "big")


def _cores(group: dist.ProcessGroup | None, places: Sequence[int]) -> int:
    """Threads for a planner of this process: its cores, shared by the planners that share them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    count = len(cores) or os.cpu_count() or 1
    mine = torch.tensor([_number([socket.gethostname(), cores])], dtype=torch.int64)
    told = [int(one) for one in gather_tensor(mine, group, "sharing cores")]
    return max(1, count // max(1, sum(told[rank] == int(mine) for rank in places)))


def _who_plans(work: Sequence[tuple[int, range]], moe_layers: Sequence[int]) -> str:
    """Such as `layers 0..3 on rank 0, layers 4..7 on rank 8`."""
    shown = [
        f"layers {moe_layers[share.start]}..{moe_layers[share.stop - 1]} on rank {rank}"
        for rank, share in work[:_MOST_SHOWN]
    ]
    return ", ".join([*shown, *(["..."] if len(work) > _MOST_SHOWN else [])])


def _send_to_all(
    mine: bytes, senders: Sequence[int], group: dist.ProcessGroup | None, what: str
) -> list[bytes]:
    """The bytes of every sender, on every rank: an all-gather of unequal parts."""
    if group is None:
        return [mine]
    size = torch.tensor([len(mine)], dtype=torch.int64)
    sizes = [int(one) for one in gather_tensor(size, group, what)]
    device, ranks = wire_device(group), Ranks.of(group)
    parts = []
    for sender in senders:
        part = torch.empty(sizes[sender], dtype=torch.uint8)
        if sender == ranks.rank:
            part = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        part = part.to(device)
        try:
            dist.broadcast(part, src=dist.get_global_rank(group, sender), group=group)
        except RuntimeError as error:
            raise sync_error(f"{what}: plan of rank {sender}", group, error) from error
        parts.append(part.cpu().numpy().tobytes())
    return parts
