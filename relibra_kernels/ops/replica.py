"""Ops that move weights out to replica slots and gradients home, through a registered transport.

Contracts and single-process oracles: reference/replica_push.py, reference/home_reduce.py; the
collective itself: transport/replica.py. Ranks in the lists are ranks of the transport's group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relibra_kernels.checks import describe
from relibra_kernels.registry import lookup
from relibra_kernels.transport.replica import ReplicaTransport


def _transport(transport_id: int) -> ReplicaTransport:
    found = lookup(transport_id)
    if not isinstance(found, ReplicaTransport):
        raise TypeError(f"transport_id: need the id of a ReplicaTransport, got {describe(found)}")
    return found


@torch.library.custom_op("relibra::replica_push", mutates_args=("replica_w",), device_types="cpu")
def replica_push(
    home_w: Tensor, replica_w: Tensor, push_list: Tensor, pull_list: Tensor, transport_id: int
) -> None:
    """Home weights -> replica slots of this and other ranks."""
    _transport(transport_id).push(
        [(home_w, replica_w)], push_list, pull_list, what="op replica_push"
    )


@replica_push.register_fake
def _(
    home_w: Tensor, replica_w: Tensor, push_list: Tensor, pull_list: Tensor, transport_id: int
) -> None:
    return None


@torch.library.custom_op("relibra::home_reduce", mutates_args=("home_grad",), device_types="cpu")
def home_reduce(
    replica_grad: Tensor,
    home_grad: Tensor,
    push_list: Tensor,
    pull_list: Tensor,
    transport_id: int,
) -> None:
    """Replica gradients -> home gradients, added in ascending (rank, replica slot) order."""
    _transport(transport_id).reduce(
        [(replica_grad, home_grad)], push_list, pull_list, what="op home_reduce"
    )


@home_reduce.register_fake
def _(
    replica_grad: Tensor,
    home_grad: Tensor,
    push_list: Tensor,
    pull_list: Tensor,
    transport_id: int,
) -> None:
    return None
