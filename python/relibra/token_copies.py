"""How many copies of a token travel, de-duplicated as the dispatch that runs does it.

`flat`: a token is sent once to every rank that executes one of its choices. `two_hop`: once to
every other node, to the rank on its own rail there, which forwards it inside the node.

Exact where expert ids are known. From counts alone the copies are expected ones: the choices of a
token are taken to be independent given its source rank, so a token of source s has a row in a slot
with probability rows / tokens. Real routing is co-activated, so real copies are fewer.

Letters: M micro-batches, L MoE layers, G ranks, N nodes, E experts, K choices, T tokens, n slots a
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.plan_check import pass_slot_experts
from relibra_kernels import native
from relibra_kernels.checks import check_choice
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.layout import Int32Array, Int64Array
    from relibra.plan import StepPlan
    from relibra.topology import Topology

FloatArray = npt.NDArray[np.float64]
DISPATCHES = ("flat", "two_hop")


@dataclass(frozen=True, eq=False)
class PassTokens:
    """Expert ids of all tokens of a pass.

    Args:
        ids_TLK: int16 `[T, L, K]`, -1 takes no part.
        first_MG: int64 `[M, G+1]`; source g of micro-batch m has tokens `first_MG[m, g]` to
            `first_MG[m, g+1] - 1`.
        repeat: every token stands for so many alike, in a row.
    """

    ids_TLK: npt.NDArray[np.int16]
    first_MG: npt.NDArray[np.int64]
    repeat: int = 1


@dataclass(frozen=True, eq=False)
class TokenCopies:
    """Copies of tokens that cross each link in the dispatch; the combine runs the other way.

    Args:
        rdma_out_G: float64 `[..., G]`, copies that leave a rank by its rail.
        rdma_in_G: float64 `[..., G]`, copies that arrive by it.
        nvlink_out_G: float64 `[..., G]`, copies that leave a rank inside its node.
        nvlink_in_G: float64 `[..., G]`, copies that arrive inside the node.
        received_G: float64 `[..., G]`, tokens that a rank holds, its own included.

    Example:
        >>> zero = np.zeros(2)
        >>> TokenCopies(np.array([3.0, 1]), np.array([1.0, 3]), zero, zero, zero).rdma_G.tolist()
        [3.0, 3.0]
    """

    rdma_out_G: FloatArray
    rdma_in_G: FloatArray
    nvlink_out_G: FloatArray
    nvlink_in_G: FloatArray
    received_G: FloatArray

    @property
    def rdma_G(self) -> FloatArray:
        """max(out, in) of each rank's rail, float64 `[..., G]`."""
        return np.maximum(self.rdma_out_G, self.rdma_in_G)

    @property
    def nvlink_G(self) -> FloatArray:
        """max(out, in) of each rank inside its node, float64 `[..., G]`."""
        return np.maximum(self.nvlink_out_G, self.nvlink_in_G)

    @classmethod
    def stack(cls, parts: list[TokenCopies], *leading: int) -> TokenCopies:
        """Joins single uses into arrays with leading axes such as `[M, L]`.

        Args:
            parts: one a use, in order.
            *leading: sizes of the leading axes.
        """
        names = ("rdma_out_G", "rdma_in_G", "nvlink_out_G", "nvlink_in_G", "received_G")
        joined = [np.stack([getattr(part, name) for part in parts]) for name in names]
        return cls(*(each.reshape(*leading, -1) for each in joined))


def plan_copies(
    plan: StepPlan,
    pass_: str,
    *,
    dispatch: str = "flat",
    distinct: bool = True,
    tokens: PassTokens | None = None,
) -> TokenCopies:
    """Copies of every use of a pass (native).

    Args:
        plan: with loads.
        pass_: name of the pass.
        dispatch: `flat` or `two_hop`.
        distinct: False counts rows instead of tokens (combine mode `exact`).
        tokens: ids of the pass, for exact counts; None = expected copies.

    Returns:
        Arrays `[M, L, G]`. Of a plan for reports only that names no slots, `even_copies`.

    Raises:
        PlanError: no loads of the pass.
        ValueError: an unknown dispatch, or ids that the loads were not counted from.
    """
    check_choice("dispatch", dispatch, DISPATCHES)
    if pass_ not in plan.loads:
        raise PlanError(f"loads: need those of pass {pass_!r} to count copies, got none")
    rows, one = plan.loads[pass_].rows_MLGE, plan.passes[pass_]
    top_k, topology = plan.shape.top_k, plan.topology
    known = plan.report_slots.get(pass_)
    if not plan.is_executable and known is None:
        tokens_MLG = rows.sum(axis=3) / top_k
        rank_rows_MLG = one.slot_rows_MLGn.sum(3)
        uses = [
            even_copies(
                rank_rows_MLG[place],
                tokens_MLG[place],
                top_k,
                topology,
                dispatch=dispatch,
                distinct=distinct,
            )
            for place in np.ndindex(*rank_rows_MLG.shape[:2])
        ]
        return TokenCopies.stack(uses, *rank_rows_MLG.shape[:2])
    slots = pass_slot_experts(plan, one), one.slot_rows_MLGn
    if known is not None:
        slots = np.ascontiguousarray(known.slot_expert_MLGn), known.slot_rows_MLGn
    ranks = topology.rank_to_node_G, topology.rank_to_rail_G
    gateway = _gateways(topology).astype(np.int32) if dispatch == "two_hop" else None
    threads = plan.config.num_threads
    if tokens is not None and distinct:
        links = native.planner().count_copies(
            tokens.ids_TLK, tokens.first_MG, rows, *slots, *ranks, gateway, tokens.repeat, threads
        )
    else:
        links = native.planner().expected_copies(
            rows, *slots, *ranks, gateway, top_k, distinct, threads
        )
    return TokenCopies(*(links[:, :, link] for link in range(links.shape[2])))


def expected_copies(
    quota_Gq: npt.NDArray[np.integer],
    slot_expert_Gn: Int32Array,
    tokens_G: npt.NDArray[np.number],
    topology: Topology,
    *,
    dispatch: str = "flat",
    distinct: bool = True,
) -> TokenCopies:
    """Copies of one use of a layer from the rows that each source sends to each slot.

    Derived: with p = rows of a slot / tokens of the source, a rank gets tokens * (1 - product of
    (1 - p) over its slots); a node the same over its experts.

    Args:
        quota_Gq: `[G, G*n]`, rows from source to slot (`StepPlan.source_quota`).
        slot_expert_Gn: int32 `[G, n]`, -1 = none.
        tokens_G: `[G]`, tokens of each source.
        topology: of the ranks.
        dispatch: `flat` or `two_hop`.
        distinct: False counts rows instead of tokens (combine mode `exact`).

    Raises:
        ValueError: an unknown dispatch.

    Example:
        >>> from relibra.topology import Topology
        >>> quota = np.array([[2, 2], [0, 0]])  # 2 tokens of rank 0, each on both ranks
        >>> copies = expected_copies(
        ...     quota, np.array([[0], [1]], np.int32), np.array([2, 0]), Topology(2, 1)
        ... )
        >>> copies.rdma_out_G.tolist(), copies.received_G.tolist()
        ([2.0, 0.0], [2.0, 2.0])
    """
    ranks, nodes = topology.num_ranks, topology.num_nodes
    rows = np.asarray(quota_Gq, np.float64).reshape(ranks, ranks, -1)
    node_GG = np.eye(nodes)[topology.rank_to_node_G]  # [G, N]
    if not distinct:
        by_rank = rows.sum(2)
        return travel(by_rank, by_rank @ node_GG, topology, dispatch)
    tokens = np.asarray(tokens_G, np.float64)
    share = np.minimum(rows / np.maximum(tokens, 1)[:, None, None], 1.0)
    by_rank = tokens[:, None] * (1 - np.prod(1 - share, axis=2))
    by_node = np.empty((ranks, nodes))
    num_experts = int(slot_expert_Gn.max(initial=0)) + 1
    for node in range(nodes):
        members = list(topology.ranks_of_node(node))
        held = slot_expert_Gn[members].reshape(-1)
        onto_expert = np.zeros((len(held), num_experts))
        onto_expert[np.flatnonzero(held >= 0), held[held >= 0]] = 1
        of_expert = np.minimum(share[:, members].reshape(ranks, -1) @ onto_expert, 1.0)
        by_node[:, node] = tokens * (1 - np.prod(1 - of_expert, axis=1))
    return travel(by_rank, by_node, topology, dispatch)


def even_copies(
    rank_rows_G: npt.NDArray[np.number],
    tokens_G: npt.NDArray[np.number],
    top_k: int,
    topology: Topology,
    *,
    dispatch: str = "flat",
    distinct: bool = True,
) -> TokenCopies:
    """Copies when only the rows of each rank are known (strategies for reports only).

    Every source is taken to spread its rows like the whole group, and the K choices of a token to
    be independent.

    Args:
        rank_rows_G: `[G]`, rows executed on each rank.
        tokens_G: `[G]`, tokens of each source.
        top_k: K.
        topology: of the ranks.
        dispatch: `flat` or `two_hop`.
        distinct: False counts rows instead of tokens.
    """
    rows = np.asarray(rank_rows_G, np.float64)
    share = rows / max(float(rows.sum()), 1.0)
    on_node = share @ np.eye(topology.num_nodes)[topology.rank_to_node_G]
    tokens = np.asarray(tokens_G, np.float64)[:, None]
    if not distinct:
        return travel(tokens * top_k * share, tokens * top_k * on_node, topology, dispatch)
    by_rank = tokens * (1 - (1 - np.minimum(share, 1)) ** top_k)
    by_node = tokens * (1 - (1 - np.minimum(on_node, 1)) ** top_k)
    return travel(by_rank, by_node, topology, dispatch)


def count_token_copies(
    ids_GTK: list[npt.NDArray[np.integer]],
    quota_Gq: npt.NDArray[np.integer],
    slot_expert_Gn: Int32Array,
    topology: Topology,
    *,
    dispatch: str = "flat",
) -> TokenCopies:
    """Exact distinct copies of one use of a layer.

    Args:
        ids_GTK: for each source rank its ids `[T, K]`; -1 takes no part.
        quota_Gq: `[G, G*n]`, rows from source to slot; those of an expert add up to its ids.
        slot_expert_Gn: int32 `[G, n]`.
        topology: of the ranks.
        dispatch: `flat` or `two_hop`.

    Raises:
        PlanError: more ids of an expert than the quota has rows.
        ValueError: an unknown dispatch.
    """
    ranks, nodes = topology.num_ranks, topology.num_nodes
    by_rank, by_node = np.zeros((ranks, ranks)), np.zeros((ranks, nodes))
    slots_per_rank = slot_expert_Gn.shape[1]
    for source, ids in enumerate(ids_GTK):
        slot = _slots_of_choices(np.asarray(ids), quota_Gq[source], slot_expert_Gn.reshape(-1))
        token, choice = np.nonzero(slot >= 0)
        rank = slot[token, choice] // slots_per_rank
        reached = np.zeros((len(slot), ranks), np.bool_)
        reached[token, rank] = True
        by_rank[source] = reached.sum(0)
        reached = np.zeros((len(slot), nodes), np.bool_)
        reached[token, topology.rank_to_node_G[rank]] = True
        by_node[source] = reached.sum(0)
    return travel(by_rank, by_node, topology, dispatch)


def travel(
    by_rank_GG: FloatArray, by_node_GN: FloatArray, topology: Topology, dispatch: str
) -> TokenCopies:
    """Links that copies cross.

    Args:
        by_rank_GG: float64 `[G, G]`, copies of source s that rank g needs.
        by_node_GN: float64 `[G, N]`, copies of source s that node n needs.
        topology: of the ranks.
        dispatch: `flat` or `two_hop`.

    Raises:
        ValueError: an unknown dispatch.
    """
    check_choice("dispatch", dispatch, DISPATCHES)
    node_G = topology.rank_to_node_G
    inside = node_G[:, None] == node_G[None]
    received = by_rank_GG.sum(0)
    near = np.where(inside, by_rank_GG, 0.0)
    np.fill_diagonal(near, 0.0)
    near_out, near_in = near.sum(1), near.sum(0)
    if dispatch == "flat":
        far = np.where(inside, 0.0, by_rank_GG)
        return TokenCopies(far.sum(1), far.sum(0), near_out, near_in, received)
    far_node: FloatArray = np.where(
        node_G[:, None] == np.arange(topology.num_nodes), 0.0, by_node_GN
    )
    gateway_GN = _gateways(topology)
    rdma_in: FloatArray = np.bincount(
        gateway_GN.reshape(-1), far_node.reshape(-1), minlength=len(node_G)
    ).astype(np.float64)
    far = np.where(inside, 0.0, by_rank_GG)
    entry_GG = gateway_GN[:, node_G]  # where copies from s enter the node of g
    far[entry_GG == np.arange(len(node_G))] = 0.0  # already there: no forward
    forward_out = np.bincount(entry_GG.reshape(-1), far.reshape(-1), minlength=len(node_G))
    return TokenCopies(
        far_node.sum(1), rdma_in, near_out + forward_out, near_in + far.sum(0), received
    )


def _gateways(topology: Topology) -> Int64Array:
    """Rank of each node on the rail of each source, int64 `[G, N]`; else one in turn."""
    table = np.empty((topology.num_ranks, topology.num_nodes), np.int64)
    for node in range(topology.num_nodes):
        members = topology.ranks_of_node(node)
        by_rail = {topology.rank_to_rail[rank]: rank for rank in members}
        for source, rail in enumerate(topology.rank_to_rail):
            table[source, node] = by_rail.get(rail, members[rail % len(members)])
    return table


def _slots_of_choices(
    ids_TK: npt.NDArray[np.integer],
    quota_q: npt.NDArray[np.integer],
    slot_expert_q: npt.NDArray[np.integer],
) -> Int64Array:
    """Slot of every choice: an expert's slots in ascending id take its choices in order."""
    flat = ids_TK.reshape(-1).astype(np.int64)
    order = np.argsort(flat, kind="stable")
    order = order[flat[order] >= 0]
    used = np.flatnonzero((slot_expert_q >= 0) & (quota_q > 0))
    used = used[np.argsort(slot_expert_q[used], kind="stable")]
    slots = np.repeat(used, quota_q[used])
    slot = np.full(flat.shape, -1, np.int64)
    if len(slots) != len(order) or not np.array_equal(slot_expert_q[slots], flat[order]):
        raise PlanError(
            f"ids_GTK: need the ids that the plan was made for ({len(slots)} rows), got "
            f"{len(order)} rows or other experts"
        )
    slot[order] = slots
    return slot.reshape(ids_TK.shape)
