"""Reading `.npz` files from strangers, with TraceError; see `relibra.array_files`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from relibra.array_files import ArrayArchive, ArrayFileError, Member, clip
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt


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
    try:
        with ArrayArchive(path) as archive:
            return archive.members
    except ArrayFileError as error:
        raise _refused(path, error) from None


def read_npz(path: str | Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Some arrays of an `.npz` file; nothing else in it is read.

    Args:
        path: the file.
        names: members to read, of 8 GiB together at most.

    Returns:
        The arrays by name.

    Raises:
        OSError: no such file.
        TraceError: as `list_npz`, or code `field_missing`.
    """
    try:
        with ArrayArchive(path) as archive:
            for name in names:
                if name not in archive.members:
                    raise TraceError(
                        f"field_missing: {Path(path).name}: need {name}, got "
                        f"{_names(archive.members)}",
                        code="field_missing",
                    )
            return archive.read(names)
    except ArrayFileError as error:
        raise _refused(path, error) from None


def _refused(path: str | Path, error: ArrayFileError) -> TraceError:
    return TraceError(f"{error.code}: {Path(path).name}: {error}", code=error.code)


def _names(members: Mapping[str, Member]) -> str:
    """The first few names."""
    more = f" and {len(members) - 6} more" if len(members) > 6 else ""
    return (clip(", ".join(list(members)[:6])) if members else "no arrays") + more
