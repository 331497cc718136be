"""Static copies of a model: weights of one optimizer step, and the sums of its gradients.

A static copy keeps its slot for a rollout batch, on any node. When a step is entered, homes send
their weights to it; every backward of the step adds its gradients, in fp32 and in the order of the
backwards; when the step ends the sums go home and are added there in ascending (rank, static slot)
order. Both ways go point to point over ``torch.distributed``, whatever moves the replicas.

Letters: L MoE layers, G ranks, H home and X static slots a rank.
Source: planner's option `PlannerConfig.static_copies`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relibra.copy_lists import copy_lists
from relibra.expert_weights import FIELDS, as_list
from relibra.weight_grads import main_grad_of
from relibra_kernels.errors import PlanError
from relibra_kernels.reference.combine import accumulation_dtype
from relibra_kernels.slot_layout import SlotLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from relibra.expert_weights import ExpertWeights
    from relibra.module import BalancedMoE
    from relibra.plan import StepPlan
    from relibra.runtime import Runtime


@dataclasses.dataclass
class LayerCopies:
    """Static slots of one layer on this rank.

    Attributes:
        moe: the layer; its parameters are what the slots are copies of.
        weights: field name -> ``[X, ...]``.
        grads: field name -> ``[X, ...]``, of one backward; fp32 (fp64 for fp64), shared by layers
            of the same sizes.
        sums: field name -> ``[X, ...]``, of the backwards of the step, where ``summed`` says so.
        push_list, pull_list: which home slots go where, see `relibra.copy_lists`.
        summed: fields that a backward of this step has added to.
    """

    moe: BalancedMoE
    weights: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]
    push_list: torch.Tensor
    pull_list: torch.Tensor
    summed: set[str] = dataclasses.field(default_factory=set)

    def check_home(self, weights: ExpertWeights, what: str) -> None:
        """Refuses to run home experts whose static copies hold other weights.

        Args:
            weights: of the home slots, as the layer was called with.
            what: names the use.

        Raises:
            ValueError: they do not lie in the parameters of the attached layer.
        """
        for name, field in weights.fields().items():
            param = getattr(self.moe, name)
            if param is None or not _same_memory(as_list(field)[0], param):
                raise ValueError(
                    f"{name}: need the parameter of the attached layer {self.moe.layer} for "
                    f"{what}, whose plan has static copies of it, got another tensor"
                )

    def add(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Adds ``grads`` to the sums of the optimizer step.

        Args:
            names: of the fields whose gradients were computed.

        Returns:
            The sums of these fields, ``[X, ...]``.
        """
        found = {}
        for name in names:
            found[name] = self.sums[name]
            if name in self.summed:
                self.sums[name].add_(self.grads[name])
            else:
                self.sums[name].copy_(self.grads[name])
            self.summed.add(name)
        return found

    def in_order(self) -> list[str]:
        """Fields with sums, in the same order on all ranks."""
        return [name for name in FIELDS if name in self.summed]


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class StaticSlots:
    """Static slots of all layers of an attached model.

    Args:
        runtime: of the group.
        layers: MoE layers by decoder layer number.
    """

    def __init__(self, runtime: Runtime, layers: Mapping[int, BalancedMoE]) -> None:
        self.runtime = runtime
        self.modules = [layers[number] for number in sorted(layers)]
        self._rank = runtime.rank
        self._copies_L: list[LayerCopies] = []
        self._memory: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
        self._plan_hash: str | None = None

    def check(self, plan: StepPlan) -> None:
        """Refuses parameters of which no slot can be sent.

        Args:
            plan: about to be entered.

        Raises:
            PlanError: the plan has static slots, and experts are sharded by FSDP.
        """
        if num_static(plan) == 0:
            return
        for moe, layout in zip(self.modules, plan.layouts, strict=True):
            for name, param in moe.named_parameters():
                held = len(param) if param.dim() else 0
                if hasattr(param, "full_tensor") or held != layout.slots_per_rank:
                    raise PlanError(
                        f"plan: static copies need whole expert parameters on every rank of the EP "
                        f"group, got a sharded {name} (FSDP) in layer {moe.layer}; plan with "
                        "static_copies=0"
                    )

    def send_weights(self, plan: StepPlan, what: str) -> int:
        """Home weights -> static slots of all layers; collective where a plan has static copies.

        Args:
            plan: that is entered, the same on all ranks.
            what: names the step.

        Returns:
            Bytes that this rank sent.

        Raises:
            ReplicaSyncError: a message failed or timed out.
        """
        if plan.hash != self._plan_hash:
            self._copies_L = self._make(plan)
            self._plan_hash = plan.hash
        sent = 0
        for copies in self._copies_L:
            copies.summed.clear()
            fields = copies.moe.expert_weights.slots()
            pairs = [(home.detach(), copies.weights[name]) for name, home in fields.items()]
            with self.runtime.noting_failure(), torch.no_grad():
                self.runtime.replicas.push(
                    pairs,
                    copies.push_list,
                    copies.pull_list,
                    what=f"{what}, layer {copies.moe.layer}: weights of static copies",
                )
            slot_bytes = sum(home[0].numel() * home.element_size() for home, _ in pairs)
            sent += len(copies.push_list) * slot_bytes
        return sent

    def of(self, index: int, slots: int) -> dict[str, Any]:
        """What a `MoEHandle` needs of the static slots of a layer.

        Args:
            index: place of the layer among the MoE layers.
            slots: X of its tables; 0 where rows follow the live router past the static copies.
        """
        if slots == 0:
            return {}
        copies = self._copies_L[index]
        return {
            "static": copies.weights,
            "static_grads": copies.grads,
            "static_copies": copies,
        }

    def fault(self) -> Exception | None:
        """Why gradients of this step cannot be added to those of this rank's home experts."""
        try:
            for copies in self._copies_L:
                for name in copies.in_order() if self.runtime.grad_mode == "main_grad" else ():
                    main_grad_of(copies.moe.get_parameter(name))
        except (TypeError, ValueError) as error:
            return error
        return None

    def return_grads(self, what: str) -> bool:
        """Sums of this step -> gradients of the home experts; collective.

        They are added to ``param.main_grad``, or with ``grad_mode="returned"``, where autograd is
        done already, to ``param.grad``, which is made where it is None.

        Args:
            what: names the step.

        Returns:
            Whether any backward of this step had gradients for static copies, as on all ranks.

        Raises:
            ReplicaSyncError: a message failed or timed out.
        """
        is_any = False
        for copies in self._copies_L:
            names = copies.in_order()
            if names:
                is_any = True
                self._return_layer(copies, names, f"{what}, layer {copies.moe.layer}")
        self.forget_sums()
        return is_any

    def _return_layer(self, copies: LayerCopies, names: Sequence[str], what: str) -> None:
        params = {name: copies.moe.get_parameter(name) for name in names}
        into_main = self.runtime.grad_mode == "main_grad"
        find = main_grad_of if into_main else _wide_grad
        home = {name: find(param) for name, param in params.items()}
        with self.runtime.noting_failure(), torch.no_grad():
            self.runtime.replicas.reduce(
                [(copies.sums[name], home[name]) for name in names],
                copies.push_list,
                copies.pull_list,
                what=f"{what}: gradients of static copies",
            )
        if into_main or not len(copies.push_list):
            return
        for name, param in params.items():
            if param.grad is None:
                with torch.inference_mode(False):  # backwards add to it
                    param.grad = home[name].to(param.dtype)
            elif param.grad is not home[name]:
                param.grad.copy_(home[name])

    def forget_sums(self) -> None:
        """Gradients of an ended step, also of one that failed, are not needed again."""
        for copies in self._copies_L:
            copies.summed.clear()

    def _make(self, plan: StepPlan) -> list[LayerCopies]:
        """Slots for the copies of a plan; memory of the plan before serves again where it fits."""
        before, self._memory, found = self._memory, {}, []
        if num_static(plan) == 0:
            return []
        for index, moe in enumerate(self.modules):
            static_GX = plan.static_slot_expert_LGX[index]
            home_GH = plan.layouts[index].home_slot_expert_GH
            lists = copy_lists(home_GH, static_GX, np.ones_like(static_GX, np.int64), self._rank)
            like = moe.expert_weights.slots()
            fields = {name: (w.dtype, tuple(w.shape[1:])) for name, w in like.items()}
            place = (static_GX.shape[1], moe.w13.device)
            wide = {n: (accumulation_dtype(dtype), shape) for n, (dtype, shape) in fields.items()}
            weights = self._slots(("weights", index), fields, place, before)
            grads = self._slots(("grads",), wide, place, before)
            sums = self._slots(("sums", index), wide, place, before)
            found.append(LayerCopies(moe, weights, grads, sums, *lists))
        return found

    def _slots(
        self,
        name: tuple[Any, ...],
        fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        place: tuple[int, torch.device],
        before: Mapping[tuple[Any, ...], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Field name -> ``[X, ...]``; equal arguments give the same memory."""
        key = (*name, *place, *fields.items())
        if key not in self._memory:
            layout = SlotLayout.of(fields)
            self._memory[key] = before.get(key) or layout.views(layout.allocate(*place))
        return self._memory[key]


def _wide_grad(param: torch.Tensor) -> torch.Tensor:
    """``param.grad`` in the accumulation dtype, zeros for None."""
    need = accumulation_dtype(param.dtype)
    if param.grad is None:
        with torch.inference_mode(False):  # it may become the gradient
            return torch.zeros(param.shape, dtype=need, device=param.device)
    return param.grad.to(need)


def num_static(plan: object) -> int:
    """X, static slots a rank of a plan; 0 for what is none."""
    static = getattr(plan, "static_slot_expert_LGX", None)
    return 0 if static is None else int(static.shape[2])
