"""What a format module hands to the loader, and the model that everything is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from relibra.limits import MAX_EXPERTS, MAX_LAYERS, layer_tuple
from relibra_kernels.checks import check_choice, check_int

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from relibra.id_arrays import IdArray

LastRow: TypeAlias = Literal["keep", "drop"]
Missing: TypeAlias = Literal["live", "error"]
Suspect: TypeAlias = Literal["report", "live", "error"]


@dataclass(frozen=True)
class TraceModel:
    """The layers and experts of a model, which no carrier names.

    Args:
        num_layers: decoder layers, dense ones too, at most 4,096.
        moe_layers: decoder layer numbers of the MoE layers, rising, from 0.
        top_k: K, choices a token.
        num_experts: E, at most 65,536.

    Raises:
        TypeError: no integers.
        ValueError: a number above its limit, a layer outside 0..num_layers-1 or twice there, or K
            above E.

    Example:
        >>> TraceModel(6, range(1, 6), 4, 16).dense_layers
        (0,)
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    num_experts: int

    def __post_init__(self) -> None:
        """Checks every field."""
        num_layers = check_int("num_layers", self.num_layers, minimum=1, maximum=MAX_LAYERS)
        layers = layer_tuple("moe_layers", self.moe_layers)
        for one in layers:
            check_int("moe_layers", one, minimum=0, maximum=num_layers - 1)
        if not layers or list(layers) != sorted(set(layers)):
            raise ValueError(f"moe_layers: need rising layer numbers, got {list(layers)}")
        num_experts = check_int("num_experts", self.num_experts, minimum=1, maximum=MAX_EXPERTS)
        check_int("top_k", self.top_k, minimum=1, maximum=num_experts)
        object.__setattr__(self, "moe_layers", layers)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Decoder layers that are no MoE layers."""
        moe_layers = set(self.moe_layers)
        return tuple(one for one in range(self.num_layers) if one not in moe_layers)


@dataclass(frozen=True)
class LoadRules:
    """What the loader does with rows that are missing or look wrong; see `load_routing`.

    Args:
        last_row: `"keep"` or `"drop"` the row of the last token; None is the format's default.
        missing: rows that the carrier admits not to have.
        suspect: rows that look wrong.
        allow_duplicates: whether a row may have an id twice.

    Raises:
        ValueError: an unknown option.

    Example:
        >>> LoadRules(missing="never")
        Traceback (most recent call last):
        ValueError: missing: need one of 'live', 'error', got 'never'
    """

    last_row: LastRow | None = None
    missing: Missing = "live"
    suspect: Suspect = "report"
    allow_duplicates: bool = False

    def __post_init__(self) -> None:
        """Checks every option."""
        check_choice("last_row", self.last_row, (None, "keep", "drop"))
        check_choice("missing", self.missing, ("live", "error"))
        check_choice("suspect", self.suspect, ("report", "live", "error"))


@dataclass(frozen=True)
class Part:
    """Routing of one sample, or of one of its turns, as a rollout engine delivered it.

    Args:
        rows: integer `[rows, layers, K]`, or flat `[elements]`; None where the engine says that it
            has none.
        label: where it stood, for messages, such as `"turn 2"`.
        start: row of the sample at which the part begins; None where the carrier does not say.
        num_tokens: prompt and completion tokens of the sample up to this part; None if not said.
        raw_dtype: whether the dtype was assumed, so that another may be meant.
    """

    rows: IdArray | None
    label: str
    start: int | None = None
    num_tokens: int | None = None
    raw_dtype: bool = False


@dataclass(frozen=True)
class Batch:
    """Rows of any number of samples, already joined.

    Args:
        rows: integer `[rows, layers, K]`.
        cu_seqlens: int64 `[samples + 1]`.
        valid: bool `[rows]`; None is all valid.
        has_last_row: whether each sample has the row of its last token.
        moe_layers: number of each place on the layers axis where the file says so.
        num_experts: E where the file says so.
        notes: kept with the trace.
    """

    rows: IdArray
    cu_seqlens: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_] | None = None
    has_last_row: bool = False
    moe_layers: tuple[int, ...] | None = None
    num_experts: int | None = None
    notes: tuple[str, ...] = ()


Delivery: TypeAlias = "tuple[Part, ...] | Batch"


class Format(Protocol):
    """What a format module offers."""

    NAME: str
    NEEDS: str

    def matches(self, payload: object) -> bool:
        """Whether `read` takes this payload, judged without looking at ids."""
        ...

    def read(self, payload: object, label: str) -> Delivery:
        """Takes the rows of a payload, unchecked."""
        ...
