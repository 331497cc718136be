"""Where the ranks of an expert-parallel group sit: nodes and rails.

Letters: G ranks of the group, N nodes.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.limits import MAX_RANKS
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch.distributed import ProcessGroup

MAX_RAIL = (1 << 16) - 1


@dataclass(frozen=True, init=False)
class Topology:
    """Node and rail of every rank of one expert-parallel group.

    A node is a group of ranks that share an NVLink domain; replicas stay inside it. Ranks with the
    same rail number in different nodes are one network hop apart. The ranks of a node need not be
    contiguous, and nodes may have different sizes.

    Args:
        num_nodes: N, with `ranks_per_node`: a uniform group, rank = node * ranks_per_node + rail.
        ranks_per_node: P.
        rank_to_node: node of each rank instead, at most 2^20 ranks; every node 0..N-1 has at least
            one rank.
        rank_to_rail: rail of each rank, by default its position inside its node.

    Raises:
        PlanError: a number is out of range, or the two forms are mixed.

    Example:
        >>> topology = Topology(num_nodes=2, ranks_per_node=2)
        >>> topology.rank_to_node, topology.rank_to_rail
        ((0, 0, 1, 1), (0, 1, 0, 1))
        >>> uneven = Topology(rank_to_node=[0, 1, 0, 0])
        >>> uneven.num_nodes, uneven.ranks_of_node(0), uneven.rank_to_rail
        (2, (0, 2, 3), (0, 0, 1, 2))
    """

    rank_to_node: tuple[int, ...]
    rank_to_rail: tuple[int, ...]

    def __init__(
        self,
        num_nodes: int | None = None,
        ranks_per_node: int | None = None,
        *,
        rank_to_node: Sequence[int] | None = None,
        rank_to_rail: Sequence[int] | None = None,
    ) -> None:
        if rank_to_node is None:
            if num_nodes is None or ranks_per_node is None:
                raise PlanError(
                    "Topology: need num_nodes and ranks_per_node, or rank_to_node, got "
                    f"num_nodes={num_nodes}, ranks_per_node={ranks_per_node}"
                )
            nodes = _whole("num_nodes", num_nodes, 1)
            width = _whole("ranks_per_node", ranks_per_node, 1)
            if nodes * width > MAX_RANKS:
                raise PlanError(
                    f"num_nodes, ranks_per_node: need at most {MAX_RANKS} ranks, got {nodes} x "
                    f"{width}"
                )
            node_of = tuple(np.repeat(np.arange(nodes), width).tolist())
        else:
            if num_nodes is not None or ranks_per_node is not None:
                raise PlanError(
                    "Topology: need either num_nodes and ranks_per_node or rank_to_node, got both"
                )
            node_of = _whole_tuple("rank_to_node", rank_to_node)
        _check_nodes(node_of)
        if rank_to_rail is None:
            rail_of = tuple(positions(node_of))
        else:
            rail_of = _whole_tuple("rank_to_rail", rank_to_rail)
            if len(rail_of) != len(node_of):
                raise PlanError(
                    f"rank_to_rail: need {len(node_of)} entries, one a rank, got {len(rail_of)}"
                )
        if max(rail_of) > MAX_RAIL:
            raise PlanError(f"rank_to_rail: need at most {MAX_RAIL}, got {max(rail_of)}")
        object.__setattr__(self, "rank_to_node", node_of)
        object.__setattr__(self, "rank_to_rail", rail_of)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | None,
        etp: int = 1,
        *,
        node: Hashable | None = None,
        rail: int | None = None,
    ) -> Topology:
        """Topology of a process group; a collective call.

        Args:
            group: of all ranks that hold the experts, in rank order; None = the world. With expert
                tensor parallelism the ranks of an ETP group are neighbours in it, and one rank of
                the topology stands for each.
            etp: expert tensor parallel size.
            node: name of this rank's NVLink domain, equal on all its ranks and different elsewhere
                (such as the domain of an NVL72 rack); None = the name of the host.
            rail: of this rank; None = its CUDA device, or without one its position in the node.

        Raises:
            PlanError: a group that etp does not divide, or an ETP group that crosses nodes.
        """
        import torch
        from torch import distributed

        size = _whole("etp", etp, 1)
        if rail is None and torch.cuda.is_available():
            rail = torch.cuda.current_device()
        name = socket.gethostname() if node is None else node
        told: list[tuple[Hashable, int | None]] = [("", None)] * distributed.get_world_size(group)
        distributed.all_gather_object(told, (name, rail), group=group)
        return cls.from_names([one[0] for one in told], [one[1] for one in told], size)

    @classmethod
    def from_names(
        cls, nodes: Sequence[Hashable], rails: Sequence[int | None] | None = None, etp: int = 1
    ) -> Topology:
        """Topology from the node name and rail of every rank of a group.

        Args:
            nodes: name of each rank's node; equal names are one node.
            rails: rail of each rank; one that is None makes all of them positions in the node.
            etp: neighbours that form one rank, with the rail of the first.

        Raises:
            PlanError: as `from_group`.

        Example:
            >>> Topology.from_names(["b", "b", "a", "a"], etp=2).rank_to_node
            (0, 1)
        """
        size = _whole("etp", etp, 1)
        if not nodes or len(nodes) % size:
            raise PlanError(f"group: need a multiple of etp {size} ranks, got {len(nodes)}")
        for first in range(0, len(nodes), size):
            names = nodes[first : first + size]
            if len(set(names)) > 1:
                raise PlanError(
                    f"etp: need ranks {first}..{first + size - 1} of one ETP group on one node, "
                    f"got {sorted(set(map(str, names)))}"
                )
        known = [] if rails is None else [rail for rail in rails[::size] if rail is not None]
        to_node = dense_numbers(nodes[::size])
        return cls(rank_to_node=to_node, rank_to_rail=known if len(known) == len(to_node) else None)

    @property
    def num_ranks(self) -> int:
        """G."""
        return len(self.rank_to_node)

    @cached_property
    def num_nodes(self) -> int:
        """N."""
        return max(self.rank_to_node) + 1

    @property
    def ranks_per_node(self) -> int:
        """P of a uniform topology.

        Raises:
            PlanError: nodes have different numbers of ranks.
        """
        sizes = set(self.node_sizes)
        if len(sizes) != 1:
            raise PlanError(f"ranks_per_node: need equal nodes, got sizes {list(self.node_sizes)}")
        return self.node_sizes[0]

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return tuple(int(size) for size in np.bincount(self.rank_to_node_G))

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """Ranks of a node, ascending."""
        return self._ranks_by_node[node] if 0 <= node < self.num_nodes else ()

    @cached_property
    def _ranks_by_node(self) -> tuple[tuple[int, ...], ...]:
        order = np.argsort(self.rank_to_node_G, kind="stable").tolist()
        ends = np.cumsum(self.node_sizes).tolist()
        return tuple(
            tuple(order[end - size : end]) for end, size in zip(ends, self.node_sizes, strict=True)
        )

    @cached_property
    def rank_to_node_G(self) -> npt.NDArray[np.int32]:
        """int32 `[G]`, read-only."""
        return _frozen(self.rank_to_node)

    @cached_property
    def rank_to_rail_G(self) -> npt.NDArray[np.int32]:
        """int32 `[G]`, read-only."""
        return _frozen(self.rank_to_rail)

    def __str__(self) -> str:
        """Such as `2 nodes x 4 ranks`."""
        if len(set(self.node_sizes)) == 1:
            return f"{self.num_nodes} nodes x {self.node_sizes[0]} ranks"
        return f"{self.num_nodes} nodes of {list(self.node_sizes)} ranks"


def dense_numbers(names: Sequence[Hashable]) -> list[int]:
    """Equal names get equal numbers, from 0 in order of appearance.

    Args:
        names: of anything.

    Example:
        >>> dense_numbers(["b", "a", "b"])
        [0, 1, 0]
    """
    number: dict[Hashable, int] = {}
    return [number.setdefault(name, len(number)) for name in names]


def positions(names: Sequence[Hashable]) -> list[int]:
    """How many equal names come before each.

    Args:
        names: of anything.

    Example:
        >>> positions(["b", "a", "b"])
        [0, 0, 1]
    """
    seen: dict[Hashable, int] = {}
    found = []
    for name in names:
        found.append(seen.get(name, 0))
        seen[name] = found[-1] + 1
    return found


def _whole(name: str, value: object, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
        raise PlanError(f"{name}: need an integer >= {lowest}, got {value!r}")
    return int(value)


def _whole_tuple(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        found = list(islice(values, MAX_RANKS + 1))
    except TypeError:
        raise TypeError(f"{name}: need one number a rank, got {values!r}") from None
    if len(found) > MAX_RANKS:
        raise PlanError(f"{name}: need at most {MAX_RANKS} ranks, got more")
    for i, value in enumerate(found):
        if type(value) is not int or value < 0:  # the common case without making a name
            found[i] = _whole(f"{name}[{i}]", value, 0)
    return tuple(found)


def _check_nodes(node_of: tuple[int, ...]) -> None:
    if not node_of:
        raise PlanError("rank_to_node: need at least one rank, got none")
    largest, held = max(node_of), set(node_of)
    if len(held) <= largest:
        # The first one is near, whatever the largest: n different numbers leave one of 0..n out.
        missing = (node for node in range(min(largest, len(held) + 8)) if node not in held)
        raise PlanError(
            f"rank_to_node: need every node 0..{largest} to have a rank, got none for "
            f"{list(islice(missing, 8))}"
        )


def _frozen(values: tuple[int, ...]) -> npt.NDArray[np.int32]:
    array = np.asarray(values, np.int32)
    array.flags.writeable = False
    return array
