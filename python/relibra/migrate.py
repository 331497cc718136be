"""Moves experts to their new home ranks between batches: weights and everything tied to them.

What moves with an expert, all or nothing: its weights, every optimizer moment with an expert axis,
and gradients that wait for a step (``grad``, ``main_grad``). The router and its statistics stay in
expert order and never move. Source: ReLibra (arXiv 2605.08639), inter-batch reordering.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from relibra.module import BalancedMoE
    from relibra.plan import ExpertLayout

Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]

_PENDING_GRADS = ("grad", "main_grad")


@dataclasses.dataclass(frozen=True)
class MoveLists:
    """Where this rank's slots come from.

    Attributes:
        stay_to, stay_from: new and old slot of experts that stay on this rank.
        send_from: old slots of experts that leave, by (destination rank, new slot).
        recv_to: new slots of experts that arrive, by (source rank, new slot).
        empty_to: new filler slots.
        send_splits, recv_splits: experts to and from each rank.
    """

    stay_to: list[int]
    stay_from: list[int]
    send_from: list[int]
    recv_to: list[int]
    empty_to: list[int]
    send_splits: list[int]
    recv_splits: list[int]


def move_lists(old: ExpertLayout, new: ExpertLayout, rank: int) -> MoveLists:
    """What one rank sends and receives to turn layout ``old`` into ``new``.

    Args:
        old: layout of one layer.
        new: layout over the same ranks and experts.
        rank: this rank.

    Returns:
        The lists; sender and receiver derive matching orders from the layouts alone.

    Raises:
        ValueError: the layouts do not describe the same experts on the same slots.

    Example:
        >>> from relibra.plan import ExpertLayout
        >>> old, new = ExpertLayout([[0, 1], [2, 3]]), ExpertLayout([[0, 3], [2, 1]])
        >>> lists = move_lists(old, new, 0)
        >>> lists.send_from, lists.send_splits, lists.recv_to, lists.stay_from
        ([1], [0, 1], [1], [0])
    """
    if old.home_slot_expert_GH.shape != new.home_slot_expert_GH.shape:
        raise ValueError(
            f"new: need home slots {list(old.home_slot_expert_GH.shape)}, got "
            f"{list(new.home_slot_expert_GH.shape)}"
        )
    if old.num_experts != new.num_experts:
        raise ValueError(f"new: need {old.num_experts} experts, got {new.num_experts}")
    num_ranks, num_home = old.home_slot_expert_GH.shape
    old_place_E, new_place_E = old.expert_to_slot, new.expert_to_slot
    experts = np.argsort(new_place_E, kind="stable")  # ascending (new rank, new slot)
    from_E, to_E = old_place_E[experts], new_place_E[experts]
    source, target = from_E // num_home, to_E // num_home
    leaves = (source == rank) & (target != rank)
    arrives = (source != rank) & (target == rank)
    stays = (source == rank) & (target == rank)
    by_source = np.argsort(source[arrives], kind="stable")
    return MoveLists(
        stay_to=(to_E[stays] % num_home).tolist(),
        stay_from=(from_E[stays] % num_home).tolist(),
        send_from=(from_E[leaves] % num_home).tolist(),
        recv_to=(to_E[arrives] % num_home)[by_source].tolist(),
        empty_to=np.flatnonzero(new.home_slot_expert_GH[rank] < 0).tolist(),
        send_splits=np.bincount(target[leaves], minlength=num_ranks).tolist(),
        recv_splits=np.bincount(source[arrives], minlength=num_ranks).tolist(),
    )


def expert_fields(
    moe: BalancedMoE, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Every tensor of a layer with an expert axis, by name.

    Args:
        moe: the layer.
        optimizer: the optimizer that holds its moments, None for no optimizer state.

    Returns:
        name -> tensor ``[H, ...]``: parameters, pending gradients, optimizer moments.

    Raises:
        ValueError: a state tensor is neither a scalar nor ``[H, ...]``; it cannot be moved.
    """
    fields: dict[str, torch.Tensor] = {}
    for name, param in moe.named_parameters():
        # Not `.data`: a graph that still holds the weights must notice that they moved.
        fields[name] = param.detach()
        for kind in _PENDING_GRADS:
            grad = getattr(param, kind, None)
            if isinstance(grad, torch.Tensor):
                fields[f"{name}.{kind}"] = grad
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                _refuse_nested(f"state {key!r} of layer {moe.layer} {name}", value)
                continue
            if value.numel() == 1 and value.shape != param.shape:
                continue
            if value.dim() == 0 or value.shape[0] != param.shape[0]:
                raise ValueError(
                    f"optimizer: state {key!r} of layer {moe.layer} {name} must be a scalar or "
                    f"have the expert axis first ([{param.shape[0]}, ...]) to move with its "
                    f"expert, got {list(value.shape)}"
                )
            fields[f"{name}.{key}"] = value
    return fields


def _refuse_nested(what: str, value: object) -> None:
    """Tensors inside containers would stay behind unseen."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if isinstance(parts, list | tuple):
        for part in parts:
            if isinstance(part, torch.Tensor) and part.numel() > 1:
                raise ValueError(
                    f"optimizer: {what}: need tensors directly in the state to move them with "
                    f"their expert, got a {type(value).__name__} that holds {list(part.shape)}"
                )
            _refuse_nested(what, part)


def move_fields(fields: Sequence[torch.Tensor], lists: MoveLists, exchange: Exchange) -> int:
    """Move the experts of one layer in place; all fields of one dtype travel together.

    Args:
        fields: tensors ``[H, ...]``, the same list on every rank.
        lists: from :func:`move_lists`.
        exchange: all-to-all of rows ``(tensor, send_splits, recv_splits) -> tensor``.

    Returns:
        Bytes that this rank sent.
    """
    sent = 0
    for dtype in dict.fromkeys(field.dtype for field in fields):
        same = [field for field in fields if field.dtype == dtype]
        leaving = [
            field[lists.send_from].reshape(len(lists.send_from), field[:1].numel())
            for field in same
        ]
        packed = torch.cat(leaving, 1)
        arrived = exchange(packed, lists.send_splits, lists.recv_splits)
        sent += packed.numel() * packed.element_size()
        widths = [part.shape[1] for part in leaving]
        for field, rows in zip(same, torch.split(arrived, widths, 1), strict=True):
            moved = torch.empty_like(field)
            moved[lists.stay_to] = field[lists.stay_from]
            moved[lists.recv_to] = rows.reshape(len(lists.recv_to), *field.shape[1:])
            moved[lists.empty_to] = 0
            field.copy_(moved)
    return sent
