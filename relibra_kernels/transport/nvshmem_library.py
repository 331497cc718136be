"""NVSHMEM's host library as one process sees it: version, state, owner, and the few calls used.

NVSHMEM is one instance a process. It may be somebody else's (PyTorch, DeepEP, the user's own
code): then it is used as it is and never finalised here. What it would do to the process on a
failure is kept away: ``nvshmemx_init_attr`` calls ``exit``, so the form of it that returns a code
is used; and release 3.4.5 returns success from a failed initialisation, so the state is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_VERSION = (3, 4, 5)
END_VERSION = (3, 9, 0)  # the first that was not tried
INITIALIZED = 2  # init_status: 0 nothing, 1 bootstrapped only, 2 and more usable
REMEDY = "pip install nvshmem4py-cu13 nvidia-nvshmem-cu13"

_initialized_here: NvshmemLibrary | None = None  # that made the instance of this process
_num_allocations = 0


class NvshmemError(RuntimeError):
    """NVSHMEM is missing, unsuitable, or refused a call; says what to do about it.

    Example:
        >>> issubclass(NvshmemError, RuntimeError)
        True
    """


class NvshmemLibrary:
    """The calls, over the bindings of nvshmem4py.

    Args:
        bindings: the module ``nvshmem.bindings``, or a stand-in for tests.
    """

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    @classmethod
    def open(cls) -> NvshmemLibrary:
        """Loads the bindings and the host library; initialises nothing.

        Raises:
            NvshmemError: not installed, does not load, or not a release that is supported.
        """
        try:
            bindings = importlib.import_module("nvshmem.bindings")
            if loaded_path() is None:  # another copy would be another instance
                finder = importlib.import_module("cuda.pathfinder")
                finder.load_nvidia_dynamic_lib("nvshmem_host")
        except (ImportError, OSError, RuntimeError) as error:
            text = " ".join(str(error).split())[:200]
            raise NvshmemError(
                f"NVSHMEM does not load ({type(error).__name__}: {text}): {REMEDY}"
            ) from error
        library = cls(bindings)
        library.check_version()
        return library

    def version(self) -> tuple[int, int, int]:
        """Of the host library, such as (3, 8, 0)."""
        parts = [ctypes.c_int() for _ in range(3)]
        self._bindings.vendor_get_version_info(*map(ctypes.addressof, parts))
        return parts[0].value, parts[1].value, parts[2].value

    def check_version(self) -> None:
        """Raises unless the release is one of those tried.

        Raises:
            NvshmemError: names the release and those that are supported.
        """
        found = self.version()
        if not MIN_VERSION <= found < END_VERSION:
            need = f"{_dotted(MIN_VERSION)} to below {_dotted(END_VERSION)}"
            raise NvshmemError(f"NVSHMEM: need {need}, got {_dotted(found)}: {REMEDY}")

    def status(self) -> int:
        """State of the instance of this process, see `INITIALIZED`."""
        return int(self._bindings.init_status())

    def my_pe(self) -> int:
        """This process's number inside the instance."""
        return int(self._bindings.my_pe())

    def n_pes(self) -> int:
        """Number of processes of the instance."""
        return int(self._bindings.n_pes())

    def unique_id(self) -> bytes:
        """A new identity for an instance, made by one process and given to all."""
        made = self._bindings.uniqueid()
        self._call("nvshmemx_get_uniqueid", self._bindings.get_uniqueid, made.ptr)
        return ctypes.string_at(made.ptr, self._id_bytes())

    def initialize(self, rank: int, num_ranks: int, unique_id: bytes, *, multicast: bool) -> None:
        """Makes the instance of this process; collective.

        Args:
            rank: becomes the PE number.
            num_ranks: becomes the number of PEs.
            unique_id: of `unique_id`, from one of them.
            multicast: whether NVLink SHARP may be set up.

        Raises:
            NvshmemError: a call returned an error, or the instance is not usable afterwards.
        """
        global _initialized_here
        bindings = self._bindings
        if len(unique_id) != self._id_bytes():
            raise NvshmemError(
                f"unique_id: need {self._id_bytes()} bytes, got {len(unique_id)}: all ranks need "
                f"the same NVSHMEM release"
            )
        identity, attributes = bindings.uniqueid(), bindings.InitAttr()
        ctypes.memmove(identity.ptr, unique_id, len(unique_id))
        with _environment(multicast):
            arguments = (rank, num_ranks, identity.ptr, attributes.ptr)
            self._call(
                "nvshmemx_set_attr_uniqueid_args", bindings.set_attr_uniqueid_args, *arguments
            )
            flags = int(bindings.Flags.INIT_WITH_UNIQUEID)
            self._call(
                "nvshmemx_hostlib_init_attr", bindings.hostlib_init_attr, flags, attributes.ptr
            )
        self.check_usable("the initialisation returned, but")
        _initialized_here = self

    def check_usable(self, when: str) -> None:
        """Raises unless memory can be allocated.

        Args:
            when: begins the message.

        Raises:
            NvshmemError: names the state.
        """
        if (status := self.status()) < INITIALIZED:
            raise NvshmemError(
                f"{when} NVSHMEM's init_status is {status} (need {INITIALIZED} or more; 1 is "
                f"bootstrapped without a usable GPU): set NVSHMEM_DEBUG=INFO to see why"
            )

    def malloc(self, nbytes: int) -> int:
        """Address of symmetric memory; collective over all PEs.

        Raises:
            NvshmemError: no memory.
        """
        global _num_allocations
        address = int(self._call("nvshmem_malloc", self._bindings.malloc, nbytes) or 0)
        if address == 0:
            raise NvshmemError(f"nvshmem_malloc: no symmetric memory of {nbytes} bytes")
        _num_allocations += 1
        return address

    def free(self, address: int) -> None:
        """Gives symmetric memory back; collective over all PEs."""
        global _num_allocations
        self._call("nvshmem_free", self._bindings.free, address)
        _num_allocations -= 1

    def peer_address(self, address: int, pe: int) -> int:
        """The same memory of another PE as this GPU addresses it, 0 where it cannot."""
        return int(self._bindings.ptr(address, pe) or 0)

    def multicast_address(self, address: int, num_ranks: int) -> int:
        """Where one store reaches all PEs of this machine.

        Args:
            address: of symmetric memory.
            num_ranks: PEs that the store must reach, no more and no fewer.

        Returns:
            0 where there is no multicast, or where it would reach others.
        """
        team = int(self._bindings.Team_id.TEAM_NODE)
        if int(self._bindings.team_n_pes(team)) != num_ranks:
            return 0
        return int(self._bindings.mc_ptr(team, address) or 0)

    def tensor(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """Symmetric memory of this PE as uint8 ``[nbytes]`` on its GPU."""
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=device)

    def finalize_own(self) -> bool:
        """Ends the instance if, and only if, it was made here; collective over all PEs.

        Returns:
            Whether it was.
        """
        global _initialized_here
        if not _initialized_here:
            return False
        self._call("nvshmemx_hostlib_finalize", self._bindings.hostlib_finalize)
        _initialized_here = None
        return True

    def _id_bytes(self) -> int:
        return int(self._bindings.uniqueid_dtype.itemsize)

    def _call(self, name: str, function: Any, *arguments: int) -> Any:
        """A call whose error code the bindings raise; its text alone would name no function."""
        try:
            return function(*arguments)
        except Exception as error:  # the bindings' error derives from Exception alone
            raise NvshmemError(f"{name} failed: {type(error).__name__}: {error}") from error


class _DeviceBytes:
    """Device memory for ``torch.as_tensor``, which then makes no copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@contextlib.contextmanager
def _environment(multicast: bool) -> Iterator[None]:
    """What NVSHMEM reads while it starts; a value that the user has set stays."""
    wanted = {"NVSHMEM_REMOTE_TRANSPORT": "none"}  # only peers on this machine
    if not multicast:
        wanted["NVSHMEM_DISABLE_NVLS"] = "1"
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def loaded_path() -> str | None:
    """File of the NVSHMEM host library in this process; None where none is loaded.

    Example:
        >>> loaded_path() is None or "libnvshmem_host" in loaded_path()
        True
    """
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if "libnvshmem_host.so" in line), None)


def finalize_unused() -> bool:
    """Ends the instance if it was made here and all its memory was given back; collective then.

    All PEs have left `NvshmemLibrary.free` together, or none has allocated; memory that was
    abandoned after an error keeps the instance until the process ends.

    Returns:
        Whether it was ended.

    Example:
        >>> finalize_unused()
        False
    """
    if not _initialized_here or _num_allocations:
        return False
    return _initialized_here.finalize_own()


def owner() -> str:
    """Who owns the NVSHMEM instance of this process, in words; loads and starts nothing.

    Example:
        >>> owner().split(":")[0]
        'nobody'
    """
    if (path := loaded_path()) is None:
        return "nobody: not loaded in this process"
    library = ctypes.CDLL(path)
    status = int(library.nvshmemx_init_status())
    if status < INITIALIZED:
        return f"nobody: loaded, init_status {status}"
    who = "ReLibra" if _initialized_here else "other code in this process"
    return f"{who}: PE {library.nvshmem_my_pe()} of {library.nvshmem_n_pes()}"


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
