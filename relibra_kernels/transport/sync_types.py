"""What Python and the native library of replica synchronisation agree on: structs, codes, words.

The dtypes are the structs of `cuda/replica_sync/c_api.h`, byte for byte; addresses are integers.
Words of different generations, uses, layers, plans or experts differ:

    word   = generation (16 bits) << 48 | (n + 1) (32 bits) << 16 | hash (16 bits)
    credit = generation (16 bits) << 48 | count (48 bits)
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import NamedTuple

import numpy as np

ABI_VERSION = 2

WAIT_ITEM = np.dtype(
    [("word", "u8"), ("at_least", "u8"), ("exact", "u8"), ("peer", "i4"), ("slot", "i4")]
)
PUSH_ITEM = np.dtype(
    [
        ("src", "u8"),
        ("dst", "u8"),
        ("bytes", "u8"),
        ("full", "u8"),
        ("word", "u8"),
        ("arrivals", "u8"),
    ]
)
PUBLISH_ITEM = np.dtype([("word", "u8"), ("value", "u8")])
REDUCE_ITEM = np.dtype(
    [("home", "u8"), ("grads", "u8"), ("num_replicas", "i4"), ("kind", "i4"), ("count", "u8")]
)
ERROR_RECORD = np.dtype(
    [
        ("code", "u4"),
        ("rank", "i4"),
        ("op", "i4"),
        ("peer", "i4"),
        ("slot", "i4"),
        ("reserved", "i4"),
        ("use", "u8"),
        ("expected", "u8"),
        ("observed", "u8"),
    ]
)
FAULT = np.dtype(
    [
        ("record", "u8"),
        ("abort", "u8"),
        ("peer_aborts", "u8"),
        ("num_peers", "i4"),
        ("rank", "i4"),
        ("generation", "u8"),
    ]
)

GENERATIONS = 1 << 16
MAX_USES = (1 << 32) - 1
MAX_COUNT = (1 << 48) - 1
_ODD = 0x9E37  # maps different experts of a use to different hashes


class ErrorCode(IntEnum):
    """What an error record says."""

    OK = 0
    TIMEOUT = 1
    MISMATCH = 2
    PEER_ABORTED = 3
    BEING_WRITTEN = 0x80000000


class SyncOp(IntEnum):
    """What a wait waits for."""

    WEIGHT_CREDIT = 1
    WEIGHTS = 2
    GRAD_CREDIT = 3
    GRADS = 4
    ROWS = 5
    ROW_CREDIT = 6


class ReduceKind(IntEnum):
    """Types of a reduction: home += gradient."""

    FP32_FROM_FP32 = 0
    FP32_FROM_BF16 = 1
    FP64_FROM_FP64 = 2


class Word(NamedTuple):
    """Parts of a word; `n` is -1 in a word that was never written, or only as a lower bound."""

    generation: int
    n: int
    hash16: int


def pack_word(generation: int, n: int, hash16: int) -> int:
    """Signal word of use `n`.

    Args:
        generation: of the arena, 0 to 65535.
        n: number of the use in its domain, 0 to 2**32 - 2.
        hash16: of key, expert and plan; 0 gives the least word of the use.

    Returns:
        The word, below 2**64.

    Raises:
        ValueError: a part is out of range; names it.

    Example:
        >>> hex(pack_word(2, 7, 0xABCD))
        '0x200000008abcd'
        >>> unpack_word(pack_word(2, 7, 0xABCD))
        Word(generation=2, n=7, hash16=43981)
    """
    _check_range("generation", generation, GENERATIONS - 1)
    _check_range("n", n, MAX_USES - 1)
    _check_range("hash16", hash16, 0xFFFF)
    return generation << 48 | (n + 1) << 16 | hash16


def unpack_word(word: int) -> Word:
    """Parts of a signal word.

    Example:
        >>> unpack_word(0)
        Word(generation=0, n=-1, hash16=0)
    """
    word = int(word)
    return Word(word >> 48, (word >> 16 & 0xFFFFFFFF) - 1, word & 0xFFFF)


def pack_credit(generation: int, count: int) -> int:
    """Credit word: how many uses have been retired.

    Args:
        generation: of the arena, 0 to 65535.
        count: uses retired, 0 to 2**48 - 1.

    Raises:
        ValueError: a part is out of range; names it.

    Example:
        >>> pack_credit(1, 5) - pack_credit(1, 0)
        5
    """
    _check_range("generation", generation, GENERATIONS - 1)
    _check_range("count", count, MAX_COUNT)
    return generation << 48 | count


def unpack_credit(word: int) -> tuple[int, int]:
    """Generation and count of a credit word.

    Example:
        >>> unpack_credit(pack_credit(1, 5))
        (1, 5)
    """
    return int(word) >> 48, int(word) & MAX_COUNT


def hash16(key: tuple[int | str, ...], expert: int, plan_hash: str) -> int:
    """Hash of what a slot holds in a use, equal on every rank that has the same plan.

    Args:
        key: of the use; integers and strings.
        expert: logical id of the expert; different ids of a use always differ in the hash.
        plan_hash: of the plan.

    Returns:
        0 to 65535; another key or plan gives another value but for one chance in 65536.

    Example:
        >>> key = ("policy", 3, 0, 1, 7, "forward")
        >>> len({hash16(key, expert, "p") for expert in range(512)})
        512
    """
    return hash_of_expert(hash_of_use(key, plan_hash), expert)


def hash_of_use(key: tuple[int | str, ...], plan_hash: str) -> int:
    """The part of `hash16` that all experts of a use share.

    Args:
        key: of the use; integers and strings.
        plan_hash: of the plan.
    """
    parts = [part if isinstance(part, str) else int(part) for part in key]
    text = repr((parts, plan_hash)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=2).digest(), "little")


def hash_of_expert(use: int, expert: int) -> int:
    """`hash16` from `hash_of_use`.

    Example:
        >>> key = ("policy", 3, 0, 1, 7, "forward")
        >>> hash_of_expert(hash_of_use(key, "p"), 5) == hash16(key, 5, "p")
        True
    """
    return (use + expert * _ODD) & 0xFFFF


def _check_range(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise ValueError(f"{name}: need 0 to {largest}, got {value}")
