"""Which models and optimizers a runtime can take charge of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.layout import ExpertLayout
from relibra.module import BalancedMoE

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from relibra.runtime import Runtime


def find_layers(model: nn.Module, runtime: Runtime) -> dict[int, BalancedMoE]:
    """MoE layers of a model by decoder layer number.

    Args:
        model: holds the layers.
        runtime: that the model is to be attached to.

    Raises:
        ValueError: none, two with one number, different sizes, attached already, sharded for
            another group, or not in identity layout.
    """
    layers: dict[int, BalancedMoE] = {}
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, BalancedMoE)]
    for name, moe in found:
        if moe.layer in layers:
            raise ValueError(f"model: layer number {moe.layer} appears twice, again at {name!r}")
        if moe.is_attached:
            raise ValueError(
                f"model: {name!r} is attached already; need runtime.detach or runtime.close first"
            )
        if (moe.rank, moe.num_ranks) != runtime.model_shard:
            rank, num_ranks = runtime.model_shard
            raise ValueError(
                f"model: {name!r} is shard {moe.rank} of {moe.num_ranks}, this is rank "
                f"{rank} of {num_ranks}"
            )
        home = ExpertLayout.identity(moe.num_experts, moe.num_ranks).home_slot_expert_GH[moe.rank]
        if moe.home_slot_expert.tolist() != home.tolist():
            raise ValueError(
                f"model: {name!r} holds experts {moe.home_slot_expert.tolist()}; need the identity "
                f"layout {home.tolist()} to attach (runtime.set_layout restores it; after a "
                "failure load a logical state dict into a new model)"
            )
        layers[moe.layer] = moe
    if not layers:
        raise ValueError("model: need at least one BalancedMoE layer, got none")
    if len({moe.num_experts for moe in layers.values()}) > 1:
        raise ValueError("model: need the same number of experts in all MoE layers")
    return layers


def check_holds(optimizer: torch.optim.Optimizer, layers: Mapping[int, BalancedMoE]) -> None:
    """Moments of weights that this optimizer does not train would stay behind when experts move.

    Args:
        optimizer: trains the model.
        layers: MoE layers by decoder layer number.

    Raises:
        ValueError: a trainable expert weight is in none of its parameter groups.
    """
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for layer, moe in layers.items():
        for name, param in moe.named_parameters():
            if param.requires_grad and id(param) not in held:
                raise ValueError(
                    f"optimizer: need all trainable expert weights of the model in its parameter "
                    f"groups, got none with {name} of layer {layer}"
                )
