"""pytest plugin of a process with AddressSanitizer: the native library is the instrumented build.

The folder of the builds is the first one on PYTHONPATH; see tests/cuda/test_replica_sync_asan.py.
"""

import importlib
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import plain_memory

NAME = "relibra_kernels._replica_sync"
FILE = plain_memory.__file__.replace("plain_memory", "_replica_sync")

_run = threading.Thread.run


def run(thread):
    plain_memory.install()
    _run(thread)


def load():
    spec = spec_from_file_location(NAME, FILE, loader=ExtensionFileLoader(NAME, FILE))
    sys.modules[NAME] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


plain_memory.install()
threading.Thread.run = run
load()
assert importlib.import_module(NAME).__file__ == FILE
