"""Which GPU each rank uses, and whether the GPUs of a domain reach each other's memory."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class GpuPlace:
    """Where a rank computes.

    Attributes:
        machine: differs between machines, and between two starts of one.
        gpu: unique id of the GPU, "" on the CPU.

    Example:
        >>> GpuPlace.here(torch.device("cpu")).gpu
        ''
    """

    machine: str
    gpu: str

    @classmethod
    def here(cls, device: torch.device) -> GpuPlace:
        """The place of this process.

        Args:
            device: that the rank uses.
        """
        try:
            machine = _BOOT_ID.read_text("ascii").strip()
        except OSError:
            machine = socket.gethostname()
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(machine, gpu)


def why_no_peer_access(places: Sequence[GpuPlace], rank: int) -> str:
    """Why this rank's GPU cannot address the memory of all peers; "" where nothing is against it.

    Peers whose GPU this process does not see are left to the provider, which tries.

    Args:
        places: of all ranks, by rank.
        rank: this rank.

    Example:
        >>> places = [GpuPlace("a", "gpu-0"), GpuPlace("b", "gpu-1")]
        >>> why_no_peer_access(places, 0)
        'rank 1 is on another machine'
    """
    own = places[rank]
    for peer, place in enumerate(places):
        if peer == rank:
            continue
        if place.machine != own.machine:
            return f"rank {peer} is on another machine"
        if place.gpu == own.gpu:
            return f"ranks {rank} and {peer} use the same GPU {own.gpu}"
    seen = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    own_index = seen[own.gpu]
    for peer, place in enumerate(places):
        index = seen.get(place.gpu)
        if peer == rank or index is None:
            continue
        if not torch.cuda.can_device_access_peer(own_index, index):
            return (
                f"GPU {own_index} of rank {rank} has no peer access to GPU {index} of rank {peer}"
            )
    return ""
