"""The few numbers of a model that a plan needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relibra.limits import MAX_EXPERTS, MAX_WIDTH, layer_tuple
from relibra_kernels.errors import PlanError

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the MoE layers of a model.

    Args:
        num_experts: E, at most 65,536.
        top_k: K, choices of a token.
        moe_layers: decoder layer number of each MoE layer, ascending, 0..4095.
        hidden_size: D, None when unknown.
        expert_size: F, None when unknown.
        dtype: of the expert weights, a torch name without the prefix.

    Raises:
        PlanError: a value is out of range or of the wrong type.

    Example:
        >>> shape = ModelShape(128, 8, range(48), hidden_size=2048, expert_size=768)
        >>> shape.num_layers, shape.expert_bytes
        (48, 9437184)
        >>> ModelShape(16, 4, (1, 2, 3)).expert_bytes is None
        True
    """

    num_experts: int
    top_k: int
    moe_layers: Sequence[int]
    hidden_size: int | None = None
    expert_size: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Checks every value and makes `moe_layers` a tuple of int."""
        for name in ("num_experts", "top_k", "hidden_size", "expert_size"):
            value = getattr(self, name)
            if value is None and name in ("hidden_size", "expert_size"):
                continue
            if not _is_whole(value) or value < 1:
                raise PlanError(f"{name}: need an integer >= 1, got {value!r}")
            if name in ("hidden_size", "expert_size") and value > MAX_WIDTH:
                raise PlanError(f"{name}: need at most {MAX_WIDTH}, got {value}")
            object.__setattr__(self, name, int(value))  # JSON takes no NumPy integers
        if self.num_experts > MAX_EXPERTS:
            raise PlanError(f"num_experts: need at most {MAX_EXPERTS}, got {self.num_experts}")
        if self.top_k > self.num_experts:
            raise PlanError(f"top_k: need <= num_experts {self.num_experts}, got {self.top_k}")
        try:
            layers = layer_tuple("moe_layers", self.moe_layers)
        except (TypeError, ValueError) as error:
            raise PlanError(str(error)) from None
        if any(second <= first for first, second in zip(layers, layers[1:], strict=False)):
            raise PlanError(f"moe_layers: need ascending layer numbers, got {layers!r}")
        object.__setattr__(self, "moe_layers", layers)
        if self.dtype not in _ITEM_BYTES:
            raise PlanError(f"dtype: need one of {sorted(_ITEM_BYTES)}, got {self.dtype!r}")

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return len(self.moe_layers)

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of one expert's weights, 3*D*F*itemsize; None when D or F is unknown."""
        if self.hidden_size is None or self.expert_size is None:
            return None
        return 3 * self.hidden_size * self.expert_size * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight."""
        return _ITEM_BYTES[self.dtype]


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
