"""One logical view over every storage of expert weights; what does not fit is refused by name."""

import re

import pytest
import torch

from relibra_kernels.weights import WeightSet

W = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)


def test_concatenated_halves() -> None:
    w = WeightSet(W, halves=2)
    assert torch.equal(w.view(W), torch.stack([W[:, :3], W[:, 3:]], 1))
    assert (w.num_home, w.num_rows, w.num_columns) == (2, 3, 4)


def test_interleaved_halves() -> None:
    w = WeightSet(W, halves=2, interleaved=True)
    assert torch.equal(w.view(W), torch.stack([W[:, 0::2], W[:, 1::2]], 1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_transposed(interleaved: bool) -> None:
    stored = W.transpose(1, 2).contiguous()
    w = WeightSet(stored, halves=2, interleaved=interleaved, transposed=True)
    plain = WeightSet(W, halves=2, interleaved=interleaved)
    assert torch.equal(w.view(stored), plain.view(W))
    assert (w.num_rows, w.num_columns) == (3, 4)


def test_one_half() -> None:
    w = WeightSet(W)
    assert torch.equal(w.view(W), W.unsqueeze(1))
    assert (w.num_rows, w.num_columns) == (6, 4)


def test_a_view_is_no_copy() -> None:
    wide = torch.zeros(2, 8, 6)[:, :6, :4]
    for interleaved in (False, True):
        view = WeightSet(wide, halves=2, interleaved=interleaved).view(wide)
        assert view.data_ptr() == wide.data_ptr()


def test_separate_experts() -> None:
    w = WeightSet(tuple(W), replica=W[:1])
    assert w.is_table
    assert w.num_home == 2
    assert torch.equal(w.view(w.home[1]), W[1:, None])
    assert [name for name, _ in w.families()] == ["home", "replica"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"home": W, "halves": 3}, ValueError, "halves: need"),
        ({"home": W, "interleaved": True}, ValueError, "interleaved: need halves=2"),
        ({"home": W[:, :5], "halves": 2}, ValueError, "home: need an even number"),
        ({"home": W, "replica": W[:, :4]}, ValueError, "replica"),
        ({"home": W, "static": W.double()}, TypeError, "static"),
        ({"home": W.int()}, TypeError, "home"),
        ({"home": W.transpose(1, 2)}, ValueError, "home: need contiguous columns"),
        ({"home": ()}, TypeError, "home: need a tensor or a tuple"),
        ({"home": [W[0]]}, TypeError, "home: need a tensor or a tuple"),
        ({"home": (W[0], W[1, :4])}, ValueError, "home[1]"),
        ({"home": (W[0], W[1].double())}, TypeError, "home[1]"),
        ({"home": (W[0], torch.zeros(6, 8)[:, :4])}, ValueError, "home[1]: need the strides"),
    ],
)
def test_what_does_not_fit(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        WeightSet(**arguments)  # type: ignore[arg-type]
