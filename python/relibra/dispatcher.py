"""Which transport moves the tokens of a runtime, and the process groups of a two-hop dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.agreement import grid_groups
from relibra.hop_splits import HopRanks
from relibra_kernels.checks import check_choice
from relibra_kernels.transport.dispatch import FlatDispatch
from relibra_kernels.transport.two_hop import TwoHopDispatch

if TYPE_CHECKING:
    import torch.distributed as dist

    from relibra.topology import Topology

DISPATCH_MODES = ("flat", "two_hop")


def hop_ranks(dispatch: str, topology: Topology, rank: int) -> HopRanks | None:
    """Place of a rank in a two-hop dispatch; None where tokens travel directly.

    With one node, or one rank a node, one of the hops would move nothing: that is flat.

    Args:
        dispatch: ``"flat"`` or ``"two_hop"``.
        topology: of the ranks.
        rank: this rank.

    Raises:
        ValueError: an unknown mode.
        PlanError: ``"two_hop"`` and nodes of different sizes.

    Example:
        >>> from relibra.topology import Topology
        >>> hop_ranks("two_hop", Topology(2, 3), 4).rail_ranks.tolist()
        [1, 4]
        >>> hop_ranks("two_hop", Topology(1, 4), 0), hop_ranks("flat", Topology(2, 2), 0)
        (None, None)
    """
    if check_choice("dispatch", dispatch, DISPATCH_MODES) == "flat":
        return None
    ranks = HopRanks.of(topology, rank)
    return None if ranks.is_flat else ranks


class Dispatcher:
    """The transports of one runtime.

    Args:
        group: of all ranks, None for one.
        ranks: place in a two-hop dispatch, None for a flat one.
        timeout_s: as in `relibra.Runtime`.

    Attributes:
        flat: over the whole group; migration and all flat dispatch use it.
        ranks: as given.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: HopRanks | None, timeout_s: float | None
    ) -> None:
        self.group, self.ranks, self.timeout_s = group, ranks, timeout_s
        self.flat = FlatDispatch(group)
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

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that were made here."""
        if self._two_hop is None:
            return []
        hops = (self._two_hop.rail, self._two_hop.node)
        return [hop.ranks.group for hop in hops if hop.ranks.group is not None]
