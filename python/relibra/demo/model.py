"""A tiny Qwen3-MoE whose experts are replaced, its routers kept.

T tokens | K choices a token | E experts | D model dim | F expert dim
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relibra.demo.settings import DemoSettings
    from relibra.demo.task import SortTask

_EXPERT_NAMES = {"w13": "gate_up_proj", "w2": "down_proj"}


class DemoSetupError(RuntimeError):
    """Something that the demo needs is missing or unusable; the message says the remedy."""


def import_demo_library(name: str) -> Any:
    """Import an optional library of the demo.

    Args:
        name: Module name.

    Returns:
        The module.

    Raises:
        DemoSetupError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DemoSetupError(
            f"the demo needs {package}, which cannot be imported ({error}); "
            "install it with: pip install relibra-kernels[demo]"
        ) from error


def build_language_model(settings: DemoSettings, task: SortTask) -> Any:
    """Build transformers' Qwen3-MoE with random weights from torch's current seed.

    Args:
        settings: Sizes.
        task: Vocabulary and length of a sample.

    Returns:
        A ``Qwen3MoeForCausalLM`` in float32 that holds all experts.

    Raises:
        DemoSetupError: transformers is not installed.
    """
    transformers = import_demo_library("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=task.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        moe_intermediate_size=settings.expert_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    return transformers.Qwen3MoeForCausalLM(config)


class ReplayedMoeBlock(nn.Module):
    """Router of the original block in front of experts that follow replayed ids.

    Replay fixes the choice, never the probability: scores are gathered from the live dense
    probabilities, so the router learns as it would without replay.

    Args:
        gate: Module that owns the router weight ``[E, D]``.
        experts: Module with ``replayed_ids()`` and ``forward(x_TD, scores_TK, ids_TK)``.
        norm_topk_prob: Whether the scores of a token are divided by their sum.
    """

    def __init__(self, gate: nn.Module, experts: nn.Module, *, norm_topk_prob: bool) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.norm_topk_prob = norm_topk_prob

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``[..., D]``."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids_TK = self.experts.replayed_ids()  # type: ignore[operator]
        if ids_TK is None:
            raise RuntimeError("a MoE layer ran outside a training step: it has no replayed ids")
        weight_ED = self.gate.weight
        assert isinstance(weight_ED, torch.Tensor)
        probs_TE = F.linear(x_TD, weight_ED).softmax(dim=-1, dtype=torch.float32)
        scores_TK = probs_TE.gather(1, ids_TK)
        if self.norm_topk_prob:
            scores_TK = scores_TK / scores_TK.sum(dim=-1, keepdim=True)
        y_TD: torch.Tensor = self.experts(x_TD, scores_TK, ids_TK)
        return y_TD.view_as(hidden_states)


def replace_experts(
    model: Any, make_experts: Callable[[int, torch.Tensor, torch.Tensor], nn.Module]
) -> Any:
    """Replace the experts of every MoE block in place.

    Args:
        model: A model of :func:`build_language_model`.
        make_experts: Called with decoder layer number, w13 ``[E, 2F, D]`` and w2 ``[E, D, F]``.

    Returns:
        ``model``.
    """
    for number, layer in enumerate(model.model.layers):
        block = layer.mlp
        experts = make_experts(
            number, block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        )
        layer.mlp = ReplayedMoeBlock(
            block.gate, experts, norm_topk_prob=bool(model.config.norm_topk_prob)
        )
    return model


def to_language_model_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a logical state dict to the names of the full model.

    Args:
        state: Tensors in logical expert order, experts under ``...experts.w13`` and ``.w2``.

    Returns:
        The same tensors under transformers' names.

    Example:
        >>> list(to_language_model_names({"model.layers.0.mlp.experts.w13": torch.zeros(1)}))
        ['model.layers.0.mlp.experts.gate_up_proj']
    """
    renamed = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".")
        is_expert = prefix.endswith(".experts") and last in _EXPERT_NAMES
        renamed[f"{prefix}.{_EXPERT_NAMES[last]}" if is_expert else name] = tensor
    return renamed
