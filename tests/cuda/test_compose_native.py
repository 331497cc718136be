"""The native composition search by itself: kept scores against a recount, blocks, arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_kernels import native

WIDE = 1 << 40


def arguments(rng, units, columns, cells=1, width=24, big=False):
    """Samples that fit anywhere, a start that does, and units of one or more samples."""
    unit = np.concatenate([np.arange(units), rng.integers(0, units, units // 3)]).astype(np.int32)
    count = len(unit)
    rows = rng.poisson(rng.gamma(0.4, 40, (count, width))).astype(np.int32)
    if big:
        rows[rng.integers(count)] *= 10_000
    place = rng.integers(0, columns, units)[unit] * cells + rng.integers(0, cells, count)
    return {
        "rows_JW": rows,
        "tokens_J": rng.integers(1, 50, count),
        "attention_J": rng.integers(1, 50, count),
        "unit_J": unit,
        "group_C": np.zeros(cells, np.int32),
        "budget_C4": np.tile(np.array([WIDE, WIDE, WIDE, 0]), (cells, 1)),
        "num_micro_batches": columns,
        "start_J": place.astype(np.int32),
        "num_features": width,
        "feature_W": None,
        "max_passes": 6,
        "least_gain": 0.0,
        "block": 2048,
        "seed": 0,
        "check": True,
        "num_threads": 1,
    }


def compose(given_arguments, **changes):
    return native.planner().compose(**(given_arguments | changes))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 30),
    st.integers(1, 5),
    st.sampled_from([24, 7, 40]),
    st.sampled_from([2, 5, 2048]),
    st.booleans(),
)
def test_kept_scores_equal_a_recount(seed, units, columns, width, block, big):
    """Swaps and moves, units of several samples, blocks; `check` rescores after every pass."""
    rng = np.random.default_rng(seed)
    base = arguments(rng, units, columns, cells=int(rng.integers(1, 3)), width=width, big=big)
    bins, misfit, figures = compose(base, block=block)
    assert misfit[0] == 0
    assert figures[1] <= figures[0] * (1 + 1e-9)
    cells = len(base["group_C"])
    for unit in range(units):
        assert len(set(bins[base["unit_J"] == unit] // cells)) == 1, "a unit in two columns"
    assert np.array_equal(bins, compose(base, block=block, num_threads=3, check=False)[0])


def test_blocks_reach_what_one_block_reaches():
    rng = np.random.default_rng(3)
    base = arguments(rng, 300, 10) | {"check": False, "max_passes": 16}
    whole, blocks = compose(base)[2], compose(base, block=64)[2]
    assert blocks[1] < 0.25 * blocks[0]
    assert blocks[1] < 1.5 * whole[1]


def test_features_as_sums_and_as_a_fold():
    """Sums over sets of cells equal the search on summed rows; a fold of all cells is exact."""
    rng = np.random.default_rng(5)
    base = arguments(rng, 40, 4)
    feature = np.repeat(np.arange(6, dtype=np.int32), 4)
    summed = base["rows_JW"].reshape(-1, 6, 4).sum(2).astype(np.int32)
    one = compose(base, num_features=6, feature_W=feature)
    other = compose(base, rows_JW=summed, num_features=6)
    assert np.array_equal(one[0], other[0])
    assert one[2] == other[2]


def test_empty_and_equal_rows():
    rng = np.random.default_rng(7)
    base = arguments(rng, 12, 3)
    for rows in (np.zeros_like(base["rows_JW"]), np.full_like(base["rows_JW"], 7)):
        bins, misfit, figures = compose(base, rows_JW=rows)
        assert misfit[0] == 0
        assert np.isfinite(figures[:2]).all()
        assert len(bins) == len(rows)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rows_JW": np.zeros((3, 24), np.int64)}, TypeError, "rows_JW: need"),
        ({"unit_J": np.array([0, 2], np.int32)}, ValueError, "unit_J"),
        ({"group_C": np.array([5], np.int32)}, ValueError, "group_C"),
        ({"num_micro_batches": 0}, ValueError, "num_micro_batches"),
        ({"num_features": 25}, ValueError, "num_features"),
        ({"feature_W": np.full(24, 24, np.int32)}, ValueError, "feature_W"),
        ({"block": 1}, ValueError, "block"),
    ],
)
def test_refuses_bad_arguments(change, error, text):
    base = arguments(np.random.default_rng(0), 2, 2)
    base |= {name: base[name][:2] for name in ("rows_JW", "tokens_J", "attention_J", "start_J")}
    base["unit_J"] = np.arange(2, dtype=np.int32)
    with pytest.raises(error, match=text):
        compose(base, **change)


def test_refuses_negative_rows_and_bad_starts():
    base = arguments(np.random.default_rng(0), 4, 2)
    rows = base["rows_JW"].copy()
    rows[0, 3] = -1
    with pytest.raises(ValueError, match="negative"):
        compose(base, rows_JW=rows)
    with pytest.raises(ValueError, match="start_J"):
        compose(base, start_J=base["start_J"] + 2)
