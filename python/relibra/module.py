"""``BalancedMoE``: the routed experts of one MoE layer as a module.

The module owns this rank's home experts and nothing else. The router stays outside: it works on
expert ids and never sees the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from relibra.balanced_moe import MoEHandle, balanced_moe
from relibra.compiled import CompiledLayer
from relibra.local_use import local_handle
from relibra.plan import ExpertLayout
from relibra_kernels.checks import check_int, check_tensor

if TYPE_CHECKING:
    import weakref

    from relibra.attachment import Attachment


class BalancedMoE(nn.Module):
    """SwiGLU experts of one layer, sharded by expert over the ranks of an EP group.

    Args:
        num_experts: E, experts of the layer over all ranks.
        hidden_size: D.
        expert_size: F.
        layer: decoder layer number; plans and routes find the module by it.
        num_ranks: G, size of the EP group.
        rank: this rank in the EP group.
        device, dtype: of the parameters.

    Attributes:
        w13: ``[H, 2F, D]``, gate rows first, then up rows, H = ceil(E / G) home slots.
        w2: ``[H, D, F]``.
        home_slot_expert: int64 ``[H]`` on the CPU, expert of each home slot, -1 for a filler slot.
            It is part of the state dict, so that weights saved under one layout cannot be loaded
            by position under another; it is no buffer, since data parallelism overwrites buffers.

    Raises:
        ValueError: a size is out of range.

    Example:
        >>> moe = BalancedMoE(4, 8, 16, layer=0)
        >>> _ = torch.nn.init.normal_(moe.w13), torch.nn.init.normal_(moe.w2)
        >>> ids = torch.tensor([[0, 2], [3, 1], [2, 0]])
        >>> moe(torch.randn(3, 8), torch.full((3, 2), 0.5), ids).shape
        torch.Size([3, 8])
    """

    home_slot_expert: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        layer: int,
        num_ranks: int = 1,
        rank: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = check_int("num_experts", num_experts, minimum=1)
        hidden_size = check_int("hidden_size", hidden_size, minimum=1)
        expert_size = check_int("expert_size", expert_size, minimum=1)
        self.layer = check_int("layer", layer, minimum=0)
        self.num_ranks = check_int("num_ranks", num_ranks, minimum=1)
        self.rank = check_int("rank", rank, minimum=0, maximum=num_ranks - 1)
        home = ExpertLayout.identity(num_experts, num_ranks).home_slot_expert_GH[rank]
        shape13, shape2 = (2 * expert_size, hidden_size), (hidden_size, expert_size)
        self.w13 = nn.Parameter(torch.empty(len(home), *shape13, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(len(home), *shape2, device=device, dtype=dtype))
        self.home_slot_expert = torch.tensor(home.tolist(), dtype=torch.int64, device="cpu")
        self._attachment: weakref.ref[Attachment] | None = None
        self._grads_to_main = False  # set when attached, read while a graph is traced
        self._make_opaque()
        self.reset_parameters()

    def _make_opaque(self) -> None:
        self._opaque = CompiledLayer(self)
        self._layer_id = self._opaque.layer_id  # the only part of it that enters a graph

    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 1/sqrt(fan-in); filler slots are zero."""
        with torch.no_grad():
            for weight in (self.w13, self.w2):
                weight.normal_(std=weight.shape[-1] ** -0.5)
                weight[self.home_slot_expert < 0] = 0

    @classmethod
    def from_dense(
        cls,
        w13_E2FD: torch.Tensor,
        w2_EDF: torch.Tensor,
        *,
        layer: int,
        num_ranks: int = 1,
        rank: int = 0,
    ) -> BalancedMoE:
        """This rank's part of a whole layer, experts laid out in order.

        Args:
            w13_E2FD: ``[E, 2F, D]`` weights of all experts, gate rows first; any float dtype.
            w2_EDF: ``[E, D, F]``, dtype and device of ``w13_E2FD``.
            layer: decoder layer number.
            num_ranks: G.
            rank: this rank.

        Raises:
            TypeError, ValueError: weights that do not fit each other, or a number out of range.
        """
        check_tensor("w13_E2FD", w13_E2FD, ndim=3)
        num_experts, rows13, hidden = w13_E2FD.shape
        if rows13 % 2:
            raise ValueError(f"w13_E2FD: need [E, 2F, D], got {list(w13_E2FD.shape)}")
        shape2, like = (num_experts, hidden, rows13 // 2), w13_E2FD
        check_tensor("w2_EDF", w2_EDF, dtype=like.dtype, shape=shape2, device=like.device)
        place: dict[str, Any] = {"device": w13_E2FD.device, "dtype": w13_E2FD.dtype}
        moe = cls(
            num_experts,
            hidden,
            rows13 // 2,
            layer=layer,
            num_ranks=num_ranks,
            rank=rank,
            **place,
        )
        slots = torch.nonzero(moe.home_slot_expert >= 0).squeeze(1)
        experts = moe.home_slot_expert[slots]  # CPU indices serve tensors on any device
        with torch.no_grad():
            moe.w13[slots] = w13_E2FD[experts]
            moe.w2[slots] = w2_EDF[experts]
        return moe

    # Traced, the ids of one micro-batch would become a constant of the graph.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def replayed_ids(self) -> torch.Tensor | None:
        """Expert ids of the current use; not inside a compiled graph, which takes them as input.

        Returns:
            int64 ``[T, K]``, -1 in rows that follow the live router: the caller puts its own ids
            there. None outside a step and in passes without recorded routing.
        """
        attachment = self._attached()
        use = attachment.current_use(self) if attachment is not None else None
        ids = None if use is None else use.expert_ids(self.layer)
        return None if ids is None else ids.long()

    def forward(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts of every token.

        Args:
            x: ``[..., D]`` with T tokens in all.
            scores: ``[T, K]`` weight of each choice, gathered by the caller from the live dense
                scores of these ids (before any top-k mask); used as given.
            expert_ids: ``[T, K]`` integer; -1 takes no part. Inside a training step they must be
                the replayed ids wherever those are known, or None to take them.

        Returns:
            The shape of ``x``.

        Raises:
            ValueError: wrong shapes, ids out of range, or ids that differ from the replayed ones.
            RuntimeError: a sharded layer that no runtime was attached to, or a recomputed layer
                whose micro-batch cannot be told.
        """
        if torch.compiler.is_compiling():
            return self._traced(x, scores, expert_ids)
        check_tensor("x", x)
        if x.dim() == 0:
            raise ValueError("x: need [..., D], got a scalar")
        x_TD = x.reshape(-1, x.shape[-1])
        handle = self._handle(expert_ids, x_TD.shape[0])
        return balanced_moe(x_TD, scores, self.w13, self.w2, handle=handle).view(x.shape)

    def _traced(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """One opaque op in the graph; it looks up the use, and checks, when it runs."""
        mode = "main_grad" if self._grads_to_main else "returned"
        if self._grads_to_main and hasattr(self.w13, "grad_added_to_main_grad"):
            mode = "dummy"
        x_TD, keep = x.reshape(-1, x.shape[-1]), torch.is_grad_enabled()
        weights = (self.w13, self.w2)
        y_TD: torch.Tensor = torch.ops.relibra.moe_forward(
            x_TD, scores, *weights, expert_ids, self._layer_id, keep, mode
        )[0]
        return y_TD.view(x.shape)

    def _handle(self, expert_ids: torch.Tensor | None, num_tokens: int) -> MoEHandle:
        attachment = self._attached()
        use = attachment.current_use(self) if attachment is not None else None
        if use is not None:
            return use.handle(self.layer, expert_ids, num_tokens)
        if expert_ids is None:
            raise ValueError("expert_ids: need [T, K] ids outside a training step, got None")
        if attachment is not None:
            return attachment.live_handle(self, expert_ids)
        if self.num_ranks > 1:
            raise RuntimeError(
                f"BalancedMoE layer {self.layer} holds 1 of {self.num_ranks} shards and no runtime "
                "is attached: call runtime.attach(model) first"
            )
        return local_handle(expert_ids, self.home_slot_expert, self.num_experts)

    @property
    def is_attached(self) -> bool:
        """Whether a runtime is in charge of this very module."""
        return self._attached() is not None

    def _attached(self) -> Attachment | None:
        attachment = self._attachment() if self._attachment is not None else None
        return attachment if attachment is not None and attachment.owns(self) else None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "home_slot_expert"] = self.home_slot_expert.clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = prefix + "home_slot_expert"
        saved = state_dict.get(name)
        if saved is None and strict:
            missing_keys.append(name)
        if saved is not None and saved.tolist() != self.home_slot_expert.tolist():
            raise ValueError(
                f"{name}: the saved weights hold experts {saved.tolist()}, this "
                f"rank's slots hold {self.home_slot_expert.tolist()}; use "
                "runtime.load_logical_state_dict, or restore that layout first"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if name in unexpected_keys:
            unexpected_keys.remove(name)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not attached: they are other parameters."""
        dropped = ("_opaque", "_layer_id")
        state = {name: part for name, part in self.__dict__.items() if name not in dropped}
        return {**state, "_attachment": None, "_grads_to_main": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own to compiled graphs."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_opaque()

    def extra_repr(self) -> str:
        """Sizes for ``print(model)``."""
        home, rows13, hidden = self.w13.shape
        return (
            f"layer={self.layer}, num_experts={self.num_experts}, home_slots={home}, "
            f"hidden_size={hidden}, expert_size={rows13 // 2}, rank={self.rank}/{self.num_ranks}"
        )
