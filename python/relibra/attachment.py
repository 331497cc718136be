"""One model under a runtime: its MoE layers, its layout, and where its layers are right now."""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from relibra.attachable import check_holds, find_layers
from relibra.balanced_moe import MoEHandle
from relibra.expert_weights import joined_slots
from relibra.layout import ExpertLayout
from relibra.live_routes import live_tables
from relibra.local_use import narrow_ids
from relibra.migrate import expert_fields, move_fields, move_lists
from relibra.module import BalancedMoE
from relibra.movers import GroupMovers
from relibra.output_marker import OutputMarker, tensors_in
from relibra.plan import StepPlan
from relibra.rank_settings import model_facts
from relibra.static_slots import StaticSlots
from relibra_kernels.errors import PlanError
from relibra_kernels.thread_state import graph_task_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from relibra.runtime import Runtime
    from relibra.step import TrainingStep
    from relibra.use import Use


class Attachment:
    """A model, its layout and its current uses; made by ``runtime.attach``."""

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        name: str,
    ) -> None:
        self.runtime, self.model, self.optimizer, self.name = runtime, model, optimizer, name
        self.layers = find_layers(model, runtime)
        self.moe_layers = tuple(sorted(self.layers))
        self._places = {layer: place for place, layer in enumerate(self.moe_layers)}
        if optimizer is not None:
            check_holds(optimizer, self.layers)
        first = self.layers[self.moe_layers[0]]
        self.num_home = first.w13.shape[0]
        self.static = StaticSlots(runtime, self.layers)
        identity = ExpertLayout.identity(first.num_experts, runtime.num_ranks)
        self.layout = (identity,) * len(self.moe_layers)
        self.plan_hash: str | None = None
        self.active: TrainingStep | None = None
        self._thread = threading.local()
        # Autograd graph task -> use whose backward it runs, None while it mixes several.
        self._task_uses: dict[int, Use | None] = {}
        self._recomputed: set[tuple[int, tuple[int, str, int], int]] = set()
        self._options_agreed = False
        self._hook = model.register_forward_hook(OutputMarker(self))
        for moe in self.layers.values():
            moe._attachment = weakref.ref(self)
            moe._grads_to_main = runtime.grad_mode == "main_grad"

    # -- layers ------------------------------------------------------------------------------

    def owns(self, moe: BalancedMoE) -> bool:
        """Whether this very module is attached; a deep copy of it is not."""
        held = self.runtime.attachments.get(self.name) is self
        return held and self.layers.get(moe.layer) is moe

    def part(self, module: nn.Module | None) -> nn.Module:
        """A part of the model whose layout is this one's, None for the whole model.

        Raises:
            ValueError: it holds MoE layers of another model, such as a copy of this one.
        """
        for name, moe in (self.model if module is None else module).named_modules():
            if isinstance(moe, BalancedMoE) and not self.owns(moe):
                raise ValueError(
                    f"module: need a part of the attached model {self.name!r}, got one whose MoE "
                    f"layer {name!r} is not attached: its experts may lie in another layout"
                )
        return self.model if module is None else module

    def release(self) -> None:
        """The runtime forgets this model."""
        if self.active is not None:
            self.active.cancel()
        self._hook.remove()
        for moe in self.layers.values():
            moe._grads_to_main = False

    def layer_of(self, layer: int) -> BalancedMoE:
        """The module of a decoder layer.

        Raises:
            ValueError: there is none; names the layers there are.
        """
        if layer not in self.layers:
            raise ValueError(f"layer: need one of {list(self.moe_layers)}, got {layer}")
        return self.layers[layer]

    def layer_index(self, layer: int) -> int:
        """Place of a decoder layer among the MoE layers."""
        index = self._places.get(layer)
        if index is None:
            self.layer_of(layer)  # raises
            raise AssertionError(layer)
        return index

    def pushed_weights(self, index: int, num_static: int) -> dict[str, Any]:
        """Field name -> ``[H + X, ...]``, what the replicas of a layer are copies of.

        Args:
            index: place of the layer among the MoE layers.
            num_static: X of its tables.
        """
        slots = self.layers[self.moe_layers[index]].expert_weights.slots()
        static = self.static.of(index, num_static).get("static", {})
        return {name: joined_slots(one, static.get(name)) for name, one in slots.items()}

    def layouts_by_layer(self) -> dict[int, ExpertLayout]:
        """Decoder layer number -> layout."""
        return dict(zip(self.moe_layers, self.layout, strict=True))

    # -- which use a layer is in -------------------------------------------------------------

    @contextlib.contextmanager
    def use_on_this_thread(self, use: Use) -> Iterator[None]:
        """``use`` is current on this thread inside the block."""
        before = getattr(self._thread, "use", None)
        self._thread.use = use
        try:
            yield
        finally:
            self._thread.use = before

    def current_use(self, moe: BalancedMoE) -> Use | None:
        """The use that a layer executes now, None outside a training step.

        Raises:
            RuntimeError: inside a backward (recompute) whose micro-batch cannot be told.
        """
        task = graph_task_id()
        use: Use | None = getattr(self._thread, "use", None)
        if task >= 0:
            use = self._task_uses.get(task, use)
        if use is None and task >= 0 and self.active is not None:
            raise RuntimeError(
                f"layer {moe.layer} is recomputed in a backward whose micro-batch cannot be told: "
                "call backward on a value computed from the output of the attached model, or "
                "inside `with step.forward(micro_batch=...)`, and do not interleave the layers of "
                "several micro-batches in one graph"
            )
        return use

    def enter_task(self, use: Use, *, at_output: bool = False) -> None:
        """The running backward belongs to ``use``; recomputed layers look it up.

        At an output of the model the backward of a use begins. A layer of another use than the one
        before says that the graph mixes them: then nobody can tell what is recomputed next.
        """
        task = graph_task_id()
        if task < 0:
            return
        before = self._task_uses.get(task, use)
        mixed = not at_output and (before is None or before.key != use.key)
        self._task_uses[task] = None if mixed else use

    def note_recompute(self, use: Use, layer: int) -> None:
        """A backward recomputes each layer of a use once; twice means it took another's use.

        Raises:
            RuntimeError: the second time in one backward.
        """
        if self.runtime.domain_sync is not None:
            self.runtime.domain_sync.note_handle(use, layer)
        task = graph_task_id()
        if task < 0:
            return
        key = (task, use.key, layer)
        if key in self._recomputed:
            raise RuntimeError(
                f"layer {layer} is recomputed twice for {use} in one backward: several "
                "micro-batches in one backward, or nested activation checkpoints, cannot be told "
                "apart; run one backward a micro-batch"
            )
        self._recomputed.add(key)

    def forget_tasks(self) -> None:
        """No backward of the ended step can run any more."""
        self._task_uses.clear()
        self._recomputed.clear()

    def facts(self) -> dict[str, int | str]:
        """What all ranks must attach alike, as facts to agree on."""
        kind = "None" if self.optimizer is None else type(self.optimizer).__name__
        return {"name": repr(self.name), "optimizer": kind, **model_facts(self.layers)}

    def mark_outputs(self, output: Any) -> None:
        """Gradients that arrive at the model's outputs tell which use their backward is of."""
        use: Use | None = getattr(self._thread, "use", None)
        if use is None or graph_task_id() >= 0:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                register: Callable[..., Any] = tensor.register_hook
                register(lambda grad, use=use: self.enter_task(use, at_output=True))

    # -- movers and handles ------------------------------------------------------------------

    def movers(self, use: Use | None, index: int | None) -> GroupMovers:
        """Movers of one use of one layer."""
        return GroupMovers(self.runtime, use, index)

    def live_handle(self, moe: BalancedMoE, expert_ids: torch.Tensor) -> MoEHandle:
        """Handle for routing that no plan knows: every row goes home; collective."""
        runtime, movers = self.runtime, self.movers(None, None)
        runtime.require_open()
        layout = self.layouts_by_layer()[moe.layer]
        what = f"live use of layer {moe.layer}"
        if not self._options_agreed:
            self.runtime.agree(model_facts(self.layers), what=what)
            self._options_agreed = True
        ids = narrow_ids(expert_ids)
        tables = live_tables(runtime, movers, "home", ids, layout, expert_ids, what)
        return MoEHandle(
            tables,
            movers,
            what,
            runtime.combine,
            runtime.grad_mode,
            runtime.block_rows,
            kernels=runtime.kernels,
        )

    # -- layout ------------------------------------------------------------------------------

    def check_layouts(self, layouts: Sequence[ExpertLayout]) -> None:
        """Raise unless these layouts fit the attached layers.

        Raises:
            PlanError: another number of layers, experts or slots.
        """
        if len(layouts) != len(self.moe_layers):
            raise PlanError(
                f"layouts: need {len(self.moe_layers)}, one a MoE layer, got {len(layouts)}"
            )
        for layer, old, new in zip(self.moe_layers, self.layout, layouts, strict=True):
            need, got = old.home_slot_expert_GH.shape, new.home_slot_expert_GH.shape
            if need != got or old.num_experts != new.num_experts:
                raise PlanError(
                    f"layouts: layer {layer}: need {old.num_experts} experts on {need[0]} ranks x "
                    f"{need[1]} home slots, got {new.num_experts} on {got[0]} x {got[1]}"
                )

    def check_enter(self, step: TrainingStep) -> None:
        """Local conditions for entering a step; the caller agrees on them with all ranks.

        Raises:
            PlanError, RuntimeError: what is wrong, on this rank.
        """
        plan, runtime = step.plan, self.runtime
        if not isinstance(plan, StepPlan):
            raise TypeError(f"plan: need a StepPlan, got {type(plan).__name__}")
        if self.active is not None:
            raise RuntimeError(f"model {self.name!r} is in a training step already")
        if not plan.is_executable:
            raise PlanError(f"plan: strategy {plan.strategy!r} is for reports, not executable")
        if plan.shape.moe_layers != self.moe_layers:
            raise PlanError(
                f"plan: need MoE layers {list(self.moe_layers)} as attached, got "
                f"{list(plan.shape.moe_layers)}"
            )
        if plan.topology != runtime.topology:
            raise PlanError(f"plan: need topology {runtime.topology}, got {plan.topology}")
        self.check_layouts(plan.layouts)
        self.static.check(plan)
        if plan.hash != self.plan_hash and plan.base_layout != self.layout:
            raise PlanError(
                "plan: its base layout differs from runtime.layout; plan again with "
                "layout=runtime.layout"
            )
        if plan.hash == self.plan_hash and plan.layouts != self.layout:
            raise PlanError("plan: the layout was changed since this plan was entered; plan again")
        for name, passed in plan.passes.items():
            if passed.replica_slots > runtime.replica_slots:
                raise PlanError(
                    f"plan: pass {name!r} uses {passed.replica_slots} replica slots a rank, the "
                    f"runtime has {runtime.replica_slots}"
                )

    def fields_of(self, layer: int) -> dict[str, torch.Tensor]:
        """Every tensor that moves with the experts of a decoder layer, by name."""
        return expert_fields(self.layers[layer], self.optimizer)

    def migrate(self, layouts: tuple[ExpertLayout, ...]) -> tuple[int, int]:
        """Move weights and optimizer state to new layouts; collective.

        Returns:
            Experts that changed their rank, and bytes that this rank sent.

        Raises:
            PlanError: layouts that do not fit, or ranks with different layouts or optimizer states.
            RuntimeError: inside a training step.
            ReplicaSyncError: a rank did not take part.
        """
        fields_by_layer: dict[int, dict[str, torch.Tensor]] = {}
        fault: Exception | None = None
        try:
            if self.active is not None:
                raise RuntimeError(f"model {self.name!r} is in a training step: experts stay")
            self.check_layouts(layouts)
            for layer in self.moe_layers:
                fields_by_layer[layer] = self.fields_of(layer)
        except Exception as error:  # whatever it is, the peers must hear of it
            fault, layouts = error, ()
        names = [f"{layer}.{n}" for layer, fields in fields_by_layer.items() for n in fields]
        homes = b"".join(layout.home_slot_expert_GH.tobytes() for layout in layouts)
        facts = {
            "number of tensors with an expert axis": len(names),
            "tensors with an expert axis (CRC-32 of their names)": zlib.crc32(
                "|".join(names).encode()
            ),
            "layouts (CRC-32)": zlib.crc32(homes),
        }
        self.runtime.agree(facts, what="migration", fault=fault)
        moved = sum(
            len(old.moved_experts(new)) for old, new in zip(self.layout, layouts, strict=True)
        )
        try:
            sent = self._move(layouts, [list(f.values()) for f in fields_by_layer.values()])
        except BaseException as error:  # an interrupt too leaves some experts moved
            self.runtime.failure = RuntimeError(f"migration interrupted by {error!r}")
            if isinstance(error, Exception):
                self.runtime.failure = error
            raise
        if layouts != self.layout:
            self.layout, self.plan_hash = layouts, None
        return moved, sent

    def _move(
        self, layouts: tuple[ExpertLayout, ...], fields_L: Sequence[Sequence[torch.Tensor]]
    ) -> int:
        """Moves the fields of every layer whose layout changes; returns bytes sent."""
        sent, movers, rank = 0, self.movers(None, None), self.runtime.rank
        for layer, old, new, fields in zip(
            self.moe_layers, self.layout, layouts, fields_L, strict=True
        ):
            if old == new:
                continue

            def exchange(
                x: torch.Tensor, send: list[int], recv: list[int], layer: int = layer
            ) -> torch.Tensor:
                return movers.exchange(x, send, recv, f"migration of layer {layer}")

            sent += move_fields(fields, move_lists(old, new, rank), exchange)
            home = new.home_slot_expert_GH[rank].tolist()
            with torch.inference_mode(False):
                self.layers[layer].home_slot_expert = torch.tensor(home, dtype=torch.int64)
        return sent
