"""What a push must leave in the replica slots, all ranks in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def replica_push(
    home_w_G: Sequence[torch.Tensor],
    replica_w_G: Sequence[torch.Tensor],
    push_list_G: Sequence[torch.Tensor],
) -> None:
    """Copies home weights into replica slots: ``replica[rank][slot] = home[own][home slot]``.

    The op ``relibra::replica_push`` does one rank's part through a transport; this is its oracle.

    Args:
        home_w_G: for every rank, ``[H, ...]``.
        replica_w_G: for every rank, ``[S, ...]``, written here; slots that no list names keep
            their bits.
        push_list_G: for every rank, int32 ``[p, 3]`` = (home slot, destination rank, replica slot).

    Example:
        >>> import torch
        >>> home = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
        >>> replica = [torch.zeros(1, 1), torch.zeros(1, 1)]
        >>> nothing = torch.empty(0, 3, dtype=torch.int32)
        >>> replica_push(home, replica, [torch.tensor([[1, 1, 0]], dtype=torch.int32), nothing])
        >>> replica[1].item()
        2.0
    """
    for own, pushes in enumerate(push_list_G):
        for home_slot, rank, replica_slot in pushes.tolist():
            replica_w_G[rank][replica_slot].copy_(home_w_G[own][home_slot])
