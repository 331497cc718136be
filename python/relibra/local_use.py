"""Uses of a layer that need no runtime: every expert lives in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relibra.balanced_moe import MoEHandle
from relibra.plan import ExpertLayout
from relibra.rank_tables import LayerTables, SourceRoute
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.transport.dispatch import PendingRows
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.two_hop import TwoHopDispatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relibra_kernels.transport.dispatch import Arrival
    from relibra_kernels.transport.two_hop import Relay

LOCAL_BLOCK_ROWS = 16


class LocalMovers:
    """Movers of a group of one rank: nothing moves."""

    def exchange(
        self, x: torch.Tensor, send_splits: list[int], recv_splits: list[int], what: str
    ) -> torch.Tensor:
        """The rows themselves."""
        return x

    def start_exchange(
        self,
        x: torch.Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        what: str,
        channel: str = "",
    ) -> Arrival:
        """The rows themselves, here already."""
        return PendingRows(x, x, None, Ranks.of(None), what)

    def start_relay(self, x: torch.Tensor, relay: Relay, what: str) -> Arrival:
        """What this rank passes on to itself."""
        return TwoHopDispatch(None, None).start(x, relay, what=what)

    def push(
        self, weights: Mapping[str, torch.Tensor], tables: LayerTables, what: str
    ) -> dict[str, torch.Tensor]:
        """Empty replica buffers ``[0, ...]``."""
        return {name: _no_slots(w, w.dtype) for name, w in weights.items()}

    def release_weights(self) -> None:
        """Nothing was pushed."""

    def replica_grads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Empty gradient buffers ``[0, ...]``."""
        return {name: _no_slots(w, accumulation_dtype(w.dtype)) for name, w in weights.items()}

    def reduce(
        self,
        replica_grads: Mapping[str, torch.Tensor],
        home_grads: Mapping[str, torch.Tensor],
        tables: LayerTables,
        what: str,
    ) -> None:
        """No replica, nothing to add."""

    def note_stage(self, stage: str, *, is_open: bool) -> None:
        """No step ends here."""

    def enter_experts(self, handle: MoEHandle, detail: str) -> None:
        """Nothing to note."""

    def enter_backward(self, handle: MoEHandle, detail: str) -> None:
        """Nothing to note."""

    def leave_backward(self, handle: MoEHandle) -> None:
        """Nothing to release."""


def _no_slots(home: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, *home.shape[1:], dtype=dtype, device=home.device)


def count_ids(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows of each expert, int64 ``[E]``; -1 takes no part.

    Raises:
        TypeError: not an integer dtype.
        ValueError: not ``[T, K]``, or an id outside [-1, E); the message names its place.
    """
    if not isinstance(ids_TK, torch.Tensor):
        raise TypeError(f"expert_ids: need an integer tensor [T, K], got {ids_TK!r:.80}")
    if ids_TK.is_floating_point() or ids_TK.is_complex() or ids_TK.dtype == torch.bool:
        raise TypeError(f"expert_ids: need an integer dtype, got {ids_TK.dtype}")
    ids_TK = ids_TK.long()  # unsigned types cannot be compared with -1
    if ids_TK.dim() != 2:
        raise ValueError(f"expert_ids: need [T, K], got {list(ids_TK.shape)}")
    bad = (ids_TK < -1) | (ids_TK >= num_experts)
    if bad.any():
        token, choice = torch.nonzero(bad)[0].tolist()
        raise ValueError(
            f"expert_ids: need -1 <= id < {num_experts}, got {int(ids_TK[token, choice])} at "
            f"token {token}, choice {choice}"
        )
    return torch.bincount(ids_TK.reshape(-1) + 1, minlength=num_experts + 1)[1:]


def narrow_ids(expert_ids: Any) -> Any:
    """The ids as int32; what fits in no int32 becomes an id that :func:`count_ids` refuses.

    Args:
        expert_ids: ``[T, K]``; what is no integer stays as it is, for `count_ids` to name.

    Example:
        >>> narrow_ids(torch.tensor([3, -1, 2**32 + 3])).tolist()
        [3, -1, 2147483647]
    """
    is_integer = isinstance(expert_ids, torch.Tensor) and not (
        expert_ids.is_floating_point() or expert_ids.is_complex() or expert_ids.dtype == torch.bool
    )
    if not is_integer:
        return expert_ids
    return expert_ids.long().clamp(-2, 2**31 - 1).to(torch.int32)


def local_tables(
    ids_TK: torch.Tensor, layout: ExpertLayout, block_rows: int = LOCAL_BLOCK_ROWS
) -> LayerTables:
    """Tables of a group of one rank.

    Args:
        ids_TK: integer ``[T, K]``.
        layout: a layout over one rank.
        block_rows: rows of a GEMM tile.
    """
    counts = count_ids(ids_TK, layout.num_experts)
    source = SourceRoute.live(counts.cpu().numpy()[None], layout, 0, 0, block_rows)
    ids = ids_TK.to(torch.int32)
    sends = source.count_sends(ids, 1).tolist()

    def keep(x: torch.Tensor, send: Sequence[int], recv: Sequence[int]) -> torch.Tensor:
        return x

    num_home = layout.home_slot_expert_GH.shape[1]
    return LayerTables.build(
        ids, source, sends, sends, keep, num_home=num_home, block_rows=block_rows
    )


def local_handle(
    expert_ids: torch.Tensor, home_slot_expert: torch.Tensor, num_experts: int
) -> MoEHandle:
    """Handle for a layer whose experts are all here."""
    layout = ExpertLayout(np.asarray(home_slot_expert.tolist(), np.int32)[None])
    if layout.num_experts != num_experts:
        raise ValueError(
            f"home_slot_expert: need all {num_experts} experts here, got {layout.num_experts}"
        )
    tables = local_tables(expert_ids, layout)
    return MoEHandle(tables, LocalMovers(), "local use", block_rows=LOCAL_BLOCK_ROWS)
