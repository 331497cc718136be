"""Replicas of a runtime over the symmetric memory of its domain: prefetch, use, and the way home.

Layers whose experts have the same fields share buffers and one `ReplicaSync`. The replicas of the
next layer are pushed before the experts of this one run, where the next layer is certain: inside a
forward the next MoE layer, inside a backward the one before, unless it will be recomputed. A push
whose use does not come next after all is given back unread by every rank. The backward of a
recompute just made reads the buffer of the recompute.

Gradients are home when a layer's backward returns; with ``grad_mode="main_grad"`` they come home
under the backwards of other layers: before the next backward of this layer, in its last backward of
the step, or when the step ends.

Source: ReLibra (arXiv 2605.08639), section 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.arena_layout import ArenaLayout
from relibra_kernels.transport.replica_sync import ReplicaSync
from relibra_kernels.transport.sync_report import UseKey
from relibra_kernels.transport.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relibra.rank_tables import LayerTables
    from relibra.use import Use
    from relibra_kernels.transport.symmetric_heap import Arena, SymmetricHeap
    from relibra_kernels.transport.sync_engine import SyncEngine
    from relibra_kernels.transport.sync_items import Use as SyncUse

Lists = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class LayerHooks:
    """What a host says about the weights of a layer.

    Attributes:
        weights_ready: called before a push ahead of the layer's entry: an event of the device
            (True on the CPU) after which the weights are there, None while nobody can tell.
        weights_release: called with an event after which they have been read.
        starts_stage: whether other layers may run between the one before and this one, so that
            nothing is pushed ahead across that border.
    """

    weights_ready: Callable[[], Any] | None = None
    weights_release: Callable[[Any], None] | None = None
    starts_stage: bool = False


@dataclasses.dataclass
class _Kind:
    """Layers with the same fields.

    Attributes:
        heap, sync, watchdog: memory, protocol, and who looks after its waits.
        now: the use whose weights were read last.
        ahead: a use that was pushed before its turn.
        may_be_reused: whether ``now`` is a recompute, whose backward may follow.
    """

    heap: SymmetricHeap
    sync: ReplicaSync
    watchdog: Watchdog
    now: SyncUse | None = None
    ahead: SyncUse | None = None
    may_be_reused: bool = False

    def retire_now(self) -> None:
        if self.now is not None and not self.now.is_retired:
            self.sync.retire(self.now)

    def abandon_ahead(self) -> None:
        if self.ahead is not None:
            use, self.ahead = self.ahead, None
            self.sync.abandon(use)


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
        on_abort: see `Watchdog`.

    Attributes:
        hooks: (model, layer) -> what the host says about its weights.
        log: submitted operations as ``(operation, key)``; None notes nothing.
    """

    def __init__(
        self,
        make_heap: Callable[[], SymmetricHeap],
        make_engine: Callable[[Arena, ArenaLayout], SyncEngine],
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
        self._make_heap, self._make_engine = make_heap, make_engine
        self._on_abort = on_abort
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._current: _Kind | None = None  # of the layer that runs
        self._reducing: dict[tuple[str, int], tuple[_Kind, Any]] = {}
        self._direct: set[tuple[Any, ...]] = set()
        self._num_backwards: dict[tuple[str, int, str], int] = {}

    # -- memory ------------------------------------------------------------------------------

    def prepare(self, like: Mapping[str, torch.Tensor]) -> None:
        """Buffers for layers with these home weights; collective in the domain where new.

        Args:
            like: field -> ``[H, ...]``.

        Raises:
            ValueError: weights that are not on the CPU, whose memory no process can share.
            ReplicaSyncError: no memory, or a rank did not take part.
        """
        for name, weight in like.items():
            if weight.device.type != "cpu":
                raise ValueError(
                    f'transport: "cpu_shm" needs expert weights on the CPU, got {name} on '
                    f'{weight.device}; use transport="dist"'
                )
        key = _kind_key(like)
        if key in self._kinds:
            return
        weights = SlotLayout.of({n: (w.dtype, tuple(w.shape[1:])) for n, w in like.items()})
        grads = weights.as_dtype({n: accumulation_dtype(w.dtype) for n, w in like.items()})
        layout = ArenaLayout(weights, grads, len(self.domain), self.num_slots)
        heap = self._make_heap()
        arena = heap.alloc(layout.nbytes, self.generation)
        engine = self._make_engine(arena, layout)
        sync = ReplicaSync(arena, layout, self.domain, self.rank, engine, timeout_s=self.timeout_s)
        self._kinds[key] = _Kind(heap, sync, Watchdog(sync, self._on_abort))

    def close(self, *, peers_alive: bool) -> None:
        """Gives all memory back.

        Args:
            peers_alive: False after a failure: waits for nobody.
        """
        for kind in self._kinds.values():
            if not peers_alive or kind.sync.num_ahead:  # of a step that an error ended
                kind.sync.abort()
            kind.watchdog.close()
            kind.sync.close()
            kind.heap.close(peers_alive=peers_alive)
        self._kinds.clear()
        self._current = None
        self._reducing.clear()

    # -- weights -----------------------------------------------------------------------------

    def note_handle(self, use: Use, layer: int) -> None:
        """A layer is about to run forward: whether its backward will follow without a recompute."""
        key = (*_name(use), layer)
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        is_recompute = torch._C._current_graph_task_id() >= 0
        if torch.is_grad_enabled() and not has_hooks and not is_recompute:
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
        kind = self._current = self._kinds[_kind_key(weights)]
        kind.sync.log = self.log
        if use is None or index is None:
            return kind.sync.buffer(0)
        key = self._key(use, index, self.direction)
        lists = (tables.push_list, tables.pull_list)
        kind.now = self._begin(kind, key, use, index, weights, lists)
        self._push_ahead(use, index)
        return kind.sync.weights(kind.now)

    def release_weights(self, use: Use | None) -> None:
        """The weights of the current use were read for the last time."""
        kind = self._current
        if use is None or kind is None:
            return
        is_recompute = torch._C._current_graph_task_id() >= 0 and self.direction == "forward"
        kind.may_be_reused = is_recompute
        if not is_recompute:
            kind.retire_now()

    def _begin(
        self,
        kind: _Kind,
        key: UseKey,
        use: Use,
        index: int,
        weights: Mapping[str, Any],
        lists: Lists,
    ) -> SyncUse:
        """The use of the protocol: the recompute's, the one pushed ahead, or a new one."""
        now = kind.now
        recompute = dataclasses.replace(key, direction="forward")
        if now is not None and not now.is_retired:
            if kind.may_be_reused and key.direction == "backward" and now.key == recompute:
                return now
            kind.retire_now()
        ahead = kind.ahead
        if ahead is not None and ahead.key == key and ahead.is_of(weights):
            kind.ahead = None
            return ahead
        kind.abandon_ahead()
        return self._submit(kind, key, use, index, weights, lists)

    def _submit(
        self,
        kind: _Kind,
        key: UseKey,
        use: Use,
        index: int,
        weights: Mapping[str, Any],
        lists: Lists,
    ) -> SyncUse:
        plan = use.step.plan
        homes = plan.layouts[index].home_slot_expert_GH
        copies = plan.static_slot_expert_LGX[index]
        num_home = homes.shape[1]

        def experts(rank: int, slot: int) -> int:
            one = homes[rank, slot] if slot < num_home else copies[rank, slot - num_home]
            return int(one)

        made = kind.sync.submit_push(key, weights, *lists, experts=experts, plan_hash=plan.hash)
        hooks = self.hooks.get((key.model, key.layer))
        if hooks is not None and hooks.weights_release is not None:
            hooks.weights_release(made.pushed)
        return made

    def _push_ahead(self, use: Use, index: int) -> None:
        """Pushes the replicas of the next use, where it is certain and its weights are there."""
        following = self._successor(use, index)
        tables = None if following is None else use.step.built_tables(use, following)
        if following is None or tables is None:
            return
        key = self._key(use, following, self.direction)
        weights = use.step.attachment.pushed_weights(following, tables.num_static)
        kind = self._kinds.get(_kind_key(weights))
        if kind is None:  # sharded by the host until its entry
            return
        kind.sync.log = self.log
        hooks = self.hooks.get((key.model, key.layer), LayerHooks())
        if hooks.weights_ready is not None and hooks.weights_ready() is None:
            return
        if kind.ahead is None and kind.sync.num_ahead < kind.sync.layout.weight_buffers:
            lists = (tables.push_list, tables.pull_list)
            kind.ahead = self._submit(kind, key, use, following, weights, lists)

    def _successor(self, use: Use, index: int) -> int | None:
        """Place of the layer that certainly runs next in this direction."""
        layers = use.step.attachment.moe_layers
        model = use.step.attachment.name
        if self.direction == "forward":
            following, border = index + 1, index + 1
            is_known = use.mode == "exact" and torch._C._current_graph_task_id() < 0
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
        kind = self._kinds[_kind_key(weights)]
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

    def finish(self) -> None:
        """The step ends: gradients are home, weights may change; gives back what is ahead.

        Raises:
            ReplicaSyncError: something of the step failed.
        """
        for kind in self._kinds.values():
            kind.retire_now()
            kind.abandon_ahead()
        for kind in self._kinds.values():
            kind.sync.join()
        self.forget_step()

    def forget_step(self) -> None:
        """No use of the ended step comes any more."""
        self._reducing.clear()
        self._direct.clear()
        self._num_backwards.clear()

    def abort(self) -> None:
        """This rank failed: ends the waits of all ranks of the domain."""
        for kind in self._kinds.values():
            kind.sync.abort()

    def _key(self, use: Use, index: int, direction: str) -> UseKey:
        model, layer = self._layer(use, index)
        step = use.step.optimizer_step
        return UseKey(model, step, use.pass_, use.micro_batch, layer, direction)

    def _layer(self, use: Use, index: int) -> tuple[str, int]:
        attachment = use.step.attachment
        return attachment.name, attachment.moe_layers[index]


def _name(use: Use) -> tuple[Any, ...]:
    return (use.step.attachment.name, *use.key)


def _kind_key(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, w.dtype, tuple(w.shape[1:])) for name, w in weights.items())
