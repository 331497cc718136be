"""What went wrong in replica synchronisation, in words: who waited for whom, and for what."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.transport.sync_types import ErrorCode, SyncOp, unpack_credit, unpack_word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra_kernels.transport.arena_layout import ArenaLayout

OPERATIONS = {
    SyncOp.WEIGHT_CREDIT: "replica push (until the buffer may be overwritten)",
    SyncOp.WEIGHTS: "use of replica weights",
    SyncOp.GRAD_CREDIT: "replica gradients (until the buffer may be overwritten)",
    SyncOp.GRADS: "home reduce",
    SyncOp.ROWS: "exchange of rows",
    SyncOp.ROW_CREDIT: "exchange of rows (until the buffer may be overwritten)",
}


@dataclasses.dataclass(frozen=True)
class SyncFailure:
    """Facts of a failed step of the protocol.

    Attributes:
        rank: EP rank that reports.
        code: what happened.
        operation: in which it happened.
        peer: EP rank that was waited for, or that failed first; -1 unknown.
        slot: replica slot, -1 none.
        expert: logical id, -1 none or unknown.
        key: of the use, None unknown.
        expected, observed: words.
        table: all words of this rank, one a line.
    """

    rank: int
    code: ErrorCode
    operation: SyncOp
    peer: int
    slot: int
    expert: int
    key: UseKey | None
    expected: int
    observed: int
    table: str

    def error(self, timeout_s: float) -> ReplicaSyncError:
        """As an exception.

        Args:
            timeout_s: of the wait.
        """
        use = "an unknown use" if self.key is None else str(self.key)
        where = f"{OPERATIONS[self.operation]} of {use}"
        if self.slot >= 0:
            where += f", replica slot {self.slot}"
        if self.expert >= 0:
            where += f", expert {self.expert}"
        if self.code == ErrorCode.PEER_ABORTED:
            what = f"stopped, since rank {self.peer} failed first"
        elif self.code == ErrorCode.MISMATCH:
            what = f"met another plan, layer, use or expert of rank {self.peer}"
        elif self.peer < 0:
            what = "stopped, since this rank failed elsewhere"
        else:
            what = f"waited {timeout_s:g} s in vain for rank {self.peer}"
        return ReplicaSyncError(
            f"rank {self.rank}: {where}: {what}; expected word {self.expected:#x}, observed "
            f"{self.observed:#x}; words of rank {self.rank}:\n{self.table}",
            self,
        )


@dataclasses.dataclass(frozen=True)
class UseKey:
    """Which execution of a layer's experts a use is; equal on all ranks.

    Attributes:
        model: name.
        optimizer_step: of the rollout batch.
        pass_: such as ``train``.
        micro_batch: of the rollout batch.
        layer: decoder layer.
        direction: ``forward`` or ``backward``.
    """

    model: str
    optimizer_step: int
    pass_: str
    micro_batch: int
    layer: int
    direction: str

    def __str__(self) -> str:
        """Such as ``optimizer step 1, train, micro-batch 2, layer 5, forward``."""
        return (
            f"optimizer step {self.optimizer_step}, {self.pass_}, micro-batch {self.micro_batch}, "
            f"layer {self.layer}, {self.direction}"
        )

    def parts(self) -> tuple[int | str, ...]:
        """For `sync_types.hash16`."""
        use = (self.optimizer_step, self.pass_, self.micro_batch, self.layer, self.direction)
        return (self.model, *use)  # `dataclasses.astuple` makes deep copies


def table_of_words(
    layout: ArenaLayout,
    base: int,
    domain: Sequence[int],
    load: Callable[[Sequence[int]], list[int]],
) -> str:
    """All words of a rank as text.

    Args:
        layout: of the arena.
        base: address of the rank's part.
        domain: EP ranks.
        load: addresses -> words.
    """
    lines = []
    for name, place in (("retired", layout.retired), ("grad_retired", layout.grad_retired)):
        words = load([base + place(p) for p in range(layout.num_ranks)])
        counts = [unpack_credit(word)[1] for word in words]
        shown = ", ".join(f"rank {r}: {n}" for r, n in zip(domain, counts, strict=True))
        lines.append(f"  {name} (uses): {shown}")
    slots = range(layout.num_slots)
    for buffer in range(layout.weight_buffers):
        words = load([base + layout.full(buffer, slot) for slot in slots])
        lines.append(f"  full[{buffer}]: {_words(words)}")
    for buffer in range(layout.grad_buffers):
        for peer, rank in enumerate(domain):
            words = load([base + layout.grad_ready(buffer, peer, slot) for slot in slots])
            if any(words):
                lines.append(f"  grad_ready[{buffer}] of rank {rank}: {_words(words)}")
    (abort,) = load([base + layout.abort])
    lines.append(f"  abort: {abort:#x}")
    return "\n".join(lines)


def _words(words: Sequence[int]) -> str:
    shown = []
    for slot, word in enumerate(words):
        parts = unpack_word(word)
        shown.append(f"slot {slot}: use {parts.n}, hash {parts.hash16:#06x}" if word else "never")
    return "; ".join(shown)
