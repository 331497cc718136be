"""Replica synchronisation on the CPU: the bodies of the GPU kernels, run by this process.

Items are C-contiguous arrays `[n]` of the dtypes in `transport/sync_types.py`, `fault` is one item
of `FAULT`; what their addresses name must stay alive during the call. The GIL is released.
TypeError: an array of another shape or item size; ValueError: a value that no call can use. The
module also exports the C ABI of `cuda/replica_sync/c_api.h` for `ctypes.CDLL(module.__file__)`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_Items = npt.NDArray[Any]
_Words = npt.NDArray[np.uint64]

def rs_abi_version() -> int:
    """Version of the C ABI; `sync_types.ABI_VERSION` when both are of one release."""

def push(items: _Items, fault: _Items, blocks: int = 1, threads: int = 1) -> int:
    """Copies every `PUSH_ITEM`, then stores its `full` word; 0."""

def wait(items: _Items, use: int, op: int, timeout_ns: int, fault: _Items) -> int:
    """Waits for every `WAIT_ITEM`; 0, or the `ErrorCode` of this wait or of this rank's record."""

def publish(items: _Items, fault: _Items) -> int:
    """Stores the value of every `PUBLISH_ITEM` with release order; 0."""

def reduce(items: _Items, fault: _Items, blocks: int = 1, threads: int = 1) -> int:
    """Adds the gradients of every `REDUCE_ITEM` to its home, in the order of its list; 0."""

def report(
    fault: _Items,
    code: int,
    op: int,
    use: int,
    peer: int = -1,
    slot: int = -1,
    expected: int = 0,
    observed: int = 0,
) -> None:
    """Writes the error record unless one is there, then the abort word of every rank.

    With code 3, aborted by a peer, only the record is written.
    """

def load_words(addresses: _Words) -> _Words:
    """Words at these addresses, each loaded with acquire order, `[n]`."""

def load_code(record: int) -> int:
    """Code of the `ERROR_RECORD` at this address, loaded with acquire order."""
