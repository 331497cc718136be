"""The rollout engine: samples on a full copy of the model and records the routed experts.

Letters: B samples, n tokens of a sample, L MoE layers, K choices a token, c completion tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch

from relibra.demo.model import import_demo_library, to_language_model_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.demo.task import SortTask


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Samples of one rank with the routing that made them.

    Attributes:
        tokens_Bn: int64 ``[B, n]``, prompt and completion.
        log_probs_Bc: float32 ``[B, c]``, of the sampled tokens, as the rollout saw them.
        ids_BrLK: int64 ``[B, n-1, L, K]``: the last sampled token of a sample never ran through
            the model, so it has no row.
    """

    tokens_Bn: torch.Tensor
    log_probs_Bc: torch.Tensor
    ids_BrLK: torch.Tensor

    def __post_init__(self) -> None:
        """Check that every token but the last has a row."""
        need = (self.tokens_Bn.shape[0], self.tokens_Bn.shape[1] - 1)
        if tuple(self.ids_BrLK.shape[:2]) != need:
            raise ValueError(
                f"ids_BrLK: need [B, n-1] = {list(need)} in front, got {list(self.ids_BrLK.shape)}"
            )


class RolloutEngine:
    """A full copy of the model with all experts, refreshed through the logical export.

    Args:
        model: A model of ``build_language_model``; it is used and overwritten.
        task: Vocabulary and lengths.
    """

    def __init__(self, model: Any, task: SortTask) -> None:
        self._model = model.eval()
        self._task = task
        self._new_cache = import_demo_library("transformers").DynamicCache
        # transformers 5 renamed this argument on the way; the cache itself is updated in place.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._recorded: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
        for recorded, layer in zip(self._recorded, model.model.layers, strict=True):
            layer.mlp.gate.register_forward_hook(
                lambda _module, _inputs, outputs, kept=recorded: kept.append(outputs[2])
            )

    def refresh(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a logical state dict; every tensor of the model must be in it."""
        self._model.load_state_dict(to_language_model_names(state), strict=True)

    @torch.no_grad()
    def sample(self, digits: torch.Tensor, generator: torch.Generator | None) -> Rollout:
        """Complete prompts token by token with a key-value cache.

        Args:
            digits: int64 ``[B, c]``, digits of the prompts.
            generator: Source of randomness; None takes the most likely token.
        """
        for recorded in self._recorded:
            recorded.clear()
        tokens = inputs = self._task.prompt_tokens(digits)
        memory = {self._cache_name: self._new_cache()}
        log_probs = []
        for _ in range(self._task.num_digits):
            output = self._model(input_ids=inputs, use_cache=True, **memory)
            all_log_probs = output.logits[:, -1].log_softmax(dim=-1)
            if generator is None:
                inputs = all_log_probs.argmax(dim=-1, keepdim=True)
            else:
                inputs = torch.multinomial(all_log_probs.exp(), 1, generator=generator)
            log_probs.append(all_log_probs.gather(1, inputs))
            tokens = torch.cat([tokens, inputs], dim=1)
        return Rollout(tokens, torch.cat(log_probs, dim=1), self._recorded_ids(len(digits)))

    def _recorded_ids(self, num_samples: int) -> torch.Tensor:
        # The first call saw the whole prompt, each later call one token: [B, tokens, K] pieces.
        layers = [
            torch.cat([piece.view(num_samples, -1, piece.shape[-1]) for piece in pieces], dim=1)
            for pieces in self._recorded
        ]
        return torch.stack(layers, dim=2)
