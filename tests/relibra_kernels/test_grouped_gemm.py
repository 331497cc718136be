import numpy as np
import pytest
import torch

from relibra_kernels.reference import grouped_gemm as reference
from relibra_kernels.tables import m_tiles
from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.op_checks import GemmCase, check_grouped_gemm

relibra = torch.ops.relibra

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EDGES = {
    "one_row": {"slot_rows": (1,), "num_home": 1},
    "empty_home": {"slot_rows": (0, 0, 7), "num_home": 2},
    "empty_replica": {"slot_rows": (5, 0), "num_home": 1},
    "replica_serves_all": {"slot_rows": (0, 30), "num_home": 1},
    "no_replica": {"slot_rows": (5, 9), "num_home": 2},
    "no_rows": {"slot_rows": (0, 0), "num_home": 1},
    "no_buffer": {"slot_rows": (0, 0), "num_home": 1, "spare": 0},
    "no_tail_kernel_13": {"slot_rows": (8, 4), "num_home": 1, "spare": 0},
    "tile_of_one_row": {"slot_rows": (3, 2), "num_home": 1, "block_rows": 1},
}


def run(case, *, exact, rows=None, home=None):
    return relibra.grouped_gemm(
        case.rows if rows is None else rows,
        case.home if home is None else home,
        case.replica,
        case.mtile,
        case.block_rows,
        exact,
    )


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, exact):
    check_grouped_gemm(GemmCase(dtype), exact=exact)
    check_grouped_gemm(GemmCase(dtype, (48, 1000), block_rows=16), exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge, exact):
    check_grouped_gemm(GemmCase(**EDGES[edge]), exact=exact)


def test_tiles_in_any_order():
    case = GemmCase()
    shuffled = case.mtile[torch.randperm(len(case.mtile))]
    for exact in (False, True):
        out = relibra.grouped_gemm(
            case.rows, case.home, case.replica, shuffled, case.block_rows, exact
        )
        torch.testing.assert_close(out, run(case, exact=exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
def test_kernel_04_rows_behind_the_last_tile_change_nothing(exact):
    case = GemmCase(slot_rows=(41, 29), num_home=1, block_rows=1, spare=26)
    assert case.rows.shape[0] == 96
    outs = []
    for tail in (float("inf"), 0.0):
        rows = case.rows.clone()
        rows[~case.real] = tail
        outs.append(run(case, rows=rows, exact=exact))
    assert_equal_bits("rows", *outs)


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
@pytest.mark.parametrize("width", [192, 136])
def test_kernel_06_strided_operands_equal_copies_and_weights_are_not_copied(
    width, exact, monkeypatch
):
    case = GemmCase(torch.float16, (64, width), block_rows=16)
    storage = torch.zeros(len(case.rows), width + 4, dtype=torch.float16)
    storage[:, :width] = case.rows
    packed = torch.cat([case.home, torch.full_like(case.home, float("nan"))], 1)
    gate = packed[:, : case.home.shape[1]]
    assert storage[:, :width].stride(0) * 2 % 16
    assert not gate.is_contiguous()
    seen = []
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: seen.append(b.data_ptr()) or product(a, b, out=out)
    )
    strided = run(case, rows=storage[:, :width], home=gate, exact=exact)
    slots = [*gate, *case.replica]
    assert set(seen) <= {slot.data_ptr() for slot in slots}
    assert seen
    assert_equal_bits("strided", strided, run(case, exact=exact))


def random_split(rng, rows, num_slots):
    """A random number of rows for each slot, zeros among them."""
    return rng.multinomial(rows, rng.dirichlet(np.full(num_slots, 0.4)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(24, 20), (33, 17), (64, 64), (10, 6)], ids=str)
def test_exact_bits_do_not_depend_on_the_split(dtype, sizes):
    """One expert's rows over random slots with equal weights: every row keeps its bits."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    num_rows, num_slots = 53, 4
    rows = torch.randn(num_rows, sizes[1]).to(dtype)
    weight = (torch.randn(sizes) / sizes[1] ** 0.5).to(dtype)
    home = weight.expand(2, *sizes).contiguous()
    replica = torch.cat([weight.new_zeros(1), home.flatten()])[1:].view_as(home)  # not aligned
    for block_rows in (1, 4, 16):
        whole = None
        for _ in range(12):
            split = random_split(rng, num_rows, num_slots)
            order = torch.from_numpy(rng.permutation(num_rows))
            case = GemmCase(dtype, sizes, slot_rows=split, num_home=2, block_rows=block_rows)
            place = torch.nonzero(case.real).squeeze(1)
            buffer = torch.full_like(case.rows, float("nan"))
            buffer[place] = rows[order]
            out = relibra.grouped_gemm(buffer, home, replica, case.mtile, block_rows, True)
            by_row = torch.empty(num_rows, sizes[0], dtype=dtype)
            by_row[order] = out[place]
            whole = by_row if whole is None else whole
            assert_equal_bits(f"split {split.tolist()}", by_row, whole)


def test_exact_needs_aligned_rows(monkeypatch):
    """Packed without alignment, rows of 24 bytes change bits when they move."""
    monkeypatch.setattr(reference, "ALIGN_BYTES", 4)
    with pytest.raises(AssertionError, match="first difference"):
        test_exact_bits_do_not_depend_on_the_split(torch.float32, (10, 6))


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
def test_gradients(exact):
    case = GemmCase(torch.float64, (5, 3), slot_rows=(3, 0, 2, 4), num_home=2, block_rows=2)
    rows = torch.where(case.real[:, None], case.rows, 0).requires_grad_()
    home, replica = case.home.clone().requires_grad_(), case.replica.clone().requires_grad_()
    torch.autograd.gradcheck(
        lambda *leaves: relibra.grouped_gemm(*leaves, case.mtile, case.block_rows, exact),
        (rows, home, replica),
    )


def test_gradients_have_the_dtype_of_their_leaf_and_only_the_needed_are_made():
    case = GemmCase(torch.bfloat16)
    home = case.home.clone().requires_grad_()
    out = run(case, home=home, exact=False)
    (grad,) = torch.autograd.grad(out.sum(), home)
    assert grad.dtype == torch.bfloat16
    assert torch.equal(grad[1], torch.zeros_like(grad[1])), "the empty home slot"
    frozen = relibra.grouped_gemm(
        case.rows.requires_grad_(), case.home, case.replica, case.mtile, case.block_rows, False
    )
    (grad,) = torch.autograd.grad(frozen.sum(), case.rows)
    assert torch.equal(grad[~case.real], torch.zeros_like(grad[~case.real]))


def test_kernel_05_expanded_gradients():
    case = GemmCase()
    leaves = [t.clone().requires_grad_() for t in (case.rows, case.home, case.replica)]
    out = relibra.grouped_gemm(*leaves, case.mtile, case.block_rows, False)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    dense = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for name, a, b in zip(("rows", "home", "replica"), expanded, dense, strict=True):
        assert_equal_bits(name, a, b)


def test_kernel_13_no_rows_still_have_gradients():
    case = GemmCase(slot_rows=(0, 0), num_home=1, spare=0)
    leaves = [t.clone().requires_grad_() for t in (case.rows, case.home, case.replica)]
    out = relibra.grouped_gemm(*leaves, case.mtile, case.block_rows, False)
    assert out.shape == (0, case.home.shape[1])
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert_equal_bits("gradient", grad, torch.zeros_like(leaf))


TILE = m_tiles([4], 1, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": torch.ones(8, 4)}, ValueError, "rows_RD: need 3 columns to fit home_w_HND"),
        ({"rows": torch.ones(8, 3).bfloat16()}, TypeError, "home_w_HND: need dtype torch.bfloat16"),
        ({"rows": torch.ones(8, 3).long()}, TypeError, "rows_RD: need dtype torch.float32"),
        ({"home": torch.ones(5, 3)}, ValueError, "home_w_HND: need 3 dimensions"),
        ({"replica": torch.ones(1, 5, 4)}, ValueError, r"replica_w_SND: need shape \[any, 5, 3\]"),
        ({"replica": torch.ones(1, 5, 3).half()}, TypeError, "replica_w_SND: need dtype"),
        ({"mtile": TILE.long()}, TypeError, "mtile_B4: need dtype torch.int32"),
        ({"mtile": TILE[:, :3]}, ValueError, r"mtile_B4: need shape \[any, 4\]"),
        (
            {"mtile": TILE + torch.tensor([1, 0, 0, 0]).int()},
            ValueError,
            r"home weight < 1 .* got \[1,",
        ),
        (
            {"mtile": TILE + torch.tensor([1 << 24, 0, 0, 0]).int()},
            ValueError,
            "family 1, weight 0",
        ),
        (
            {"mtile": TILE + torch.tensor([(2 << 24) + 1, 0, 0, 0]).int()},
            ValueError,
            "family 2, weight 1",
        ),
        ({"mtile": TILE + torch.tensor([0, 8, 0, 0]).int()}, ValueError, "rows below row 8"),
        ({"mtile": TILE + torch.tensor([0, -4, 0, 0]).int()}, ValueError, "mtile_B4: need"),
        ({"mtile": TILE + torch.tensor([0, 2, 0, 0]).int()}, ValueError, "a multiple of 4"),
        ({"mtile": TILE + torch.tensor([0, 0, 1, 0]).int()}, ValueError, "1 to 4 rows"),
        ({"mtile": TILE * torch.tensor([1, 1, 0, 1]).int()}, ValueError, "1 to 4 rows"),
        ({"mtile": torch.cat([TILE, TILE])}, ValueError, "in no other tile.* at tile 1"),
        ({"block_rows": 0}, ValueError, "block_rows: need 1 to 65536, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("op", ["grouped_gemm", "grouped_gemm_dgrad"])
def test_kernel_11_wrong_arguments_are_refused(op, change, error, message):
    """Also for dgrad, whose rows have as many columns as the weights have rows."""
    given = {"rows": torch.ones(8, 3), "home": torch.ones(1, 5, 3), "replica": torch.ones(1, 5, 3)}
    given |= {"mtile": TILE, "block_rows": 4} | change
    if op == "grouped_gemm_dgrad":
        given["home"], given["replica"] = (
            w.transpose(-1, -2) for w in (given["home"], given["replica"])
        )
        message = message.replace("rows_RD", "grad_RN").replace("[any, 5, 3", "[any, 3, 5")
        message = message.replace(r"\[any, 5, 3\]", r"\[any, 3, 5\]")
    with pytest.raises(error, match=message):
        getattr(relibra, op)(*given.values(), False)


@pytest.mark.parametrize("exact", [False, True], ids=["slots", "exact"])
def test_opcheck(exact):
    case = GemmCase(slot_rows=(3, 2), num_home=1)
    rows = torch.where(case.real[:, None], case.rows, 0).requires_grad_()
    home, replica = case.home.clone().requires_grad_(), case.replica.clone().requires_grad_()
    torch.library.opcheck(
        relibra.grouped_gemm, (rows, home, replica, case.mtile, case.block_rows, exact)
    )
