"""Gate and up weights in two tensors: bits of the joined ones, whichever lies first in memory."""

import dataclasses

import pytest
import torch
from kernel_cases import BLOCK_ROWS, KernelCase, assert_same_bits, mutate, normal
from kernel_mutants import killed

from relibra_kernels.tables import w_tiles
from relibra_kernels.triton_ops import descriptors
from relibra_kernels.triton_ops import grouped_gemm_wgrad as wgrad
from relibra_kernels.triton_ops.configs import GemmConfig
from relibra_kernels.triton_ops.expert_up import expert_up
from relibra_kernels.triton_ops.grouped_gemm import grouped_gemm
from relibra_kernels.weights import WeightSet

D, F = 48, 24  # three k-steps; the last column tile is ragged
FAMILIES = KernelCase("two_tensors", (7, 0, 18, 5), num_home=2, num_static=1)
POINTERS, TMA = GemmConfig(16, 16, 16), GemmConfig(16, 16, 16, tma=True)
MODES = pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
PLACES = pytest.mark.parametrize(
    ("gate_first", "transposed"),
    [(True, False), (False, False), (False, True)],
    ids=["gate_first", "up_first", "up_first_transposed"],
)


def in_two(joined: WeightSet, gate_first: bool) -> WeightSet:
    """The same weights; home's halves lie apart in a buffer full of NaN, in the order asked for."""
    halves = joined.home.chunk(2, dim=2 if joined.transposed else 1)
    size = halves[0].numel()
    buffer = joined.home.new_full((3 * size + 16,), torch.nan)
    places = [buffer[:size], buffer[2 * size + 16 :]]
    pair = []
    for half, place in zip(halves, places if gate_first else places[::-1], strict=True):
        place.copy_(half.reshape(-1))
        pair.append(place.view(half.shape))
    assert (pair[0].data_ptr() < pair[1].data_ptr()) == gate_first
    return dataclasses.replace(joined, home=tuple(pair), halves_apart=True)


def weights(case: KernelCase, transposed: bool, dtype: torch.dtype = torch.float32) -> WeightSet:
    layout = "transposed" if transposed else "contiguous"
    return case.weights(F, D, dtype, halves=2, layout=layout)


@MODES
@PLACES
def test_the_first_gemm_reads_both(config, gate_first, transposed):
    case, joined = FAMILIES, weights(FAMILIES, transposed)
    tables = case.mtile, case.num_tiles
    x = case.tokens(D, torch.float32)
    need = expert_up(x, case.row_to_token, joined, *tables, config=config)
    found = expert_up(x, case.row_to_token, in_two(joined, gate_first), *tables, config=config)
    assert_same_bits(found, need)


@MODES
@PLACES
def test_its_backward_reads_both(config, gate_first, transposed):
    case, joined = FAMILIES, weights(FAMILIES, transposed)
    options = {"config": config, "backward": True}
    dh = torch.nan_to_num(case.rows(2 * F, torch.float32))
    need = grouped_gemm(dh, joined, case.mtile, case.num_tiles, **options)
    found = grouped_gemm(dh, in_two(joined, gate_first), case.mtile, case.num_tiles, **options)
    assert_same_bits((found,), (need,))


@PLACES
@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
def test_the_gradient_goes_to_both(gate_first, transposed, accumulate):
    case = FAMILIES
    config = GemmConfig(16, 16, 16)
    rows = (
        case.tokens(D, torch.float32), case.tokens(D, torch.float32, seed=9),
        torch.nan_to_num(case.rows(2 * F, torch.float32)),
        torch.nan_to_num(case.rows(F, torch.float32, seed=4)),
    )  # fmt: skip
    per_half = wgrad.count_output_tiles(D, F, config)
    tiles = w_tiles(
        case.slot_rows, case.num_home, case.num_static, BLOCK_ROWS, 2 * per_half, 0, accumulate
    )
    number = torch.tensor([len(tiles)], dtype=torch.int32)
    joined = weights(case, transposed)
    apart = in_two(weights(case, transposed), gate_first)
    for grads in (joined, apart):
        wgrad.expert_wgrad(*rows, case.row_to_token, tiles, number, grads, None, config=config)
    home = torch.cat(apart.home, dim=2 if transposed else 1)
    assert_same_bits((home, apart.static, apart.replica),
                     (joined.home, joined.static, joined.replica))  # fmt: skip


def test_descriptors_are_used_where_they_can_be():
    joined = weights(FAMILIES, False)
    for gate_first, order in ((True, 1), (False, 2)):
        found = descriptors.weight_operands(in_two(joined, gate_first), 16, 16, tma=True)
        assert found.constexprs["W_TMA"]
        assert (found.apart, found.home.shape[1]) == (order, 2)
        assert found.home.strides[1] > 0
    by_pointer = descriptors.weight_operands(in_two(joined, False), 16, 16, tma=False)
    assert by_pointer.strides[1] < 0


def test_tensors_too_far_apart_for_a_descriptor_go_by_pointers(monkeypatch):
    monkeypatch.setattr(descriptors, "MAX_STRIDE_BYTES", 64)
    pair = in_two(weights(FAMILIES, False), True)
    assert not descriptors.weight_operands(pair, 16, 16, tma=True).constexprs["W_TMA"]


def test_a_pair_that_moved_is_found_again():
    """Operands are remembered by address: an optimizer may give a parameter other storage."""
    pair = in_two(weights(FAMILIES, False), True)
    first = descriptors.weight_operands(pair, 16, 16, tma=True)
    assert descriptors.weight_operands(pair, 16, 16, tma=True) is first
    pair.home[1].set_(normal(tuple(pair.home[1].shape), torch.float32, 5))
    assert descriptors.weight_operands(pair, 16, 16, tma=True) is not first


MUTANTS = {  # name: text, replacement, settings
    "order of the tensors ignored": ("tl.where(family == 0, 1 - half, half)", "half", TMA),
    "halves of copies exchanged too": ("(family == 0, 1 - half", "(family >= 0, 1 - half", TMA),
    "up weights of home not reached": (
        "half_stride = tl.cast(home_half, tl.int64)",
        "half_stride = tl.cast(home_half, tl.int64) * 0",
        POINTERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, tmp_path):
    before, after, config = MUTANTS[name]
    mutant = mutate("expert_up", before, after, tmp_path)
    case = KernelCase("two_tensors", (7, 5), num_home=1)
    joined = weights(case, False)
    operands = case.tokens(D, torch.float32), case.row_to_token
    tables = case.mtile, case.num_tiles
    pair = in_two(joined, False)
    need = expert_up(*operands, joined, *tables, config=config)
    with killed(name):
        assert_same_bits(mutant.expert_up(*operands, pair, *tables, config=config), need)
