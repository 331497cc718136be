"""Reading `.npz` files from strangers: sizes are checked before memory of that size is taken."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What the libraries raise on a damaged file; a ZipFile seeks to where a damaged index points.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


class Member(NamedTuple):
    """Shape and dtype that one member of the file declares."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def list_npz(path: str | Path) -> Mapping[str, Member]:
    """Members of an `.npz` file, read from their headers only.

    Args:
        path: the file.

    Returns:
        Shape and dtype by name.

    Raises:
        OSError: no such file.
        TraceError: code `bad_encoding`, no zip file, a damaged one, or a member whose size is not
            what its header declares; code `dtype`, pickled objects.
    """
    with Path(path).open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return {
                    info.filename.removesuffix(".npy"): _member(archive, info)
                    for info in archive.infolist()
                    if info.filename.endswith(".npy")
                }
        except _DAMAGE as error:
            if isinstance(error, TraceError):
                raise
            raise _broken(path, f"a zip file, got {_clip(error)}") from None


def read_npz(path: str | Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Some arrays of an `.npz` file.

    Args:
        path: the file.
        names: members to read.

    Returns:
        The arrays by name.

    Raises:
        OSError: no such file.
        TraceError: as `list_npz`, or code `field_missing`.
    """
    members = list_npz(path)
    for name in names:
        if name not in members:
            raise TraceError(
                f"field_missing: {Path(path).name}: need {name}, got {_names(members)}",
                code="field_missing",
            )
    with Path(path).open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in names}
        except _DAMAGE as error:
            raise _broken(path, f"whole arrays, got {_clip(error)}") from None


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    """Checks one header against the bytes that follow it."""
    with archive.open(info) as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read_header(file)
        except (ValueError, KeyError) as error:
            raise _broken(info.filename, f"a .npy header, got {_clip(error)}") from None
        if dtype.hasobject:
            raise TraceError(
                f"dtype: {info.filename}: need plain numbers, got pickled objects", code="dtype"
            )
        num_bytes = math.prod(int(size) for size in shape) * dtype.itemsize
        if num_bytes != info.file_size - file.tell():
            raise _broken(
                info.filename,
                f"{num_bytes} bytes for {dtype} {list(shape)}, got {info.file_size - file.tell()}",
            )
    return Member(tuple(int(size) for size in shape), dtype)


def _broken(name: str | Path, what: str) -> TraceError:
    return TraceError(f"bad_encoding: {Path(name).name}: need {what}", code="bad_encoding")


def _names(members: Mapping[str, Member]) -> str:
    """The first few names."""
    more = f" and {len(members) - 6} more" if len(members) > 6 else ""
    return (", ".join(list(members)[:6]) or "no arrays") + more


def _clip(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
