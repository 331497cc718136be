import pytest
import torch

from relibra.demo.control import Difference


def test_difference_is_relative_to_the_control_and_largest_by_element():
    control = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    near = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([4.4])}
    difference = Difference.of(near, control)
    assert difference.relative == pytest.approx(0.1, rel=1e-6)
    assert difference.largest == pytest.approx(0.4, rel=1e-6)
    assert Difference.of(control, control) == Difference(0.0, 0.0)


def test_swapped_experts_of_equal_size_are_a_difference():
    experts = torch.randn(4, 8)
    swapped = experts[[1, 0, 2, 3]]
    assert Difference.of({"w": swapped}, {"w": experts}).relative > 0.1


def test_a_missing_tensor_is_refused():
    with pytest.raises(ValueError, match=r"need the names of the control.*\['b'\]"):
        Difference.of({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)})


def test_nothing_and_zeros_are_equal_but_zero_and_something_are_not():
    zero = {"a": torch.zeros(3)}
    assert Difference.of({"a": torch.zeros(0)}, {"a": torch.zeros(0)}) == Difference(0.0, 0.0)
    assert Difference.of(zero, zero) == Difference(0.0, 0.0)
    assert Difference.of({"a": torch.ones(3)}, zero).relative == float("inf")


def test_nan_stays_nan():
    difference = Difference.of({"a": torch.tensor([float("nan")])}, {"a": torch.ones(1)})
    assert difference.relative != difference.relative
