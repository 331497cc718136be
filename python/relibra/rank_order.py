"""Expert-parallel groups of a job that numbers its ranks in the order `tp-cp-ep-dp-pp`.

The world is counted twice with the same ranks: attention by tp, cp, dp and pp, experts by etp, ep,
dp and pp; the first name of the order counts fastest, and a name that one side lacks has size 1
there. (Megatron-LM numbers its ranks so; its etp is tp unless it is set.) So with tp 4 the eight
members of an EP group are neighbours with etp 1 (one node of eight), and four ranks apart with
etp 4 (four nodes of two).

Letters: G members of an EP group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relibra.limits import MAX_RANKS
from relibra.topology import Topology, dense_numbers, positions
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class ExpertGroup:
    """One EP group of one pipeline stage.

    Args:
        stage: pipeline stage; every stage plans its own layers.
        members: world ranks of each of the G planning ranks: one, or the ETP group it stands for.
        topology: of the planning ranks.
        cells: planning ranks that share samples (TP x CP), by cell; a planning rank whose ETP group
            spans several cells is in all of them.

    Example:
        >>> group = expert_groups(8, tp=2, ep=4, etp=1, gpus_per_node=4)[0]
        >>> group.members, str(group.topology), group.cells
        (((0,), (1,), (2,), (3,)), '1 nodes x 4 ranks', ((0, 1), (2, 3)))
    """

    stage: int
    members: tuple[tuple[int, ...], ...]
    topology: Topology
    cells: tuple[tuple[int, ...], ...]


def expert_groups(
    world_size: int,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    etp: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
    gpus_per_node: int = 8,
    rank_to_node: Sequence[int] | None = None,
) -> tuple[ExpertGroup, ...]:
    """EP groups of a job, with nodes, rails and cells.

    Args:
        world_size: ranks of the job.
        tp: tensor parallel size of attention.
        cp: context parallel size.
        ep: expert parallel size, G.
        pp: pipeline stages.
        etp: expert tensor parallel size; None = tp.
        order: names from the fastest to the slowest.
        gpus_per_node: world rank r is on node r // gpus_per_node, rail r % gpus_per_node.
        rank_to_node: node of every world rank instead; the rail is then the position in the node.

    Returns:
        Groups by stage, then by their first world rank. Several may share a node, and a group need
        not begin at a node boundary.

    Raises:
        PlanError: sizes that do not divide the world, an unknown order, or an ETP group that
            crosses nodes.

    Example:
        >>> groups = expert_groups(64, tp=4, ep=8, etp=4)
        >>> len(groups), str(groups[0].topology), groups[0].members[1]
        (2, '4 nodes x 2 ranks', (4, 5, 6, 7))
    """
    sizes = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "etp": tp if etp is None else etp}
    given: dict[str, object] = {"world_size": world_size, "gpus_per_node": gpus_per_node, **sizes}
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"{name}: need an integer >= 1, got {size!r}")
        if size > MAX_RANKS:
            raise PlanError(f"{name}: need at most {MAX_RANKS} ranks, got {size}")
    names = tuple(order.split("-"))
    if sorted(names) != sorted(_NAMES):
        raise PlanError(f"order: need each of {', '.join(_NAMES)} once, got {order!r}")
    if rank_to_node is None:
        node_of = [rank // gpus_per_node for rank in range(world_size)]
        rail_of = [rank % gpus_per_node for rank in range(world_size)]
    else:
        node_of = list(rank_to_node)
        rail_of = positions(node_of)
        if len(node_of) != world_size:
            raise PlanError(f"rank_to_node: need {world_size} entries, got {len(node_of)}")
    attention = _split_world(world_size, names, {"tp": tp, "cp": cp, "pp": pp})
    experts = _split_world(world_size, names, {"tp": sizes["etp"], "ep": ep, "pp": pp})
    # World ranks by group, then by planning rank: ranks that agree in dp and pp, then also in ep.
    groups: dict[tuple[int, int], list[list[int]]] = {}
    for rank in range(world_size):
        place = experts[rank]
        members = groups.setdefault((place["pp"], place["dp"]), [[] for _ in range(ep)])
        members[place["ep"]].append(rank)
    cell_of = [(place["pp"], place["dp"]) for place in attention]
    found = []
    for (stage, _), members in sorted(groups.items(), key=lambda item: (item[0][0], item[1])):
        topology = _topology(members, node_of, rail_of)
        cells: dict[tuple[int, int], list[int]] = {}
        for index, world_ranks in enumerate(members):
            for cell in sorted({cell_of[rank] for rank in world_ranks}):
                cells.setdefault(cell, []).append(index)
        frozen = tuple(tuple(world_ranks) for world_ranks in members)
        by_cell = tuple(tuple(cells[cell]) for cell in sorted(cells))
        found.append(ExpertGroup(stage, frozen, topology, by_cell))
    return tuple(found)


def _split_world(
    world_size: int, names: tuple[str, ...], sizes: dict[str, int]
) -> list[dict[str, int]]:
    """Coordinates of every world rank; dp is what the sizes leave."""
    known = math.prod(sizes.values())
    if world_size % known:
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise PlanError(f"world_size: need a multiple of {known} ({text}), got {world_size}")
    radix = {name: sizes.get(name, 1) for name in names} | {"dp": world_size // known}
    places = []
    for rank in range(world_size):
        place, rest = {}, rank
        for name in names:
            rest, place[name] = divmod(rest, radix[name])
        places.append(place)
    return places


def _topology(members: list[list[int]], node_of: list[int], rail_of: list[int]) -> Topology:
    for index, world_ranks in enumerate(members):
        nodes = sorted({node_of[rank] for rank in world_ranks})
        if len(nodes) > 1:
            raise PlanError(
                f"etp: need the expert tensor parallel ranks {world_ranks} of EP rank {index} on "
                f"one node, got nodes {nodes}"
            )
    first = [world_ranks[0] for world_ranks in members]
    return Topology(
        rank_to_node=dense_numbers([node_of[rank] for rank in first]),
        rank_to_rail=[rail_of[rank] for rank in first],
    )
