"""Composition: what never changes, budgets, refusals, determinism, and that it helps."""

import dataclasses
import itertools

import numpy as np
import pytest
from composition_checks import broken_rules, squares
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import relibra
from relibra import Budgets, Composition, PlanError, Sample, Samples, compose


@dataclasses.dataclass(frozen=True)
class Case:
    samples: Samples
    cells: object
    budgets: Budgets
    current: Composition
    keep: str


SLACK = st.integers(0, 3)


@st.composite
def cases(draw, slack=SLACK):
    """Samples in a random composition, and budgets that just hold it, or leave some slack."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = draw(st.integers(1, 3))
    micro_batches = draw(st.lists(st.integers(1, 4), min_size=steps, max_size=steps))
    cells = draw(st.sampled_from([1, 2, 3, [0, 1], [0, 1, 0]]))
    num_cells = cells if isinstance(cells, int) else len(cells)
    group_of_cell = np.zeros(num_cells, int) if isinstance(cells, int) else np.array(cells)
    keep = draw(st.sampled_from(["sample", "group"]))
    count = draw(st.integers(steps, 40))
    step_J = np.sort(np.concatenate([np.arange(steps), rng.integers(0, steps, count - steps)]))
    if draw(st.booleans()):
        step_J = rng.permutation(step_J)
    group_J = rng.integers(0, max(1, count // 3), count)
    rows = rng.poisson(rng.gamma(0.5, 8, (count, 2, 4)))
    tokens = rng.integers(1, 9, count)
    first = np.concatenate([[0], np.cumsum(micro_batches)])
    place_J = first[step_J] + rng.integers(0, 1 << 20, count) % np.array(micro_batches)[step_J]
    cell_J = rng.integers(0, num_cells, count)
    if keep == "group":  # the group's first sample leads
        for j in range(count):
            lead = np.flatnonzero((group_J == group_J[j]) & (step_J == step_J[j]))[0]
            place_J[j] = place_J[lead]
            same = np.flatnonzero(group_of_cell == group_of_cell[cell_J[lead]])
            cell_J[j] = cell_J[j] if cell_J[j] in same else same[0]
    samples = Samples(rows, tokens, None, group_J, step_J * 10)
    current = Composition(
        place_J, cell_J, np.repeat(np.arange(steps) * 10, micro_batches), num_cells
    )
    bins = place_J * num_cells + cell_J
    extra = draw(slack)
    most = [
        int(np.bincount(bins, weights).max()) + extra * int(np.max(weights))
        for weights in (tokens, samples.attention_cost_J, np.ones(count, int))
    ]
    least = int(np.bincount(bins, minlength=first[-1] * num_cells).min())
    budgets = Budgets(micro_batches, *most, least_count=draw(st.sampled_from([0, least])))
    return Case(samples, cells, budgets, current, keep)


def composed(case, **options):
    return compose(
        case.samples, case.cells, case.budgets, keep=case.keep, loss_normalisation="step", **options
    )


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([None, 3, 5, "nodes"]))
def test_rules_hold_from_a_current_composition(case, projection):
    """Same samples a step, same micro-batches, budgets, groups, and no worse than before."""
    if projection == "nodes":
        projection = [[0, 1, 1, -1], [0, 0, 1, 1]]
    result = composed(case, current=case.current, projection=projection)
    assert broken_rules(case.samples, case.cells, case.budgets, result, case.keep) == []
    before, after = (squares(case.samples, case.cells, each) for each in (case.current, result))
    if projection is None:
        assert after <= before * (1 + 1e-3)
    for one, other in zip(result.report.spread_before, result.report.spread_after, strict=True):
        assert other <= one * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(cases(slack=st.integers(0, 1)))
def test_rules_hold_from_scratch_or_the_error_names_the_place(case):
    try:
        result = composed(case)
    except PlanError:
        with pytest.raises(PlanError, match=r"^budgets\.\w+: .*cell \d+ in micro-batch \d+"):
            composed(case)
        return
    assert broken_rules(case.samples, case.cells, case.budgets, result, case.keep) == []


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 5), st.sampled_from([None, 4]))
def test_same_for_any_number_of_threads(case, seed, projection):
    one, three = (
        composed(case, current=case.current, seed=seed, projection=projection, num_threads=threads)
        for threads in (1, 3)
    )
    assert np.array_equal(one.micro_batch_J, three.micro_batch_J)
    assert np.array_equal(one.cell_J, three.cell_J)


def bad(case, **changes):
    return broken_rules(
        case.samples,
        case.cells,
        case.budgets,
        dataclasses.replace(case.current, **changes),
        case.keep,
    )


@settings(max_examples=60, deadline=None)
@given(cases(slack=st.just(0)), st.data())
def test_the_checks_above_see_mutated_compositions(case, data):
    """Mutations: a sample in another step, over a budget, a group apart, one micro-batch less."""
    assert bad(case) == []
    j = data.draw(st.integers(0, len(case.samples) - 1))
    place = case.current.micro_batch_J.copy()
    place[j] = data.draw(st.integers(0, case.current.num_micro_batches - 1))
    assume(place[j] != case.current.micro_batch_J[j])
    found = bad(case, micro_batch_J=place)
    moved_step = case.current.optimizer_step_M[place[j]] != case.samples.optimizer_step_J[j]
    assert ("steps" in found) == moved_step
    mates = (case.samples.group_J == case.samples.group_J[j]) & (
        case.samples.optimizer_step_J == case.samples.optimizer_step_J[j]
    )
    if case.keep == "group" and mates.sum() > 1:
        assert "groups" in found
    full = (case.current.micro_batch_J == place[j]) & (
        case.current.cell_J == case.current.cell_J[j]
    )
    if full.sum() == case.budgets.count:
        assert "count" in found
    if case.samples.tokens_J[full].sum() == case.budgets.tokens:
        assert "tokens" in found
    if len(case.current.optimizer_step_M) > 1:
        steps = case.current.optimizer_step_M[:-1]
        kept = np.minimum(case.current.micro_batch_J, len(steps) - 1)
        assert "micro-batches" in bad(case, micro_batch_J=kept, optimizer_step_M=steps)


def make(rows, tokens=None, **fields):
    rows = np.asarray(rows)[:, None]
    return Samples(rows, np.ones(len(rows), int) if tokens is None else tokens, **fields)


def test_alike_samples_are_spread():
    samples = make([[8, 0, 0, 0]] * 4 + [[0, 8, 0, 0]] * 4 + [[0, 0, 4, 4]] * 4)
    result = compose(samples, 1, Budgets(4, count=3), loss_normalisation="step")
    for m in range(4):
        kinds = sorted(j // 4 for j in result.samples_of(m, 0))
        assert kinds == [0, 1, 2], f"micro-batch {m} has {kinds}"
    assert result.report.spread_after == (0.0,)


def test_near_the_optimum_of_small_problems():
    """Against all ways to deal 8 samples to 2 micro-batches of 4; swaps stop at local optima."""
    better = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        samples = make(rng.integers(0, 50, (8, 6)))
        result = compose(samples, 1, Budgets(2, count=4), loss_normalisation="step")
        value = squares(samples, 1, result)
        for chosen in itertools.combinations(range(8), 4):
            place = np.ones(8, int)
            place[list(chosen)] = 0
            other = squares(samples, 1, Composition(place, np.zeros(8, int), [0, 0], 1))
            better.append(other < value)
    assert np.mean(better) < 0.05  # chance alone: 0.5


def test_moves_fill_an_unused_micro_batch():
    samples = make([[5, 0], [5, 0], [0, 5], [0, 5]])
    current = Composition([0, 0, 0, 0], [0, 0, 0, 0], [0, 0], 1)
    result = compose(samples, 1, Budgets(2), loss_normalisation="step", current=current)
    assert sorted(map(len, (result.samples_of(0, 0), result.samples_of(1, 0)))) == [2, 2]
    assert result.report.num_moves[0] >= 2


def test_cells_share_the_tokens_of_a_micro_batch():
    samples = make([[1, 1]] * 6, tokens=[6, 5, 4, 3, 2, 1])
    current = Composition([0] * 6, [0, 0, 0, 1, 1, 1], [0], 2)
    result = compose(samples, 2, Budgets(1), loss_normalisation="step", current=current)
    tokens = [sum(int(samples.tokens_J[j]) for j in result.samples_of(0, c)) for c in (0, 1)]
    assert max(tokens) <= 11


def test_groups_of_cells_are_columns_of_their_own():
    """Two expert parallel groups: each micro-batch of each group gets one sample of each kind."""
    samples = make([[9, 0]] * 4 + [[0, 9]] * 4)
    result = compose(samples, [0, 0, 1, 1], Budgets(2, count=1), loss_normalisation="step")
    for m in range(2):
        for cells in ((0, 1), (2, 3)):
            members = [j for c in cells for j in result.samples_of(m, c)]
            assert sorted(j // 4 for j in members) == [0, 1]


def test_projection_and_node_objective_help():
    rng = np.random.default_rng(0)
    popularity = rng.gamma(0.3, size=(8, 1, 4, 32)).repeat(16, axis=1).reshape(128, 4, 32)
    samples = Samples(rng.poisson(100 * popularity), np.full(128, 10))
    budgets = Budgets(8, count=4)
    place = np.repeat(np.arange(8), 16)
    current = Composition(place, np.tile(np.repeat(np.arange(4), 4), 8), np.zeros(8, int), 4)

    def value(projection):
        result = compose(
            samples, 4, budgets, loss_normalisation="step", current=current, projection=projection
        )
        return squares(samples, 4, result), result

    start, (exact, _), (folded, _) = squares(samples, 4, current), value(None), value(32)
    equal = float((samples.rows_JLE.sum(0, dtype=np.int64) ** 2).sum()) / 8
    assert exact - equal < 0.02 * (start - equal)
    assert folded - equal < 0.1 * (start - equal)
    node_LE = np.tile(np.arange(32) // 8, (4, 1))
    _, by_node = value(node_LE)
    nodes = Samples(samples.rows_JLE.reshape(128, 4, 4, 8).sum(3), samples.tokens_J)
    exact_result = value(None)[1]
    assert squares(nodes, 4, by_node) < squares(nodes, 4, exact_result)


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        ("micro_batch", PlanError, "would change the gradient"),
        ({"policy": "step", "aux": "micro_batch"}, PlanError, "need 'step' for 'aux'"),
        ("token", ValueError, "loss_normalisation: need one of 'step', 'micro_batch'"),
    ],
)
def test_refuses_losses_that_depend_on_the_micro_batch(loss, error, text):
    with pytest.raises(error, match=text):
        compose(make([[1, 1]]), 1, Budgets(1), loss_normalisation=loss)


def test_requires_the_statement_about_the_loss():
    with pytest.raises(TypeError, match="loss_normalisation"):
        compose(make([[1, 1]]), 1, Budgets(1))


def one(budgets, cells=1, samples=None, **options):
    samples = make([[1, 1]] * 3, tokens=[5, 4, 3]) if samples is None else samples
    return compose(samples, cells, budgets, loss_normalisation="step", **options)


TOO_MUCH = [
    (Budgets(2, tokens=4), r"tokens: .* sample 0 of 5 fits nowhere; cell 0 .* its 4 by 1"),
    (Budgets(2, tokens=6), r"tokens: .* sample 2 of 3 .* micro-batch [01] .* its 6 by [12]"),
    (Budgets(2, attention_cost=24), r"attention_cost: .* sample 0 of 25 .* its 24 by 1"),
    (Budgets(1, count=2), r"count: .* sample 2 fits nowhere; cell 0 in micro-batch 0 .* 2 by 1"),
    (Budgets(4, least_count=1), r"least_count: need 1 samples, but cell 0 in micro-batch 3 .* 1"),
    (Budgets([1, 1]), r"budgets.micro_batches: need .*\[1\]"),
    (Budgets(0), "budgets.micro_batches"),
    (Budgets(1, tokens=[5, 5]), r"budgets.tokens"),
    (Budgets(1, tokens=-1), r"budgets.tokens"),
]


@pytest.mark.parametrize(("budgets", "text"), TOO_MUCH)
def test_budgets_that_cannot_hold_say_where_and_by_how_much(budgets, text):
    with pytest.raises(PlanError, match=text):
        one(budgets)


def test_a_group_that_does_not_fit_together():
    samples = make([[1, 1]] * 4, tokens=[5, 4, 3, 2], group_J=[0, 0, 0, 1])
    with pytest.raises(PlanError, match=r"sample 2 of 3 fits nowhere; .* its 10 by 2"):
        one(Budgets(2, tokens=10), samples=samples, keep="group")
    one(Budgets(2, tokens=12), samples=samples, keep="group")


CURRENT = Composition([0, 1, 1], [0, 0, 0], [0, 0], 1)


@pytest.mark.parametrize(
    ("current", "options", "text"),
    [
        (
            CURRENT,
            {"budgets": Budgets(2, tokens=6)},
            "cell 0 in micro-batch 1 .* exceeds that by 1",
        ),
        (CURRENT, {"budgets": Budgets(3)}, r"need \[0, 0, 0\] steps by micro-batch, got \[0, 0\]"),
        (CURRENT, {"cells": 2}, "need 2 cells, got 1"),
        (Composition([0], [0], [0, 0], 1), {}, "need 3 samples, got 1"),
        (dataclasses.replace(CURRENT, ids=(0, 2, 1)), {}, "ids of the samples"),
        (
            CURRENT,
            {"samples": make([[1, 1]] * 3, optimizer_step_J=[0, 0, 7]), "budgets": Budgets([1, 1])},
            r"steps by micro-batch",
        ),
        (
            Composition([0, 1, 1], [0, 0, 0], [0, 7], 1),
            {"samples": make([[1, 1]] * 3, optimizer_step_J=[0, 0, 7]), "budgets": Budgets([1, 1])},
            "sample 1 in optimizer step 0, got 7",
        ),
        (
            CURRENT,
            {"samples": make([[1, 1]] * 3, group_J=[3, 3, 4]), "keep": "group"},
            "group 3 in one micro-batch with keep='group', got sample 1 apart",
        ),
    ],
)
def test_refuses_a_current_composition_that_does_not_fit(current, options, text):
    with pytest.raises(PlanError, match=text):
        one(**({"budgets": Budgets(2), "current": current} | options))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"cells": 0}, ValueError, "cells: need 1 to 1048576, got 0"),
        ({"cells": [0, 2]}, PlanError, "cells"),
        ({"cells": []}, PlanError, "cells"),
        ({"keep": "prompt"}, ValueError, "keep: need one of"),
        ({"projection": 0}, ValueError, "projection: need at least 1"),
        ({"projection": [[0]]}, PlanError, "projection"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 64}, ValueError, "seed: need 0 to"),
        ({"num_threads": 10**30}, ValueError, "num_threads: need 0 to 65536"),
        ({"cells": 10**12}, ValueError, "cells: need 1 to 1048576"),
        ({"cells": 1024, "budgets": Budgets(1 << 20)}, PlanError, "budgets.micro_batches: need at"),
        ({"samples": ["a"]}, TypeError, "samples: need Sample, got str"),
        ({"budgets": 3}, TypeError, "budgets: need Budgets"),
        ({"current": 3}, TypeError, "current: need a Composition"),
        ({"samples": make(np.zeros((1, 0), int))}, PlanError, "rows_JLE"),
        ({"samples": make([[2**31 - 1, 1]])}, PlanError, "2\\^31 - 1 rows"),
    ],
)
def test_refuses_bad_arguments(change, error, text):
    with pytest.raises(error, match=text):
        one(**({"budgets": Budgets(1)} | change))


def test_single_samples_and_arrays_are_the_same():
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 9, (6, 2, 4))
    as_list = [Sample(f"s{j}", 0, j // 3, 4, 16, rows[j]) for j in range(6)]
    arrays = Samples(rows, [4] * 6, None, [0] * 6, [0, 0, 0, 1, 1, 1], [f"s{j}" for j in range(6)])
    options = {"cells": 1, "budgets": Budgets(2), "loss_normalisation": "step"}
    one_way, other = compose(as_list, **options), compose(arrays, **options)
    assert [entry.ids for entry in one_way] == [entry.ids for entry in other]
    assert [entry.optimizer_step for entry in one_way] == [0, 0, 1, 1]


def test_no_global_random_state_is_read():
    before = np.random.get_state()[1].copy()
    rng = np.random.default_rng(0)
    one(Budgets(3), samples=make(rng.integers(0, 9, (30, 8))), projection=2)
    assert np.array_equal(np.random.get_state()[1], before)
    assert relibra.compose is compose
