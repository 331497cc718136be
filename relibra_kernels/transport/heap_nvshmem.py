"""Provider ``nvshmem``: one arena of NVSHMEM's symmetric heap, for the GPUs of one machine.

An instance that is there is used, whoever made it, and its PE numbers are exchanged, since they
need not be the ranks of the group. Otherwise one is made over the group. Allocation and freeing
are collective over all PEs of an instance: where it has more PEs than the group has ranks, the
user must say that all of them allocate together.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.nvshmem_library import NvshmemError, NvshmemLibrary
from relibra_kernels.transport.rank_messages import RefusedError, agree, exchange, step
from relibra_kernels.transport.symmetric_heap import Arena, Heap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

log = logging.getLogger(__name__)


class NvshmemHeap(Heap):
    """One rank's heap.

    Args:
        group: the ranks of the domain, all on one machine.
        device: CUDA device of this rank.
        timeout_s: seconds to wait for the slowest rank before each collective step. The steps
            inside NVSHMEM know no time-out, so none is entered before all ranks are there.
        multicast: whether a multicast address is wanted; without hardware for it, plain puts.
        all_pes_allocate: the user's word that all PEs of a larger instance that is there make the
            same `alloc` and `close` calls.
        library: NVSHMEM, None to load it.

    Raises:
        NvshmemError: NVSHMEM is missing or of a release that is not supported.
    """

    name = "nvshmem"
    granule_bytes = 2**29  # its heap grows by this much, NVSHMEM_CUMEM_GRANULARITY

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float = 60.0,
        multicast: bool = False,
        all_pes_allocate: bool = False,
        library: NvshmemLibrary | None = None,
    ) -> None:
        super().__init__(device)
        self._ranks, self._timeout_s = Ranks.of(group), timeout_s
        self._multicast, self._all_pes_allocate = multicast, all_pes_allocate
        self._library = library or NvshmemLibrary.open()
        self._address = 0

    @staticmethod
    def why_not(device: torch.device) -> str:
        """Why this process cannot use the provider; "" where nothing is against it.

        Args:
            device: that the rank uses.

        Example:
            >>> NvshmemHeap.why_not(torch.device("cpu"))
            'NVSHMEM needs a CUDA device, got cpu'
        """
        if device.type != "cuda":
            return f"NVSHMEM needs a CUDA device, got {device}"
        if not torch.cuda.is_available():
            return "this PyTorch sees no CUDA device"
        try:
            NvshmemLibrary.open()
        except NvshmemError as error:
            return str(error)
        return ""

    def start(self) -> list[int]:
        """Uses the instance that is there, or makes one; collective.

        Returns:
            PE number of every rank.

        Raises:
            RefusedError: a rank's initialisation failed, or the instance does not fit the group.
            ReplicaSyncError: a rank is missing, or ranks have different releases or states.
        """
        library, what = self._library, "starting NVSHMEM"
        state = {0: "none", 1: "failed to start"}.get(library.status(), "running")
        mine = {"release": ".".join(map(str, library.version())), "instance": state}
        agree(self._ranks, mine, what=what, timeout_s=self._timeout_s)
        if state != "running":
            self._initialize(what)
        self._step(what, self._check_size)
        rows = exchange(self._ranks, {"pe": library.my_pe()}, what=what, timeout_s=self._timeout_s)
        return [int(row["pe"]) for row in rows]

    def _initialize(self, what: str) -> None:
        """A new instance: its identity comes from rank 0."""
        library, ranks = self._library, self._ranks
        identity = b""

        def prepare() -> None:
            nonlocal identity
            if library.status() != 0:
                library.check_usable("an earlier start failed, and a process has one only:")
            if ranks.rank == 0:
                identity = library.unique_id()

        def initialize() -> None:
            with self._on_device():
                library.initialize(ranks.rank, ranks.size, identity, multicast=self._multicast)

        self._step(what, prepare)
        rows = exchange(ranks, {"id": identity.hex()}, what=what, timeout_s=self._timeout_s)
        identity = bytes.fromhex(rows[0]["id"])
        self._step(what, initialize)

    def _check_size(self) -> None:
        size = self._library.n_pes()
        if size != self._ranks.size and not self._all_pes_allocate:
            raise NvshmemError(
                f"the NVSHMEM instance of this process has {size} PEs, the group {self._ranks.size}"
                f" ranks: allocation is collective over all PEs, so pass all_pes_allocate=True if "
                f"all of them make the same calls, or use another transport"
            )

    def _alloc(self, nbytes: int, generation: int) -> Arena:
        what, ranks, library = f"alloc of a {self.name} arena", self._ranks, self._library
        facts = {"nbytes": nbytes, "generation": generation}
        agree(ranks, facts, what=what, timeout_s=self._timeout_s)
        pes = self.start()
        peers: list[int] = []
        made: list[torch.Tensor] = []

        def allocate() -> None:
            with self._on_device():
                self._address = library.malloc(nbytes)

        def find_peers() -> None:
            made.append(self._zeroed(nbytes))
            peers.extend(library.peer_address(self._address, pe) for pe in pes)
            peers[ranks.rank] = self._address
            if missing := [rank for rank, address in enumerate(peers) if address == 0]:
                raise NvshmemError(f"{self.device} has no peer access to rank(s) {missing}")

        try:
            self._step("allocating symmetric memory", allocate)
        except ReplicaSyncError:
            self._abandon()  # freeing is collective, and a rank has nothing to free
            raise
        try:
            self._step("mapping the memory of peers", find_peers)
        except RefusedError:  # all ranks are here and all hold the memory
            made.clear()
            self._give_back()
            raise
        except ReplicaSyncError:
            self._abandon()
            raise
        return Arena(
            made[0], tuple(peers), self._multicast_address(), nbytes, generation, ranks.rank
        )

    def _free(self, peers_alive: bool) -> None:
        if not peers_alive:
            self._abandon()
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        try:  # nvshmem_free waits for its peers for ever: see first that they come
            agree(self._ranks, {}, what="close of an nvshmem arena", timeout_s=self._timeout_s)
        except ReplicaSyncError:
            self._abandon()
            raise
        self._give_back()

    def _give_back(self) -> None:
        address, self._address = self._address, 0
        with self._on_device():
            self._library.free(address)

    def _abandon(self) -> None:
        """Leaves the memory allocated until the process ends."""
        if self._address:
            log.warning("nvshmem: memory stays allocated, since peers cannot help to free it")
        self._address = 0

    def _zeroed(self, nbytes: int) -> torch.Tensor:
        with self._on_device():
            base = self._library.tensor(self._address, nbytes, self.device).zero_()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # zeroed before a peer may write
        return base

    def _multicast_address(self) -> int | None:
        if not self._multicast:
            return None
        address = self._library.multicast_address(self._address, self._ranks.size)
        if address == 0:
            log.info("%s: no multicast on %s: plain puts", self.name, self.device)
        return address or None

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """NVSHMEM uses the current device."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def _step(self, what: str, do: Callable[[], None]) -> None:
        step(self._ranks, do, what=what, timeout_s=self._timeout_s)
