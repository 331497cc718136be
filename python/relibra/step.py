"""One optimizer step under a plan: which micro-batch a layer is in, and its tables.

A use (`relibra.use`) is one execution of a pass on a micro-batch. Its key travels in the runtime
object and in the autograd node, never in a queue: backward and recompute run in any order and on
any thread.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra.hop_splits import Splits, count_tokens, cross_node_tokens
from relibra.rank_tables import SourceRoute
from relibra.replica_counts import StepCounts
from relibra.route_checks import Routes, checked_routes
from relibra.row_needs import row_needs
from relibra.step_calls import StepCalls
from relibra.step_facts import check_step_routes, step_facts
from relibra.step_tables import StepTables
from relibra.use import Use
from relibra_kernels.errors import PlanError
from relibra_kernels.ops.backend import raise_device_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from relibra.attachment import Attachment
    from relibra.dispatch_rows import DispatchRows
    from relibra.plan import StepPlan
    from relibra.rank_tables import LayerTables


class TrainingStep(StepCalls):
    """Context of one optimizer step; made by ``runtime.step(...)``.

    Entering agrees with all ranks on plan, counts and micro-batches, moves experts if the plan's
    layout is new, exchanges the token counts of every micro-batch, and sends weights to the static
    copies. Leaving it checks that all ranks got as far and adds the gradients of static copies to
    those of their homes (`relibra.static_slots`); only then may gradients be clipped or reduced
    over data-parallel ranks, and the optimizer run.

    Attributes:
        cross_node_tokens: with ``dispatch="two_hop"``, tokens that cross between nodes in one
            dispatch of every replayed use, over all ranks: flat, and over two hops.
        static_sent_bytes: of weights that this rank sent to static copies when it entered.
        row_buffer_bytes: of receive buffers and words on every rank, with ``dispatch="peer"``.
        replica_counts: what replicas have cost this rank so far.
    """

    def __init__(
        self,
        attachment: Attachment,
        plan: StepPlan,
        routes: Routes,
        optimizer_step: int,
        unknown_rows: str = "online",
        live_passes: Mapping[str, str] | None = None,
    ) -> None:
        self.attachment, self.runtime = attachment, attachment.runtime
        self.plan, self.optimizer_step = plan, optimizer_step
        self.unknown_rows, self.live_passes = unknown_rows, dict(live_passes or {})
        self._live: set[tuple[str, int]] = set()  # micro-batches with unknown rows on some rank
        self._given_routes = routes
        self.routes: dict[str, list[DispatchRows]] = {}
        self.num_uses, self.moved_experts, self.moved_bytes = 0, 0, 0
        self.cross_node_tokens, self.static_sent_bytes = (0, 0), 0
        self._what = f"optimizer step {optimizer_step} of model {attachment.name!r}"
        self._order = 0  # CRC-32 over the executed stages, in order
        self._open_stages: list[str] = []  # handles of `relibra.stages` that wait for their use
        self._sources: dict[tuple[str, int, int], SourceRoute] = {}
        self._splits: dict[tuple[str, int, int], Splits] = {}
        self._tables = StepTables(self)
        self._open, self._num_inside = False, 0
        self.replica_counts = StepCounts()

    # -- entering and leaving ----------------------------------------------------------------

    def __enter__(self) -> TrainingStep:
        """Agree, migrate, exchange counts; collective.

        Raises:
            PlanError: the plan, the routes or the ranks do not fit together; on every rank.
            ReplicaSyncError: a rank did not take part in time.
        """
        attachment = self.attachment
        fault: Exception | None = None
        try:
            attachment.check_enter(self)
            self.routes = checked_routes(self._given_routes, attachment.moe_layers)
            check_step_routes(self)
        except Exception as error:  # whatever it is, the peers must hear of it
            fault = error
        self.runtime.agree(step_facts(self), what=self._what, fault=fault)
        self.runtime.departures.forget()
        try:
            self._begin()
        except BaseException as error:  # perhaps of this rank alone
            self.runtime.leave_step(attachment.name, error, self._what)
            raise
        attachment.active, self._open = self, True
        return self

    def _begin(self) -> None:
        """Brings layout, counts and static copies to where the plan wants them; collective."""
        attachment = self.attachment
        if self.plan.layouts != attachment.layout:
            self.moved_experts, self.moved_bytes = attachment.migrate(self.plan.layouts)
        attachment.plan_hash = self.plan.hash
        self._exchange_counts()
        self.static_sent_bytes = attachment.static.send_weights(self.plan, self._what)
        self.replica_counts = self.runtime.replica_counts.begin(attachment.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Check that all ranks executed the same uses; collective unless an error is on its way.

        Raises:
            PlanError: the ranks executed different numbers of uses.
            ReplicaSyncError: a rank did not get here in time, or a use failed.
        """
        self._open, self.attachment.active = False, None
        self._tables.clear()
        self._sources.clear()
        self.attachment.forget_tasks()
        unfinished = RuntimeError(self._open_stages[0]) if self._open_stages else None
        self._open_stages.clear()
        static = self.attachment.static
        if error is not None:
            static.forget_sums()
            self.runtime.leave_step(self.attachment.name, error, self._what)
            return
        replicas = self.runtime.replica_fault(self.attachment.name)
        fault = (
            self.runtime.failure or replicas or unfinished or self._device_fault() or static.fault()
        )
        with self.runtime.voting(fault):
            self.runtime.agree(
                {
                    "number of executed layers": self.num_uses,
                    "order of executed passes, micro-batches and layers (CRC-32)": self._order,
                },
                what=f"end of optimizer step {self.optimizer_step}",
                fault=fault,
            )
            if static.return_grads(self._what):
                self.runtime.agree({}, what=f"{self._what}: gradients of static copies are home")

    def _device_fault(self) -> Exception | None:
        """What kernels of this step found wrong; the only device sync of a step on CUDA."""
        try:
            for moe in self.attachment.layers.values():
                raise_device_errors(moe.w13.device)
        except Exception as error:  # whatever it is, the peers must hear of it
            return error
        return None

    def require_open(self, what: str) -> None:
        """Raise unless the step's context is active.

        Raises:
            RuntimeError: it has ended or was never entered.
        """
        if not self._open:
            raise RuntimeError(
                f"{what}: its training step is not active; run forward, recompute and backward "
                "inside `with runtime.step(...)`"
            )

    def cancel(self) -> None:
        """The runtime forgets the model: nothing of this step runs any more."""
        self._open = False

    # -- what layers call --------------------------------------------------------------------

    def use_of(self, pass_: str, micro_batch: int) -> Use:
        """A pass of a micro-batch, unchecked."""
        return Use(self, pass_, micro_batch)

    def mode_of(self, pass_: str, micro_batch: int) -> str:
        """``exact``, or a mode of `relibra.live_routes` where rows follow the live router."""
        if pass_ in self.live_passes:
            return self.live_passes[pass_]
        return self.unknown_rows if (pass_, micro_batch) in self._live else "exact"

    def ids(self, use: Use, index: int) -> torch.Tensor | None:
        """Replayed ids, int32 ``[T, K]``, of a layer (its place among the MoE layers)."""
        if use.pass_ not in self.routes:
            return None
        rows = self.routes[use.pass_][use.micro_batch]
        return torch.from_numpy(np.ascontiguousarray(rows.layer_ids(index)))

    def planned_ids(self, use: Use, index: int, other: object) -> torch.Tensor | None:
        """`ids`, but those of the tables where these are built, which need not be made again.

        Args:
            use: of the layer.
            index: place of the layer.
            other: what they are compared with on its device, None for nothing.
        """
        built = self._tables.built(use, index) if use.mode == "exact" else None
        if built is None:
            return self.ids(use, index)
        if other is None:
            return built.ids_TK  # only their shape is looked at
        if getattr(other, "device", None) != built.ids_TK.device:
            return self.ids(use, index)
        return self._tables[use.pass_, use.micro_batch, index].ids_TK  # when they are there

    def tables(self, use: Use, index: int, ids_TK: torch.Tensor) -> LayerTables:
        """Tables of one use of one layer, see `relibra.step_tables`; may be collective."""
        return self._tables.get(use, index, ids_TK)

    def built_tables(self, use: Use, index: int) -> LayerTables | None:
        """Tables that are there already, for their host integers; None without."""
        return self._tables.built(use, index)

    def num_micro_batches(self, pass_: str) -> int:
        """Micro-batches of a pass in this optimizer step; 0 for one without recorded routing."""
        return len(self.micro_batches(pass_)) if pass_ in self.routes else 0

    def note(self, stage: str, use: Use, layer: int, detail: str = "") -> None:
        """A layer begins a stage; all ranks must do the same in the same order.

        Over gloo this is checked at once (collective), since gloo ends the process when the sizes
        of an exchange differ; elsewhere at the end of the step.

        Raises:
            PlanError: another rank is somewhere else; on every rank.
        """
        self.num_uses += stage != "experts"
        index = self.attachment.layer_index(layer)
        exchanges = self._tables.to_build(use, index) if stage == "forward" else []
        done = f"{stage} {use.key} {layer} {exchanges} {detail}"
        self.check_order(done, f"{use.text}, layer {layer}, {stage}")

    def check_order(self, done: str, what: str) -> None:
        """Notes what this rank did, and compares where that is cheap."""
        self._order = zlib.crc32(done.encode(), self._order)
        if self.runtime.checks_order:
            orders = self.runtime.gather(torch.tensor([self._order]), f"{what}: order of uses")
            if len({int(order) for order in orders}) > 1:
                raise PlanError(
                    f"{what}: need the same order of passes, micro-batches and layers, with the "
                    "same options, biases and wanted gradients, on all ranks; this rank is at use "
                    f"{self.num_uses} of the step, others elsewhere"
                )

    def note_stage(self, stage: str, *, is_open: bool) -> None:
        """A handle of `relibra.stages` was made, or used.

        Args:
            stage: what a handle that is left over is called.
            is_open: made.
        """
        if is_open:
            self._open_stages.append(stage)
        elif stage in self._open_stages:  # it is not after a step that was left by an error
            self._open_stages.remove(stage)

    def release(self, use: Use, index: int) -> None:
        """The backward of a use of a layer is done: its tables are not needed again."""
        self._tables.release((use.pass_, use.micro_batch, index))

    # -- set-up ------------------------------------------------------------------------------

    def micro_batches(self, pass_: str) -> list[int]:
        """Of a pass with recorded routing, those that this step covers."""
        steps = self.plan.loads[pass_].optimizer_step_M
        return np.flatnonzero(steps == self.optimizer_step).tolist()

    def source_of(self, pass_: str, micro_batch: int, index: int) -> SourceRoute:
        """Host integers of a use of a layer, made once."""
        key = (pass_, micro_batch, index)
        if key not in self._sources:
            replica = self.plan.replica_plan(pass_, micro_batch, index)
            self._sources[key] = SourceRoute.build(
                replica.layout,
                replica.replica_slot_expert_GS,
                self.plan.source_quota(pass_, micro_batch, index),
                self.runtime.rank,
                self.runtime.block_rows,
                self.runtime.dispatcher.ranks,
                static_slot_expert_GX=replica.static_slot_expert_GX,
                rank_to_node_G=self.plan.topology.rank_to_node_G,
            )
        return self._sources[key]

    def splits_of(self, key: tuple[str, int, int]) -> Splits:
        """Tokens that a use of a layer sends and receives."""
        return self._splits[key]

    def _exchange_counts(self) -> None:
        """Tokens that every rank sends to every rank, and where any rank has unknown rows."""
        runtime = self.runtime
        keys = [
            (name, m, index)
            for name in sorted(self.routes)
            for m in self.micro_batches(name)
            for index in range(len(self.plan.layouts))
        ]
        hops = runtime.dispatcher.ranks
        width = runtime.num_ranks + (0 if hops is None else len(hops.grid_NP))
        sends = torch.zeros(len(keys), width + 1, dtype=torch.int32)
        for place, (name, m, index) in enumerate(keys):
            rows = self.routes[name][m]
            ids = torch.from_numpy(np.ascontiguousarray(rows.layer_ids(index)))
            source = self.source_of(name, m, index)
            sends[place, :-1] = count_tokens(source, ids, runtime.num_ranks, hops)
            sends[place, -1] = rows.has_unknown
        gathered = runtime.gather(sends, "exchange of token counts")
        all_sends = torch.stack(gathered, 1).numpy()  # [uses, source, destination and flag]
        if hops is not None:
            self.cross_node_tokens = cross_node_tokens(all_sends[:, :, :-1], runtime.topology)
        for place, key in enumerate(keys):
            source = self.source_of(*key)
            self._splits[key] = Splits.of(all_sends[place, :, :-1], runtime.rank, source, hops)
            if all_sends[place, :, -1].any():
                self._live.add(key[:2])
        self._tables.reserve(keys)
        if runtime.dispatcher.peer is not None:
            pairs = all_sends[:, :, : runtime.num_ranks]
            needs = row_needs(self, zip(keys, pairs, strict=True))
            self.row_buffer_bytes = runtime.reserve_rows(needs, self._what)
