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
from relibra.expert_weights import FIELDS, ExpertWeights, check_weights
from relibra.layer_options import LayerOptions, check_options
from relibra.local_use import local_handle
from relibra.plan import ExpertLayout
from relibra.stages import dispatch
from relibra.started_layer import StartedLayer
from relibra_kernels.checks import check_int, check_tensor

if TYPE_CHECKING:
    import weakref

    from relibra.attachment import Attachment

_DEFAULTS = LayerOptions()


class BalancedMoE(nn.Module):
    """Experts of one layer, SwiGLU by default, sharded by expert over the ranks of an EP group.

    Args:
        num_experts: E, experts of the layer over all ranks.
        hidden_size: D.
        expert_size: F.
        layer: decoder layer number; plans and routes find the module by it.
        num_ranks: G, size of the EP group.
        rank: this rank in the EP group.
        bias: whether the experts have biases ``b13`` and ``b2``.
        options: activation, storage, and what is kept for the backward.
        device, dtype: of the parameters.

    Attributes:
        w13: ``[H, 2F, D]``, gate rows first, then up rows, H = ceil(E / G) home slots; other
            `LayerOptions` store it otherwise.
        w2: ``[H, D, F]``, likewise.
        b13, b2: ``[H, 2F]`` in the order of the rows of ``w13``, and ``[H, D]``; None without bias.
        home_slot_expert: int64 ``[H]`` on the CPU, expert of each home slot, -1 for a filler slot.
            It is part of the state dict, so that weights saved under one layout cannot be loaded
            by position under another; it is no buffer, since data parallelism overwrites buffers.

    Raises:
        TypeError, ValueError: a size is out of range, or options that do not exist.

    Example:
        >>> moe = BalancedMoE(4, 8, 16, layer=0)
        >>> _ = torch.nn.init.normal_(moe.w13), torch.nn.init.normal_(moe.w2)
        >>> ids = torch.tensor([[0, 2], [3, 1], [2, 0]])
        >>> moe(torch.randn(3, 8), torch.full((3, 2), 0.5), ids).shape
        torch.Size([3, 8])
    """

    home_slot_expert: torch.Tensor
    w13: nn.Parameter
    w2: nn.Parameter
    b13: nn.Parameter | None
    b2: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        layer: int,
        num_ranks: int = 1,
        rank: int = 0,
        bias: bool = False,
        options: LayerOptions = _DEFAULTS,
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
        check_options(options)
        if not isinstance(bias, bool):
            raise TypeError(f"bias: need a bool, got {bias!r:.80}")
        self.options = options
        home = ExpertLayout.identity(num_experts, num_ranks).home_slot_expert_GH[rank]
        shapes: dict[str, tuple[int, ...]] = {
            "w13": options.w13_shape(hidden_size, expert_size),
            "w2": options.w2_shape(hidden_size, expert_size),
        }
        if bias:
            shapes |= {"b13": (options.inner_rows(expert_size),), "b2": (hidden_size,)}
        for name in FIELDS:
            shape = shapes.get(name)
            param = None
            if shape is not None:
                param = nn.Parameter(torch.empty(len(home), *shape, device=device, dtype=dtype))
            self.register_parameter(name, param)
        self.home_slot_expert = torch.tensor(home.tolist(), dtype=torch.int64, device="cpu")
        self._attachment: weakref.ref[Attachment] | None = None
        self._grads_to_main = False  # set when attached, read while a graph is traced
        self._make_opaque()
        self.reset_parameters()

    def _make_opaque(self) -> None:
        self._opaque = CompiledLayer(self)
        self._layer_id = self._opaque.layer_id  # the only part of it that enters a graph

    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 1/sqrt(fan-in); biases, filler slots are zero."""
        with torch.no_grad():
            for weight in (self.w13, self.w2):
                fan_in = weight.shape[-2 if self.options.transposed else -1]
                weight.normal_(std=fan_in**-0.5)
                weight[self.home_slot_expert < 0] = 0
            for bias in (self.b13, self.b2):
                if bias is not None:
                    bias.zero_()

    @property
    def expert_weights(self) -> ExpertWeights:
        """The parameters of the home slots."""
        return ExpertWeights(self.w13, self.w2, self.b13, self.b2)

    @classmethod
    def from_dense(
        cls,
        w13_E2FD: torch.Tensor,
        w2_EDF: torch.Tensor,
        *,
        layer: int,
        num_ranks: int = 1,
        rank: int = 0,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        options: LayerOptions = _DEFAULTS,
    ) -> BalancedMoE:
        """This rank's part of a whole layer, experts laid out in order.

        Args:
            w13_E2FD: ``[E, 2F, D]`` weights of all experts, gate rows first, or as ``options``
                store them; any float dtype.
            w2_EDF: ``[E, D, F]``, dtype and device of ``w13_E2FD``.
            layer: decoder layer number.
            num_ranks: G.
            rank: this rank.
            b13: ``[E, 2F]`` biases; both or none.
            b2: ``[E, D]`` biases.
            options: activation, storage, and what is kept for the backward.

        Raises:
            TypeError, ValueError: weights that do not fit each other, or a number out of range.
        """
        check_options(options)
        check_tensor("w13_E2FD", w13_E2FD, ndim=3)
        check_tensor("w2_EDF", w2_EDF, ndim=3)
        if (b13 is None) != (b2 is None):
            name = "b13" if b13 is None else "b2"
            raise ValueError(f"{name}: need both biases or none, got only the other one")
        hidden = w2_EDF.shape[2 if options.transposed else 1]
        whole = ExpertWeights(w13_E2FD, w2_EDF, b13, b2)
        check_weights(whole, w13_E2FD.new_empty(0, hidden), options, slots="E")
        moe = cls(
            len(w13_E2FD),
            hidden,
            options.expert_size(tuple(w13_E2FD.shape[1:])),
            layer=layer,
            num_ranks=num_ranks,
            rank=rank,
            bias=b13 is not None,
            options=options,
            device=w13_E2FD.device,
            dtype=w13_E2FD.dtype,
        )
        slots = torch.nonzero(moe.home_slot_expert >= 0).squeeze(1)
        experts = moe.home_slot_expert[slots]  # CPU indices serve tensors on any device
        with torch.no_grad():
            for name, tensor in whole.slots().items():
                moe.get_parameter(name)[slots] = tensor[experts]
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
        x_TD = _as_tokens(x)
        handle = self._handle(expert_ids, x_TD.shape[0])
        y_TD = balanced_moe(
            x_TD,
            scores,
            self.w13,
            self.w2,
            handle=handle,
            b13=self.b13,
            b2=self.b2,
            options=self.options,
        )
        return y_TD.view(x.shape)

    def start(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor | None = None
    ) -> StartedLayer:
        """`forward` in stages: ``start(...).compute().wait()``; not in a compiled graph.

        What the host computes in between overlaps with the tokens and outputs that travel; see
        :func:`relibra.dispatch`.

        Args:
            x: as in `forward`, and so are ``scores`` and ``expert_ids``.
            scores: ``[T, K]``.
            expert_ids: ``[T, K]``.

        Raises:
            ValueError, RuntimeError: as `forward`.
        """
        x_TD = _as_tokens(x)
        handle = self._handle(expert_ids, x_TD.shape[0])
        return StartedLayer(self, dispatch(x_TD, scores, handle=handle), x.shape)

    def _traced(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """One opaque op in the graph; it looks up the use, and checks, when it runs."""
        mode = "main_grad" if self._grads_to_main else "returned"
        if self._grads_to_main and hasattr(self.w13, "grad_added_to_main_grad"):
            mode = "dummy"
        x_TD, keep = x.reshape(-1, x.shape[-1]), torch.is_grad_enabled()
        saves_x = self.options.save == "redispatch"
        y_TD: torch.Tensor = torch.ops.relibra.moe_forward(
            x_TD,
            scores,
            self.w13,
            self.w2,
            expert_ids,
            self._layer_id,
            keep,
            mode,
            self.b13,
            self.b2,
            saves_x,
        )[0]
        return y_TD.view(x.shape)

    def _handle(self, expert_ids: torch.Tensor | None, num_tokens: int) -> MoEHandle:
        attachment = self._attached()
        use = attachment.current_use(self) if attachment is not None else None
        if use is not None:
            return use.handle(self.layer, expert_ids, num_tokens)
        if attachment is None and self.num_ranks > 1:
            raise RuntimeError(
                f"BalancedMoE layer {self.layer} holds 1 of {self.num_ranks} shards and no runtime "
                "is attached: call runtime.attach(model) first"
            )
        if expert_ids is None:
            where = "outside `with step.forward(micro_batch=...)` of a training step"
            if attachment is None:
                where = "outside a runtime: call runtime.attach(model) to have them replayed"
            raise ValueError(f"expert_ids: need [T, K] ids {where}; got None in layer {self.layer}")
        if attachment is not None:
            return attachment.live_handle(self, expert_ids)
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
        home, *shape = self.w13.shape
        hidden = self.w2.shape[2 if self.options.transposed else 1]
        options = "" if self.options == _DEFAULTS else f", options={self.options}"
        return (
            f"layer={self.layer}, num_experts={self.num_experts}, home_slots={home}, "
            f"hidden_size={hidden}, expert_size={self.options.expert_size(tuple(shape))}, "
            f"bias={self.b13 is not None}, rank={self.rank}/{self.num_ranks}{options}"
        )


def _as_tokens(x: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` as ``[T, D]``."""
    check_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x: need [..., D], got a scalar")
    return x.reshape(-1, x.shape[-1])
