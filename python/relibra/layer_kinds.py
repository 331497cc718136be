"""Layers with the same fields, which share replica buffers, and what hosts say about weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relibra_kernels.transport.replica_sync import ReplicaSync
    from relibra_kernels.transport.symmetric_heap import SymmetricHeap
    from relibra_kernels.transport.sync_items import Use as SyncUse
    from relibra_kernels.transport.watchdog import Watchdog


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

    def ready(self) -> tuple[bool, Any]:
        """Whether the weights can be pushed now, and the event to wait for, None for none.

        Raises:
            TypeError: the host said something else than None, True or an event.
        """
        said = True if self.weights_ready is None else self.weights_ready()
        is_event = hasattr(said, "wait")
        if not (said is None or said is True or is_event):
            raise TypeError(f"weights_ready: need None, True or an event, got {said!r:.80}")
        return said is not None, said if is_event else None

    def release(self, event: Any) -> None:
        """Tells the host after which event the weights have been read."""
        if self.weights_release is not None:
            self.weights_release(event)


@dataclasses.dataclass
class Kind:
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

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes of a replica's weights."""
        return sum(field.num_bytes for field in self.sync.layout.weights.fields)

    def retire_now(self) -> None:
        """Gives back the buffer that was read last, or that an error kept from being read."""
        if self.now is None or self.now.is_retired:
            return
        if self.now.waited is None:
            self.sync.abandon(self.now)
        else:
            self.sync.retire(self.now)

    def keep(self, made: SyncUse, *, is_ahead: bool) -> None:
        """A use that was submitted, before anything else can fail."""
        if is_ahead:
            self.ahead = made
        else:
            self.now = made

    def settle(self, event: Any) -> None:
        """Gradients are home, or never come: then the next call of the rank says so."""
        with contextlib.suppress(ReplicaSyncError):
            self.sync.wait_event(event)

    def forget(self, model: str) -> None:
        """A step of a model ended: its weights may change, so nothing pushed in it is read."""
        for use in (self.now, self.ahead):
            if use is not None and use.key.model == model:
                use.sources, self.may_be_reused = (), False

    def abandon_ahead(self) -> SyncUse | None:
        """Gives back what was pushed for a use that does not come; that use."""
        use, self.ahead = self.ahead, None
        if use is not None:
            self.sync.abandon(use)
        return use


def kind_key(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for layers of one kind.

    Args:
        weights: field -> ``[n, ...]``.
    """
    return tuple((name, w.dtype, tuple(w.shape[1:])) for name, w in weights.items())
