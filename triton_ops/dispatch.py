"""The source's tables, built on the device: `route_to_slots`, `count_sends`, `build_route`.

Contracts: reference/<op>.py. The ordinal of a choice is the number of earlier choices with the
same expert. It is counted without a sort: ranks inside blocks of choices, then a scan over the
blocks' counts. The place of a token among those sent to a rank is counted by the same two kernels,
over destination ranks. Nothing is read by the host; a wrong value sets a bit of the error word
(`device_errors`) and takes no part.

Letters as in `relibra_kernels.tables`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from relibra_kernels.tables import INT32_MAX
from relibra_kernels.triton_ops.device_errors import (
    BAD_ID,
    BAD_SLOT,
    OVER_QUOTA,
    WRONG_NUM_SENT,
    report,
)

BLOCK = 256  # choices of a program
STEP = 32  # choices that each of them is compared with at a time
SCAN_ROWS, SCAN_COLUMNS = 64, 32


@triton.jit(do_not_specialize=["ids_ptr", "error_ptr", "num_entries", "num_ids"])
def _rank_in_block_kernel(
    ids_ptr,  # [num_entries] int32 or int64, -1 takes no part
    rank_ptr,  # [num_entries] int32, out: equal ids before this one in the block
    counts_ptr,  # [blocks, num_ids] int32, zeros; out: ids of each kind in the block
    error_ptr,
    num_entries,
    num_ids,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """All pairs inside a block; the last of its kind knows the count, so nothing is added up."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    inside = first + lane < num_entries
    ids = tl.load(ids_ptr + first + lane, mask=inside, other=-1)
    taking_part = (ids >= 0) & (ids < num_ids)
    report(error_ptr, (ids < -1) | (ids >= num_ids), BAD_ID)
    ids = tl.where(taking_part, ids, -1).to(tl.int32)  # after the checks, 32 bits are enough
    rank = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, STEP):
        other_lane = start + tl.arange(0, STEP)
        others = tl.load(
            ids_ptr + first + other_lane, mask=first + other_lane < num_entries, other=-1
        )
        others = tl.where((others >= 0) & (others < num_ids), others, -1).to(tl.int32)
        same = (ids[:, None] == others[None, :]).to(tl.int32)
        count += tl.sum(same, axis=1)
        rank += tl.sum(tl.where(other_lane[None, :] < lane[:, None], same, 0), axis=1)
    tl.store(rank_ptr + first + lane, rank, mask=inside)
    column = counts_ptr + tl.program_id(0).to(tl.int64) * num_ids + tl.where(taking_part, ids, 0)
    tl.store(column, count, mask=taking_part & (rank == count - 1))


@triton.jit(do_not_specialize=["num_blocks", "num_ids"])
def _scan_blocks_kernel(
    counts_ptr,  # [blocks, num_ids] int32; out: sums over the earlier blocks
    total_ptr,  # [num_ids] int64, out
    num_blocks,
    num_ids,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Exclusive sums down the columns, in place."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    carry = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, num_blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        ptrs = counts_ptr + row.to(tl.int64)[:, None] * num_ids + column[None, :]
        inside = (row < num_blocks)[:, None] & (column < num_ids)[None, :]
        count = tl.load(ptrs, mask=inside, other=0)
        tl.store(ptrs, tl.cumsum(count, axis=0) - count + carry[None, :], mask=inside)
        carry += tl.sum(count, axis=0)
    tl.store(total_ptr + column, carry.to(tl.int64), mask=column < num_ids)


@triton.jit
def _tokens(num_tokens, K: tl.constexpr, KP: tl.constexpr, TOKENS: tl.constexpr):
    """This program's tokens and choices: token [TOKENS], choice [KP], flat index, what exists."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    choice = tl.arange(0, KP)
    flat = token[:, None] * K + choice[None, :]
    return token, choice, flat, (token < num_tokens)[:, None] & (choice < K)[None, :]


@triton.jit
def _ordinal(rank_ptr, base_ptr, flat, ids, num_ids, mask, BLOCK: tl.constexpr):
    """Equal ids before each entry, from the two kernels above."""
    rank = tl.load(rank_ptr + flat, mask=mask, other=0)
    return rank + tl.load(base_ptr + (flat // BLOCK) * num_ids + ids, mask=mask, other=0)


@triton.jit
def _find_entry(position, begin, end, quota_end_ptr, steps, mask):
    """First entry of [begin, end) whose quotas, summed up to it, exceed the position; else end."""
    low, high = begin, end
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = mask & (low < high)
        right = tl.load(quota_end_ptr + middle, mask=open_, other=0) <= position
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & (right == 0), middle, high)
    return low


@triton.jit(
    do_not_specialize=[
        "ids_ptr",
        "expert_first_ptr",
        "slot_id_ptr",
        "slot_first_row_ptr",
        "error_ptr",
        "num_tokens",
        "num_experts",
        "num_entries",
        "steps",
        "slots_per_rank",
        "num_ranks",
    ]
)
def _assign_kernel(
    ids_ptr,  # [T, K] int32 or int64
    rank_ptr,  # [T, K] int32
    base_ptr,  # [blocks, E] int32
    expert_first_ptr,  # [E+1] int32
    quota_end_ptr,  # [nnz] int64, running sums of the quotas
    slot_id_ptr,  # [nnz] int32
    slot_first_row_ptr,  # [nnz] int32
    slot_ptr,  # [T, K] int32, out
    row_ptr,  # [T, K] int32, out
    dest_ptr,  # [T, K] int32, out: rank that computes the choice
    leader_ptr,  # [T, K] int32, out: that rank at the token's first choice there, else -1
    error_ptr,
    num_tokens,  # T
    num_experts,  # E
    num_entries,  # nnz
    steps,  # of the search: bits of nnz
    slots_per_rank,  # n
    num_ranks,  # G
    K: tl.constexpr,
    KP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slot, destination row and destination rank of every choice."""
    token, choice, flat, inside = _tokens(num_tokens, K, KP, TOKENS)
    ids = tl.load(ids_ptr + flat, mask=inside, other=-1)
    taking_part = (ids >= 0) & (ids < num_experts)
    ids = tl.where(taking_part, ids, 0).to(tl.int32)
    ordinal = _ordinal(rank_ptr, base_ptr, flat, ids, num_experts, taking_part, BLOCK)

    # Nobody has read the offsets: they stay inside the list here.
    begin = tl.load(expert_first_ptr + ids, mask=taking_part, other=0)
    end = tl.load(expert_first_ptr + ids + 1, mask=taking_part, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), num_entries)
    end = tl.minimum(end, num_entries)
    before = tl.load(quota_end_ptr + begin - 1, mask=taking_part & (begin > 0), other=0)
    position = before + ordinal
    entry = _find_entry(position, begin, end, quota_end_ptr, steps, taking_part)
    found = taking_part & (entry < end)
    report(error_ptr, taking_part & (entry >= end), OVER_QUOTA)
    slot = tl.load(slot_id_ptr + entry, mask=found, other=-1)
    known = (slot >= 0) & (slot < slots_per_rank * num_ranks)
    report(error_ptr, found & (known == 0), BAD_SLOT)
    before = tl.load(quota_end_ptr + entry - 1, mask=known & (entry > 0), other=0)
    first_row = tl.load(slot_first_row_ptr + entry, mask=known, other=0)
    row = (first_row + position - before).to(tl.int32)
    dest = tl.where(known, slot // slots_per_rank, -1)
    earlier = (dest[:, :, None] == dest[:, None, :]) & (
        choice[None, None, :] < choice[None, :, None]
    )
    is_leader = known & (tl.sum(earlier.to(tl.int32), axis=2) == 0)
    tl.store(slot_ptr + flat, tl.where(known, slot, -1), mask=inside)
    tl.store(row_ptr + flat, tl.where(known, row, -1), mask=inside)
    tl.store(dest_ptr + flat, dest, mask=inside)
    tl.store(leader_ptr + flat, tl.where(is_leader, dest, -1), mask=inside)


@triton.jit(do_not_specialize=["error_ptr", "num_tokens", "num_ranks", "num_sent"])
def _send_tables_kernel(
    row_ptr,  # [T, K] int32
    dest_ptr,  # [T, K] int32
    leader_ptr,  # [T, K] int32
    rank_ptr,  # [T, K] int32, of the leaders
    base_ptr,  # [blocks, G] int32
    sent_end_ptr,  # [G] int64, running sums of the tokens sent to each rank
    send_token_ptr,  # [V] int32, out
    send_rows_ptr,  # [V, K] int32, out
    return_ptr,  # [T, J] int32, out
    error_ptr,
    num_tokens,  # T
    num_ranks,  # G
    num_sent,  # V
    K: tl.constexpr,
    KP: tl.constexpr,
    J: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place of each (token, rank) pair among what is sent; the tables follow from it."""
    token, choice, flat, inside = _tokens(num_tokens, K, KP, TOKENS)
    row = tl.load(row_ptr + flat, mask=inside, other=-1)
    dest = tl.load(dest_ptr + flat, mask=inside, other=-1)
    leader = tl.load(leader_ptr + flat, mask=inside, other=-1)
    leads = leader >= 0
    rank = tl.where(leads, leader, 0)
    ordinal = _ordinal(rank_ptr, base_ptr, flat, rank, num_ranks, leads, BLOCK)
    place = ordinal + tl.load(sent_end_ptr + rank - 1, mask=leads & (rank > 0), other=0)
    known = leads & (place < num_sent)
    token_KP = (token[:, None] + tl.zeros((1, KP), tl.int64)).to(tl.int32)
    tl.store(send_token_ptr + place, token_KP, mask=known)
    here = dest[:, None, :] == leader[:, :, None]
    rows = tl.where(here, row[:, None, :], -1)
    ptrs = send_rows_ptr + place.to(tl.int64)[:, :, None] * K + choice[None, None, :]
    tl.store(ptrs, rows, mask=known[:, :, None] & (choice < K)[None, None, :])

    # Ranks of the token before this one; then -1 for the columns that no rank takes.
    lower = leads[:, None, :] & (leader[:, None, :] < leader[:, :, None])
    column = tl.sum(lower.to(tl.int32), axis=2)
    ptrs = return_ptr + token[:, None] * J
    tl.store(ptrs + column, tl.where(known, place, -1).to(tl.int32), mask=leads & (column < J))
    used = tl.sum(leads.to(tl.int32), axis=1)
    rest = (token < num_tokens)[:, None] & (choice[None, :] >= used[:, None])
    none = tl.full((TOKENS, KP), -1, tl.int32)
    tl.store(ptrs + choice[None, :], none, mask=rest & (choice < J)[None, :])
    wrong = tl.load(sent_end_ptr + num_ranks - 1) != num_sent
    if wrong & (tl.program_id(0) == 0):
        tl.atomic_or(error_ptr, WRONG_NUM_SENT)


class _Blocks(NamedTuple):
    """How the tokens are cut into programs, K padded to a power of two."""

    num_programs: int
    K: int
    KP: int
    TOKENS: int


def _token_blocks(num_tokens: int, num_choices: int, block: int) -> _Blocks:
    padded = 1 << (max(num_choices, 1) - 1).bit_length()
    tokens = max(1, block // padded)
    return _Blocks(-(-num_tokens // tokens), num_choices, padded, tokens)


def _ordinals(
    ids: torch.Tensor, num_ids: int, error: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rank of every id inside its block, ids of each kind before each block, and in all."""
    num_entries = ids.numel()
    num_blocks = -(-num_entries // block)
    rank = torch.empty(num_entries, dtype=torch.int32, device=ids.device)
    base = torch.zeros((num_blocks, num_ids), dtype=torch.int32, device=ids.device)
    make_total = torch.empty if num_blocks and num_ids else torch.zeros  # written by the scan
    total = make_total(num_ids, dtype=torch.int64, device=ids.device)
    if num_blocks and num_ids:
        _rank_in_block_kernel[(num_blocks,)](
            ids, rank, base, error, num_entries, num_ids, block, min(STEP, block), num_warps=8
        )
        _scan_blocks_kernel[(-(-num_ids // SCAN_COLUMNS),)](
            base, total, num_blocks, num_ids, ROWS=SCAN_ROWS, COLUMNS=SCAN_COLUMNS
        )
    return rank, base, total


def _assign(
    ids_TK: torch.Tensor,
    lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int],
    error: torch.Tensor,
    block: int,
) -> list[torch.Tensor]:
    """Slot, row, rank and leading rank of every choice, all int32 ``[T, K]``.

    One compiled kernel serves the three ops; what one of them does not ask for costs less than a
    second kernel to compile.
    """
    ids = ids_TK.contiguous()
    expert_first, slot_id, slot_quota, slot_first_row = lists
    num_experts, num_entries = expert_first.numel() - 1, slot_id.numel()
    outputs = [torch.empty(ids.shape, dtype=torch.int32, device=ids.device) for _ in range(4)]
    if not ids.numel():
        return outputs
    rank, base, _ = _ordinals(ids, num_experts, error, block)
    blocks = _token_blocks(ids.shape[0], ids.shape[1], block)
    quota_end = slot_quota.cumsum(0)  # int64
    integers = ids.shape[0], num_experts, num_entries, num_entries.bit_length(), *sizes
    _assign_kernel[(blocks.num_programs,)](
        ids, rank, base, expert_first, quota_end, slot_id, slot_first_row, *outputs, error,
        *integers, *blocks[1:], block,
    )  # fmt: skip
    return outputs


def route_to_slots(
    ids_TK: torch.Tensor,
    expert_first: torch.Tensor,
    slot_id: torch.Tensor,
    slot_quota: torch.Tensor,
    error: torch.Tensor,
    *,
    block: int = BLOCK,
) -> torch.Tensor:
    """Expert ids -> slot ids; contract in ``reference/route_to_slots.py``.

    Args:
        ids_TK: int32 or int64 ``[T, K]``.
        expert_first: int32 ``[E+1]``.
        slot_id: int32 ``[nnz]``.
        slot_quota: int32 ``[nnz]``.
        error: int32 ``[1]``, error bits are added to it.
        block: choices of a program, a power of two.
    """
    lists = expert_first, slot_id, slot_quota, slot_quota  # nobody asks for rows
    return _assign(ids_TK, lists, (INT32_MAX, 1), error, block)[0]


def count_sends(
    ids_TK: torch.Tensor,
    expert_first: torch.Tensor,
    slot_id: torch.Tensor,
    slot_quota: torch.Tensor,
    slots_per_rank: int,
    num_ranks: int,
    error: torch.Tensor,
    *,
    block: int = BLOCK,
) -> torch.Tensor:
    """Distinct tokens to each rank, int64 ``[G]``; contract in ``reference/count_sends.py``."""
    lists = expert_first, slot_id, slot_quota, slot_quota  # nobody asks for rows
    leader = _assign(ids_TK, lists, (slots_per_rank, num_ranks), error, block)[3]
    return _ordinals(leader, num_ranks, error, block)[2]


def build_route(
    ids_TK: torch.Tensor,
    expert_first: torch.Tensor,
    slot_id: torch.Tensor,
    slot_quota: torch.Tensor,
    slot_first_row: torch.Tensor,
    slots_per_rank: int,
    num_ranks: int,
    num_sent: int,
    error: torch.Tensor,
    *,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The source's tables of one use; contract in ``reference/build_route.py``.

    With a wrong ``num_sent`` the entries that nothing fills are -1.
    """
    num_tokens, num_choices = ids_TK.shape
    lists = expert_first, slot_id, slot_quota, slot_first_row
    _, rows_TK, dest, leader = _assign(ids_TK, lists, (slots_per_rank, num_ranks), error, block)
    rank, base, total = _ordinals(leader, num_ranks, error, block)
    send_token = rows_TK.new_empty(num_sent).fill_(-1)
    send_rows = rows_TK.new_empty(num_sent, num_choices).fill_(-1)
    token_to_return = rows_TK.new_empty(num_tokens, min(num_choices, num_ranks))
    if ids_TK.numel():
        blocks = _token_blocks(num_tokens, num_choices, block)
        _send_tables_kernel[(blocks.num_programs,)](
            rows_TK, dest, leader, rank, base, total.cumsum(0), send_token, send_rows,
            token_to_return, error, num_tokens, num_ranks, num_sent, *blocks[1:3],
            token_to_return.shape[1], blocks.TOKENS, block,
        )  # fmt: skip
    elif num_sent:
        error.bitwise_or_(WRONG_NUM_SENT.value)
    return rows_TK, send_token, send_rows, token_to_return
