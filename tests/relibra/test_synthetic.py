"""The package's own generator: conservation, order, seeds and skew."""

import numpy as np
import pytest

from relibra.synthetic import KINDS, make_batch
from relibra_kernels.errors import PlanError


def small(**values: object):
    settings = {"num_ranks": 8, "num_micro_batches": 4, "num_layers": 2, "num_experts": 32}
    return make_batch(**(settings | {"top_k": 4, "tokens": 400} | values))


def imbalance(rows: np.ndarray) -> float:
    loads = rows.sum(2).reshape(*rows.shape[:2], rows.shape[2], -1).sum(3)
    return float((loads.max(2) / loads.mean(2)).mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["grouped", "random"])
def test_every_bin_is_full(kind: str, order: str) -> None:
    batch = small(kind=kind)
    rows = batch.rows(order)
    assert rows.shape == (4, 2, 8, 32)
    assert (rows.sum(3) == 400 * 4).all()
    assert rows.max() <= 400
    assert rows.min() >= 0
    assert (batch.lengths().sum(2) == 400).all()


def test_both_orders_have_the_same_samples() -> None:
    batch = small()
    order = batch.order("random")
    assert sorted(order) == list(range(len(batch.tokens_Q)))
    assert np.array_equal(batch.tokens_Q[order], batch.tokens_Q)  # so bins and lengths stay
    assert not np.array_equal(order, batch.order("grouped"))
    assert np.array_equal(batch.rows("grouped").sum((0, 2)), batch.rows("random").sum((0, 2)))


def test_seeds() -> None:
    assert np.array_equal(small(seed=3).rows_QLE, small(seed=3).rows_QLE)
    assert not np.array_equal(small(seed=3).rows_QLE, small(seed=4).rows_QLE)
    before = np.random.get_state()[1].copy()
    small()
    assert np.array_equal(np.random.get_state()[1], before)  # no global state


def test_grouped_is_harder_than_random() -> None:
    for kind in ("medium", "volatile"):
        batch = make_batch(kind, num_ranks=8, num_micro_batches=8, num_layers=2)
        assert imbalance(batch.rows("grouped")) > imbalance(batch.rows("random")) > 1.2


def test_prompts_make_neighbours_alike() -> None:
    """Rows of samples of one prompt correlate more than those of two prompts of a batch."""
    batch = small(kind="volatile", tokens=4000)
    share = batch.rows_QLE[:, 0] / batch.tokens_Q[:, None]
    correlation = np.corrcoef(share)
    prompt = np.arange(len(share)) // 16
    same = prompt[:, None] == prompt[None]
    np.fill_diagonal(correlation, np.nan)
    assert np.nanmean(correlation[same]) > np.nanmean(correlation[~same]) + 0.2


def test_one_expert_a_token_and_all_experts() -> None:
    assert (small(top_k=1).rows("grouped").sum(3) == 400).all()
    every = small(num_experts=4, top_k=4).rows("grouped")
    assert (every == 400).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "wild"}, "kind: need one of stable, medium, volatile, qwenlike, got 'wild'"),
        ({"num_ranks": 0}, "num_ranks: .*0"),
        ({"top_k": 33}, "num_experts: .*32"),
        ({"tokens": 2.5}, "tokens: "),
        ({"tokens": 1 << 40}, "tokens: need 20 to 16777216"),
        ({"seed": -1}, "seed: "),
    ],
)
def test_bad_input(values: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        small(**values)


def test_unknown_order() -> None:
    with pytest.raises(ValueError, match="order: need one of .*'sorted'"):
        small().rows("sorted")
