"""Where the ranks of an expert-parallel group sit: nodes and rails.

Letters: G ranks of the group, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from relibra_kernels.errors import PlanError

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
        rank_to_node: node of each rank instead; every node 0..N-1 has at least one rank.
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
            node_of = tuple(rank // width for rank in range(nodes * width))
        else:
            if num_nodes is not None or ranks_per_node is not None:
                raise PlanError(
                    "Topology: need either num_nodes and ranks_per_node or rank_to_node, got both"
                )
            node_of = _whole_tuple("rank_to_node", rank_to_node)
        _check_nodes(node_of)
        if rank_to_rail is None:
            rail_of = tuple(node_of[:rank].count(node) for rank, node in enumerate(node_of))
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
        return tuple(rank for rank, other in enumerate(self.rank_to_node) if other == node)

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


def _whole(name: str, value: object, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
        raise PlanError(f"{name}: need an integer >= {lowest}, got {value!r}")
    return int(value)


def _whole_tuple(name: str, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(_whole(f"{name}[{i}]", value, 0) for i, value in enumerate(values))


def _check_nodes(node_of: tuple[int, ...]) -> None:
    if not node_of:
        raise PlanError("rank_to_node: need at least one rank, got none")
    if max(node_of) >= len(node_of):  # before anything of that size is made
        raise PlanError(
            f"rank_to_node: need node numbers below the {len(node_of)} ranks, got {max(node_of)}"
        )
    missing = sorted(set(range(max(node_of) + 1)) - set(node_of))
    if missing:
        raise PlanError(
            f"rank_to_node: need every node 0..{max(node_of)} to have a rank, got none for "
            f"{missing[:8]}"
        )


def _frozen(values: tuple[int, ...]) -> npt.NDArray[np.int32]:
    array = np.asarray(values, np.int32)
    array.flags.writeable = False
    return array
