"""One model under a runtime: its MoE layers, its layout, and where its layers are right now."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relibra.agreement import agree, gather_tensor
from relibra.balanced_moe import MoEHandle
from relibra.layout import ExpertLayout
from relibra.local_use import count_ids
from relibra.migrate import expert_fields, move_fields, move_lists
from relibra.module import BalancedMoE
from relibra.movers import GroupMovers
from relibra.rank_tables import LayerTables, SourceRoute
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from relibra.runtime import Runtime
    from relibra.step import TrainingStep, Use


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
        first = self.layers[self.moe_layers[0]]
        self.num_home = first.w13.shape[0]
        identity = ExpertLayout.identity(first.num_experts, runtime.num_ranks)
        self.layout = (identity,) * len(self.moe_layers)
        self.plan_hash: str | None = None
        self.active: TrainingStep | None = None
        self._thread = threading.local()
        self._task_uses: dict[int, Use] = {}  # autograd graph task -> use it belongs to
        self._hook = model.register_forward_hook(_OutputMarker(self))
        for moe in self.layers.values():
            moe._attachment = weakref.ref(self)

    # -- layers ------------------------------------------------------------------------------

    def owns(self, moe: BalancedMoE) -> bool:
        """Whether this very module is attached; a deep copy of it is not."""
        return self.layers.get(moe.layer) is moe and self.name in self.runtime.attachments

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
        self.layer_of(layer)
        return self.moe_layers.index(layer)

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
        task = torch._C._current_graph_task_id()
        if task >= 0 and task in self._task_uses:
            return self._task_uses[task]
        use: Use | None = getattr(self._thread, "use", None)
        if use is None and task >= 0 and self.active is not None:
            raise RuntimeError(
                f"layer {moe.layer} is recomputed in a backward whose micro-batch cannot be told: "
                "call backward on a value computed from the output of the attached model, or "
                "inside `with step.forward(micro_batch=...)`"
            )
        return use

    def enter_task(self, use: Use) -> None:
        """The running backward belongs to ``use``; recomputed layers look it up."""
        task = torch._C._current_graph_task_id()
        if task >= 0:
            self._task_uses[task] = use

    def forget_tasks(self) -> None:
        """No backward of the ended step can run any more."""
        self._task_uses.clear()

    def mark_outputs(self, output: Any) -> None:
        """Gradients that arrive at the model's outputs tell which use their backward is of."""
        use: Use | None = getattr(self._thread, "use", None)
        if use is None or torch._C._current_graph_task_id() >= 0:
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                register: Callable[..., Any] = tensor.register_hook
                register(lambda grad, use=use: self.enter_task(use))

    # -- movers and handles ------------------------------------------------------------------

    def movers(self, use: Use | None, index: int | None) -> GroupMovers:
        """Movers of one use of one layer."""
        return GroupMovers(self.runtime, use, index)

    def live_handle(self, moe: BalancedMoE, expert_ids: torch.Tensor) -> MoEHandle:
        """Handle for routing that no plan knows: every row goes home; collective."""
        runtime = self.runtime
        layout = self.layouts_by_layer()[moe.layer]
        what = f"live use of layer {moe.layer}"
        counts = count_ids(expert_ids, moe.num_experts)
        ids = expert_ids.to(torch.int32)
        alone = np.zeros((runtime.num_ranks, moe.num_experts), np.int64)
        alone[runtime.rank] = counts.numpy()
        own = SourceRoute.live(alone, layout, runtime.replica_slots, runtime.rank, 1)
        sends = own.count_sends(ids, runtime.num_ranks)
        gathered = torch.stack(gather_tensor(torch.cat([counts, sends]), runtime.group, what))
        counts_GE, sends_GG = torch.split(gathered, [moe.num_experts, runtime.num_ranks], 1)
        source = SourceRoute.live(
            counts_GE.numpy(), layout, runtime.replica_slots, runtime.rank, runtime.block_rows
        )
        movers = self.movers(None, None)

        def exchange(x: torch.Tensor, send: list[int], recv: list[int]) -> torch.Tensor:
            return movers.exchange(x, send, recv, f"{what}: rows")

        tables = LayerTables.build(
            ids,
            source,
            sends_GG[runtime.rank].tolist(),
            sends_GG[:, runtime.rank].tolist(),
            exchange,
            num_home=self.num_home,
            block_rows=runtime.block_rows,
        )
        return MoEHandle(
            tables, movers, what, runtime.combine, runtime.grad_mode, runtime.block_rows
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

    def migrate(self, layouts: tuple[ExpertLayout, ...]) -> tuple[int, int]:
        """Move weights and optimizer state to new layouts; collective.

        Returns:
            Experts that changed their rank, and bytes that this rank sent.

        Raises:
            PlanError: ranks hold different optimizer states.
            ReplicaSyncError: a rank did not take part.
        """
        fields_by_layer, fault = {}, None
        try:
            for layer in self.moe_layers:
                fields_by_layer[layer] = expert_fields(self.layers[layer], self.optimizer)
        except ValueError as error:
            fault = error
        names = [f"{layer}.{n}" for layer, fields in fields_by_layer.items() for n in fields]
        facts = {"number of tensors with an expert axis": len(names)}
        runtime = self.runtime
        agree(runtime.group, facts, what="migration", fault=fault, timeout_s=runtime.timeout_s)
        moved, sent = 0, 0
        for layer, old, new in zip(self.moe_layers, self.layout, layouts, strict=True):
            if old == new:
                continue
            moved += len(old.moved_experts(new))
            movers = self.movers(None, None)

            def exchange(
                x: torch.Tensor, send: list[int], recv: list[int], layer: int = layer
            ) -> torch.Tensor:
                return movers.exchange(x, send, recv, f"migration of layer {layer}")  # noqa: B023

            lists = move_lists(old, new, runtime.rank)
            sent += move_fields(list(fields_by_layer[layer].values()), lists, exchange)
            home = new.home_slot_expert_GH[runtime.rank]
            self.layers[layer].home_slot_expert.copy_(torch.tensor(home.tolist()))
        self.layout = tuple(layouts)
        self.plan_hash = None
        return moved, sent


class _OutputMarker:
    """Forward hook of an attached model; does nothing in copies of the model."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = weakref.ref(attachment)

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        attachment = self.attachment()
        if attachment is not None and attachment.model is model:
            attachment.mark_outputs(output)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle belongs to no attachment."""
        return _no_marker, ()


def _no_marker() -> Any:
    return _ignore_outputs


def _ignore_outputs(model: nn.Module, args: Any, output: Any) -> None:
    """What `_OutputMarker` is in a copied model."""


def find_layers(model: nn.Module, runtime: Runtime) -> dict[int, BalancedMoE]:
    """MoE layers of a model by decoder layer number.

    Raises:
        ValueError: none, two with one number, different sizes, or sharded for another group.
    """
    layers: dict[int, BalancedMoE] = {}
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, BalancedMoE)]
    for name, moe in found:
        if moe.layer in layers:
            raise ValueError(f"model: layer number {moe.layer} appears twice, again at {name!r}")
        if (moe.num_ranks, moe.rank) != (runtime.num_ranks, runtime.rank):
            raise ValueError(
                f"model: {name!r} is shard {moe.rank} of {moe.num_ranks}, this is rank "
                f"{runtime.rank} of {runtime.num_ranks}"
            )
        home = ExpertLayout.identity(moe.num_experts, moe.num_ranks).home_slot_expert_GH[moe.rank]
        if moe.home_slot_expert.tolist() != home.tolist():
            raise ValueError(
                f"model: {name!r} holds experts {moe.home_slot_expert.tolist()}; need the identity "
                f"layout {home.tolist()} to attach (runtime.set_layout restores it)"
            )
        layers[moe.layer] = moe
    if not layers:
        raise ValueError("model: need at least one BalancedMoE layer, got none")
    if len({moe.num_experts for moe in layers.values()}) > 1:
        raise ValueError("model: need the same number of experts in all MoE layers")
    return layers


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested outputs: mappings, sequences, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))
