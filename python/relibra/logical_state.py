"""State in expert order: what leaves or enters the process never shows a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from relibra.agreement import gather_tensor
from relibra.module import BalancedMoE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist
    from torch import nn

    from relibra.plan import ExpertLayout


def gather_experts(
    local_H: torch.Tensor, layout: ExpertLayout, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Per-slot tensors of all ranks in expert order; collective.

    Args:
        local_H: ``[H, ...]``, one entry a home slot of this rank.
        layout: the layout they are stored under.
        group: the EP group.

    Returns:
        ``[E, ...]`` on every rank.
    """
    slots = torch.cat(gather_tensor(local_H.detach(), group, "gathering experts"))
    return slots[torch.from_numpy(layout.expert_to_slot.astype("int64")).to(slots.device)]


def local_experts(whole_E: torch.Tensor, layout: ExpertLayout, rank: int) -> torch.Tensor:
    """The part of one rank, ``[E, ...]`` -> ``[H, ...]``; filler slots are zero."""
    home = torch.from_numpy(layout.home_slot_expert_GH[rank].astype("int64")).to(whole_E.device)
    part = whole_E[home.clamp(min=0)]
    part[home < 0] = 0
    return part


def moe_prefixes(module: nn.Module) -> dict[str, BalancedMoE]:
    """State-dict prefix (with its trailing dot) -> MoE layer, under each of its names."""
    return {
        f"{name}." if name else "": child
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, BalancedMoE)
    }


def to_logical(
    module: nn.Module, layouts: dict[int, ExpertLayout], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """State dict with whole expert tensors in expert order; collective.

    Args:
        module: holds the layers.
        layouts: decoder layer number -> layout.
        group: the EP group.
    """
    state = dict(module.state_dict())
    for prefix, moe in moe_prefixes(module).items():
        del state[prefix + "home_slot_expert"]
        for name, param in moe.named_parameters():
            state[prefix + name] = gather_experts(param, layouts[moe.layer], group)
    return state


def from_logical(
    module: nn.Module, state: dict[str, Any], layouts: dict[int, ExpertLayout], rank: int
) -> None:
    """Load a state dict in expert order into the layout at hand.

    Args:
        module: holds the layers.
        state: from :func:`to_logical` under any layout and any number of ranks.
        layouts: decoder layer number -> layout of ``module``.
        rank: this rank.

    Raises:
        ValueError: an expert tensor is missing or has another number of experts.
    """
    local = dict(state)
    for prefix, moe in moe_prefixes(module).items():
        local[prefix + "home_slot_expert"] = moe.home_slot_expert
        for name, param in moe.named_parameters():
            whole = state.get(prefix + name)
            need = [moe.num_experts, *param.shape[1:]]
            got = None if whole is None else list(whole.shape)
            if whole is None or got != need:
                raise ValueError(f"state[{prefix + name!r}]: need a tensor {need}, got {got}")
            local[prefix + name] = local_experts(whole, layouts[moe.layer], rank)
    module.load_state_dict(local)


def iterate_experts(
    moe: BalancedMoE, layout: ExpertLayout, group: dist.ProcessGroup | None
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """``(expert, {"w13": [2F, D], "w2": [D, F], ...})`` in expert order; collective when called.

    Args:
        moe: the layer; every parameter it has is a field, biases included.
        layout: its layout.
        group: the EP group.
    """
    whole = {name: gather_experts(p, layout, group) for name, p in moe.named_parameters()}
    return (
        (expert, {name: tensor[expert] for name, tensor in whole.items()})
        for expert in range(moe.num_experts)
    )
