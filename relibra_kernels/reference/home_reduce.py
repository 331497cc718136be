"""What a home-reduce must leave in the home gradients, all ranks in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def home_reduce(
    replica_grad_G: Sequence[torch.Tensor],
    home_grad_G: Sequence[torch.Tensor],
    push_list_G: Sequence[torch.Tensor],
) -> None:
    """Adds replica gradients to their home in ascending (rank, replica slot) order, in fp32.

    The op ``relibra::home_reduce`` does one rank's part through a transport; this is its oracle.

    Args:
        replica_grad_G: for every rank, ``[S, ...]``.
        home_grad_G: for every rank, fp32 ``[H, ...]``, added to here; slots that no list names
            keep their bits.
        push_list_G: for every rank, int32 ``[p, 3]`` = (home slot, replica's rank, replica slot).

    Example:
        >>> import torch
        >>> home, replica = [torch.tensor([[1.0]]), torch.zeros(1, 1)], [torch.zeros(1, 1)] * 2
        >>> replica[1] = torch.tensor([[5.0]])
        >>> nothing = torch.empty(0, 3, dtype=torch.int32)
        >>> home_reduce(replica, home, [torch.tensor([[0, 1, 0]], dtype=torch.int32), nothing])
        >>> home[0].item()
        6.0
    """
    for own, pushes in enumerate(push_list_G):
        for home_slot, rank, replica_slot in sorted(pushes.tolist(), key=lambda one: one[1:]):
            home_grad_G[own][home_slot].add_(replica_grad_G[rank][replica_slot])
