"""Arrays in `.npy` and `.npz` files from strangers.

Nothing is unpickled, and no size that a file declares is believed: it is compared with the bytes
that are there before memory of that size is taken.
"""

from __future__ import annotations

import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relibra.limits import MAX_ARRAY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

# NumPy reads headers of at most 10,000 characters, but takes the memory that a longer one asks for.
_HEAD_BYTES = 1 << 14
_MAX_MEMBERS = 1 << 12
# Deflate stores at most 258 bytes in 2 bits.
_MAX_DEFLATE_RATIO = 1032
# What the libraries raise on a damaged file; a ZipFile seeks to where a damaged index points.
_DAMAGE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class ArrayFileError(ValueError):
    """A file of arrays that cannot be used.

    Args:
        message: what was needed and what was found.
        code: `"bad_encoding"`, or `"dtype"` for pickled objects and records.

    Example:
        >>> ArrayFileError("need a zip file, got 3 bytes").code
        'bad_encoding'
    """

    def __init__(self, message: str, code: str = "bad_encoding") -> None:
        super().__init__(message)
        self.code = code


class Member(NamedTuple):
    """What the header of an array declares.

    Args:
        shape: sizes.
        dtype: without objects and records.
        is_fortran: whether the first index runs fastest.
        offset: bytes of the header.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, below 2^63."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> npt.NDArray[Any]:
        """The array of a header without bytes behind it."""
        return np.zeros(self.shape, self.dtype)


def read_header(head: bytes) -> Member:
    """Parses the header of a `.npy` file.

    Args:
        head: the first 16 KiB of the file, or all of it.

    Raises:
        ArrayFileError: no header, pickled objects, records, or sizes that no array can have.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.zeros((2, 3), np.int16))
        >>> read_header(file.getvalue())[:3]
        ((2, 3), dtype('int16'), False)
    """
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read(file)
    # The header is a Python literal, which a parser of Python reads, whatever that then raises.
    except Exception as error:
        raise ArrayFileError(f"need a .npy header, got {clip(error)}") from None
    if dtype.hasobject:
        raise ArrayFileError("need plain numbers, got pickled objects", "dtype")
    if dtype.names is not None or dtype.subdtype is not None:
        raise ArrayFileError(f"need plain numbers, got records {clip(dtype)}", "dtype")
    check_shape(shape, dtype)
    return Member(shape, dtype, is_fortran, file.tell())


def check_shape(shape: Iterable[Any], dtype: np.dtype[Any]) -> None:
    """Refuses sizes that no array can have, also behind a size of 0.

    Args:
        shape: sizes that a file declares.
        dtype: of the elements.

    Raises:
        ArrayFileError: a size that is no integer or negative, or 2^63 bytes and more.

    Example:
        >>> check_shape((2, -1), np.dtype(np.int32))
        Traceback (most recent call last):
        relibra.array_files.ArrayFileError: need sizes of an array of int32, got [2, -1]
    """
    sizes = list(shape)
    whole = all(type(size) is int and size >= 0 for size in sizes)
    if whole and len(sizes) <= 16:
        num_bytes = math.prod(max(size, 1) for size in sizes) * max(dtype.itemsize, 1)
        if num_bytes < 1 << 63:
            return
    raise ArrayFileError(f"need sizes of an array of {dtype}, got {clip(sizes)}")


def map_npy(path: str | Path) -> npt.NDArray[Any]:
    """Maps a `.npy` file, read-only.

    Args:
        path: the file.

    Raises:
        OSError: no such file.
        ArrayFileError: as `read_header`, or a file that ends before its array does.
    """
    path = Path(path)
    with path.open("rb") as file:
        member = read_header(file.read(_HEAD_BYTES))
    held = path.stat().st_size - member.offset
    if member.num_bytes > held:
        raise ArrayFileError(_need_bytes(member, held))
    if member.num_bytes == 0:  # a mapping cannot be empty
        return member.empty()
    order: Any = "F" if member.is_fortran else "C"
    mapped = np.memmap(path, member.dtype, "r", member.offset, member.shape, order)
    return mapped.view(np.ndarray)


class ArrayArchive:
    """An open `.npz` file; the header of every array has been checked.

    Args:
        path: the file.

    Raises:
        OSError: no such file.
        ArrayFileError: no zip file, a damaged one, an array twice, or sizes that the bytes of the
            file do not bear out.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115  # closed by __exit__
        try:
            self._members = self._open(Path(path).stat().st_size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ArrayArchive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def members(self) -> Mapping[str, Member]:
        """Headers by name, without the suffix `.npy`; other files in the archive are left out."""
        return self._members

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of all files in the archive."""
        return tuple(self._zip.namelist())

    def read(self, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
        """Reads arrays, of 8 GiB together at most.

        Args:
            names: keys of `members`.

        Returns:
            Read-only arrays by name.

        Raises:
            ArrayFileError: too much, or damaged bytes.
        """
        names = list(names)
        total = sum(self._members[name].num_bytes for name in names)
        if total > MAX_ARRAY_BYTES:
            raise ArrayFileError(
                f"need at most {MAX_ARRAY_BYTES} bytes in {clip(', '.join(names))}, got {total}"
            )
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> npt.NDArray[Any]:
        try:
            with self._zip.open(f"{name}.npy") as file:
                array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
                file.read(1)  # the end of the file, where its checksum is compared
        except _DAMAGE as error:
            raise ArrayFileError(f"need a whole array {name}, got {clip(error)}") from None
        array.flags.writeable = False
        return array

    def _open(self, file_bytes: int) -> dict[str, Member]:
        try:
            self._zip = zipfile.ZipFile(self._file)
            infos = [info for info in self._zip.infolist() if info.filename.endswith(".npy")]
        except _DAMAGE as error:
            raise ArrayFileError(f"need a zip file, got {clip(error)}") from None
        names = [info.filename for info in infos]
        if len(set(names)) != len(names):
            raise ArrayFileError(f"need every array once, got {clip(sorted(names))}")
        if len(names) > _MAX_MEMBERS:
            raise ArrayFileError(f"need at most {_MAX_MEMBERS} arrays, got {len(names)}")
        stored = sum(info.compress_size for info in infos)
        if stored > file_bytes:  # members that share their bytes
            raise ArrayFileError(f"need arrays of {file_bytes} bytes in all, got {stored}")
        members = {}
        for info in infos:
            try:
                members[info.filename.removesuffix(".npy")] = self._member(info)
            except ArrayFileError as error:
                raise ArrayFileError(f"{clip(info.filename)}: {error}", error.code) from None
        return members

    def _member(self, info: zipfile.ZipInfo) -> Member:
        """Checks one header against the bytes that follow it."""
        ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MAX_DEFLATE_RATIO}
        if info.compress_type not in ratio:
            raise ArrayFileError(f"need stored or deflated bytes, got type {info.compress_type}")
        most = ratio[info.compress_type] * info.compress_size
        if info.file_size > most:
            raise ArrayFileError(
                f"need at most {most} bytes of {info.compress_size} compressed ones, got "
                f"{info.file_size}"
            )
        try:
            with self._zip.open(info) as file:
                head = file.read(_HEAD_BYTES)
        except _DAMAGE as error:
            raise ArrayFileError(f"need a .npy header, got {clip(error)}") from None
        member = read_header(head)
        if member.num_bytes != info.file_size - member.offset:
            raise ArrayFileError(_need_bytes(member, info.file_size - member.offset))
        return member


def check_output(path: str | Path) -> Path:
    """The path, if a file may appear there; a device or a pipe would be replaced, so none may be.

    Args:
        path: the file that is to appear.

    Raises:
        OSError: `path` is a folder or another thing that is no file, or lies in no folder, or the
            folder cannot be written to.

    Example:
        >>> check_output("plan.npz").name
        'plan.npz'
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"need a folder {path.parent} to write {path.name}, got none")
    if path.is_dir():
        raise IsADirectoryError(f"need a file to write, got the folder {path}")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"need a plain file to write, got {path}, a device or a pipe")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"need a folder that can be written to, got {path.parent}")
    return path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to; what is there replaces `path` when the block ends well.

    Args:
        path: the file that is to appear.

    Raises:
        OSError: as `check_output`.

    Example:
        >>> with whole_file("no/such/folder/plan.npz") as partial:
        ...     pass
        Traceback (most recent call last):
        FileNotFoundError: need a folder no/such/folder to write plan.npz, got none
    """
    path = check_output(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def clip(value: object, length: int = 120) -> str:
    """The first line of an error or another value, for messages.

    Args:
        value: anything.
        length: characters at most.

    Example:
        >>> clip("abcdefgh", 6)
        'abc...'
    """
    lines = str(value).splitlines()
    text = lines[0] if lines and lines[0] else type(value).__name__
    return text if len(text) <= length else text[: length - 3] + "..."


def _need_bytes(member: Member, got: int) -> str:
    return f"need {member.num_bytes} bytes for {member.dtype} {list(member.shape)}, got {got}"
