"""Replicas of a runtime over the symmetric memory of its domain: prefetch, use, and the way home.

Layers whose experts have the same fields share buffers and one `ReplicaSync`. The replicas of the
next layer are pushed before the experts of this one run, where the next layer is certain: inside a
forward the next MoE layer, inside a backward the one before unless it will be recomputed; elsewhere
the host may say what runs next. A push whose use does not come next after all is given back unread
by every rank. The backward of a recompute just made reads the buffer of the recompute.

Gradients are home when a layer's backward returns; with ``grad_mode="main_grad"`` they come home
under the backwards of other layers: before the next backward of this layer, in its last backward of
the step, or when the step ends.

Source: ReLibra (arXiv 2605.08639), section 4.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from relibra.copy_lists import expert_of
from relibra.layer_kinds import Kind, LayerHooks, kind_key
from relibra.replica_counts import ReplicaCounts
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.thread_state import graph_task_id, has_saved_tensor_hooks
from relibra_kernels.transport.arena_layout import ArenaLayout
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.watchdog import AbortGate, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from relibra.rank_tables import LayerTables
    from relibra.use import Use
    from relibra_kernels.transport.arena_layout import AnyLayout
    from relibra_kernels.transport.symmetric_heap import Arena, SymmetricHeap
    from relibra_kernels.transport.sync_engine import SyncEngine
    from relibra_kernels.transport.sync_items import Use as SyncUse

Lists = tuple[torch.Tensor, torch.Tensor]
Following = tuple["Use", int, str]  # use, place of the layer, direction


class DomainSync:
    """The replicas of one rank of a runtime.

    Args:
        make_heap: makes a heap over the domain; collective there.
        make_engine: runs the protocol over an arena of it.
        domain: EP ranks of the domain, ascending, more than one.
        rank: this EP rank.
        num_slots: S.
        timeout_s: seconds of a wait.
        generation: of the arenas.
        on_abort: ends the collectives of this rank, but not while it votes.

    Attributes:
        hooks: (model, layer) -> what the host says about its weights.
        log: submitted operations as ``(operation, key)``; None notes nothing.
        counts: what replicas cost; the runtime's.
    """

    def __init__(
        self,
        make_heap: Callable[[], SymmetricHeap],
        make_engine: Callable[[Arena, AnyLayout], SyncEngine],
        domain: tuple[int, ...],
        rank: int,
        num_slots: int,
        *,
        timeout_s: float,
        generation: int = 1,
        on_abort: Callable[[], None] | None = None,
    ) -> None:
        self.domain, self.rank, self.num_slots = domain, rank, num_slots
        self.timeout_s, self.generation = timeout_s, generation
        self.hooks: dict[tuple[str, int], LayerHooks] = {}
        self.log: list[tuple[str, UseKey]] | None = None
        self.direction = "forward"
        self.counts = ReplicaCounts()
        self.make_heap, self.make_engine = make_heap, make_engine
        self.on_abort = AbortGate(on_abort)
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._current: Kind | None = None  # of the layer that runs
        self._reducing: dict[tuple[str, int], tuple[Kind, Any]] = {}
        self._direct: set[tuple[Any, ...]] = set()
        self._num_backwards: dict[tuple[str, int, str], int] = {}
        self._said: collections.deque[Following] = collections.deque()
        self._was_left = False  # a step ended by an error: peers may be anywhere

    # -- memory ------------------------------------------------------------------------------

    def prepare(self, like: Mapping[str, torch.Tensor]) -> None:
        """Buffers for layers with these home weights; collective in the domain where new.

        Args:
            like: field -> ``[H, ...]``.

        Raises:
            ValueError: weights on another device than the memory.
            ReplicaSyncError: no memory, or a rank did not take part.
        """
        key = kind_key(like)
        known = self._kinds.get(key)
        heap = self.make_heap() if known is None else known.heap
        for name, weight in like.items():
            if weight.device != heap.device:
                raise ValueError(
                    f'transport: "{heap.name}" needs expert weights on {heap.device}, got {name} '
                    f'on {weight.device}; use transport="dist"'
                )
        if known is not None:
            return
        weights = SlotLayout.of({n: (w.dtype, tuple(w.shape[1:])) for n, w in like.items()})
        grads = weights.as_dtype({n: accumulation_dtype(w.dtype) for n, w in like.items()})
        layout = ArenaLayout(weights, grads, len(self.domain), self.num_slots)
        arena = heap.alloc(layout.nbytes, self.generation)
        engine = self.make_engine(arena, layout)
        sync = ReplicaSync(arena, layout, self.domain, self.rank, engine, timeout_s=self.timeout_s)
        self._kinds[key] = Kind(heap, sync, Watchdog(sync, self.on_abort))

    def close(self, *, peers_alive: bool) -> None:
        """Gives all memory back.

        Args:
            peers_alive: False after a failure: waits for nobody.
        """
        peers_alive = peers_alive and not self._was_left
        for kind in self._kinds.values():
            kind.watchdog.close()  # which need not end collectives for what follows
            if not peers_alive:
                kind.sync.abort()
            kind.sync.close()
            kind.heap.close(peers_alive=peers_alive)
        self._kinds, self._reducing, self._current = {}, {}, None
        self.counts.forget_waits()

    def meet(self) -> None:
        """All ranks are here to close: none waits any more for uses of a step that it left."""
        for kind in self._kinds.values() if self._was_left else ():
            kind.watchdog.close()
            kind.sync.end_waits()
        self._was_left = False

    # -- weights -----------------------------------------------------------------------------

    def note_handle(self, use: Use, layer: int) -> None:
        """A layer is about to run forward: whether its backward will follow without a recompute."""
        key = (*_name(use), layer)
        is_recomputed = has_saved_tensor_hooks() or graph_task_id() >= 0  # or will be
        if torch.is_grad_enabled() and not is_recomputed:
            self._direct.add(key)
        else:
            self._direct.discard(key)

    def push(
        self, use: Use | None, index: int | None, weights: Mapping[str, Any], tables: LayerTables
    ) -> dict[str, torch.Tensor]:
        """Replica slots of a use with its weights in them; pushes those of the next use too.

        Args:
            use: that runs; None outside a training step, where nothing has replicas.
            index: place of the layer among the MoE layers.
            weights: field -> ``[H + X, ...]``.
            tables: of the use.
        """
        kind = self._current = self._kinds[kind_key(weights)]
        kind.sync.log = self.log
        if use is None or index is None:
            return kind.sync.buffer(0)
        key = self._key(use, index, self.direction)
        lists = (tables.push_list, tables.pull_list)
        kind.now = self._begin(kind, key, use, index, weights, lists)
        self._push_ahead(use, index)
        slots = kind.sync.weights(kind.now)
        if kind.now.waited is not None:
            seconds = kind.sync.engine.seconds
            self.counts.of(key.model, key.layer).waits.append((seconds, *kind.now.waited))
        return slots

    def release_weights(self, use: Use | None) -> None:
        """The weights of the current use were read for the last time."""
        kind = self._current
        if use is None or kind is None:
            return
        is_recompute = graph_task_id() >= 0 and self.direction == "forward"
        kind.may_be_reused = is_recompute
        if not is_recompute:
            kind.retire_now()

    def say_next(self, following: Iterable[Following], *, is_inside: bool) -> None:
        """The host says what runs where nothing is certain; the same on all ranks.

        Args:
            following: uses of layers, in the order in which they will run.
            is_inside: whether a forward runs, whose certain uses come first.
        """
        self._said.extend(following)
        if not is_inside and all(kind.ahead is None for kind in self._kinds.values()):
            self._push_said()

    def _begin(
        self,
        kind: Kind,
        key: UseKey,
        use: Use,
        index: int,
        weights: Mapping[str, Any],
        lists: Lists,
    ) -> SyncUse:
        """The use of the protocol: the recompute's, the one pushed ahead, or a new one."""
        now, ahead, counts = kind.now, kind.ahead, self.counts.of(key.model, key.layer)
        if self._said and self._key(*self._said[0]) == key:
            self._said.popleft()
        if now is not None and not now.is_retired:
            may_reuse = kind.may_be_reused and key.direction == "backward"
            if may_reuse and now.key == dataclasses.replace(key, direction="forward"):
                counts.reused += 1
                return now
            kind.retire_now()
        if ahead is not None and ahead.key == key and ahead.is_of(weights):
            kind.ahead = None
            counts.ahead += 1
            return ahead
        self._abandon_ahead(kind)
        counts.at_entry += 1
        return self._submit(kind, key, use, index, weights, lists)

    def _abandon_ahead(self, kind: Kind) -> None:
        use = kind.abandon_ahead()
        if use is not None:
            self.counts.of(use.key.model, use.key.layer).given_back += 1

    def _submit(
        self,
        kind: Kind,
        key: UseKey,
        use: Use,
        index: int,
        weights: Mapping[str, Any],
        lists: Lists,
        ready: Any = None,
        is_ahead: bool = False,
    ) -> SyncUse:
        plan = use.step.plan
        homes = plan.layouts[index].home_slot_expert_GH
        experts = expert_of(homes, plan.static_slot_expert_LGX[index])
        options = {"experts": experts, "plan_hash": plan.hash, "ready": ready}
        made = kind.sync.submit_push(key, weights, *lists, **options)
        kind.keep(made, is_ahead=is_ahead)
        self.counts.of(key.model, key.layer).pushed_bytes += len(made.pushes) * kind.slot_bytes
        self.hooks.get((key.model, key.layer), LayerHooks()).release(made.pushed)
        return made

    def _push_ahead(self, use: Use, index: int) -> None:
        """Pushes the replicas of the next use, where it is certain and its weights are there."""
        following = self._successor(use, index)
        if following is None:
            self._push_said()
            return
        tables = use.step.built_tables(use, following)
        if tables is not None:
            lists = (tables.push_list, tables.pull_list)
            self._push_one((use, following, self.direction), lists, tables.num_static)

    def _push_said(self) -> None:
        """Pushes the first use that the host said; its replicas are those of the plan."""
        if self._said:
            use, index, _ = self._said[0]
            source = use.step.source_of(use.pass_, use.micro_batch, index)
            lists = (source.push_list, source.pull_list)
            if self._push_one(self._said[0], lists, source.num_static):
                self._said.popleft()

    def _push_one(self, following: Following, lists: Lists, num_static: int) -> bool:
        """Pushes the replicas of a use ahead of its turn, if that is possible now."""
        use, index, _ = following
        key = self._key(*following)
        weights = use.step.attachment.pushed_weights(index, num_static)
        kind = self._kinds.get(kind_key(weights))
        if kind is None:  # sharded by the host until its entry
            return False
        kind.sync.log = self.log
        is_ready, event = self.hooks.get((key.model, key.layer), LayerHooks()).ready()
        is_full = kind.ahead is not None or kind.sync.num_ahead >= kind.sync.layout.weight_buffers
        if not is_ready or is_full:
            return False
        self._submit(kind, key, use, index, weights, lists, event, is_ahead=True)
        return True

    def _successor(self, use: Use, index: int) -> int | None:
        """Place of the layer that certainly runs next in this direction."""
        model, layers = use.step.attachment.name, use.step.attachment.moe_layers
        if self.direction == "forward":
            following, border = index + 1, index + 1
            is_known = use.mode == "exact" and graph_task_id() < 0
        else:
            following, border = index - 1, index
            is_known = following >= 0 and (*_name(use), layers[following]) in self._direct
        if not is_known or not 0 <= following < len(layers):
            return None
        starts = self.hooks.get((model, layers[border]), LayerHooks()).starts_stage
        return None if starts else following

    # -- gradients ---------------------------------------------------------------------------

    def grad_slots(
        self, use: Use | None, index: int | None, weights: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Gradient slots of the current use; the home gradients of its layer are complete."""
        kind = self._kinds[kind_key(weights)]
        if use is None or index is None or kind.now is None:
            return kind.sync.grad_buffer(0)
        earlier, event = self._reducing.pop(self._layer(use, index), (kind, None))
        earlier.sync.wait_event(event)
        return kind.sync.grad_slots(kind.now)

    def reduce(
        self,
        use: Use | None,
        index: int | None,
        home_grads: Mapping[str, Any],
        *,
        may_lag: bool,
    ) -> None:
        """Gradients of the current use go home.

        Args:
            use: that runs.
            index: place of the layer.
            home_grads: field -> ``[H + X, ...]`` of the wanted fields.
            may_lag: whether they may be complete later.
        """
        kind = self._current
        if use is None or index is None or kind is None or kind.now is None:
            return
        kind.sync.publish_grads(kind.now)
        event = kind.sync.home_reduce(kind.now, home_grads)
        place = (*self._layer(use, index), use.pass_)
        count = self._num_backwards[place] = self._num_backwards.get(place, 0) + 1
        if may_lag and count < use.step.num_micro_batches(use.pass_):
            self._reducing[self._layer(use, index)] = (kind, event)
        else:
            kind.sync.wait_event(event)

    # -- ends --------------------------------------------------------------------------------

    def finish(self, model: str) -> None:
        """A step ends: gradients are home, weights may change; gives back what is ahead.

        Args:
            model: whose step it is; others may be in theirs.

        Raises:
            ReplicaSyncError: something of the step failed.
        """
        for kind in self._kinds.values():
            kind.retire_now()
            self._abandon_ahead(kind)
        for kind in self._kinds.values():
            kind.sync.is_aborted()  # no wait may have met it, and the vote shall hear of it
            kind.sync.join()
        self.counts.settle()
        self.forget_step(model)
        self._was_left = False

    def forget_step(self, model: str) -> None:
        """No use of a model's ended step comes any more."""
        for at in [at for at in self._reducing if at[0] == model]:
            kind, event = self._reducing.pop(at)
            kind.settle(event)  # the host may clear its gradients next
        self._direct = {key for key in self._direct if key[0] != model}
        self._num_backwards = {at: n for at, n in self._num_backwards.items() if at[0] != model}
        self._said = collections.deque(one for one in self._said if _name(one[0])[0] != model)
        for kind in self._kinds.values():
            kind.forget(model)
        self.counts.forget_waits()
        self._was_left = True

    def abort(self) -> None:
        """This rank failed: ends the waits of all ranks of the domain."""
        for kind in self._kinds.values():
            kind.sync.abort()

    def _key(self, use: Use, index: int, direction: str) -> UseKey:
        model, layer = self._layer(use, index)
        return UseKey(model, use.step.optimizer_step, use.pass_, use.micro_batch, layer, direction)

    def _layer(self, use: Use, index: int) -> tuple[str, int]:
        attachment = use.step.attachment
        return attachment.name, attachment.moe_layers[index]


def _name(use: Use) -> tuple[Any, ...]:
    return (use.step.attachment.name, *use.key)
