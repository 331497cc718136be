"""The protocol of replica synchronisation: weights out ahead of their use, gradients home in order.

Written once, over an arena of any provider and an engine of any device. Uses are numbered n = 0, 1,
... in the order this domain makes them, the same on all its ranks; weight buffer n mod W. Uses with
gradients have a number q of their own; gradient buffer q mod G2.

    submit_push(n)  waits until every destination has retired use n - W, copies, writes ``full``
    weights(n)      waits for ``full``, whose hash must be that of this key, plan and expert
    retire(n)       tells all ranks that the buffer may be overwritten
    grad_slots(q)   waits until the homes of use q - G2 have added its gradients
    publish_grads   tells each home that its gradients are there
    home_reduce(q)  waits for them and adds them in ascending (rank, slot) order; tells all ranks

Why it cannot deadlock: submitting push(n + W - 1), then using n, then reducing n finishes on one
queue a rank, since each wait is for an earlier entry of some rank's queue; `submit_push` refuses a
larger distance, and more queues only add freedom. Why it cannot hang: every wait has a time-out,
the first error stores a word at all ranks, and that word ends every wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relibra_kernels.transport.arena_layout import ArenaLayout
from relibra_kernels.transport.sync_engine import COMPUTE, PUSH, REDUCE
from relibra_kernels.transport.sync_items import SyncItems, Use, copies_of, sources_of
from relibra_kernels.transport.sync_report import SyncFailure, UseKey, table_of_words
from relibra_kernels.transport.sync_side import REMEMBERED, SyncSide
from relibra_kernels.transport.sync_types import ErrorCode, SyncOp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import torch

    from relibra_kernels.transport.symmetric_heap import Arena
    from relibra_kernels.transport.sync_engine import SyncEngine


class ReplicaSync(SyncSide[ArenaLayout]):
    """One rank's side of the protocol in one domain, for layers of one kind.

    Args:
        arena: of the domain.
        layout: of the arena.
        domain: EP ranks of the domain, ascending; place is the rank inside the arena.
        rank: this EP rank.
        engine: that runs the calls.
        timeout_s: of a wait, for messages.

    Attributes:
        log: where submitted operations are noted as ``(operation, key)``; None notes nothing.

    Raises:
        ValueError: the sizes of arena, layout and domain do not fit together.
    """

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        domain: Sequence[int],
        rank: int,
        engine: SyncEngine,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(arena, layout, domain, rank, engine, timeout_s=timeout_s)
        self.log: list[tuple[str, UseKey]] | None = None
        self._items = SyncItems(arena, layout)
        self._place = {ep_rank: place for place, ep_rank in enumerate(domain)}
        self._weights = [layout.weight_views(arena.base, b) for b in range(layout.weight_buffers)]
        self._grads = [layout.grad_views(arena.base, b) for b in range(layout.grad_buffers)]
        self._num_retired = self._num_grads = 0
        self._grad_homes: list[tuple[int, ...]] = [()] * layout.grad_buffers
        self._recent: dict[int, Use] = {}

    # -- weights -----------------------------------------------------------------------------

    def submit_push(
        self,
        key: UseKey,
        weights: Mapping[str, torch.Tensor],
        push_list: torch.Tensor,
        pull_list: torch.Tensor,
        *,
        experts: Callable[[int, int], int] | None = None,
        plan_hash: str = "",
        ready: Any = None,
    ) -> Use:
        """Starts a use: its weights go out as soon as they are there and their buffer is free.

        Args:
            key: of the use.
            weights: field -> home slots ``[H, ...]``; unchanged until `retire` has returned.
            push_list: int32 ``[p, 3]`` = (home slot, destination EP rank, replica slot there).
            pull_list: int32 ``[q, 3]`` = (replica slot, home EP rank, home slot there).
            experts: (EP rank, home slot) -> logical id; None numbers the home slots.
            plan_hash: of the plan.
            ready: event of the engine after which the weights are there; None waits for all that
                the compute stream was given.

        Raises:
            TypeError, ValueError: fields or lists that do not fit.
            RuntimeError: more than W - 1 uses ahead of the last retired one.
            ReplicaSyncError: an earlier use failed.
        """
        self.check()
        if self.num_ahead >= self.layout.weight_buffers:
            raise RuntimeError(
                f"submit_push: need fewer than {self.layout.weight_buffers} uses that are not "
                f"retired, got {key} as one more"
            )
        self._items.check_fields(weights)
        sizes = len(next(iter(weights.values()))), self.layout.num_slots
        lists = (push_list, pull_list)
        pushes, pulls = copies_of(*lists, self._place, sizes, experts, self.rank)
        use = Use(self._number(key), key, plan_hash, pushes, pulls)
        use.sources = sources_of(weights)
        self._recent[use.n] = use
        self._recent.pop(use.n - REMEMBERED, None)
        self._note("push", key)
        if ready is not None and not all(w[0].is_contiguous() for w in weights.values() if len(w)):
            self.engine.wait_event(COMPUTE, ready)  # they are packed there
            ready = None
        items, keep = self._items.pushed(use, weights)
        self.engine.wait_event(PUSH, self.engine.record(COMPUTE) if ready is None else ready)
        self.engine.wait(PUSH, self._items.weight_credits(use), use.n, SyncOp.WEIGHT_CREDIT)
        self.engine.push(PUSH, items, keep)
        use.pushed = self._last[PUSH] = self.engine.record(PUSH)
        return use

    def weights(self, use: Use) -> dict[str, torch.Tensor]:
        """Field -> replica slots ``[S, ...]`` of a use, when its weights are there.

        Args:
            use: the oldest one that is not retired.

        Raises:
            RuntimeError: it is another one.
            ReplicaSyncError: the weights did not come in time, or are those of another plan.
        """
        self._require_next(use, "weights")
        self._note("weights", use.key)
        items, since = self._items.weights_there(use), self.engine.clock(COMPUTE)
        self.engine.wait(COMPUTE, items, use.n, SyncOp.WEIGHTS)
        use.waited = (since, self.engine.clock(COMPUTE))
        self.check()
        return self._weights[self._items.weight_buffer(use)]

    def abandon(self, use: Use) -> None:
        """Gives the buffer of a use back that nobody will make; all ranks do so.

        Args:
            use: the oldest one that is not retired.
        """
        self._note("abandon", use.key)
        self.weights(use)  # the next home to write here need not be the one of this use
        self.retire(use)

    @property
    def num_ahead(self) -> int:
        """Uses that were submitted and not retired."""
        return self._num_uses - self._num_retired

    def retire(self, use: Use) -> None:
        """The weights of a use were read for the last time; returns when its own were sent.

        Args:
            use: the oldest one that is not retired; all its weights have come.

        Raises:
            RuntimeError: it is another one.
        """
        self._require_next(use, "retire")
        use.is_retired = True
        self._num_retired += 1
        self._note("retire", use.key)
        self.engine.publish(COMPUTE, self._items.weights_read(use))
        self.engine.wait_event(COMPUTE, use.pushed)

    # -- gradients ---------------------------------------------------------------------------

    def grad_slots(self, use: Use) -> dict[str, torch.Tensor]:
        """Field -> gradient slots ``[S, ...]``, to be overwritten; numbers the use among these.

        Args:
            use: a use without gradients so far.

        Raises:
            RuntimeError: it has gradient slots already.
            ReplicaSyncError: a home did not add earlier gradients in time.
        """
        if use.q >= 0:
            raise RuntimeError(f"grad_slots: need a use without gradients, got {use.key} again")
        use.q = self._num_grads
        self._num_grads += 1
        self._note("grad_slots", use.key)
        buffer = self._items.grad_buffer(use)
        items = self._items.grad_credits(use, self._grad_homes[buffer])
        self.engine.wait(COMPUTE, items, use.n, SyncOp.GRAD_CREDIT)
        self._grad_homes[buffer] = tuple(sorted({copy.peer for copy in use.pulls}))
        self.check()
        return self._grads[buffer]

    def publish_grads(self, use: Use) -> None:
        """The gradients of a use are in its slots.

        Args:
            use: after `grad_slots`.
        """
        self._note("publish_grads", use.key)
        self.engine.publish(COMPUTE, self._items.grads_published(use))

    def home_reduce(self, use: Use, home_grads: Mapping[str, Any]) -> Any:
        """Adds the replicas' gradients to those of their homes, by ascending (rank, slot).

        Args:
            use: after `publish_grads`.
            home_grads: field -> fp32 or fp64 ``[H, ...]`` or H tensors, those wanted; complete but
                for the replicas' share, on the compute stream.

        Returns:
            An event of the engine after the sums.
        """
        self._note("home_reduce", use.key)
        ready = self.engine.record(COMPUTE)
        items, keep = self._items.reduced(use, home_grads)
        self.engine.wait_event(REDUCE, ready)
        self.engine.wait(REDUCE, self._items.grads_there(use), use.n, SyncOp.GRADS)
        self.engine.reduce(REDUCE, items, keep)
        self.engine.publish(REDUCE, self._items.grads_added(use))
        self._last[REDUCE] = self.engine.record(REDUCE)
        return self._last[REDUCE]

    # -- ends --------------------------------------------------------------------------------

    def buffer(self, number: int) -> dict[str, torch.Tensor]:
        """Field -> slots of a weight buffer, for uses that read none of them."""
        return self._weights[number]

    def grad_buffer(self, number: int) -> dict[str, torch.Tensor]:
        """Field -> slots of a gradient buffer, for uses that write none of them."""
        return self._grads[number]

    def table(self) -> str:
        """All words of this rank."""
        base = self.arena.peers[self.arena.rank]
        return table_of_words(self.layout, base, self.domain, self.engine.load_words)

    # -- helpers -----------------------------------------------------------------------------

    def _note(self, operation: str, key: UseKey) -> None:
        if self.log is not None:
            self.log.append((operation, key))

    def _require_next(self, use: Use, operation: str) -> None:
        if use.is_retired or use.n != self._num_retired:
            raise RuntimeError(
                f"{operation}: need use {self._num_retired}, the oldest that is not retired, got "
                f"use {use.n} ({use.key})"
            )

    def _failure(self, record: np.void) -> SyncFailure:
        """The error record in words of EP ranks, layers and experts."""
        operation, peer, slot = SyncOp(record["op"]), int(record["peer"]), int(record["slot"])
        use = self._recent.get(int(record["use"]))
        copies = () if use is None else use.pushes if operation == SyncOp.GRADS else use.pulls
        is_own = operation != SyncOp.GRADS  # slots of this rank: the peer need not be looked at
        experts = [c.expert for c in copies if c.slot == slot and (is_own or c.peer == peer)]
        return SyncFailure(
            rank=self.rank,
            code=ErrorCode(record["code"]),
            operation=operation,
            peer=self.domain[peer] if peer >= 0 else -1,
            slot=slot,
            expert=experts[0] if experts else -1,
            key=None if use is None else use.key,
            expected=int(record["expected"]),
            observed=int(record["observed"]),
            table=self.table(),
        )
