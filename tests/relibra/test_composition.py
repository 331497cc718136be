"""Samples, budgets and compositions check what they are made of."""

import numpy as np
import pytest

from relibra import Budgets, Composition, PlanError, RoutingTrace, Sample, Samples


def test_counts_of_a_trace():
    """Rows of each sample by layer and expert; an unknown row counts as a token only."""
    ids = np.array([[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[3, 1], [0, 2]]], np.uint8)
    trace = RoutingTrace(
        ids, [True, True, False], [0, 1, 3], moe_layers=(1, 3), num_experts=4, has_last_row=True
    )
    samples = Samples.from_trace(trace, group_J=[5, 5], optimizer_step_J=[0, 1])
    assert samples.rows_JLE.tolist() == [
        [[1, 1, 0, 0], [0, 0, 1, 1]],
        [[1, 0, 1, 0], [0, 1, 0, 1]],
    ]
    assert samples.tokens_J.tolist() == [1, 2]
    assert samples.attention_cost_J.tolist() == [1, 4]
    assert samples.optimizer_step_J.tolist() == [0, 1]


def test_a_last_token_without_a_row_counts_as_a_token():
    trace = RoutingTrace(np.zeros((3, 1, 1), int), moe_layers=[0], num_experts=2)
    assert Samples.from_trace(trace).tokens_J.tolist() == [4]


ROWS = [[[1, 2]], [[3, 4]]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((np.zeros((0, 1, 2), int), []), "rows_JLE: need at least one sample"),
        ((ROWS, [1]), r"tokens_J: need .*\[2\]"),
        (([[[1, -2]]], [1]), r"rows_JLE: .* got -2"),
        (([[1, 2]], [1]), "rows_JLE"),
        ((ROWS, [1, -1]), "tokens_J"),
        ((ROWS, [1, 1], [1]), "attention_cost_J"),
        ((ROWS, [1, 1 << 32]), "attention_cost_J: need values in 0.."),  # squared, 2^64 is 0
        ((ROWS, [1, 1], None, [0]), "group_J"),
        ((ROWS, [1, 1], None, None, [0, -1]), "optimizer_step_J"),
        ((ROWS, [1, 1], None, None, None, ("a", "a")), "ids: need 2 different ids, got 1 of 2"),
    ],
)
def test_samples_refuse(arguments, text):
    with pytest.raises(PlanError, match=text):
        Samples(*arguments)


def test_samples_refuse_fractions():
    with pytest.raises(TypeError, match="rows_JLE: need integers"):
        Samples([[[0.5]]], [1])


def test_single_samples_of_different_shapes():
    one, other = (Sample(name, 0, 0, 1, 1, np.ones(shape, int)) for name, shape in
                  (("a", (1, 2)), ("b", (1, 3))))  # fmt: skip
    with pytest.raises(PlanError, match=r"rows_LE of 'b': need \[1, 2\] like 'a'"):
        Samples.from_list([one, other])
    with pytest.raises(PlanError, match="at least one sample"):
        Samples.from_list([])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([0], [0], [], 1), "optimizer_step_M"),
        (([0], [0], [1, 0], 1), r"non-decreasing steps, got \[1, 0\]"),
        (([2], [0], [0, 0], 1), "micro_batch_J"),
        (([0], [1], [0], 1), "cell_J"),
        (([0, 0], [0], [0], 1), "cell_J"),
        (([0], [0], [0], 1, ("a", "b")), "ids: need 1 ids, got 2"),
    ],
)
def test_compositions_refuse(arguments, text):
    with pytest.raises(PlanError, match=text):
        Composition(*arguments)


def test_entries_name_step_micro_batch_cell_and_samples():
    composition = Composition([1, 0, 1], [1, 0, 1], [3, 4], 2, ("a", "b", "c"))
    entries = [
        (each.optimizer_step, each.micro_batch, each.cell, each.samples, each.ids)
        for each in composition
    ]
    assert entries == [
        (3, 0, 0, (1,), ("b",)),
        (3, 0, 1, (), ()),
        (4, 1, 0, (), ()),
        (4, 1, 1, (0, 2), ("a", "c")),
    ]
    assert composition.optimizer_step_J.tolist() == [4, 3, 4]


def test_limits_by_cell():
    table = Budgets(1, tokens=[3, 4], count=2, least_count=1).limits(2)
    assert table[:, [0, 2, 3]].tolist() == [[3, 2, 1], [4, 2, 1]]
    assert (table[:, 1] > 1 << 60).all()
