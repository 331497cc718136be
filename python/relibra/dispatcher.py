"""Which transport moves the tokens of a runtime, and the process groups of a two-hop dispatch.

With ``"peer"`` ranks write rows straight into each other's receive buffers, where all ranks share
symmetric memory. Uses that follow the live router, index tables and migration have no places that
the plan knows: they travel flat, on the same ranks at the same times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.agreement import grid_groups
from relibra.hop_splits import HopRanks
from relibra_kernels.checks import check_choice
from relibra_kernels.errors import PlanError
from relibra_kernels.transport.dispatch import FlatDispatch
from relibra_kernels.transport.peer_dispatch import PeerDispatch
from relibra_kernels.transport.two_hop import TwoHopDispatch

if TYPE_CHECKING:
    import torch.distributed as dist

    from relibra.domain_sync import DomainSync
    from relibra.topology import Topology

DISPATCH_MODES = ("flat", "two_hop", "peer")


def hop_ranks(dispatch: str, topology: Topology, rank: int) -> HopRanks | None:
    """Place of a rank in a two-hop dispatch; None where tokens travel directly.

    With one node, or one rank a node, one of the hops would move nothing: that is flat.

    Args:
        dispatch: one of `DISPATCH_MODES`.
        topology: of the ranks.
        rank: this rank.

    Raises:
        ValueError: an unknown mode.
        PlanError: ``"two_hop"`` and nodes of different sizes, or ``"peer"`` and several nodes.

    Example:
        >>> from relibra.topology import Topology
        >>> hop_ranks("two_hop", Topology(2, 3), 4).rail_ranks.tolist()
        [1, 4]
        >>> hop_ranks("two_hop", Topology(1, 4), 0), hop_ranks("flat", Topology(2, 2), 0)
        (None, None)
    """
    check_choice("dispatch", dispatch, DISPATCH_MODES)
    if dispatch == "peer" and topology.num_nodes > 1:
        raise PlanError(
            f'dispatch: "peer" needs all ranks on one node, got {topology}; use "flat" or "two_hop"'
        )
    if dispatch != "two_hop":
        return None
    ranks = HopRanks.of(topology, rank)
    return None if ranks.is_flat else ranks


def make_peer(
    dispatch: str, num_ranks: int, domain_sync: DomainSync | None, transport: str
) -> PeerDispatch | None:
    """Receive buffers in the memory that carries the replicas.

    Args:
        dispatch: one of `DISPATCH_MODES`.
        num_ranks: of the runtime.
        domain_sync: of the runtime.
        transport: as the user asked for it.

    Returns:
        None for other modes, and for one rank, where nothing moves.

    Raises:
        ValueError: ``"peer"`` without symmetric memory.
    """
    if dispatch != "peer" or num_ranks == 1:
        return None
    if domain_sync is None:
        raise ValueError(
            'dispatch: "peer" needs symmetric memory between the ranks, such as '
            f'transport="cpu_shm", got transport={transport!r}, which has none here; use "flat"'
        )
    return PeerDispatch(
        domain_sync.make_heap,
        domain_sync.make_engine,
        domain_sync.domain,
        domain_sync.rank,
        timeout_s=domain_sync.timeout_s,
        generation=domain_sync.generation,
        on_abort=domain_sync.on_abort,
    )


class Dispatcher:
    """The transports of one runtime.

    Args:
        group: of all ranks, None for one.
        ranks: place in a two-hop dispatch, None for a flat one.
        timeout_s: as in `relibra.Runtime`.

    Attributes:
        flat: over the whole group; migration and all flat dispatch use it.
        ranks: as given.
        peer: receive buffers of all ranks, None without.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: HopRanks | None, timeout_s: float | None
    ) -> None:
        self.group, self.ranks, self.timeout_s = group, ranks, timeout_s
        self.flat = FlatDispatch(group)
        self.peer: PeerDispatch | None = None
        self._two_hop: TwoHopDispatch | None = None

    @property
    def two_hop(self) -> TwoHopDispatch:
        """The transport over both hops; the first use makes its groups (collective).

        That is the first dispatch of a step, when the ranks have agreed on their options: a rank
        that wants ``"flat"`` was refused before.

        Raises:
            RuntimeError: tokens of this runtime take one hop.
            ReplicaSyncError: a rank did not take part in time.
        """
        if self._two_hop is None:
            if self.group is None or self.ranks is None:
                raise RuntimeError(
                    'two_hop: need dispatch="two_hop" and more than one node and rank a node, got '
                    "a runtime whose tokens take one hop"
                )
            members = self.ranks.rail_ranks.tolist(), self.ranks.node_ranks.tolist()
            names = f"rail-{self.ranks.local}", f"node-{self.ranks.node}"
            rail, node = grid_groups(self.group, members, names, self.timeout_s)
            self._two_hop = TwoHopDispatch(rail, node)
        return self._two_hop

    def abort(self) -> None:
        """This rank failed: ends the waits of its peers for its rows."""
        if self.peer is not None:
            self.peer.abort()

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that were made here."""
        if self._two_hop is None:
            return []
        hops = (self._two_hop.rail, self._two_hop.node)
        return [hop.ranks.group for hop in hops if hop.ranks.group is not None]
