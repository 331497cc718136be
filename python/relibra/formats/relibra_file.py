"""Format `relibra`: our own trace files, `.npz` files with sequences, and plain arrays.

A trace file is safetensors: `ids` `[rows, L, K]` in a narrow dtype, `valid` bool `[rows]`,
`cu_seqlens` int64 `[samples + 1]`, and the model in the metadata. `ids` is mapped, not read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relibra.array_files import ArrayFileError, check_shape, clip, whole_file
from relibra.formats.carrier import Batch, Delivery, Part
from relibra.formats.npz import list_npz, read_npz
from relibra.id_arrays import as_ids, check_starts
from relibra.limits import MAX_EXPERTS, MAX_LAYERS
from relibra.trace import RoutingTrace
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "relibra"
NEEDS = (
    "a .safetensors trace file, an .npz file with routed_experts and cu_seqlens, or an integer "
    "array or tensor [rows, layers, K]"
)

_KIND = "relibra_trace"
_VERSION = "1"
_DTYPES = {
    "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "I32": np.int32,
    "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


def matches(payload: object) -> bool:
    """Whether `read` takes this payload, judged by kind, suffix and member names only.

    Args:
        payload: a `Path`, an array or tensor, or anything else.
    """
    if isinstance(payload, Path):
        if payload.suffix == ".npz":
            return {"routed_experts", "cu_seqlens"} <= set(list_npz(payload))
        return payload.suffix == ".safetensors"
    return isinstance(payload, np.ndarray | torch.Tensor) and payload.ndim == 3


def read(payload: object, label: str = "payload") -> Delivery:
    """Takes the rows of a payload without looking at the ids.

    Args:
        payload: what `matches` accepts.
        label: name of the payload, for messages.

    Raises:
        OSError: no such file.
        TraceError: a damaged or foreign file.
    """
    if isinstance(payload, Path) and payload.suffix == ".safetensors":
        return _read_safetensors(payload)
    if isinstance(payload, Path):
        arrays = read_npz(payload, ("routed_experts", "cu_seqlens"))
        rows = as_ids("routed_experts", _integers("routed_experts", arrays["routed_experts"]))
        starts = check_starts(_integers("cu_seqlens", arrays["cu_seqlens"]), len(rows))
        return Batch(rows, starts)
    if isinstance(payload, torch.Tensor):
        payload = payload.detach().cpu()
        if payload.is_floating_point() or payload.is_complex():
            raise _no_integers(label, str(payload.dtype))
        payload = payload.numpy()
    if not isinstance(payload, np.ndarray):
        raise TraceError(
            f"field_missing: {label}: need {NEEDS}, got {type(payload).__name__}",
            code="field_missing",
        )
    return (Part(_integers(label, payload), label),)


def save_trace(trace: RoutingTrace, path: str | Path) -> None:
    """Writes a trace file; it appears under its name only when it is complete.

    Args:
        trace: what to write.
        path: file to write; an existing one is replaced.
    """
    tensors = {
        "ids": np.ascontiguousarray(trace.ids),
        "valid": np.ascontiguousarray(trace.valid),
        "cu_seqlens": np.ascontiguousarray(trace.cu_seqlens),
    }
    metadata = {
        "kind": _KIND,
        "version": _VERSION,
        "moe_layers": json.dumps(trace.moe_layers),
        "num_experts": json.dumps(trace.num_experts),
        "has_last_row": json.dumps(trace.has_last_row),
        "notes": json.dumps(trace.notes),
    }
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata)


def load_trace(path: str | Path) -> RoutingTrace:
    """Maps a trace file.

    Args:
        path: the file.

    Raises:
        OSError: no such file.
        TraceError: a damaged or foreign file, or one that does not hold what it declares.
    """
    batch = _read_safetensors(Path(path))
    assert batch.moe_layers is not None
    assert batch.num_experts is not None
    return RoutingTrace(
        batch.rows,
        batch.valid,  # type: ignore[arg-type]
        batch.cu_seqlens,
        moe_layers=batch.moe_layers,
        num_experts=batch.num_experts,
        has_last_row=batch.has_last_row,
        notes=batch.notes,
    )


def _read_safetensors(path: Path) -> Batch:
    """Maps the tensors of a trace file and reads its metadata."""
    tensors, metadata = _map_tensors(path)
    if metadata.get("kind") != _KIND or metadata.get("version") != _VERSION:
        raise TraceError(
            f"field_missing: {path.name}: need metadata kind '{_KIND}' and version '{_VERSION}', "
            f"got {metadata.get('kind')!r} and {metadata.get('version')!r} with tensors "
            f"{', '.join(tensors) or 'none'}",
            code="field_missing",
        )
    missing = {"ids", "valid", "cu_seqlens"} - set(tensors)
    if missing:
        raise TraceError(
            f"field_missing: {path.name}: need tensors ids, valid, cu_seqlens, got "
            f"{', '.join(tensors)}",
            code="field_missing",
        )
    ids = as_ids("ids", _integers("ids", tensors["ids"]))
    valid = np.array(tensors["valid"])
    if valid.dtype != np.bool_ or valid.shape != ids.shape[:1]:
        raise _bad_field(path, "valid", f"bool [{len(ids)}]", f"{valid.dtype} {valid.shape}")
    valid = valid.view(np.uint8) != 0  # a damaged file may hold other bytes than 0 and 1
    layers, num_experts, has_last_row, notes = (
        _json(path, metadata, name)
        for name in ("moe_layers", "num_experts", "has_last_row", "notes")
    )
    _, num_layers, top_k = ids.shape
    whole = isinstance(layers, list) and all(
        type(one) is int and 0 <= one < MAX_LAYERS for one in layers
    )
    if not whole or len(layers) != num_layers or layers != sorted(set(layers)):
        need = f"{num_layers} rising layer numbers below {MAX_LAYERS}"
        raise _bad_field(path, "moe_layers", need, layers)
    if type(num_experts) is not int or num_experts < top_k:
        raise _bad_field(path, "num_experts", f"an integer of at least K = {top_k}", num_experts)
    if num_experts > MAX_EXPERTS:
        raise _bad_field(path, "num_experts", f"at most {MAX_EXPERTS}", num_experts)
    if type(has_last_row) is not bool:
        raise _bad_field(path, "has_last_row", "true or false", has_last_row)
    if not isinstance(notes, list) or not all(isinstance(one, str) for one in notes):
        raise _bad_field(path, "notes", "a list of sentences", notes)
    starts = check_starts(np.array(_integers("cu_seqlens", tensors["cu_seqlens"])), len(ids))
    return Batch(ids, starts, valid, has_last_row, tuple(layers), num_experts, tuple(notes))


def _map_tensors(path: Path) -> tuple[dict[str, npt.NDArray[Any]], Mapping[str, str]]:
    """Arrays of a safetensors file that read from disk when they are used, and its metadata."""
    try:
        # The library checks the header, the bounds of every tensor and the length of the file.
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            names = list(file.keys())
    except SafetensorError as error:
        raise TraceError(
            f"bad_encoding: {path.name}: need a whole safetensors file, got {error}",
            code="bad_encoding",
        ) from None
    with path.open("rb") as raw:
        header_bytes = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(header_bytes))
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name in names:
        entry = header[name]
        if entry["dtype"] not in _DTYPES:
            raise TraceError(
                f"dtype: {path.name}: {name}: need integers, got {entry['dtype']}", code="dtype"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        try:
            check_shape(shape, np.dtype(dtype))
        except ArrayFileError as error:
            raise TraceError(
                f"bad_encoding: {path.name}: {name}: {error}", code=error.code
            ) from None
        if 0 in shape:  # a mapping cannot be empty
            tensors[name] = np.zeros(shape, dtype)
            continue
        offset = 8 + header_bytes + entry["data_offsets"][0]
        tensors[name] = np.memmap(path, dtype, "r", offset, shape).view(np.ndarray)
    return tensors, metadata


def _json(path: Path, metadata: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(metadata[name])
    except (KeyError, ValueError, RecursionError):
        raise _bad_field(path, name, "JSON", metadata.get(name)) from None


def _bad_field(path: Path, name: str, need: str, got: object) -> TraceError:
    return TraceError(
        f"bad_encoding: {path.name}: {name}: need {need}, got {clip(repr(got))}",
        code="bad_encoding",
    )


def _integers(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iu":
        raise _no_integers(name, str(array.dtype))
    return array


def _no_integers(name: str, got: str) -> TraceError:
    return TraceError(f"dtype: {name}: need integers of 8 to 64 bits, got {got}", code="dtype")
