"""Dispatch inside a domain: a rank writes its tokens straight into its peers' buffers.

Only the copies; waiting for space and telling the peer are other kernels' work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from relibra_kernels.triton_ops.permute import BLOCK, NUM_WARPS, unit_columns

if TYPE_CHECKING:
    import torch


@triton.jit(
    do_not_specialize=[
        "send_token_ptr",
        "send_end_ptr",
        "address_ptr",
        "first_row_ptr",
        "num_rows_ptr",
        "num_sent",
        "num_tokens",
    ]
)
def _copy_rows_to_peers_kernel(
    x_ptr,  # [T, D]
    send_token_ptr,  # [V] int32, by destination rank
    send_end_ptr,  # [G] int64, running sums of the tokens sent to each rank
    address_ptr,  # [G] int64, addresses of the peers' buffers [num_rows, D] in the dtype of x
    first_row_ptr,  # [G] int64, row of this source's first token in each buffer
    num_rows_ptr,  # [G] int64, rows of each buffer
    num_sent,  # V
    num_tokens,  # T
    num_columns,  # D
    stride_x,
    stride_peer,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """peer[first_row[g] + i] = x[send_token[begin[g] + i]] for every rank g."""
    rank = tl.arange(0, GP)
    ends = tl.load(send_end_ptr + rank, mask=rank < G, other=0)
    ends = tl.where(rank < G, ends, 1 << 62)
    for place in tl.range(tl.program_id(0), num_sent, tl.num_programs(0)):
        peer = tl.sum((ends <= place).to(tl.int32))  # ranks whose tokens all come before
        known = peer < G
        begin = tl.load(send_end_ptr + peer - 1, mask=known & (peer > 0), other=0)
        row = tl.load(first_row_ptr + peer, mask=known, other=0) + place - begin
        limit = tl.load(num_rows_ptr + peer, mask=known, other=0)
        token = tl.load(send_token_ptr + place)
        fits = known & (row >= 0) & (row < limit) & (token >= 0) & (token < num_tokens)
        address = tl.load(address_ptr + peer, mask=known, other=0)
        out_ptr = tl.multiple_of(address.to(x_ptr.dtype), 16)
        end = tl.where(fits, num_columns, 0)
        for first in range(0, end, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            value = tl.load(x_ptr + token.to(tl.int64) * stride_x + cols, mask=cols < end)
            tl.store(out_ptr + row.to(tl.int64) * stride_peer + cols, value, mask=cols < end)


def copy_rows_to_peers(
    x_TD: torch.Tensor,
    send_token_V: torch.Tensor,
    send_end_G: torch.Tensor,
    peer_address_G: torch.Tensor,
    peer_first_row_G: torch.Tensor,
    peer_num_rows_G: torch.Tensor,
    *,
    peer_stride: int | None = None,
    num_programs: int | None = None,
    block: int = BLOCK,
) -> None:
    """Copies each sent token to its row in the buffer of its destination rank.

    Derived: rank g gets ``x[send_token[v]]`` at row ``first_row[g] + v - begin[g]`` for every v in
    ``[begin[g], end[g])``. Rows outside a buffer and tokens outside ``x`` are left out.

    Args:
        x_TD: ``[T, D]``, any row stride; D times the element size a multiple of 16 bytes.
        send_token_V: int32 ``[V]``, by destination rank, see ``build_route``.
        send_end_G: int64 ``[G]``, running sums of the tokens sent to each rank.
        peer_address_G: int64 ``[G]``, addresses of the peers' buffers, multiples of 16 bytes.
        peer_first_row_G: int64 ``[G]``, row of this source's first token in each buffer.
        peer_num_rows_G: int64 ``[G]``, rows of each buffer.
        peer_stride: elements from row to row of the buffers; None is D.
        num_programs: programs of the launch, which leave the rest of the GPU to others; None is
            one a token.
        block: columns of a step.
    """
    x = unit_columns(x_TD)
    num_sent, num_ranks = send_token_V.numel(), send_end_G.numel()
    if not num_sent:
        return
    stride = x.shape[1] if peer_stride is None else peer_stride
    tables = send_token_V, send_end_G, peer_address_G, peer_first_row_G, peer_num_rows_G
    sizes = num_sent, x.shape[0], x.shape[1], x.stride(0), stride
    _copy_rows_to_peers_kernel[(num_programs or num_sent,)](
        x, *tables, *sizes, num_ranks, 1 << (num_ranks - 1).bit_length(), block, num_warps=NUM_WARPS
    )
