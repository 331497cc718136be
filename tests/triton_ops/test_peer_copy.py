"""Peer copies on virtual ranks: what an exchange of the sent tokens would give, in place."""

import kernel_cases
import kernel_mutants
import numpy as np
import pytest
import torch

from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.virtual_group import random_group
from relibra_kernels.triton_ops import peer_copy as product

WIDTH, BLOCK = 40, 16  # three blocks of columns, the last one ragged


def group():
    rng = np.random.default_rng(0)
    return random_group(rng, num_ranks=3, num_home=2, tokens_G=(7, 0, 9), skip=0.4)


def dispatch(kernels, dtype=torch.float32, *, stride=WIDTH, num_programs=None):
    """Every rank copies to all others; returns the buffers, with a spare row each."""
    virtual = group()
    ranks = virtual.ranks
    x_G = [kernel_cases.normal((len(r.ids_TK), WIDTH), dtype, i) for i, r in enumerate(ranks)]
    buffers = [kernel_cases.guarded((sum(r.recv_splits) + 1, stride), dtype) for r in ranks]
    address = torch.tensor([one.tensor.data_ptr() for one in buffers])
    limit = torch.tensor([sum(rank.recv_splits) for rank in ranks])
    for source, (rank, x) in enumerate(zip(ranks, x_G, strict=True)):
        first = torch.tensor([sum(one.recv_splits[:source]) for one in ranks])
        ends = torch.tensor(rank.send_splits).cumsum(0)
        kernels.copy_rows_to_peers(
            x, rank.send_token_V, ends, address, first, limit,
            peer_stride=stride, num_programs=num_programs, block=BLOCK,
        )  # fmt: skip
    sent = [x[rank.send_token_V] for x, rank in zip(x_G, ranks, strict=True)]
    for buffer, expected in zip(buffers, virtual.exchange(sent), strict=True):
        buffer.check()
        assert_equal_bits("received", buffer.tensor[:-1, :WIDTH].contiguous(), expected)
        assert buffer.tensor[-1].isnan().all(), "wrote to a spare row"
        assert buffer.tensor[:, WIDTH:].isnan().all(), "wrote between the rows"
    return tuple(one.tensor for one in buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stride", [WIDTH, 48])
def test_equals_an_exchange(dtype, stride):
    dispatch(product, dtype, stride=stride)


def test_any_order_and_number_of_programs():
    kernel_cases.run_orders(lambda programs: dispatch(product, num_programs=programs), 9, 3)


def test_strided_tokens_and_nothing_to_send():
    buffer, out = torch.randn(4, 48), torch.zeros(2, 20)
    tables = torch.tensor([2]), torch.tensor([out.data_ptr()]), torch.tensor([0]), torch.tensor([2])
    token = torch.tensor([3, 1], dtype=torch.int32)
    product.copy_rows_to_peers(buffer[:, :20], token, *tables)
    assert torch.equal(out, buffer[[3, 1], :20])
    product.copy_rows_to_peers(buffer[:, :20], token[:0], torch.tensor([0]), *tables[1:])


@pytest.mark.parametrize(
    ("token", "first", "rows"),
    [
        ([0, 1, 2], 2, [2, 3]),  # the third row would lie behind the buffer
        ([0, 1, 2], -1, [0, 1]),
        ([0, -1, 4], 0, [0]),  # tokens that do not exist
        ([2**31 - 1, 1, 0], 1, [2, 3]),
    ],
)
def test_nothing_is_written_outside_of_a_buffer(token, first, rows):
    x, guard = torch.ones(4, WIDTH), kernel_cases.guarded((4, WIDTH), torch.float32)
    send, address = torch.tensor(token, dtype=torch.int32), guard.tensor.data_ptr()
    ends = torch.tensor([2])  # the table knows two of the three tokens
    for end in (ends + 1, ends):
        guard.tensor.fill_(torch.nan)
        product.copy_rows_to_peers(
            x, send, end, torch.tensor([address]), torch.tensor([first]), torch.tensor([4])
        )
        guard.check()
        written = torch.nonzero(guard.tensor.isfinite().all(1)).squeeze(1).tolist()
        assert written == [row for row in rows if row - first < int(end)]


def test_rows_beyond_32_bits():
    """The address of a row is computed in 64 bits: row 2^31 of buffers 40 elements wide."""
    x, out = torch.randn(1, WIDTH), torch.zeros(1, WIDTH)
    far = out.data_ptr() - 2**31 * WIDTH * 4
    tables = torch.tensor([1]), torch.tensor([far]), torch.tensor([2**31]), torch.tensor([2**32])
    product.copy_rows_to_peers(x, torch.zeros(1, dtype=torch.int32), *tables)
    assert torch.equal(out, x)


MUTANTS = {
    "peer_off_by_one": ("(ends <= place)", "(ends < place)"),
    "source_offset_dropped": ("other=0) + place - begin", "other=0) * 0 + place - begin"),
    "begin_dropped": ("+ place - begin", "+ place"),
    "limit_ignored": (" & (row < limit)", ""),
    "tail_columns_unmasked": ("value, mask=cols < end)", "value)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(tmp_path, name):
    mutant = kernel_mutants.mutated("peer_copy", *MUTANTS[name], tmp_path)
    with kernel_mutants.killed(name):  # either check finds it
        dispatch(mutant)
        guard = kernel_cases.guarded((1, WIDTH), torch.float32)
        address = torch.tensor([guard.tensor.data_ptr()])
        send, none = torch.zeros(2, dtype=torch.int32), torch.tensor([0])
        mutant.copy_rows_to_peers(torch.ones(1, WIDTH), send, none + 2, address, none, none + 1)
        guard.check()
