"""Messages of the shared argument checks."""

import numpy as np
import pytest
import torch

from relibra_kernels import checks

X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": [1, 2]}, TypeError, "x: need a torch.Tensor, got list [1, 2]"),
        ({"dtype": torch.int32}, TypeError, "x: need dtype torch.int32, got torch.float32 tensor"),
        (
            {"dtype": (torch.int32, torch.int64)},
            TypeError,
            "x: need dtype torch.int32 or torch.int64, got torch.float32 tensor [2, 3] on cpu",
        ),
        ({"ndim": 3}, ValueError, "x: need 3 dimensions, got torch.float32 tensor [2, 3]"),
        ({"shape": (None, 4)}, ValueError, "x: need shape [any, 4], got torch.float32 tensor"),
        ({"shape": (2,)}, ValueError, "x: need shape [2], got torch.float32 tensor [2, 3]"),
        ({"device": "meta"}, ValueError, "x: need device meta, got torch.float32 tensor"),
        ({"device": "cuda:1"}, ValueError, "x: need device cuda:1, got torch.float32 tensor"),
        (
            {"value": X.t(), "contiguous": True},
            ValueError,
            "x: need contiguous memory, got strides [1, 3]",
        ),
    ],
)
def test_check_tensor_names_argument_need_and_got(arguments, error, message):
    arguments = {"value": X, **arguments}
    with pytest.raises(error) as raised:
        checks.check_tensor("x", arguments.pop("value"), **arguments)
    assert str(raised.value).startswith(message)


def test_check_tensor_returns_what_it_accepts():
    accepted = checks.check_tensor(
        "x", X, dtype=(torch.float16, torch.float32), shape=(None, 3), ndim=2, device="cpu"
    )
    assert accepted is X


@pytest.mark.parametrize(
    "value",
    [
        [3, 0, 7],
        (3, 0, 7),
        np.array([3, 0, 7], np.uint8),
        np.array([3, 0, 7], np.uint64),
        np.array([3, 0, 7], ">i4"),
        torch.tensor([3, 0, 7], dtype=torch.int16),
    ],
)
def test_check_int_array_accepts_integers_of_any_kind(value):
    result = checks.check_int_array("rows", value, minimum=0)
    assert result.dtype == np.int32
    assert result.tolist() == [3, 0, 7]


def test_check_int_array_does_not_copy_what_fits():
    rows = np.arange(4, dtype=np.int32)
    assert np.shares_memory(checks.check_int_array("rows", rows), rows)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1.0], TypeError, "rows: need integers, got float64 array [1]"),
        (
            [1, float("nan")],
            TypeError,
            "rows: need integers, got float64 array [2] with nan at [1]",
        ),
        ([float("-inf")], TypeError, "rows: need integers, got float64 array [1] with -inf at [0]"),
        ([True], TypeError, "rows: need integers, got bool array [1]"),
        (torch.ones(1).bfloat16(), TypeError, "rows: need integers, got torch.bfloat16 tensor [1]"),
        (["7"], TypeError, "rows: need integers, got <U1 array [1]"),
        ([[1], [2, 3]], ValueError, "rows: need a rectangular array of integers"),
        ([0, -1], ValueError, "rows: need values in 0..2147483647, got -1 at [1]"),
        (
            [[0], [2**31]],
            ValueError,
            "rows: need values in 0..2147483647, got 2147483648 at [1, 0]",
        ),
        (
            np.array([2**64 - 1], np.uint64),
            ValueError,
            "rows: need values in 0..2147483647, got 184",
        ),
    ],
)
def test_check_int_array_never_changes_a_value(value, error, message):
    with pytest.raises(error) as raised:
        checks.check_int_array("rows", value, minimum=0)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, "n: need an integer, got bool True"),
        (2.0, TypeError, "n: need an integer, got float 2.0"),
        (np.float32(2), TypeError, "n: need an integer"),
        (0, ValueError, "n: need 1 to 8, got 0"),
        (9, ValueError, "n: need 1 to 8, got 9"),
    ],
)
def test_check_int(value, error, message):
    with pytest.raises(error) as raised:
        checks.check_int("n", value, minimum=1, maximum=8)
    assert str(raised.value).startswith(message)
    assert checks.check_int("n", np.int16(8), minimum=1, maximum=8) == 8


def test_check_choice():
    with pytest.raises(ValueError, match="mode: need one of 'a', 'b', got 'c'"):
        checks.check_choice("mode", "c", ("a", "b"))


def test_describe_clips_long_values():
    assert len(checks.describe("x" * 1000)) < 80
