"""One check an op: a small case with NaN wherever it must not read, against a wide oracle.

The oracles share no code with the ops.

Every body of an op is held to the same checks, and each check fails for the mutants named in the
tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import relibra_kernels.ops  # noqa: F401  registers torch.ops.relibra
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.reference.moe import dense_moe
from relibra_kernels.tables import m_tiles, slot_bases
from relibra_kernels.testing.compare import (
    assert_close_gemm,
    assert_equal_bits,
)
from relibra_kernels.testing.virtual_group import LayerResult, VirtualGroup, run_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

NAN = float("nan")
# Ragged tails, several tiles, an empty home slot and an empty replica slot; as many replica slots
# as home slots, so that a mix-up of the two stays inside the weights.
SLOT_ROWS = (19, 0, 4, 1, 9, 0)
NUM_HOME = 3
BLOCK_ROWS = 4

_relibra = torch.ops.relibra


class GemmCase:
    """Inputs of a grouped GEMM; padding rows of `rows` and `grad` are NaN.

    Args:
        dtype: of rows and weights.
        sizes: (N, D).
        slot_rows: rows of each slot.
        num_home: H.
        block_rows: rows of a tile.
        spare: tiles at the end of the buffers that belong to no slot.
        seed: of the numbers.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int] = (24, 20),
        *,
        slot_rows: Sequence[int] = SLOT_ROWS,
        num_home: int = NUM_HOME,
        block_rows: int = BLOCK_ROWS,
        spare: int = 1,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        num_out, num_in = sizes
        self.slot_rows, self.num_home, self.block_rows = tuple(slot_rows), num_home, block_rows
        self.base = slot_bases(self.slot_rows, block_rows).tolist()
        num_rows = self.base[-1] + spare * block_rows
        self.real = torch.zeros(num_rows, dtype=torch.bool)
        for base, count in zip(self.base, self.slot_rows, strict=False):
            self.real[base : base + count] = True
        self.rows = self._filled(num_rows, num_in).to(dtype)
        self.grad = self._filled(num_rows, num_out).to(dtype)
        weights = torch.randn(len(self.slot_rows), num_out, num_in) / num_in**0.5
        self.home, self.replica = weights.to(dtype).split(
            [num_home, len(self.slot_rows) - num_home]
        )
        self.mtile = m_tiles(self.slot_rows, num_home, block_rows)

    def _filled(self, num_rows: int, width: int) -> torch.Tensor:
        return torch.where(self.real[:, None], torch.randn(num_rows, width), NAN)

    def slots(self) -> list[tuple[slice, torch.Tensor]]:
        """Rows and fp64 weight of every slot."""
        weights = [*self.home.double(), *self.replica.double()]
        places = [
            slice(base, base + count)
            for base, count in zip(self.base, self.slot_rows, strict=False)
        ]
        return list(zip(places, weights, strict=True))


def check_grouped_gemm(case: GemmCase, *, exact: bool) -> torch.Tensor:
    """The product of every slot, and exact zeros in all other rows."""
    out: torch.Tensor = _relibra.grouped_gemm(
        case.rows, case.home, case.replica, case.mtile, case.block_rows, exact
    )
    oracle = torch.zeros(out.shape, dtype=torch.float64)
    for here, weight in case.slots():
        oracle[here] = case.rows[here].double() @ weight.t()
    assert_close_gemm("grouped_gemm", out, oracle)
    assert_equal_bits("padding", out[~case.real], torch.zeros_like(out[~case.real]))
    return out


def check_grouped_gemm_dgrad(case: GemmCase, *, exact: bool) -> None:
    """The gradient of every slot's rows, and exact zeros in all other rows."""
    out = _relibra.grouped_gemm_dgrad(
        case.grad, case.home, case.replica, case.mtile, case.block_rows, exact
    )
    oracle = torch.zeros(out.shape, dtype=torch.float64)
    for here, weight in case.slots():
        oracle[here] = case.grad[here].double() @ weight
    assert_close_gemm("grouped_gemm_dgrad", out, oracle)
    assert_equal_bits("padding", out[~case.real], torch.zeros_like(out[~case.real]))


def check_grouped_gemm_wgrad(case: GemmCase, *, accumulate: bool) -> None:
    """Weight gradients; empty slots keep their bits, or become zeros; replicas are overwritten."""
    wide = accumulation_dtype(case.rows.dtype)
    before = torch.randn(case.home.shape, dtype=wide)
    home = before.clone() if accumulate else torch.full_like(before, NAN)
    replica = torch.full(case.replica.shape, NAN, dtype=wide)
    slot_rows = torch.tensor(case.slot_rows, dtype=torch.int32)
    _relibra.grouped_gemm_wgrad(
        case.grad, case.rows, slot_rows, case.block_rows, home, replica, accumulate
    )
    for slot, (here, _) in enumerate(case.slots()):
        product = case.grad[here].double().t() @ case.rows[here].double()
        is_home = slot < case.num_home
        found = home[slot] if is_home else replica[slot - case.num_home]
        kept = before[slot] if is_home and accumulate else torch.zeros_like(found)
        if case.slot_rows[slot]:
            assert_close_gemm(f"gradient of slot {slot}", found, kept.double() + product)
        else:
            assert_equal_bits(f"gradient of empty slot {slot}", found, kept)


def check_swiglu(dtype: torch.dtype = torch.float32) -> None:
    """The activation and its gradient against autograd in fp64."""
    torch.manual_seed(0)
    h, da = torch.randn(13, 14).to(dtype), torch.randn(13, 7).to(dtype)
    h64 = h.double().requires_grad_()
    gate, up = h64[:, :7], h64[:, 7:]
    a64 = gate / (1 + torch.exp(-gate)) * up
    torch.autograd.backward(a64, da.double())
    assert h64.grad is not None
    assert_close_gemm("a", _relibra.swiglu(h), a64)
    assert_close_gemm("dh", _relibra.swiglu_backward(da, h), h64.grad)


def check_permute(dtype: torch.dtype = torch.float32) -> None:
    """Rows are the tokens' bits, padding is zero although a token is NaN, and back again."""
    x = torch.tensor([[NAN, NAN], [1.0, 2.0], [3.0, 4.0]]).to(dtype)
    row_to_token = torch.tensor([-1, 2, 1, 2, -1], dtype=torch.int32)
    index = torch.tensor([[-1, -1], [-1, 2], [3, 1]], dtype=torch.int32)
    rows = _relibra.token_permute(x, row_to_token, index)
    oracle = torch.tensor([[0.0, 0], [3, 4], [1, 2], [3, 4], [0, 0]]).to(dtype)
    assert_equal_bits("rows", rows, oracle)
    rows[row_to_token < 0] = NAN
    back = _relibra.token_unpermute(rows, index)
    oracle = torch.tensor([[[0.0, 0], [0, 0]], [[0, 0], [1, 2]], [[3, 4], [3, 4]]]).to(dtype)
    assert_equal_bits("choices", back, oracle)


def check_combine(dtype: torch.dtype = torch.float32) -> None:
    """Scored sums in ascending order with one rounding, and both gradients; -1 skips a NaN row."""
    torch.manual_seed(0)
    wide = accumulation_dtype(dtype)
    rows = torch.randn(9, 5).to(dtype)
    rows[0] = NAN
    index = torch.tensor([[3, 1, -1], [-1, 2, 4], [-1, -1, -1], [8, 7, 6]], dtype=torch.int32)
    scores, grad = torch.rand(4, 3).to(wide), torch.randn(4, 5).to(dtype)
    used = (index >= 0).double()
    picked = rows.double()[index.clamp_min(1).long()]
    oracle = (picked * (scores.double() * used)[:, :, None]).sum(1)
    assert_close_gemm("combine", _relibra.combine(rows, index, scores), oracle)
    plain = _relibra.combine(rows, index, None)
    assert_close_gemm("combine without scores", plain, (picked * used[:, :, None]).sum(1))

    d_rows, d_scores = _relibra.combine_backward(grad, rows, index, scores)
    oracle = torch.zeros(9, 5, dtype=torch.float64)
    oracle[index[used > 0].long()] = ((scores * used)[:, :, None] * grad.double()[:, None])[
        used > 0
    ]
    assert_close_gemm("d_rows", d_rows, oracle)
    assert_close_gemm(
        "d_scores", d_scores, (picked * grad.double()[:, None]).sum(2) * used, dtype=wide
    )

    # A running sum in bf16 gives 8.0625.
    eight = torch.full((8, 1), 1.015625).to(dtype)
    index = torch.arange(8, dtype=torch.int32)[None]
    total = _relibra.combine(eight, index, torch.ones(1, 8, dtype=wide))
    assert_equal_bits("sum of eight", total, torch.tensor([[8.125]]).to(dtype))

    # 1 + 2^30 - 2^30 is 0 in fp32 in this order, and 1 in the other.
    order = torch.tensor([[1.0], [2.0**30], [-(2.0**30)]])
    first_to_last = _relibra.combine(order, torch.tensor([[0, 1, 2]], dtype=torch.int32), None)
    assert_equal_bits("order of the sum", first_to_last, torch.zeros(1, 1))


def check_layer(
    group: VirtualGroup,
    *,
    sizes: tuple[int, int] = (24, 20),
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    seed: int = 0,
) -> LayerResult:
    """A whole layer equals the dense fp64 reference: every output, every gradient, every expert.

    Args:
        group: slots and tables.
        sizes: (D, F).
        dtype: of activations and weights.
        exact: see ``grouped_gemm``.
        seed: of the numbers.

    Returns:
        The layer's result.

    Raises:
        AssertionError: names the tensor, and the expert for weight gradients.
    """
    torch.manual_seed(seed)
    width, inner = sizes
    wide = accumulation_dtype(dtype)
    shapes = [tuple(one.ids_TK.shape) for one in group.ranks]
    x_G = [torch.randn(tokens, width).to(dtype) for tokens, _ in shapes]
    dy_G = [torch.randn(tokens, width).to(dtype) for tokens, _ in shapes]
    scores_G = [torch.rand(shape).to(wide) for shape in shapes]
    w13 = (torch.randn(group.num_experts, 2 * inner, width) / width**0.5).to(dtype)
    w2 = (torch.randn(group.num_experts, width, inner) / inner**0.5).to(dtype)
    result = run_layer(group, x_G, scores_G, w13, w2, dy_G, exact=exact)

    leaves = [t.double().requires_grad_() for t in (torch.cat(x_G), torch.cat(scores_G), w13, w2)]
    ids = torch.cat([one.ids_TK for one in group.ranks])
    y = dense_moe(leaves[0], ids, *leaves[1:])
    if y.requires_grad:  # else there was no choice at all
        torch.autograd.backward(y, torch.cat(dy_G).double())
    dx, dscores, dw13, dw2 = (
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
    )
    for name, found, oracle in (
        ("y", torch.cat(result.y_G), y),
        ("dx", torch.cat(result.dx_G), dx),
        ("dscores", torch.cat(result.dscores_G), dscores),
        ("dw13", result.dw13_E, dw13),
        ("dw2", result.dw2_E, dw2),
    ):
        assert_close_gemm(name, found, oracle, dtype=dtype)
        # With few rows the roundings of a 16-bit layer do not average out over one expert.
        if name in ("dw13", "dw2") and dtype.itemsize > 2:
            for expert in range(group.num_experts):
                what = f"{name} of expert {expert}"
                assert_close_gemm(what, found[expert], oracle[expert], dtype=dtype)
    return result
