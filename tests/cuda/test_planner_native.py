"""The native planner core by itself: exact scores, matching, limits of its arguments."""

import itertools
import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from relibra_kernels import native


def rescore(load: np.ndarray, bins: np.ndarray, scale: np.ndarray) -> int:
    """Sum over columns of the largest scaled bin; load `[E, C]`, in Python integers."""
    total = np.zeros((len(scale), load.shape[1]), object)
    for expert, place in enumerate(bins):
        total[place] += load[expert].astype(object)
    return int((total * scale.astype(object)[:, None]).max(0).sum())


def random_loads(seed: int, experts: int, columns: int, largest: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    load = (largest * rng.random((1, experts, columns)) ** 4).astype(np.int64)
    load[rng.random(load.shape) < 0.2] = 0
    return load


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 40]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([5, 10**4, 10**12]),
    st.booleans(),
)
@settings(max_examples=120)
def test_the_objective_is_exact_for_every_version_of_the_search(
    seed: int, bins: int, per_bin: int, columns: int, largest: int, uneven: bool
) -> None:
    """Few and many bins, 32 and 64 bit, scaled or not; `check` rescores after every swap."""
    rng = np.random.default_rng(seed)
    capacity = rng.integers(0, per_bin, bins, endpoint=True).astype(np.int32)
    capacity[0] += 1
    scale = rng.integers(1, 4, bins).astype(np.int32) if uneven else np.ones(bins, np.int32)
    load = random_loads(seed, int(capacity.sum()), columns, largest)
    found, objective, tried = native.planner().assign_bins(
        load, capacity, scale, None, 400, seed, True, 1
    )
    assert np.array_equal(np.bincount(found[0], minlength=bins), capacity)
    assert objective[0] == rescore(load[0], found[0], scale)
    assert tried[0] >= 0
    in_order = np.repeat(np.arange(bins), capacity).astype(np.int32)
    assert objective[0] <= rescore(load[0], in_order, scale)
    share = load.sum() / (1 / scale).sum() if uneven else load.sum() / bins
    assert objective[0] >= share * (1 - 1e-12)


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 7, 20]), st.sampled_from([100, 10**12]))
@settings(max_examples=40)
def test_descent_ends_where_no_swap_helps(seed: int, bins: int, largest: int) -> None:
    rng = np.random.default_rng(seed)
    load = random_loads(seed, 2 * bins, 3, largest)
    start = rng.permutation(np.repeat(np.arange(bins), 2))[None].astype(np.int32)
    capacity, scale = np.full(bins, 2, np.int32), np.ones(bins, np.int32)
    call = native.planner().assign_bins
    found, objective, _ = call(load, capacity, scale, start, 0, 0, False, 1)
    assert objective[0] == rescore(load[0], found[0], scale) <= rescore(load[0], start[0], scale)
    for a, b in itertools.combinations(range(2 * bins), 2):
        swapped = found[0].copy()
        swapped[[a, b]] = swapped[[b, a]]
        assert rescore(load[0], swapped, scale) >= objective[0]
    again, _, _ = call(load, capacity, scale, found, 0, 0, False, 1)
    assert np.array_equal(again, found)


def test_a_small_problem_is_solved_to_the_optimum() -> None:
    load = random_loads(3, 10, 6, 1000)
    capacity, scale = np.full(2, 5, np.int32), np.ones(2, np.int32)
    best = min(
        rescore(load[0], np.isin(np.arange(10), group).astype(int), scale)
        for group in itertools.combinations(range(10), 5)
    )
    _, objective, _ = native.planner().assign_bins(load, capacity, scale, None, 5000, 0, False, 1)
    assert objective[0] == best


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=60)
def test_matching_equals_scipy(seed: int, size: int) -> None:
    weight = np.random.default_rng(seed).integers(-5, 6, (size, size))
    column = native.planner().match(weight)
    assert sorted(column) == list(range(size))
    row, best = linear_sum_assignment(weight, maximize=True)
    assert weight[np.arange(size), column].sum() == weight[row, best].sum()


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_renaming_keeps_the_groups_and_as_many_experts_as_possible(seed: int, across: bool) -> None:
    rng = np.random.default_rng(seed)
    node = rng.permutation([0, 0, 1, 1, 2, 2]).astype(np.int32)
    base, layout = (rng.permutation(np.r_[:10, -1, -1]).reshape(6, 2) for _ in range(2))
    base, layout = base.astype(np.int32), layout.astype(np.int32)
    found = native.planner().relabel(layout[None], base[None], node, 10, across, 1)[0]
    groups = lambda table: sorted(sorted(row[row >= 0]) for row in table)  # noqa: E731
    assert groups(found) == groups(layout)
    by_node = lambda table: sorted(groups(table[node == n]) for n in range(3))  # noqa: E731
    if not across:
        assert by_node(found) == by_node(layout)
    shared = np.array([[len({*a[a >= 0]} & {*b[b >= 0]}) for b in base] for a in layout])
    most = 0
    for order in itertools.permutations(range(6)):
        names = np.array(order)
        groups_stay = all(len(set(node[names[node == n]])) == 1 for n in range(3))
        if across or groups_stay:
            most = max(most, shared[np.arange(6), names].sum())
    kept = sum(len({*a[a >= 0]} & {*b[b >= 0]}) for a, b in zip(found, base, strict=True))
    assert kept == most
    for rank in range(6):
        for slot in range(2):
            if base[rank, slot] in found[rank] and base[rank, slot] >= 0:
                assert found[rank, slot] == base[rank, slot]


def test_filler_slots_are_spread_over_nodes_and_ranks() -> None:
    call = native.planner().rank_capacities
    assert call(np.repeat([0, 1], 4).astype(np.int32), 60, 8).tolist() == [8, 8, 7, 7] * 2
    assert call(np.array([0, 0, 0, 1], np.int32), 6, 2).tolist() == [2, 2, 1, 1]


def random_nodes(seed: int, columns: int, ranks: int, home: int) -> np.ndarray:
    """Totals int64 `[columns, 1, ranks * home]` of one node, from flat to one hot expert."""
    rng = np.random.default_rng(seed)
    skew = rng.choice([0.2, 1.0, 3.0], (columns, 1, 1))
    return rng.poisson(30 * np.exp(skew * rng.normal(size=(columns, 1, ranks * home))))


def replicate_node(totals: np.ndarray, ranks: int, slots: int) -> tuple[np.ndarray, ...]:
    layout = np.arange(totals.shape[2], dtype=np.int32).reshape(1, ranks, -1)
    node = np.zeros(ranks, np.int32)
    planned: tuple[np.ndarray, ...] = native.planner().replicate(
        totals.astype(np.int64), layout, node, slots, 0.0, 1
    )
    return planned


@pytest.mark.parametrize(("ranks", "home", "slots"), [(5, 1, 1), (6, 2, 2), (4, 3, 4), (9, 2, 3)])
def test_with_as_many_replica_slots_as_home_slots_every_rank_is_flat(
    ranks: int, home: int, slots: int
) -> None:
    totals = random_nodes(ranks, 1500, ranks, home)
    _, rows, largest = replicate_node(totals, ranks, slots)
    assert np.array_equal(rows.sum((2, 3)), totals.sum(2))
    assert np.array_equal(largest, -(-totals.sum(2) // ranks))


def test_the_alias_method_serves_where_every_greedy_pass_fails() -> None:
    totals = np.array([[[1, 1, 1, 1, 4, 4, 4, 4, 9, 4]]])
    assert replicate_node(totals, 5, 2)[2].item() == 7


@pytest.mark.parametrize(("ranks", "home", "slots"), [(3, 4, 2), (4, 3, 2), (6, 6, 3), (2, 8, 4)])
def test_no_expert_is_copied_to_its_home_or_twice_to_a_rank(
    ranks: int, home: int, slots: int
) -> None:
    totals = random_nodes(ranks + slots, 1500, ranks, home)
    replicas, rows, _ = replicate_node(totals, ranks, slots)
    ordered = np.sort(replicas, axis=3)
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
    assert not ((replicas >= 0) & (replicas // home == np.arange(ranks)[:, None])).any()
    assert not (rows[..., home:][replicas < 0]).any()


@pytest.mark.parametrize(("ranks", "home", "slots"), [(4, 3, 1), (6, 6, 2), (8, 16, 1)])
def test_the_split_is_optimal_for_its_sites(ranks: int, home: int, slots: int) -> None:
    """A linear program over the same sites reaches no smaller maximum, rounded up."""
    totals = random_nodes(home, 12, ranks, home)
    replicas, _, largest = replicate_node(totals, ranks, slots)
    for column in range(len(totals)):
        rank, slot = np.nonzero(replicas[column, 0] >= 0)
        expert = replicas[column, 0, rank, slot]
        weight = totals[column, 0]
        count = len(rank)
        # Variables: rows of each replica, maximum. A replica takes rows from its home.
        load = np.zeros((ranks, count + 1))
        load[rank, np.arange(count)] += 1
        load[expert // home, np.arange(count)] -= 1
        load[:, -1] = -1
        taken = np.zeros((len(weight), count + 1))
        taken[expert, np.arange(count)] = 1
        result = linprog(
            np.append(np.zeros(count), 1.0),
            A_ub=np.vstack([load, taken]),
            b_ub=np.concatenate([-weight.reshape(ranks, home).sum(1), weight]),
        )
        assert largest[column, 0] == np.ceil(result.fun - 1e-6)


@pytest.mark.parametrize("ranks", [9, 72])
def test_wide_nodes_and_many_experts(ranks: int) -> None:
    """Nothing is sized for 8 ranks or 64 replicas a node."""
    experts, slots = 512, 2
    width = -(-experts // ranks)
    layout = np.full(ranks * width, -1, np.int32)
    layout[:experts] = np.arange(experts)
    rng = np.random.default_rng(0)
    totals = rng.poisson(100 * np.exp(2 * rng.normal(size=(2, 1, experts)))).astype(np.int64)
    replicas, rows, largest = native.planner().replicate(
        totals, layout.reshape(1, ranks, width), np.zeros(ranks, np.int32), slots, 0.0, 1
    )
    assert np.array_equal(rows.sum(3).max(2), largest)
    assert np.array_equal(rows.sum((2, 3)), totals.sum(2))
    assert (replicas[0] >= 0).sum() >= (64 if ranks == 72 else 8)
    home_only = np.where(layout >= 0, totals[..., layout], 0).reshape(2, 1, ranks, width).sum(3)
    assert (largest < home_only.max(2)).all()


def test_tolerance_buys_fewer_replicas() -> None:
    rng = np.random.default_rng(0)
    totals = rng.poisson(200 * np.exp(rng.normal(size=32)), (6, 1, 32)).astype(np.int64)
    layout = np.arange(32, dtype=np.int32).reshape(1, 8, 4)
    counts, worst = [], []
    for tolerance in (0.0, 0.02, 0.3):
        replicas, _, largest = native.planner().replicate(
            totals, layout, np.zeros(8, np.int32), 2, tolerance, 1
        )
        counts.append(int((replicas >= 0).sum()))
        worst.append(largest)
        assert (largest <= np.ceil(totals.sum(2) / 8) * (1 + tolerance) + 1).all()
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"load_LEC": np.zeros((1, 4, 2))}, TypeError, r"load_LEC: need .*int64 \[\?, \?, \?\]"),
        ({"load_LEC": np.full((1, 4, 2), -1)}, ValueError, "load_LEC: need values in 0"),
        ({"capacity_B": np.array([2, 1], np.int32)}, ValueError, "need a sum of 4 experts"),
        ({"capacity_B": np.zeros(0, np.int32)}, ValueError, "need at least one bin"),
        ({"scale_B": np.array([1, 0], np.int32)}, ValueError, "scale_B: need values in 1"),
        (
            {"start_LE": np.full((1, 4), 2, np.int32)},
            ValueError,
            r"start_LE: need values in 0\.\.1",
        ),
        ({"start_LE": np.zeros((1, 3), np.int32)}, TypeError, "start_LE: need"),
    ],
)
def test_arguments_are_checked_before_they_are_used(
    change: dict[str, np.ndarray], error: type[Exception], message: str
) -> None:
    arguments = {
        "load_LEC": np.ones((1, 4, 2), np.int64),
        "capacity_B": np.array([2, 2], np.int32),
        "scale_B": np.ones(2, np.int32),
    }
    with pytest.raises(error, match=message):
        native.planner().assign_bins(**(arguments | change))


def test_a_part_that_does_not_load_says_why_at_its_use() -> None:
    module, reason = native.load("relibra_kernels._never_built")
    assert module is None
    assert "_never_built" in reason


def test_a_missing_planner_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda name: (None, f"no file {name}"))
    with pytest.raises(RuntimeError, match="no file relibra_kernels._planner. Remedy: pip install"):
        native.planner()


def test_a_forked_child_may_use_threads_after_its_parent_did() -> None:
    """A thread pool that only the parent has would make the child wait for ever."""
    arguments = (
        np.ones((4, 8, 8), np.int64),
        np.tile(np.arange(8, dtype=np.int32).reshape(1, 4, 2), (8, 1, 1)),
        np.zeros(4, np.int32),
        1,
        0.0,
        2,
    )
    native.planner().replicate(*arguments)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        native.planner().replicate(*arguments)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
