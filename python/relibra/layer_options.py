"""What kind of experts a layer has, and what it keeps between forward and backward.

Letters: D model dim, F expert dim.
"""

from __future__ import annotations

import dataclasses
import math

from relibra_kernels.checks import check_choice
from relibra_kernels.ops.expert_arguments import SCORE_AT
from relibra_kernels.reference.activation import CLAMPED_SWIGLU, GELU, SQUARED_RELU, SWIGLU

# Name -> number in the ops; the first two have a gate.
ACTIVATIONS = {
    "swiglu": SWIGLU,
    "clamped_swiglu": CLAMPED_SWIGLU,
    "gelu": GELU,
    "relu2": SQUARED_RELU,
}
GATED = ("swiglu", "clamped_swiglu")
SAVES = ("copy", "redispatch")
ALPHA, LIMIT = 1.702, 7.0


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """Options of the experts of one layer; all combine freely except where `Raises` says so.

    Source: the clamped SwiGLU, interleaved rows and biases are those of gpt-oss (arXiv 2508.10925),
    ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate <= limit and -limit <= up <= limit.

    Attributes:
        activation: ``"swiglu"`` and ``"clamped_swiglu"`` have a gate: ``w13`` holds ``2F`` rows;
            ``"gelu"`` (exact) and ``"relu2"`` (squared ReLU) have none: ``F`` rows.
        alpha, limit: of the clamped SwiGLU.
        score_at: ``"output"`` multiplies an expert's output, bias included, by the score;
            ``"activation"`` multiplies the input of the second product, so that ``b2`` counts once
            for every choice, unscaled.
        interleaved: gate and up rows of ``w13`` (and entries of ``b13``) alternate.
        transposed: weights are stored ``w13 [H, D, 2F]`` and ``w2 [H, F, D]``.
        save: ``"copy"`` keeps the received tokens for the backward; ``"redispatch"`` keeps the
            layer's input and dispatches it once more in the backward.
        recompute_h: keep no first product; the backward makes it again, equal in every bit.

    Raises:
        TypeError, ValueError: an unknown name, ``interleaved`` without a gate, a limit that is not
            positive, or ``alpha`` and ``limit`` given to another activation.

    Example:
        >>> LayerOptions("gelu").w13_shape(hidden_size=8, expert_size=3)
        (3, 8)
        >>> LayerOptions(transposed=True).w13_shape(hidden_size=8, expert_size=3)
        (8, 6)
    """

    activation: str = "swiglu"
    alpha: float = ALPHA
    limit: float = LIMIT
    score_at: str = "output"
    interleaved: bool = False
    transposed: bool = False
    save: str = "copy"
    recompute_h: bool = False

    def __post_init__(self) -> None:
        """Checks every option and the combinations."""
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("score_at", self.score_at, SCORE_AT)
        check_choice("save", self.save, SAVES)
        for name in ("interleaved", "transposed", "recompute_h"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}: need a bool, got {value!r}")
        for name, default in (("alpha", ALPHA), ("limit", LIMIT)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: need a number, got {value!r}")
            value = _as_float(value)
            object.__setattr__(self, name, value)  # equal options read alike on every rank
            if not math.isfinite(value) or (name == "limit" and value <= 0):
                need = "a positive finite" if name == "limit" else "a finite"
                raise ValueError(f"{name}: need {need} number, got {value}")
            if value != default and self.activation != "clamped_swiglu":
                raise ValueError(
                    f'{name}: need activation="clamped_swiglu", got {name}={value} with '
                    f"activation={self.activation!r}"
                )
        if self.interleaved and not self.is_gated:
            raise ValueError(
                "interleaved: need an activation with a gate, whose rows alternate with those of "
                f"up, got activation={self.activation!r}"
            )

    @property
    def is_gated(self) -> bool:
        """Whether ``w13`` holds gate and up rows."""
        return self.activation in GATED

    @property
    def scales_output(self) -> bool:
        """Whether scores multiply outputs, and so are applied where rows are combined."""
        return self.score_at == "output"

    def inner_rows(self, expert_size: int) -> int:
        """Rows of the first product: 2F with a gate, else F."""
        return 2 * expert_size if self.is_gated else expert_size

    def w13_shape(self, hidden_size: int, expert_size: int) -> tuple[int, int]:
        """Shape of one expert's ``w13`` as stored.

        Args:
            hidden_size: D.
            expert_size: F.
        """
        rows = self.inner_rows(expert_size)
        return (hidden_size, rows) if self.transposed else (rows, hidden_size)

    def w2_shape(self, hidden_size: int, expert_size: int) -> tuple[int, int]:
        """Shape of one expert's ``w2`` as stored; arguments as for `w13_shape`."""
        shape = (hidden_size, expert_size)
        return shape[::-1] if self.transposed else shape

    def expert_size(self, w13_shape: tuple[int, ...]) -> int:
        """F from the shape of one expert's ``w13``.

        Raises:
            ValueError: an odd number of gate and up rows.
        """
        rows = w13_shape[-1 if self.transposed else -2]
        if self.is_gated and rows % 2:
            raise ValueError(
                f"w13: need an even number of gate and up rows with activation="
                f"{self.activation!r}, got {rows}"
            )
        return rows // 2 if self.is_gated else rows


def _as_float(value: float) -> float:
    """A number as a float; infinite where there is none so large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_options(options: object) -> None:
    """Raise unless these are options.

    Raises:
        TypeError: something else, such as the name of an activation.
    """
    if not isinstance(options, LayerOptions):
        raise TypeError(f"options: need a LayerOptions, got {options!r:.80}")
