"""ModelShape: sizes and what is refused."""

import pytest

from relibra.shape import ModelShape
from relibra_kernels.errors import PlanError


def test_bytes_of_an_expert() -> None:
    shape = ModelShape(8, 2, range(1, 4), hidden_size=64, expert_size=32, dtype="float32")
    assert shape.moe_layers == (1, 2, 3)
    assert shape.num_layers == 3
    assert shape.expert_bytes == 3 * 64 * 32 * 4
    assert ModelShape(8, 2, (0,), hidden_size=64).expert_bytes is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts: need an integer >= 1, got 0"),
        ({"num_experts": True}, "num_experts: need an integer >= 1, got True"),
        ({"top_k": 9}, "top_k: need <= num_experts 8, got 9"),
        ({"moe_layers": (2, 1)}, r"moe_layers: need ascending layer numbers, got \(2, 1\)"),
        ({"moe_layers": (1, 1)}, "ascending"),
        ({"moe_layers": (-1,)}, "moe_layers: need 0 to 4095, got -1"),
        ({"moe_layers": (0, 4096)}, "moe_layers: need 0 to 4095, got 4096"),
        ({"moe_layers": range(10**12)}, "moe_layers: need at most 4096 layers, got more"),
        ({"moe_layers": 3}, "moe_layers: need layer numbers, got int 3"),
        ({"num_experts": 65537}, "num_experts: need at most 65536, got 65537"),
        ({"num_experts": 2**34}, "num_experts: need at most 65536"),
        ({"hidden_size": 0}, "hidden_size: need an integer >= 1, got 0"),
        ({"dtype": "int8"}, "dtype: need one of .*bfloat16.*got 'int8'"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"num_experts": 8, "top_k": 2, "moe_layers": (0, 1)}
    with pytest.raises(PlanError, match=message):
        ModelShape(**(values | change))  # type: ignore[arg-type]
