"""`load_routing`: any carrier of recorded routing to a checked `RoutingTrace`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relibra.array_files import ArrayFileError, map_npy
from relibra.formats import relibra_file, sglang
from relibra.formats.carrier import (
    Batch,
    Delivery,
    Format,
    LastRow,
    LoadRules,
    Missing,
    Suspect,
    TraceModel,
)
from relibra.formats.readings import Rows, split_layers
from relibra.formats.row_checks import check_rows, warn_dense_layers
from relibra.formats.turns import Sample, join_parts
from relibra.id_arrays import take_layers
from relibra.limits import MAX_LAYERS, MAX_TOKENS, layer_tuple
from relibra.trace import RoutingTrace
from relibra_kernels.checks import check_choice, check_int, describe
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable

# In the order in which `auto` asks them. One module a carrier.
FORMATS: tuple[Format, ...] = (relibra_file, sglang)

_SUFFIXES = (".json", ".jsonl", ".npy", ".npz", ".pt", ".txt", ".safetensors")


def load_routing(
    payload: object,
    *,
    format: str = "auto",
    num_layers: int,
    moe_layers: Iterable[int],
    top_k: int,
    num_experts: int,
    num_tokens: int | None = None,
    start: int = 0,
    last_row: LastRow | None = None,
    layer_base: int | None = None,
    missing: Missing = "live",
    suspect: Suspect = "report",
    allow_duplicates: bool = False,
    existing: RoutingTrace | None = None,
) -> RoutingTrace:
    """Reads routing that a rollout recorded, and checks every id of it.

    Nothing in a payload is trusted: nothing is unpickled, sizes are checked before memory is taken,
    and what does not fit the model is refused with the place and the likely cause.

    Args:
        payload: parsed JSON, a list of turns of one sample, JSON or base64 text, an array or
            tensor, or a path (`.json .npy .npz .safetensors`, and what else a format reads).
        format: `"auto"` decides by keys and suffixes; or `"relibra"`, `"sglang"`.
        num_layers: decoder layers of the model, at most 4,096.
        moe_layers: decoder layer numbers of the MoE layers, from 0.
        top_k: K, choices a token.
        num_experts: E, at most 65,536.
        num_tokens: prompt and completion tokens of the sample, at most 2^24, where the payload does
            not say.
        start: row at which the payload (or its first turn) begins, where it does not say.
        last_row: `"keep"` if each sample has a row for its last token, `"drop"` if it has one to
            be dropped; None is the default of the format.
        layer_base: number of the first layer, for formats that number layers ambiguously; neither
            of these two does.
        missing: rows that the payload admits not to have: `"live"` or `"error"`.
        suspect: rows that look wrong (zero, repeated): `"report"` refuses zero rows and warns about
            repeated ones, `"live"` marks both unknown with a warning, `"error"` refuses both.
        allow_duplicates: whether an id may stand twice in a row; then both count.
        existing: rows of the same sample that were loaded before; the payload continues them.

    Returns:
        The trace: MoE layers only, in the dtype and, where possible, the memory of the payload.

    Raises:
        OSError: no such file.
        TypeError, ValueError: an argument that is no description of a model.
        TraceError: a payload that cannot be used; see `code`.

    Example:
        >>> reply = {"meta_info": {"prompt_tokens": 2, "completion_tokens": 1,
        ...     "routed_experts_dtype": "uint8", "routed_experts": "AAECAw=="}}
        >>> model = dict(num_layers=1, moe_layers=[0], top_k=2, num_experts=4)
        >>> load_routing(reply, **model).layer(0).tolist()
        [[0, 1], [2, 3]]
    """
    check_int("num_layers", num_layers, minimum=1, maximum=MAX_LAYERS)
    model = TraceModel(num_layers, layer_tuple("moe_layers", moe_layers), top_k, num_experts)
    rules = LoadRules(last_row, missing, suspect, allow_duplicates)
    check_int("start", start, minimum=0, maximum=MAX_TOKENS)
    if num_tokens is not None:
        check_int("num_tokens", num_tokens, minimum=1, maximum=MAX_TOKENS)
    if layer_base is not None:
        check_int("layer_base", layer_base, minimum=0)
    if existing is not None and not isinstance(existing, RoutingTrace):
        raise TypeError(f"existing: need a RoutingTrace, got {describe(existing)}")
    delivery = read_payload(payload, format)
    if isinstance(delivery, Batch):
        return trace_from_batch(delivery, model, rules, num_tokens)
    held = None if existing is None else _sample_of(existing, model)
    sample = join_parts(delivery, model, rules, start=start, num_tokens=num_tokens, existing=held)
    assert sample.rows is not None
    warn_dense_layers(sample.rows.dense, model)
    starts = np.array([0, sample.num_rows], np.int64)
    return RoutingTrace(
        sample.rows.ids,
        check_rows(sample.rows.ids, sample.known, starts, model, rules),
        starts,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        has_last_row=rules.last_row == "keep",
        notes=(() if existing is None else existing.notes) + sample.notes,
    )


def read_payload(payload: object, format: str = "auto") -> Delivery:
    """Finds the format of a payload and takes its rows, unchecked.

    Args:
        payload: as in `load_routing`.
        format: as in `load_routing`.

    Raises:
        OSError: no such file.
        ValueError: an unknown format.
        TraceError: code `field_missing`, a payload that no format reads, naming what was tried.
    """
    names = [each.NAME for each in FORMATS]
    check_choice("format", format, ("auto", *names))
    content, label = _open(payload)
    if format != "auto":
        return FORMATS[names.index(format)].read(content, label)
    for each in FORMATS:
        if each.matches(content):
            return each.read(content, label)
    tried = "; ".join(f"{each.NAME} needs {each.NEEDS}" for each in FORMATS)
    raise TraceError(
        f"field_missing: {label}: need a format that reads {_describe(content)}, got none; tried: "
        f"{tried}",
        code="field_missing",
    )


def _open(payload: object) -> tuple[object, str]:
    """Parses JSON and maps arrays; other files are left to the format. With a name for messages."""
    if isinstance(payload, bytes | bytearray | memoryview):
        payload = bytes(payload).decode("ascii", "replace")
    if isinstance(payload, str):
        text = payload.lstrip()
        if text[:1] in ("{", "["):
            return _parse_json(text, "payload"), "payload"
        if len(payload) > 4096 or Path(payload).suffix not in _SUFFIXES:
            return payload, "payload"
        payload = Path(payload)
    if not isinstance(payload, os.PathLike):
        return payload, "payload"
    path = Path(payload)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: need a file, got none of that name")
    if path.suffix == ".json":
        return _parse_json(path.read_text("utf-8", "replace"), path.name), path.name
    if path.suffix == ".npy":
        try:
            return map_npy(path), path.name
        except ArrayFileError as error:
            raise TraceError(
                f"bad_encoding: {path.name}: need a .npy array of plain numbers: {error}",
                code="bad_encoding",
            ) from None
    if path.suffix == ".txt":
        return path.read_text("utf-8", "replace").strip(), path.name
    return path, path.name


def _parse_json(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"bad_encoding: {label}: need JSON, got {text[:16]!r}... ({error})", code="bad_encoding"
        ) from None


def _describe(content: object) -> str:
    """What a payload is, in a few words."""
    if isinstance(content, dict):
        return f"an object with keys {list(content)[:8]}"
    if isinstance(content, list):
        inner = _describe(content[0]) if content else "nothing"
        return f"a list of {len(content)} with {inner}"
    if isinstance(content, Path):
        return f"a {content.suffix or 'nameless'} file"
    if isinstance(content, str):
        return f"text {content[:16]!r}..."
    shape = getattr(content, "shape", None)
    return type(content).__name__ + ("" if shape is None else f" {list(shape)}")


def trace_from_batch(
    batch: Batch, model: TraceModel, rules: LoadRules, num_tokens: int | None = None
) -> RoutingTrace:
    """Checks rows of several samples against the model and the caller's wishes.

    Args:
        batch: what a format delivered.
        model: what is needed.
        rules: what to do with rows that are missing or look wrong.
        num_tokens: tokens of the one sample that is expected; None accepts any samples.

    Raises:
        TraceError: rows that cannot be used.
    """
    if batch.num_experts is not None and batch.num_experts != model.num_experts:
        raise TraceError(
            f"id_range: need num_experts = {model.num_experts}, got a file of {batch.num_experts}",
            code="id_range",
        )
    rows = _layers_of(batch, model)
    valid = np.ones(len(rows.ids), bool) if batch.valid is None else batch.valid
    starts, has_last_row = batch.cu_seqlens, batch.has_last_row
    if rules.last_row == "keep":
        has_last_row = True
    elif rules.last_row == "drop":
        kept = np.ones(len(rows.ids), bool)
        kept[starts[1:][np.diff(starts) > 0] - 1] = False
        starts = np.concatenate([[0], np.cumsum(np.maximum(np.diff(starts) - 1, 0))])
        rows = Rows(rows.ids[kept], None if rows.dense is None else rows.dense[kept])
        valid, has_last_row = valid[kept], False
    if num_tokens is not None:
        need = num_tokens - (not has_last_row)
        if starts.tolist() != [0, need]:
            raise TraceError(
                f"sample_count: need one sample of {need} rows for num_tokens = {num_tokens}, got "
                f"{len(starts) - 1} samples with {int(starts[-1])} rows",
                code="sample_count",
            )
    warn_dense_layers(rows.dense, model)
    return RoutingTrace(
        rows.ids,
        check_rows(rows.ids, valid, starts, model, rules),
        starts,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        has_last_row=has_last_row,
        notes=batch.notes,
    )


def _layers_of(batch: Batch, model: TraceModel) -> Rows:
    """The model's MoE layers of a batch."""
    if batch.moe_layers is None or batch.moe_layers == model.moe_layers:
        return split_layers(batch.rows, model, "routed_experts")
    absent = [layer for layer in model.moe_layers if layer not in batch.moe_layers]
    if absent:
        raise TraceError(
            f"layer_axis: need MoE layers {list(model.moe_layers)}, got a file of "
            f"{list(batch.moe_layers)} without {absent}",
            code="layer_axis",
            layer=absent[0],
        )
    places = [batch.moe_layers.index(layer) for layer in model.moe_layers]
    return split_layers(take_layers(batch.rows, places), model, "ids")


def _sample_of(trace: RoutingTrace, model: TraceModel) -> Sample:
    """The rows held so far, as `join_parts` wants them."""
    if trace.num_samples != 1 or trace.moe_layers != model.moe_layers:
        raise TraceError(
            f"sample_count: existing: need one sample with layers {list(model.moe_layers)}, got "
            f"{trace.num_samples} samples with layers {list(trace.moe_layers)}",
            code="sample_count",
        )
    if trace.top_k != model.top_k:
        raise TraceError(
            f"top_k: existing: need {model.top_k} choices a token, got {trace.top_k}", code="top_k"
        )
    return Sample(Rows(trace.ids, None), trace.valid, ())
