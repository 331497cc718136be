"""A GPU of threads for the CUDA engine: streams run calls first in, first out, later than given.

The library is the host build of the same C ABI, called by ctypes as the CUDA library is. As on a
GPU a kernel reads its items when it runs, while copy engines and waits of streams read them at the
call.
"""

import contextlib
import ctypes
import itertools
import queue
import random
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import torch

from relibra_kernels import native
from relibra_kernels.transport.cuda_library import CudaCallError, SharedLibrary
from relibra_kernels.transport.cuda_library_cubins import RING_BYTES, WAIT_THREADS
from relibra_kernels.transport.cuda_streams import SIDE
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE
from relibra_kernels.transport.sync_types import FAULT, PUSH_ITEM, REDUCE_ITEM, WAIT_ITEM

HANDLES = {}  # as a stream of CUDA is known to a library
_REACHED = {}  # start -> end of memory, still there, that a kernel may touch: pinned, or of the GPU
_numbers = itertools.count(1)
_ON_HOST = 2  # blocks, and threads of a block, of every launch here


def host_library():
    """The host build behind the interface of the CUDA library."""
    return SharedLibrary(Path(native.replica_sync().__file__))


def check_reached(*addresses):
    """Raises for memory of the host that is pageable, which no kernel reaches, or given back."""
    for address in addresses:
        if not any(start <= address < stop for start, stop in list(_REACHED.items())):
            raise AssertionError(f"a kernel would read {address:#x}, which is not pinned memory")


class FakeEvent:
    def __init__(self):
        self.times = []
        self.passed = threading.Event()

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        self.passed.wait()

    def elapsed_time(self, other):
        return 1e3 * (other.times[-1] - self.times[-1])

    def set(self):
        self.times.append(time.perf_counter())
        self.passed.set()


class FakeStream:
    """A thread; every call is late by a random time up to ``lag_s``."""

    def __init__(self, lag_s):
        self.lag_s, self.calls, self.errors = lag_s, queue.SimpleQueue(), []
        self.random = random.Random(7)
        threading.Thread(target=self._main, daemon=True).start()

    def submit(self, call):
        self.calls.put(call)

    def close(self):
        """The thread ends after what it was given."""
        self.calls.put(None)

    def _main(self):
        while True:
            call = self.calls.get()
            if call is None:
                return
            if self.lag_s:
                time.sleep(self.lag_s * self.random.random())
            try:
                call()
            except BaseException as error:
                self.errors.append(error)
            del call


class Caller:
    """A stream that is the caller itself, so that tests can read results at once."""

    errors = ()

    def submit(self, call):
        call()

    def close(self):
        pass


class FakeStreams:
    """`DeviceStreams` of one rank; ``is_late`` gives the compute stream a thread as well."""

    def __init__(self, *, lag_s=0.0, is_late=False):
        self.device = torch.device("cpu")
        self.streams = {name: FakeStream(lag_s) for name in (PUSH, REDUCE, SIDE)}
        self.streams[COMPUTE] = FakeStream(lag_s) if is_late else Caller()
        self.handles = {name: next(_numbers) for name in self.streams}
        HANDLES.update({self.handles[name]: one for name, one in self.streams.items()})

    def current(self):
        return contextlib.nullcontext()

    def handle(self, stream):
        return self.handles[stream]

    def record(self, stream, event=None):
        event = event or FakeEvent()
        event.passed.clear()
        self.streams[stream].submit(event.set)
        return event

    def wait(self, stream, event):
        self.streams[stream].submit(event.passed.wait)

    def clock(self, stream):
        return self.record(stream)

    def pinned(self, num_bytes):
        memory = np.zeros(num_bytes, np.uint8)
        start = memory.ctypes.data
        _REACHED[start] = start + num_bytes
        weakref.finalize(memory, _REACHED.pop, start)
        return torch.from_numpy(memory)

    zeros = pinned

    def copy(self, stream, target, source):
        self.streams[stream].submit(lambda: target.copy_(source))

    def drain(self):
        for name in self.streams:
            self.record(name).synchronize()

    def close(self):
        """Ends the threads; nothing is submitted any more."""
        for name, one in self.streams.items():
            one.close()
            HANDLES.pop(self.handles[name], None)

    @property
    def errors(self):
        return [error for one in self.streams.values() for error in one.errors]


class FakeLibrary:
    """Calls of the host build on fake streams.

    Args:
        refuses: names of functions that return "not supported".
    """

    name = "fake"

    def __init__(self, refuses=()):
        self.host, self.refuses, self.calls = host_library(), set(refuses), []

    def _later(self, stream, name, items, *arguments):
        self.calls.append(name)
        if name in self.refuses:
            raise CudaCallError(f"rs_{name}", 801)

        def call():
            if not isinstance(items, Held):
                check_reached(items)  # still
            with contextlib.suppress(CudaCallError if name == "wait" else ()):  # what was found
                getattr(self.host, name)(items, *arguments, 0)

        HANDLES[stream].submit(call)

    def push(self, items, n, fault, blocks, threads, stream):
        assert 1 <= blocks <= 1024 >= threads >= 1
        kept = snapshot(fault, FAULT)
        check_push(items, n)
        self._later(stream, "push", items, n, Held(kept), _ON_HOST, _ON_HOST)

    def push_tma(self, items, n, fault, blocks, stream):
        check_push(items, n)
        self._later(stream, "push_tma", items, n, Held(snapshot(fault, FAULT)), blocks)

    def push_copy_engine(self, items, n, fault, stream):
        read = Held(snapshot(items, PUSH_ITEM, n))
        self._later(stream, "push_copy_engine", read, n, Held(snapshot(fault, FAULT)))

    def wait(self, items, n, use, op, timeout_ns, fault, stream):
        kept = Held(snapshot(fault, FAULT))
        check_reached(items, *(int(kept.array[0][name]) for name in ("record", "peer_aborts")))
        self._later(stream, "wait", items, n, use, op, timeout_ns, kept)

    def wait_values(self, items, n, stream):
        self._later(stream, "wait_values", Held(snapshot(items, WAIT_ITEM, n)), n)

    def publish(self, items, n, fault, stream):
        check_reached(items)
        self._later(stream, "publish", items, n, Held(snapshot(fault, FAULT)))

    def reduce(self, items, n, fault, blocks, threads, stream):
        kept = Held(snapshot(fault, FAULT))
        check_reached(items, *snapshot(items, REDUCE_ITEM, n)["grads"].tolist())
        self._later(stream, "reduce", items, n, kept, _ON_HOST, _ON_HOST)


def check_push(items, n):
    """Items and counters of a push by SMs."""
    read = snapshot(items, PUSH_ITEM, n)
    check_reached(items, *read["arrivals"][read["full"] != 0].tolist())


class Held(ctypes.c_void_p):
    """Address of an array, which it keeps alive."""

    def __init__(self, array):
        super().__init__(array.ctypes.data)
        self.array = array


def snapshot(address, dtype, n=1):
    """What lies at an address now."""
    raw = (ctypes.c_uint8 * (dtype.itemsize * n)).from_address(address)
    return np.frombuffer(bytearray(raw), dtype)


class FakeDriver:
    """Loads "cubins" whose kernels are the host bodies, from the argument arrays of launches."""

    name = "fake driver"
    KERNELS = ("push", "push_tma", "reduce", "wait", "publish")

    def __init__(self, lacks=()):
        self.host, self.lacks, self.shared = host_library(), lacks, {}

    def load(self, path):
        assert path.name.endswith(".fatbin")
        return 77

    def function(self, module, name):
        assert module == 77
        kernel = name.removeprefix("rs_").removesuffix("_kernel")
        if kernel in self.lacks:
            raise RuntimeError(f"named symbol not found: {name}")
        return self.KERNELS.index(kernel) + 1

    def allow_shared(self, function, num_bytes):
        self.shared[function] = num_bytes

    def launch(self, function, blocks, threads, shared, stream, arguments):
        kernel = self.KERNELS[function - 1]
        types = [ctypes.c_uint64, ctypes.c_int32]
        types += [ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64] if kernel == "wait" else []
        places = (ctypes.c_uint64 * (len(types) + 1)).from_address(arguments)
        values = [kind.from_address(at).value for kind, at in zip(types, places, strict=False)]
        fault = Held(snapshot(places[len(types)], FAULT))
        if kernel in ("wait", "publish"):
            assert (blocks, threads, shared) == (1, WAIT_THREADS, 0)
        if kernel == "push_tma":
            assert (threads, shared, self.shared[function]) == (32, RING_BYTES, RING_BYTES)
        grid = {"push": (_ON_HOST,) * 2, "reduce": (_ON_HOST,) * 2, "push_tma": (2,)}
        rest = grid.get(kernel, ())

        def call():
            tolerated = CudaCallError if kernel == "wait" else ()
            with contextlib.suppress(tolerated):
                getattr(self.host, kernel)(*values, fault, *rest, 0)

        HANDLES[stream].submit(call)
