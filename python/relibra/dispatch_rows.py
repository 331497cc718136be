"""The rows that one rank dispatches in one micro-batch: routed, unknown and padding rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from relibra.id_arrays import IdArray, as_ids, check_id_range, read_only
from relibra.limits import MAX_EXPERTS, layer_tuple
from relibra_kernels.checks import check_int, check_int_array
from relibra_kernels.errors import TraceError

UInt8Array: TypeAlias = npt.NDArray[np.uint8]
Int64Array: TypeAlias = npt.NDArray[np.int64]

# Default of fields that are never None after construction.
_FILLED_IN: Any = None


@dataclass(frozen=True, eq=False)
class DispatchRows:
    """Tokens of one rank and micro-batch with the experts they are sent to.

    Made by `RoutingTrace.slice`, or by hand from any ids. Letters: L MoE layers, K choices a token.

    Args:
        ids: integer `[rows, L, K]`, logical ids as dispatched; the ids of unknown rows do not
            matter.
        kind: uint8 `[rows]`: `KIND_ROUTED`, `KIND_UNKNOWN` (follows the live router) or
            `KIND_PADDING`; None is all routed.
        source_row: int64 `[rows]`, row of the trace, -1 where there is none (padding, last tokens);
            None is 0, 1, 2, ...
        num_experts: E, at most 65,536.
        moe_layers: decoder layer number of each place on the L axis, for messages; None is 0..L-1.

    Raises:
        TypeError: ids that are no integers.
        ValueError: a layer number or E out of range.
        TraceError: shapes that do not fit, an unknown kind, or a routed or padding row with an id
            outside 0..E-1.

    Example:
        >>> rows = DispatchRows([[[0, 1]], [[2, 3]]], kind=[0, 1], num_experts=4)
        >>> rows.layer_ids(0).tolist(), rows.has_unknown
        ([[0, 1], [-1, -1]], True)
    """

    KIND_ROUTED: ClassVar[int] = 0
    KIND_UNKNOWN: ClassVar[int] = 1
    KIND_PADDING: ClassVar[int] = 2

    ids: IdArray
    kind: UInt8Array = _FILLED_IN
    source_row: Int64Array = _FILLED_IN
    num_experts: int = field(kw_only=True)
    moe_layers: tuple[int, ...] = field(default=_FILLED_IN, kw_only=True)

    def __post_init__(self) -> None:
        """Checks everything; the ids are not copied."""
        ids = as_ids("ids", self.ids)
        num_experts = check_int("num_experts", self.num_experts, minimum=1, maximum=MAX_EXPERTS)
        kind: object = self.kind
        source: object = self.source_row
        layers: Any = self.moe_layers
        layers = range(ids.shape[1]) if layers is None else layers
        layers = layer_tuple("moe_layers", layers)
        if len(layers) != ids.shape[1]:
            raise TraceError(
                f"moe_layers: need {ids.shape[1]} layer numbers like the ids' layer axis, "
                f"got {list(layers)}",
                code="layer_axis",
            )
        if kind is None:
            kind = np.zeros(len(ids), np.int64)
        if source is None:
            source = np.arange(len(ids))
        try:
            kinds = check_int_array(
                "kind", kind, shape=(len(ids),), minimum=0, maximum=self.KIND_PADDING
            )
            source_row = check_int_array(
                "source_row", source, shape=(len(ids),), minimum=-1, dtype=np.int64
            )
        except ValueError as error:
            raise TraceError(str(error), code="layout") from None
        check_id_range("ids", ids, kinds != self.KIND_UNKNOWN, layers, num_experts)
        for name, value in (
            ("ids", read_only(ids)),
            ("kind", read_only(kinds.astype(np.uint8))),
            ("source_row", read_only(source_row)),
            ("num_experts", num_experts),
            ("moe_layers", layers),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_rows(self) -> int:
        """Tokens of this rank, padding included."""
        return len(self.ids)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.ids.shape[2])

    @property
    def has_unknown(self) -> bool:
        """Whether any row follows the live router, so that no split is known before the forward."""
        return bool((self.kind == self.KIND_UNKNOWN).any())

    def layer_ids(self, layer_index: int) -> npt.NDArray[np.int32]:
        """Choices in one layer.

        Args:
            layer_index: place on the L axis, from 0.

        Returns:
            int32 `[rows, K]`, a copy; -1 in unknown rows.
        """
        ids = self.ids[:, layer_index].astype(np.int32)
        ids[self.kind == self.KIND_UNKNOWN] = -1
        return ids
