"""Launches of the row-wise kernels on tensors without values: grids, and no look at a value."""

import pytest
import torch

from relibra_kernels.ops import combine as combine_ops
from relibra_kernels.ops import permute as permute_ops
from relibra_kernels.ops import routing
from relibra_kernels.triton_ops import (
    build_rows,
    combine,
    dispatch,
    peer_copy,
    permute,
    row_scores,
)

T, K, D, E = 1_000_000, 8, 8192, 512
N = T * K
LIMITS = 2**31 - 1, 65535, 65535


class Recorder:
    """Takes the place of a kernel and keeps the grids it is launched on."""

    def __init__(self, grids):
        self.grids = grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


@pytest.fixture
def grids(monkeypatch):
    found = []
    for module in (build_rows, combine, dispatch, peer_copy, permute, row_scores):
        for name in vars(module):
            if name.startswith("_") and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(found))
    return found


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def table(*shape, dtype=torch.int32):
    return meta(*shape, dtype=dtype)


ROUTE = table(T, K), table(E + 1), table(4 * E), table(4 * E)
CALLS = {
    "combine": lambda: combine.combine(meta(N, D), table(T, K), meta(T, K, dtype=torch.float32)),
    "combine_backward": lambda: combine.combine_backward(
        meta(T, D), meta(N, D), table(T, K), meta(T, K, dtype=torch.float32)
    ),
    "token_permute": lambda: permute.token_permute(meta(T, D), table(N)),
    "token_unpermute": lambda: permute.token_unpermute(meta(N, D), table(T, K)),
    "token_unpermute_backward": lambda: permute.token_unpermute_backward(
        meta(T, K, D), table(T, K), N, table(1)
    ),
    "row_scores": lambda: row_scores.row_scores(meta(T, K), table(N)),
    "build_rows": lambda: build_rows.build_rows(table(T, K), N, table(1)),
    "route_to_slots": lambda: dispatch.route_to_slots(*ROUTE, table(1)),
    "count_sends": lambda: dispatch.count_sends(*ROUTE, 72, 64, table(1)),
    "build_route": lambda: dispatch.build_route(*ROUTE, table(4 * E), 72, 64, 4 * T, table(1)),
    "copy_rows_to_peers": lambda: peer_copy.copy_rows_to_peers(
        meta(T, D), table(N), *(table(64, dtype=torch.int64) for _ in range(4))
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_kernel_03_grids_of_a_million_tokens(grids, call):
    call()
    assert grids
    for grid in grids:
        assert all(0 < size <= limit for size, limit in zip(grid, LIMITS, strict=False))
        assert max(grid) > 1


SCORES = meta(T, K, dtype=torch.float32)
BODIES = {
    combine_ops.combine: (meta(N, D), table(T, K), SCORES),
    combine_ops.combine_backward: (meta(T, D), meta(N, D), table(T, K), SCORES),
    permute_ops.token_permute: (meta(T, D), table(N), table(T, K)),
    permute_ops.token_unpermute: (meta(N, D), table(T, K)),
    permute_ops.token_unpermute_backward: (meta(T, K, D), table(T, K), N),
    permute_ops.row_scores: (SCORES, table(N), table(T, K)),
    routing.build_rows: (table(T, K), N),
    routing.route_to_slots: ROUTE,
    routing.count_sends: (*ROUTE, 72, 64),
    routing.build_route: (*ROUTE, table(4 * E), 72, 64, 4 * T),
}


@pytest.mark.parametrize("op", BODIES, ids=lambda op: op._name)
def test_the_bodies_of_the_ops_read_no_value(grids, monkeypatch, op):
    """A tensor without values fails at every device sync: `item`, `nonzero`, a copy to the host."""
    for module in (combine_ops, permute_ops, routing):
        monkeypatch.setattr(module, "use_triton", lambda backend, tensor: True)
    op._init_fn(*BODIES[op], "auto")
    assert grids
    with pytest.raises(RuntimeError):
        BODIES[op][0].flatten()[0].item()
