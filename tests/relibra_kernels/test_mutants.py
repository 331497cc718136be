"""Each named mistake is found by the check that is meant to find it.

A mutant replaces one function of the references, or of the virtual layer, and the check must fail;
the first test shows that the checks pass without mutants.
"""

import kernel_mutants
import numpy as np
import pytest
import torch

from relibra_kernels import validate
from relibra_kernels.reference import (
    build_rows,
    combine,
    grouped_gemm,
    grouped_gemm_wgrad,
    home_reduce,
    swiglu,
    token_permute,
    token_unpermute,
)
from relibra_kernels.testing import op_checks, virtual_group
from relibra_kernels.testing.virtual_group import random_group


def layer():
    op_checks.check_layer(random_group(np.random.default_rng(0), num_home=3, num_replica=3))


def tables():
    group = random_group(np.random.default_rng(0))
    validate.validate_group(group.ranks, group.num_home, group.block_rows)


def slots():
    op_checks.check_grouped_gemm(op_checks.GemmCase(), exact=False)


def tiles():
    op_checks.check_grouped_gemm(op_checks.GemmCase(), exact=True)
    op_checks.check_grouped_gemm_dgrad(op_checks.GemmCase(), exact=True)


def wgrad_store():
    op_checks.check_grouped_gemm_wgrad(op_checks.GemmCase(), accumulate=False)


def wgrad_add():
    op_checks.check_grouped_gemm_wgrad(op_checks.GemmCase(), accumulate=True)


CHECKS = {
    "layer": layer,
    "tables": tables,
    "slots": slots,
    "tiles": tiles,
    "wgrad_store": wgrad_store,
    "wgrad_add": wgrad_add,
    "permute": op_checks.check_permute,
    "combine": op_checks.check_combine,
    "swiglu": op_checks.check_swiglu,
}


@pytest.mark.parametrize("check", CHECKS)
def test_no_mutant(check):
    CHECKS[check]()


def gate_up_swapped(original):
    return lambda h: original(torch.cat(h.chunk(2, 1)[::-1], 1))


def dswiglu_term_dropped(original):
    def mutant(da, h):
        gate, up = h.chunk(2, 1)
        sigmoid = torch.sigmoid(gate)
        return torch.cat([da * up * sigmoid, da * gate * sigmoid], 1)

    return mutant


def dgate_and_dup_swapped(original):
    return lambda da, h: torch.cat(original(da, h).chunk(2, 1)[::-1], 1)


def score_omitted(original):
    return lambda rows, index, scores: original(rows, index, None)


def score_gradient_omitted(original):
    def mutant(grad, rows, index, scores):
        d_rows, d_scores = original(grad, rows, index, scores)
        return d_rows, torch.zeros_like(d_scores)

    return mutant


def order_reversed(original):
    def mutant(rows, index, scores):
        return original(rows, index.flip(1), None if scores is None else scores.flip(1))

    return mutant


def rounded_after_each_term(original):
    def mutant(rows, index, scores):
        total = rows.new_zeros(index.shape[0], rows.shape[1])
        for j in range(index.shape[1]):
            one = None if scores is None else scores[:, j, None]
            total += original(rows, index[:, j, None], one)
        return total

    return mutant


def pad_select_removed(original):
    return lambda x, index: x.index_select(0, index.clamp_min(0))


def pad_multiplied_away(original):
    return lambda x, index: x.index_select(0, index.clamp_min(0)) * (index >= 0)[:, None]


def pads_not_written(original):
    """Rows of the padding keep what the buffer held."""

    def mutant(rows, weights, mtile, block_rows):
        out = original(rows, weights, mtile, block_rows)
        tile = mtile.numpy()
        real = np.concatenate([np.arange(f, f + r) for f, r in tile[:, 1:3]])
        pads = np.setdiff1d(np.arange(len(rows)), real)
        out[pads] = float("nan")
        return out

    return mutant


def bases_swapped(original):
    return lambda rows, weights, *rest: original(rows, weights[::-1], *rest)


def neighbour_weight(original):
    def mutant(rows, weights, *rest):
        return original(rows, [w.roll(1, 0) if len(w) else w for w in weights], *rest)

    return mutant


def k_range_one_short(original):
    def mutant(rows, weights, *rest):
        return original(rows[:, :-1], [w[:, :-1] if len(w) else w for w in weights], *rest)

    return mutant


def last_tile_lost(original):
    return lambda rows, weights, mtile, block: original(rows, weights, mtile[:-1], block)


def tile_one_row_short(original):
    def mutant(rows, weights, mtile, block):
        short = mtile.clone()
        short[-1, 2] -= 1
        return original(rows, weights, short, block)

    return mutant


def store_and_add_swapped(original):
    return lambda out, operands, accumulate: original(out, operands, accumulate=not accumulate)


def empty_slot_left_as_it_was(original):
    def mutant(out, operands, accumulate):
        operands = list(operands)
        if len(operands[0]):
            original(out, operands, accumulate=accumulate)

    return mutant


def transposed_operands(original):
    """Rows and their order are right, the first row of a slot is taken twice."""

    def mutant(out, operands, accumulate):
        grad, rows = operands
        original(out, (grad, rows.roll(1, 0)), accumulate=accumulate)

    return mutant


def row_to_choice_off_by_one(original):
    def mutant(rows, num_rows):
        row_to_token, row_to_choice = original(rows, num_rows)
        return row_to_token, torch.where(row_to_choice >= 0, (row_to_choice + 1) % rows.numel(), -1)

    return mutant


def padding_not_marked(original):
    return lambda rows, num_rows: tuple(t.clamp_min(0) for t in original(rows, num_rows))


def first_choice_for_all(original):
    return lambda rows, index: original(rows, index[:, :1].expand_as(index))


def score_omitted_at(call):
    """`scaled` is called for dh first, then for a'."""

    def make(original):
        calls = []

        def mutant(a, score):
            calls.append(1)
            return a if (len(calls) - 1) % 2 == call else original(a, score)

        return mutant

    make.__name__ = f"score_omitted_in_{('dh', 'dw2')[call]}"
    return make


def reduced_twice(original):
    def mutant(*lists):
        original(*lists)
        original(*lists)

    return mutant


def not_reduced(original):
    return lambda *lists: None


MUTANTS = [
    ("swiglu", swiglu, "swiglu", gate_up_swapped),
    ("layer", swiglu, "swiglu", gate_up_swapped),
    ("swiglu", swiglu, "swiglu_backward", dswiglu_term_dropped),
    ("layer", swiglu, "swiglu_backward", dswiglu_term_dropped),
    ("swiglu", swiglu, "swiglu_backward", dgate_and_dup_swapped),
    ("combine", combine, "combine", score_omitted),
    ("layer", combine, "combine", score_omitted),
    ("combine", combine, "combine", order_reversed),
    ("combine", combine, "combine_backward", score_gradient_omitted),
    ("combine_bf16", combine, "combine", rounded_after_each_term),
    ("permute", token_permute, "take_rows", pad_select_removed),
    ("permute", token_permute, "take_rows", pad_multiplied_away),
    ("permute", token_unpermute, "take_rows", pad_multiplied_away),
    ("combine", combine, "take_rows", pad_multiplied_away),
    ("permute", token_unpermute, "token_unpermute", first_choice_for_all),
    ("slots", grouped_gemm, "multiply_slots", pads_not_written),
    ("tiles", grouped_gemm, "multiply_tiles", pads_not_written),
    ("slots", grouped_gemm, "multiply_slots", bases_swapped),
    ("layer", grouped_gemm, "multiply_slots", bases_swapped),
    ("slots", grouped_gemm, "multiply_slots", neighbour_weight),
    ("tiles", grouped_gemm, "multiply_tiles", neighbour_weight),
    ("slots", grouped_gemm, "multiply_slots", k_range_one_short),
    ("tiles", grouped_gemm, "multiply_tiles", k_range_one_short),
    ("slots", grouped_gemm, "multiply_slots", last_tile_lost),
    ("tiles", grouped_gemm, "multiply_tiles", tile_one_row_short),
    ("wgrad_store", grouped_gemm_wgrad, "add_outer", store_and_add_swapped),
    ("wgrad_add", grouped_gemm_wgrad, "add_outer", store_and_add_swapped),
    ("wgrad_store", grouped_gemm_wgrad, "add_outer", empty_slot_left_as_it_was),
    ("wgrad_add", grouped_gemm_wgrad, "add_outer", transposed_operands),
    ("tables", build_rows, "build_rows", row_to_choice_off_by_one),
    ("layer", build_rows, "build_rows", row_to_choice_off_by_one),
    ("tables", build_rows, "build_rows", padding_not_marked),
    ("layer", virtual_group, "scaled", score_omitted_at(0)),
    ("layer", virtual_group, "scaled", score_omitted_at(1)),
    ("layer", virtual_group, "home_reduce", reduced_twice),
    ("layer", virtual_group, "home_reduce", not_reduced),
]


@pytest.mark.parametrize(
    ("check", "module", "name", "make"),
    MUTANTS,
    ids=lambda value: getattr(value, "__name__", str(value)).split(".")[-1],
)
def test_mutant_is_killed(monkeypatch, check, module, name, make):
    run = CHECKS.get(check, lambda: op_checks.check_combine(torch.bfloat16))
    monkeypatch.setattr(module, name, make(getattr(module, name)))
    what = f"reference {name}: {make.__name__}"
    with kernel_mutants.killed(what, (AssertionError, ValueError)):
        run()


def test_home_reduce_is_a_function_of_the_reference():
    """The mutants above replace what the virtual layer calls."""
    assert virtual_group.home_reduce is home_reduce.home_reduce
