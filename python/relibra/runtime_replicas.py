"""What a runtime does with the replicas of its models: buffers, host hooks, ends of steps."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING

from relibra.layer_kinds import LayerHooks
from relibra_kernels.errors import ReplicaSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType
    from typing import Any

    import torch

    from relibra.attachment import Attachment
    from relibra.departures import Departures
    from relibra.dispatcher import Dispatcher
    from relibra.domain_sync import DomainSync
    from relibra.movers import ReplicaBuffers
    from relibra.replica_counts import ReplicaCounts


class NotingFailure:
    """Context in which an error of a collective is noted in its runtime; entered at every one."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: RuntimeReplicas) -> None:
        self._runtime = runtime

    def __enter__(self) -> None:
        """Refuse a fork of the process that connected the runtime."""
        self._runtime.require_process()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note an error, which goes on."""
        if isinstance(error, ReplicaSyncError):
            self._runtime.note_failure(error)


class RuntimeReplicas(abc.ABC):
    """The part of `relibra.Runtime` that looks after replicas.

    Attributes:
        domain_sync: replicas over symmetric memory; None where ``torch.distributed`` moves them.
        replica_counts: what they cost, by model.
        departures: why ranks left a step alone.
    """

    buffers: ReplicaBuffers
    replica_counts: ReplicaCounts
    departures: Departures
    dispatcher: Dispatcher
    domain_sync: DomainSync | None = None

    @abc.abstractmethod
    def attachment(self, name: str | None = None) -> Attachment:
        """The attached model of that name; see `relibra.Runtime`."""

    @abc.abstractmethod
    def noting_failure(self) -> NotingFailure:
        """Notes a failed collective; see `relibra.Runtime`."""

    @abc.abstractmethod
    def note_failure(self, error: ReplicaSyncError) -> None:
        """Notes this one."""

    @abc.abstractmethod
    def require_process(self) -> None:
        """Raise in a fork of the process that connected the runtime; see `relibra.Runtime`."""

    def set_layer_hooks(
        self,
        layer: int,
        *,
        weights_ready: Callable[[], Any] | None = None,
        weights_release: Callable[[Any], None] | None = None,
        starts_stage: bool = False,
        model: str | None = None,
    ) -> None:
        """Says when the weights of a layer can be pushed ahead of its entry; replaces hooks.

        Without hooks the weights must be in the layer's parameters during the whole step. With
        ``"dist"`` replicas are pushed at their layer's entry, and nothing is asked.

        Args:
            layer: decoder layer number.
            weights_ready: called on every rank at the same places: None while nobody can tell,
                then the layer is pushed at its own entry; an event of the device (on the CPU a
                `threading.Event`) that the push waits for; True where they are there.
            weights_release: called with an event after which the weights have been read.
            starts_stage: other layers may run between the layer before and this one, such as
                where a pipeline stage begins: nothing is pushed ahead across that border.
            model: name of the attached model, by default the first.

        Raises:
            ValueError: no such layer or model.
        """
        attachment = self.attachment(model)
        attachment.layer_of(layer)
        if self.domain_sync is not None:
            hooks = LayerHooks(weights_ready, weights_release, starts_stage)
            self.domain_sync.hooks[attachment.name, layer] = hooks

    def forget_hooks(self, model: str) -> None:
        """Forgets what `set_layer_hooks` was told of a model."""
        if self.domain_sync is not None:
            hooks = self.domain_sync.hooks
            self.domain_sync.hooks = {at: one for at, one in hooks.items() if at[0] != model}

    def _prepare(self, slots: Mapping[str, torch.Tensor]) -> None:
        """Replica buffers for layers with these home weights."""
        if self.domain_sync is None:
            self.buffers.weights(slots)
            self.buffers.grads(slots)
            return
        with self.noting_failure():
            self.domain_sync.prepare(slots)

    def _prepare_layers(self, attachment: Attachment) -> None:
        """Replica buffers for all layers of a model."""
        for moe in attachment.layers.values():
            self._prepare(moe.expert_weights.slots())

    def replica_fault(self, model: str) -> Exception | None:
        """Ends the replicas' part of a step: what went wrong, None where gradients are home.

        Args:
            model: name of the attached model whose step it is.
        """
        try:
            with self.noting_failure():
                if self.dispatcher.peer is not None:
                    self.dispatcher.peer.finish()
                if self.domain_sync is not None:
                    self.domain_sync.finish(model)
        except Exception as error:  # whatever it is, the peers must hear of it
            return error
        return None

    @contextlib.contextmanager
    def voting(self, fault: Exception | None) -> Iterator[None]:
        """The ranks agree whether a step was good: a failure after it ends no collective of it.

        Args:
            fault: of this rank: then the step is good on no rank, and its collectives may end.
        """
        if self.domain_sync is None or fault is not None:
            yield
            return
        with self.domain_sync.on_abort.holding():
            yield

    def leave_step(self, model: str, error: BaseException, what: str) -> None:
        """A step ended by an error: none of its uses comes any more.

        Args:
            model: name of the attached model whose step it is.
            error: of this rank.
            what: the step.
        """
        if not isinstance(error, ReplicaSyncError):  # whose cause lies elsewhere
            self.departures.note(error, what)
        if self.dispatcher.peer is not None:
            self.dispatcher.peer.leave()
        if self.domain_sync is not None:
            self.domain_sync.forget_step(model)  # waits for gradients on their way home

    def explained(self, error: ReplicaSyncError) -> ReplicaSyncError:
        """The same error, with what other ranks told: who left the step, or who said nothing."""
        told = self.departures.told()
        if told:
            error.args = (f"{error}; {told}", *error.args[1:])
        return error
