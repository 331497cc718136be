"""GPUs that reach each other, for whole runtimes on the CPU: providers over shared memory, and the
engine of GPUs over threads."""

from fake_cuda import FakeLibrary, FakeStreams

from relibra import runtime_transport
from relibra_kernels.transport import cuda_library_load, provider_choice
from relibra_kernels.transport.gpu_places import GpuPlace
from relibra_kernels.transport.heap_cpu_shm import CpuShmHeap
from relibra_kernels.transport.sync_engine_cuda import CudaEngine

ENGINES = []  # that were made in this process


def fake_heap(name, reason=""):
    """A provider's class."""

    class FakeHeap(CpuShmHeap):
        def __init__(self, group, device, *, timeout_s, **options):
            super().__init__(group, timeout_s=timeout_s)
            self.name = name

        @staticmethod
        def why_not(device):
            return reason

    return FakeHeap


def fake_engine(arena, layout, *, timeout_s, options):
    ENGINES.append(
        CudaEngine(arena, layout, timeout_s=timeout_s, options=options, library=FakeLibrary(),
                   streams=FakeStreams())
    )  # fmt: skip
    return ENGINES[-1]


def use_fake_gpus(patch, *, torch_symm="", nvshmem=""):
    """Both providers work, or have a reason not to; ``auto`` sees GPUs.

    Args:
        patch: a monkeypatch.
        torch_symm, nvshmem: reasons.
    """
    ENGINES.clear()
    patch.setattr(provider_choice, "TorchSymmHeap", fake_heap("torch_symm", torch_symm))
    patch.setattr(provider_choice, "NvshmemHeap", fake_heap("nvshmem", nvshmem))
    patch.setattr(provider_choice, "CudaEngine", fake_engine)
    patch.setattr(provider_choice, "why_no_peer_access", lambda places, rank: "")
    patch.setattr(GpuPlace, "here", classmethod(lambda cls, device: cls("machine", "gpu")))
    patch.setattr(cuda_library_load, "why_not", lambda device: "")
    patch.setattr(runtime_transport, "_device", lambda transport, group: FakeDevice())


class FakeDevice:
    """Says ``cuda`` to those who ask for the kind; its memory is that of the CPU."""

    type = "cuda"

    def __str__(self):
        return "cuda:0"
