"""Format `sglang`: base64 of flat rows in `meta_info["routed_experts"]`, one reply or its turns.

The rows are `[n - 1 - start, layers, K]`, int32 unless `routed_experts_dtype` names another dtype;
`start` is the request field `routed_experts_start_len`, which some clients copy into `meta_info`.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relibra.formats.carrier import Delivery, Part
from relibra.limits import MAX_TOKENS
from relibra_kernels.checks import describe
from relibra_kernels.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "sglang"
NEEDS = 'a reply with meta_info["routed_experts"] in base64, or a list of such turns'

_KEY = "routed_experts"
_DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "int32": np.int32}
# Base64 of the first bytes of a .npy file, which another engine sends under the same key.
_NPY_MAGIC = "k05VTVBZ"


def matches(payload: object) -> bool:
    """Whether `read` takes this payload, judged by its keys.

    Args:
        payload: parsed JSON, or anything else.
    """
    if isinstance(payload, list):
        return bool(payload) and all(matches(turn) for turn in payload)
    if not isinstance(payload, dict):
        return False
    info = _meta_info(payload)
    if info is None:
        return False
    value = info.get(_KEY)
    return value is None or (isinstance(value, str) and not value.startswith(_NPY_MAGIC))


def read(payload: object, label: str = "payload") -> Delivery:
    """Decodes one reply, or the turns of one sample in order.

    Args:
        payload: a response, its `meta_info`, a list of either, or the base64 text alone.
        label: name of the payload, for messages.

    Raises:
        TraceError: code `field_missing`, `bad_encoding`, `dtype` or `sample_count`.
    """
    if isinstance(payload, list):
        return tuple(_part(turn, f"turn {number}", True) for number, turn in enumerate(payload))
    return (_part(payload, label, False),)


def _meta_info(payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object that holds the routing, if this is a reply at all."""
    if isinstance(payload.get("meta_info"), dict):
        info: Mapping[str, Any] = payload["meta_info"]
        return info
    choices = payload.get("choices")
    if (
        isinstance(choices, list)
        and choices
        and all(isinstance(one, dict) and isinstance(one.get("meta_info"), dict) for one in choices)
    ):
        if len(choices) > 1:
            raise TraceError(
                f"sample_count: choices: need one sample, got {len(choices)}; pass one choice",
                code="sample_count",
            )
        payload = choices[0]["meta_info"]
    elif _KEY not in payload:
        return None
    return payload


def _part(payload: object, label: str, may_be_null: bool) -> Part:
    """One reply."""
    if isinstance(payload, str | bytes):
        return Part(_decode(payload, "int32", label), label, raw_dtype=True)
    info = _meta_info(payload) if isinstance(payload, dict) else None
    if info is None:
        got = f"keys {list(payload)[:8]}" if isinstance(payload, dict) else type(payload).__name__
        raise _missing(label, got)
    num_tokens = None
    if "prompt_tokens" in info and "completion_tokens" in info:
        num_tokens = _size(info, "prompt_tokens", label) + _size(info, "completion_tokens", label)
    start = None
    if info.get("routed_experts_start_len") is not None:
        start = _size(info, "routed_experts_start_len", label)
    if info.get(_KEY) is None:
        if may_be_null and _KEY in info:
            return Part(None, label, start, num_tokens)
        raise _missing(label, "null" if _KEY in info else f"keys {list(info)[:8]}")
    dtype = info.get("routed_experts_dtype")
    rows = _decode(info[_KEY], "int32" if dtype is None else dtype, label)
    return Part(rows, label, start, num_tokens, raw_dtype=dtype is None)


def _decode(value: object, dtype: object, label: str) -> npt.NDArray[Any]:
    """Base64 text to a flat, read-only array over the decoded bytes."""
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise TraceError(
            f"dtype: {label}: routed_experts_dtype: need one of {', '.join(_DTYPES)}, "
            f"got {dtype!r}",
            code="dtype",
        )
    if not isinstance(value, str | bytes):
        raise TraceError(
            f"bad_encoding: {label}: {_KEY}: need base64 text, got {type(value).__name__}",
            code="bad_encoding",
        )
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(
            f"bad_encoding: {label}: {_KEY}: need base64, got {value[:16]!r}... ({error})",
            code="bad_encoding",
        ) from None
    itemsize = np.dtype(_DTYPES[dtype]).itemsize
    if len(raw) % itemsize:
        raise TraceError(
            f"element_count: {label}: {_KEY}: need whole {dtype} elements of {itemsize} bytes, "
            f"got {len(raw)} bytes; was another dtype sent, or the buffer cut?",
            code="element_count",
        )
    return np.frombuffer(raw, np.dtype(_DTYPES[dtype]).newbyteorder("<"))


def _size(info: Mapping[str, Any], name: str, label: str) -> int:
    value = info[name]
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise TraceError(
            f"bad_encoding: {label}: {name}: need an integer 0..{MAX_TOKENS}, got "
            f"{describe(value)}",
            code="bad_encoding",
        )
    return value


def _missing(label: str, got: str) -> TraceError:
    return TraceError(
        f"field_missing: {label}: need meta_info['{_KEY}'], got {got}; start the server with "
        "--enable-return-routed-experts and send return_routed_experts=true in the request",
        code="field_missing",
    )
