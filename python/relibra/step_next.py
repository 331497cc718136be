"""What a host says about the order of its pipeline, where no rule of ReLibra can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.layer_kinds import LayerHooks
from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    from relibra.use import Use

DIRECTIONS = ("forward", "backward", "recompute")


def said_uses(use: Use, direction: str, layer: int | None) -> list[tuple[Use, int, str]]:
    """Uses of layers that were said to run next, in their order.

    Args:
        use: the pass.
        direction: one of `DIRECTIONS`.
        layer: decoder layer number; None is the first MoE layer of a forward, else the last.

    Returns:
        (Use, place of the layer, ``forward`` or ``backward``); nothing for a use whose rows follow
        the live router, since no plan knows its replicas.

    Raises:
        ValueError: no such direction or layer.
    """
    check_choice("direction", direction, DIRECTIONS)
    attachment = use.step.attachment
    index = 0 if direction == "forward" else len(attachment.moe_layers) - 1
    if layer is not None:
        index = attachment.layer_index(layer)
    if use.mode != "exact":
        return []
    if direction != "recompute":
        return [(use, index, direction)]
    sync = use.step.runtime.domain_sync
    hooks = {} if sync is None else sync.hooks
    found = []
    for place in range(index, -1, -1):
        found.append((use, place, "forward"))
        name = (attachment.name, attachment.moe_layers[place])
        if hooks.get(name, LayerHooks()).starts_stage:
            break
    return found
