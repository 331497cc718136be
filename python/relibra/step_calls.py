"""What a host calls in a training step: passes, their order, handles, slots and figures."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING

import torch

from relibra.step_next import said_uses
from relibra.step_report import step_report
from relibra.use import check_same_ids
from relibra_kernels.checks import check_int

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from relibra.attachment import Attachment
    from relibra.balanced_moe import MoEHandle
    from relibra.dispatch_rows import DispatchRows
    from relibra.plan import StepPlan
    from relibra.rank_tables import SourceRoute
    from relibra.replica_counts import StepCounts
    from relibra.runtime import Runtime
    from relibra.step_tables import StepTables
    from relibra.use import Use


class StepCalls(abc.ABC):
    """The part of `relibra.step.TrainingStep` that hosts use."""

    attachment: Attachment
    runtime: Runtime
    plan: StepPlan
    optimizer_step: int
    live_passes: Mapping[str, str]
    routes: dict[str, list[DispatchRows]]
    replica_counts: StepCounts
    moved_experts: int
    moved_bytes: int
    static_sent_bytes: int
    cross_node_tokens: tuple[int, int]
    row_buffer_bytes = 0
    _tables: StepTables
    _num_inside = 0

    @abc.abstractmethod
    def require_open(self, what: str) -> None:
        """Raise unless the step's context is active."""

    @abc.abstractmethod
    def use_of(self, pass_: str, micro_batch: int) -> Use:
        """A pass of a micro-batch, unchecked."""

    @abc.abstractmethod
    def ids(self, use: Use, index: int) -> torch.Tensor | None:
        """Replayed ids, int32 ``[T, K]``, of a layer (its place among the MoE layers)."""

    @abc.abstractmethod
    def source_of(self, pass_: str, micro_batch: int, index: int) -> SourceRoute:
        """Host integers of a use of a layer."""

    @abc.abstractmethod
    def micro_batches(self, pass_: str) -> list[int]:
        """Of a pass with recorded routing, those that this step covers."""

    @abc.abstractmethod
    def check_order(self, done: str, what: str) -> None:
        """Notes what this rank did, and compares where that is cheap."""

    @contextlib.contextmanager
    def forward(self, *, micro_batch: int, pass_: str = "train") -> Iterator[Use]:
        """Say which pass and micro-batch the layers execute on this thread.

        Args:
            micro_batch: number within the rollout batch.
            pass_: a pass for which routes were given, or one of the live passes.

        Raises:
            ValueError: unknown pass, or a micro-batch outside this optimizer step.
            RuntimeError: the step has ended.
        """
        micro_batch = self._checked(pass_, micro_batch)
        use = self.use_of(pass_, micro_batch)
        backward_follows = torch.is_grad_enabled()
        self._num_inside += 1
        try:
            with self.attachment.use_on_this_thread(use):
                yield use
        finally:
            self._num_inside -= 1
        if not backward_follows:
            for index in range(len(self.plan.layouts)):
                self._tables.release((pass_, micro_batch, index))

    def next(
        self,
        *,
        micro_batch: int,
        pass_: str = "train",
        direction: str = "forward",
        layer: int | None = None,
    ) -> None:
        """Say what runs next where ReLibra cannot tell, so that its replicas are pushed ahead.

        Inside a forward, or a backward without recompute, the next layer is certain. What follows
        the last layer of a pass is not, nor what a backward recomputes. Call this as early as the
        order is known, once a pass, in the order in which the passes will run: before a pass of
        1F1B say that pass, and what follows it. All ranks say the same. What does not come next
        after all is given back unread; the results are the same. Over ``"dist"`` nothing is pushed
        ahead.

        Args:
            micro_batch: as in `forward`.
            pass_: as in `forward`.
            direction: ``"forward"``, ``"backward"``, or ``"recompute"`` for a backward that runs
                the forward of each layer again just before it.
            layer: where the pass begins, for a pipeline stage that does not hold all layers; None
                is the first MoE layer of a forward, else the last.

        Raises:
            ValueError: an unknown pass, micro-batch, direction or layer.
            RuntimeError: the step has ended.
            PlanError: other ranks said something else; over gloo at once.
        """
        micro_batch = self._checked(pass_, micro_batch)
        following = said_uses(self.use_of(pass_, micro_batch), direction, layer)
        said = f"next: {pass_}, micro-batch {micro_batch}, {direction}, layer {layer}"
        self.check_order(said, f"optimizer step {self.optimizer_step}, {said}")
        sync = self.runtime.domain_sync
        if sync is not None:
            with self.runtime.noting_failure():
                sync.say_next(following, is_inside=self._num_inside > 0)

    def report(self) -> dict[str, float]:
        """Figures of this step for loggers, by name; also when it has ended.

        Returns:
            For every pass and layer, as ``<pass>/layer_<number>/...``, `relibra.balance_metrics` of
            the rows of the ranks over the step, and mean, p99 and max of the imbalance of its
            micro-batches; names ending in ``_routed`` are without padding rows. As
            ``layer_<number>/replica_...`` what replicas cost this rank: uses pushed ahead and at
            entry, bytes, and seconds of exposed push. Then moves, and tokens that cross nodes,
            counted only with ``dispatch="two_hop"``, else 0.
        """
        return step_report(self)

    def handle(self, layer: int, expert_ids: torch.Tensor | None = None) -> MoEHandle:
        """Handle of a layer in the current use, for :func:`relibra.balanced_moe`.

        Args:
            layer: decoder layer number.
            expert_ids: ``[T, K]`` to check against the replayed ids; needed where rows follow the
                live router.
        """
        use = self._current(layer)
        replayed = use.expert_ids(layer)
        ids = expert_ids if replayed is None else replayed
        if ids is None:
            raise ValueError(f"expert_ids: need [T, K] ids, since {use} has no routes, got None")
        return use.handle(layer, expert_ids, ids.shape[0])

    def route(self, expert_ids_TK: torch.Tensor, layer: int) -> torch.Tensor:
        """Slot of every choice, for hosts that keep their own dispatcher.

        Args:
            expert_ids_TK: ``[T, K]``, the replayed ids of the current use.
            layer: decoder layer number.

        Returns:
            int32 ``[T, K]`` slot ids ``rank * (H + X + S) + slot``; -1 stays -1.
        """
        use = self._current(layer)
        index = self.attachment.layer_index(layer)
        planned = self.ids(use, index)
        if planned is None or use.mode != "exact":
            raise ValueError(f"route: need a use whose rows are all replayed, got {use}")
        check_same_ids(expert_ids_TK, planned, f"{use}, layer {layer}")
        quota = self.source_of(use.pass_, use.micro_batch, index).quota
        slots: torch.Tensor = torch.ops.relibra.route_to_slots(
            planned, quota.expert_first, quota.slot_id, quota.slot_quota
        )
        return slots

    def _checked(self, pass_: str, micro_batch: int) -> int:
        """Refuses a use outside this step."""
        self.require_open(f"{pass_}, micro-batch {micro_batch}")
        known = sorted({*self.routes, *self.live_passes})
        if pass_ not in known:
            raise ValueError(f"pass_: need one of {known}, got {pass_!r}")
        micro_batch = check_int("micro_batch", micro_batch, minimum=0)
        if pass_ in self.routes and micro_batch not in self.micro_batches(pass_):
            raise ValueError(
                f"micro_batch: need one of {self.micro_batches(pass_)} in optimizer step "
                f"{self.optimizer_step}, got {micro_batch}"
            )
        return micro_batch

    def _current(self, layer: int) -> Use:
        use = self.attachment.current_use(self.attachment.layer_of(layer))
        if use is None:
            raise RuntimeError("no micro-batch: call inside `with step.forward(micro_batch=...)`")
        return use
