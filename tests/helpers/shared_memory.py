"""Segments of shared memory that nobody gives back; tests of other processes make some too."""

import time
from pathlib import Path

SHM = Path("/dev/shm")


def leaked_segments(patience_s=20.0):
    """Names that are there now and stay; a set-up in flight unlinks its own within moments."""
    deadline, names = time.monotonic() + patience_s, _names()
    while names and time.monotonic() < deadline:
        time.sleep(0.02)
        names &= _names()
    return sorted(names)


def _names():
    return {path.name for path in SHM.glob("relibra-*")}
