"""Provider ``torch_symm``: the symmetric memory of PyTorch, between the GPUs of one machine.

Needs nothing but a CUDA build of PyTorch and GPUs that reach each other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.rank_messages import agree, step
from relibra_kernels.transport.symmetric_heap import Arena, Heap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

log = logging.getLogger(__name__)


class TorchSymmHeap(Heap):
    """One rank's heap.

    Args:
        group: the ranks of the domain.
        device: CUDA device of this rank.
        timeout_s: seconds to wait for the slowest rank during `alloc`.
        multicast: whether a multicast address is wanted; without hardware for it, plain puts.
        module: ``torch.distributed._symmetric_memory``, or a stand-in for tests.
    """

    name = "torch_symm"
    granule_bytes = 2**21  # pages of the CUDA virtual memory API

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float = 60.0,
        multicast: bool = False,
        module: Any = None,
    ) -> None:
        super().__init__(device)
        self._group, self._ranks = group, Ranks.of(group)
        self._timeout_s, self._multicast = timeout_s, multicast
        self._module = module if module is not None else _module()
        self._base: torch.Tensor | None = None
        self._handle: Any = None

    @staticmethod
    def why_not(device: torch.device) -> str:
        """Why this process cannot use the provider; "" where nothing is against it.

        Args:
            device: that the rank uses.

        Example:
            >>> TorchSymmHeap.why_not(torch.device("cpu"))
            'symmetric memory of PyTorch needs a CUDA device, got cpu'
        """
        if device.type != "cuda":
            return f"symmetric memory of PyTorch needs a CUDA device, got {device}"
        if not torch.cuda.is_available():
            return "this PyTorch sees no CUDA device"
        try:
            _module()
        except ImportError as error:
            return f"this PyTorch {torch.__version__} has no symmetric memory ({error})"
        return ""

    def _alloc(self, nbytes: int, generation: int) -> Arena:
        what = f"alloc of a {self.name} arena"
        facts = {"nbytes": nbytes, "generation": generation}
        agree(self._ranks, facts, what=what, timeout_s=self._timeout_s)
        try:
            self._step("allocating symmetric memory", lambda: self._make(nbytes))
            self._step("mapping the memory of peers", self._meet)
            arena = self._arena(nbytes, generation)
            shift = arena.base.data_ptr() - int(self._handle.buffer_ptrs[self._ranks.rank])
            agree(self._ranks, {"offset": shift}, what=what, timeout_s=self._timeout_s)
        except BaseException:
            self._base = self._handle = None
            raise
        return arena

    def _free(self, peers_alive: bool) -> None:
        if self.device.type == "cuda" and peers_alive:
            torch.cuda.synchronize(self.device)
        self._base = self._handle = None  # peers hold the memory until they forget it as well

    def _make(self, nbytes: int) -> None:
        self._base = self._module.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._base.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # zeroed before a peer may write

    def _meet(self) -> None:
        self._handle = self._module.rendezvous(self._base, self._group)

    def _arena(self, nbytes: int, generation: int) -> Arena:
        """The allocation may begin inside a segment: at the same offset on every rank."""
        assert self._base is not None
        rank, base = self._ranks.rank, self._base
        segments = [int(address) for address in self._handle.buffer_ptrs]
        shift = base.data_ptr() - segments[rank]
        multicast = int(self._handle.multicast_ptr or 0)
        if self._multicast and not multicast:
            log.info("%s: no multicast on %s: plain puts", self.name, self.device)
        return Arena(
            base,
            tuple(address + shift for address in segments),
            multicast + shift if self._multicast and multicast else None,
            nbytes,
            generation,
            rank,
        )

    def _step(self, what: str, do: Callable[[], None]) -> None:
        step(self._ranks, do, what=what, timeout_s=self._timeout_s)


def _module() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
