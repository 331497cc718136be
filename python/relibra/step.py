"""One optimizer step under a plan: which micro-batch a layer is in, and its tables.

A use (`relibra.use`) is one execution of a pass on a micro-batch. Its key travels in the runtime
object and in the autograd node, never in a queue: backward and recompute run in any order and on
any thread.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from relibra.hop_splits import Splits, count_tokens, cross_node_tokens
from relibra.rank_tables import SourceRoute
from relibra.route_checks import Routes, check_against_plan, check_modes, checked_routes
from relibra.static_slots import num_static
from relibra.step_tables import StepTables
from relibra.use import Use, check_same_ids
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError
from relibra_kernels.ops.backend import raise_device_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from relibra.attachment import Attachment
    from relibra.balanced_moe import MoEHandle
    from relibra.dispatch_rows import DispatchRows
    from relibra.plan import StepPlan
    from relibra.rank_tables import LayerTables


class TrainingStep:
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
        self._open = False

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
            self._check_routes()
        except Exception as error:  # whatever it is, the peers must hear of it
            fault = error
        self.runtime.agree(self._facts(), what=self._what, fault=fault)
        if self.plan.layouts != attachment.layout:
            self.moved_experts, self.moved_bytes = attachment.migrate(self.plan.layouts)
        attachment.plan_hash = self.plan.hash
        self._exchange_counts()
        self.static_sent_bytes = attachment.static.send_weights(self.plan, self._what)
        attachment.active, self._open = self, True
        return self

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
            self.runtime.forget_replicas()
            return
        replicas = self.runtime.replica_fault()
        self.runtime.agree(
            {
                "number of executed layers": self.num_uses,
                "order of executed passes, micro-batches and layers (CRC-32)": self._order,
            },
            what=f"end of optimizer step {self.optimizer_step}",
            fault=self.runtime.failure
            or replicas
            or unfinished
            or self._device_fault()
            or static.fault(),
        )
        if static.return_grads(self._what):
            self.runtime.agree({}, what=f"{self._what}: gradients of static copies are home")

    def _device_fault(self) -> Exception | None:
        """What kernels of this step found wrong; the only device sync of a step on CUDA."""
        try:
            for moe in self.attachment.layers.values():
                raise_device_errors(moe.w13.device)
        except ValueError as error:
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

    # -- what hosts call ---------------------------------------------------------------------

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
        self.require_open(f"{pass_}, micro-batch {micro_batch}")
        known = sorted({*self.routes, *self.live_passes})
        if pass_ not in known:
            raise ValueError(f"pass_: need one of {known}, got {pass_!r}")
        micro_batch = check_int("micro_batch", micro_batch, minimum=0)
        if pass_ in self.routes and micro_batch not in self._micro_batches(pass_):
            raise ValueError(
                f"micro_batch: need one of {self._micro_batches(pass_)} in optimizer step "
                f"{self.optimizer_step}, got {micro_batch}"
            )
        use = Use(self, pass_, micro_batch)
        backward_follows = torch.is_grad_enabled()
        with self.attachment.use_on_this_thread(use):
            yield use
        if not backward_follows:
            for index in range(len(self.plan.layouts)):
                self._tables.release((pass_, micro_batch, index))

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

    # -- what layers call --------------------------------------------------------------------

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

    def tables(self, use: Use, index: int, ids_TK: torch.Tensor) -> LayerTables:
        """Tables of one use of one layer, see `relibra.step_tables`; may be collective."""
        return self._tables.get(use, index, ids_TK)

    def built_tables(self, use: Use, index: int) -> LayerTables | None:
        """Tables that are there already, for their host integers; None without."""
        return self._tables.built(use, index)

    def num_micro_batches(self, pass_: str) -> int:
        """Micro-batches of a pass in this optimizer step; 0 for one without recorded routing."""
        return len(self._micro_batches(pass_)) if pass_ in self.routes else 0

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
        self._order = zlib.crc32(done.encode(), self._order)
        if self.runtime.checks_order:
            what = f"{use}, layer {layer}, {stage}"
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

    def _current(self, layer: int) -> Use:
        use = self.attachment.current_use(self.attachment.layer_of(layer))
        if use is None:
            raise RuntimeError("no micro-batch: call inside `with step.forward(micro_batch=...)`")
        return use

    def _micro_batches(self, pass_: str) -> list[int]:
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

    def _facts(self) -> dict[str, int]:
        return {
            "optimizer_step": self.optimizer_step,
            **self.attachment.options(),
            "passes (CRC-32 of their names)": zlib.crc32("|".join(sorted(self.routes)).encode()),
            "choices a token": max(
                (r.top_k for rows in self.routes.values() for r in rows), default=0
            ),
            "number of micro-batches": sum(len(rows) for rows in self.routes.values()),
            "modes of live passes (CRC-32)": zlib.crc32(repr(self._live_options()).encode()),
            "static slots a rank": num_static(self.plan),
            "plan hash": int(getattr(self.plan, "hash", "0")[:15], 16),
        }

    def _live_options(self) -> tuple[str, list[tuple[str, str]]]:
        return self.unknown_rows, sorted(self.live_passes.items())

    def _check_routes(self) -> None:
        check_modes(self.unknown_rows, self.live_passes, self.routes, self.plan)
        if not self.routes and not self.live_passes:
            raise PlanError("routes: need at least one pass, got none")
        check_against_plan(self.routes, self.plan, self.runtime.rank)
        if self.routes and not any(self._micro_batches(name) for name in self.routes):
            steps = {int(s) for name in self.routes for s in self.plan.loads[name].optimizer_step_M}
            raise PlanError(
                f"optimizer_step: need one of {sorted(steps)}, got {self.optimizer_step!r}"
            )

    def _exchange_counts(self) -> None:
        """Tokens that every rank sends to every rank, and where any rank has unknown rows."""
        runtime = self.runtime
        keys = [
            (name, m, index)
            for name in sorted(self.routes)
            for m in self._micro_batches(name)
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
