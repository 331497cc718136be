"""Arrays of untrusted files: sizes that lie, headers that are no headers, and what is left out."""

import io
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from relibra.array_files import ArrayArchive, ArrayFileError, map_npy, read_header, whole_file

IDS = np.arange(24, dtype=np.int32).reshape(4, 3, 2)


def header(text, version=1):
    """A .npy header with any text in it."""
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode()


def shaped(shape, descr="'<i4'", fortran="False"):
    return header(f"{{'descr':{descr},'fortran_order':{fortran},'shape':{shape}}}\n")


def write_zip(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


HOSTILE = {
    "nested text": header("(" * 9000 + "\n"),
    "open bracket": header("{'descr':\n"),
    "zero byte": header("\x00\n"),
    "bool as size": shaped("(True,2,2)"),
    "negative": shaped("(-1,2,2)"),
    "beyond C long": shaped("(99999999999999999999999,2,2)"),
    "behind a zero": shaped("(0,2305843009213693952,2)"),
    "no tuple": shaped("3"),
    "no dtype": shaped("(1,2,2)", "[]"),
    "wide dtype": shaped("(1,2,2)", "('<i4',(1000000000,))"),
    "objects": shaped("(1,2,2)", "'|O'"),
    "too many axes": shaped(str((1,) * 17)),
    "long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + b" " * 100,
    "version 3": header("{}", version=3),
    "only the magic": b"\x93NUMPY",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.filterwarnings("ignore")
def test_damaged_headers_give_one_error(tmp_path, data):
    data += b"\0" * 64
    (tmp_path / "t.npy").write_bytes(data)
    with pytest.raises(ArrayFileError, match="need "):
        map_npy(tmp_path / "t.npy")
    write_zip(tmp_path / "t.npz", ids=data)
    with pytest.raises(ArrayFileError, match=r"ids.npy: need ") as raised:
        ArrayArchive(tmp_path / "t.npz")
    is_dtype = any(part in data for part in (b"|O", b"[]"))
    assert raised.value.code == ("dtype" if is_dtype else "bad_encoding")


def test_what_numpy_writes_is_read(tmp_path):
    arrays = {
        "c": IDS,
        "f": np.asfortranarray(IDS),
        "big_endian": IDS.astype(">u2"),
        "text": np.array("meta"),
        "none": np.zeros((0, 3), np.int64),
        "bool": IDS > 3,
    }
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "t.npz", **arrays)
        with ArrayArchive(tmp_path / "t.npz") as archive:
            assert {name: one.shape for name, one in archive.members.items()} == {
                name: one.shape for name, one in arrays.items()
            }
            found = archive.read(arrays)
        for name, array in arrays.items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype == array.dtype
            assert not found[name].flags.writeable
    for array in arrays.values():
        np.save(tmp_path / "t.npy", array)
        assert np.array_equal(map_npy(tmp_path / "t.npy"), array)


def test_a_mapped_array_must_be_whole(tmp_path):
    (tmp_path / "t.npy").write_bytes(saved(IDS)[:-1])
    with pytest.raises(ArrayFileError, match=r"need 96 bytes for int32 \[4, 3, 2\], got 95"):
        map_npy(tmp_path / "t.npy")
    np.savez(tmp_path / "t.npz", ids=IDS)
    (tmp_path / "t.npz").rename(tmp_path / "t.npy")  # np.load would take it for an archive
    with pytest.raises(ArrayFileError, match=r"need a \.npy header"):
        map_npy(tmp_path / "t.npy")


def lying_zip(path, declared, compression):
    """The header and the index declare so many bytes; 1,000 of zeros are there."""
    head = shaped((declared // 4, 1, 1))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("ids.npy", head + bytes(1000))
        archive.getinfo("ids.npy").file_size = len(head) + declared
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("declared", [4_000_000, 400_000_000_000])
def test_a_declared_size_that_the_bytes_cannot_hold(tmp_path, compression, declared):
    path = lying_zip(tmp_path / "liar.npz", declared, compression)
    tracemalloc.start()
    with pytest.raises(ArrayFileError, match=r"ids.npy: need at most \d+ bytes of \d+ compressed"):
        ArrayArchive(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_small_lie_is_found_when_the_bytes_end(tmp_path):
    path = lying_zip(tmp_path / "liar.npz", 4000, zipfile.ZIP_DEFLATED)
    with ArrayArchive(path) as archive, pytest.raises(ArrayFileError, match="need a whole array"):
        archive.read(["ids"])


def test_arrays_that_share_their_bytes(tmp_path):
    """An index that lists one member many times makes a large archive of a small file."""
    path = write_zip(tmp_path / "t.npz", a=saved(np.zeros(10_000)), b=saved(np.zeros(10_000)))
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(50):
            archive.writestr(f"{number}.npy", b"")
            info = archive.getinfo(f"{number}.npy")
            twin = archive.getinfo("a.npy")
            for field in ("header_offset", "compress_size", "file_size", "CRC", "compress_type"):
                setattr(info, field, getattr(twin, field))
    with pytest.raises(ArrayFileError, match=r"need arrays of \d+ bytes in all, got"):
        ArrayArchive(path)


def test_a_bomb_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """Each array is honest and deflates well; together they are above the limit."""
    monkeypatch.setattr("relibra.array_files.MAX_ARRAY_BYTES", 1 << 20)
    zeros = saved(np.zeros(1 << 16))
    path = write_zip(tmp_path / "t.npz", a=zeros, b=zeros, c=zeros)
    with ArrayArchive(path) as archive:
        assert set(archive.read(["a"])) == {"a"}
        with pytest.raises(ArrayFileError, match="need at most 1048576 bytes in a, b, c, got 1572"):
            archive.read(["a", "b", "c"])


def test_archives_that_are_refused(tmp_path):
    path = write_zip(tmp_path / "t.npz", zipfile.ZIP_LZMA, ids=saved(IDS))
    with pytest.raises(ArrayFileError, match="need stored or deflated bytes, got type 14"):
        ArrayArchive(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", saved(IDS))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("ids.npy", saved(IDS))
    with pytest.raises(ArrayFileError, match="need every array once"):
        ArrayArchive(path)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4097):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(ArrayFileError, match="need at most 4096 arrays, got 4097"):
        ArrayArchive(path)
    path.write_bytes(b"PK")
    with pytest.raises(ArrayFileError, match="need a zip file"):
        ArrayArchive(path)
    with pytest.raises(FileNotFoundError):
        ArrayArchive(tmp_path / "none.npz")


def test_a_member_without_the_suffix_does_not_stand_in_for_one_with_it(tmp_path):
    path = write_zip(tmp_path / "t.npz", ids=saved(IDS))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("ids", saved(IDS + 1))
    with ArrayArchive(path) as archive:
        assert archive.entries == ("ids.npy", "ids")
        assert np.array_equal(archive.read(["ids"])["ids"], IDS)


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "t.bin"
    with whole_file(path) as partial:
        partial.write_bytes(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"
    with pytest.raises(TypeError), whole_file(path) as partial:
        partial.write_bytes(b"next" + partial.write_bytes(b"part"))
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(IsADirectoryError, match="need a file to write, got the folder"):
        whole_file(tmp_path).__enter__()
    with pytest.raises(FileNotFoundError, match="need a folder .*none to write t.bin, got none"):
        whole_file(tmp_path / "none" / "t.bin").__enter__()
    os.mkfifo(tmp_path / "pipe")  # a device such as /dev/null is as little to be replaced
    with pytest.raises(FileExistsError, match="need a plain file to write, got .*pipe"):
        whole_file(tmp_path / "pipe").__enter__()
    assert (tmp_path / "pipe").is_fifo()


def test_a_header_says_where_the_array_begins():
    assert read_header(saved(IDS)).offset == len(saved(IDS)) - IDS.nbytes
    assert read_header(shaped((2,), fortran="True") + b"12345678").is_fortran
