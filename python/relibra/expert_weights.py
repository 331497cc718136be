"""The weights of this rank's home experts as one object, however a model stores them.

Letters: H home slots, D model dim, F expert dim (2F: gate and up rows; F without a gate).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from relibra_kernels.checks import check_tensor, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra.layer_options import LayerOptions

# One tensor [H, ...], or H tensors [...]: one parameter an expert.
Field: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]

FIELDS = ("w13", "w2", "b13", "b2")


class SlotList:
    """H tensors of one shape, seen as one ``[H, ...]`` by code that takes slots one by one.

    Args:
        experts: at least one.
    """

    def __init__(self, experts: Sequence[torch.Tensor]) -> None:
        self._experts = tuple(experts)
        first = self._experts[0]
        self.shape = torch.Size((len(self._experts), *first.shape))
        self.dtype, self.device = first.dtype, first.device

    def __len__(self) -> int:
        """H."""
        return len(self._experts)

    def __getitem__(self, slot: int) -> torch.Tensor:
        """The tensor of one slot."""
        return self._experts[slot]


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Weights and biases of some slots; replica slots and gradients come in this form too.

    Attributes:
        w13: ``[H, 2F, D]`` as stored (see `LayerOptions`), or a tuple of H tensors.
        w2: ``[H, D, F]``, likewise.
        b13: ``[H, 2F]``, in the order of the rows of ``w13``; None without.
        b2: ``[H, D]``; None without.

    Example:
        >>> weights = ExpertWeights((torch.zeros(4, 2), torch.ones(4, 2)), torch.zeros(2, 2, 2))
        >>> len(weights.flatten()), weights.num_slots, list(weights.fields())
        (3, 2, ['w13', 'w2'])
        >>> weights.unflatten(weights.flatten()) == weights
        True
    """

    w13: Field
    w2: Field
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def fields(self) -> dict[str, Field]:
        """Name -> tensor, or tensors, of the fields there are, in a fixed order."""
        found: dict[str, Field] = {"w13": self.w13, "w2": self.w2}
        if self.b13 is not None:
            found["b13"] = self.b13
        if self.b2 is not None:
            found["b2"] = self.b2
        return found

    def slots(self) -> dict[str, torch.Tensor]:
        """Name -> ``[H, ...]``; a tuple comes as a `SlotList`, which copies nothing."""
        seen: dict[str, Any] = {
            name: SlotList(field) if isinstance(field, tuple) else field
            for name, field in self.fields().items()
        }
        return seen

    def flatten(self) -> tuple[torch.Tensor, ...]:
        """All tensors, as autograd wants them."""
        found: list[torch.Tensor] = []
        for field in (self.w13, self.w2, self.b13, self.b2):
            if isinstance(field, tuple):
                found += field
            elif field is not None:
                found.append(field)
        return tuple(found)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> ExpertWeights:
        """Other tensors in the structure of this.

        Args:
            tensors: as many as :meth:`flatten` gives.
        """
        return ExpertWeights(**self.regroup(tensors, lambda part: part))

    def regroup(self, values: Sequence[Any], join: Callable[[Any], Any]) -> dict[str, Any]:
        """Field name -> its value, or for a tuple ``join`` of the values of its experts.

        Args:
            values: one a tensor of :meth:`flatten`.
            join: from a tuple of values to one.
        """
        out: dict[str, Any] = {}
        start = 0
        for name, field in self.fields().items():
            end = start + len(as_list(field))
            part = tuple(values[start:end])
            out[name] = join(part) if isinstance(field, tuple) else part[0]
            start = end
        return out

    def home(self, name: str) -> list[torch.Tensor]:
        """A field as ops take it: one tensor, or one an expert."""
        return as_list(getattr(self, name))

    @property
    def num_slots(self) -> int:
        """H."""
        return len(self.w13)

    @property
    def first(self) -> torch.Tensor:
        """A tensor that tells dtype and device."""
        return as_list(self.w13)[0]


def as_list(field: Field) -> list[torch.Tensor]:
    """The tensors of a field."""
    return list(field) if isinstance(field, tuple) else [field]


def joined_slots(home: Any, static: torch.Tensor | None) -> Any:
    """Home and static slots of a field as one ``[H + X, ...]``, what replicas are copied from.

    Args:
        home: ``[H, ...]``, a tensor or a `SlotList`.
        static: ``[X, ...]``, None without static slots.

    Returns:
        ``home`` itself without static slots, else a `SlotList`, which copies nothing.

    Example:
        >>> joined_slots(torch.zeros(2, 3), torch.ones(1, 3)).shape
        torch.Size([3, 3])
    """
    if static is None or not len(static):
        return home
    return SlotList([*(home[slot] for slot in range(len(home))), *static.unbind()])


def check_weights(
    weights: ExpertWeights, x: torch.Tensor, options: LayerOptions, slots: str = "H"
) -> None:
    """Shapes that fit each other, the activations and the options.

    Args:
        weights: of the home slots.
        x: ``[T, D]``.
        options: of the layer.
        slots: letter of the first dimension in messages.

    Raises:
        TypeError: no tensors, or another dtype than that of ``x``.
        ValueError: other shapes, devices, or numbers of experts.
    """
    hidden = x.shape[1]
    name13 = f"w13_{slots}2FD"
    shape13 = _check_field(name13, weights.w13, x)
    rows = shape13[-1 if options.transposed else -2]
    if shape13 != options.w13_shape(hidden, rows // 2 if options.is_gated else rows):
        inner = "2F" if options.is_gated else "F"
        need = f"[{slots}, D, {inner}]" if options.transposed else f"[{slots}, {inner}, D]"
        raise ValueError(
            f"{name13}: need {need} with D = {hidden} and activation={options.activation!r}, "
            f"got {[weights.num_slots, *shape13]}"
        )
    shape2 = options.w2_shape(hidden, options.expert_size(shape13))
    _check_field(f"w2_{slots}DF", weights.w2, x, shape2, weights.num_slots)
    for name, width in (("b13", rows), ("b2", hidden)):
        bias = getattr(weights, name)
        if bias is None:
            continue
        shape = (weights.num_slots, width)
        check_tensor(name, bias, dtype=x.dtype, shape=shape, device=x.device, contiguous=True)


def _check_field(
    argument: str,
    field: object,
    x: torch.Tensor,
    shape: tuple[int, ...] | None = None,
    num_slots: int | None = None,
) -> tuple[int, ...]:
    """Checks a weight in either storage; returns the shape of one expert's."""
    if not isinstance(field, tuple):
        need = None if shape is None else (num_slots, *shape)
        found = check_tensor(argument, field, dtype=x.dtype, ndim=3, shape=need, device=x.device)
        return tuple(found.shape[1:])
    if not field or (num_slots is not None and len(field) != num_slots):
        need_slots = "at least one expert" if num_slots is None else f"{num_slots} experts"
        raise ValueError(f"{argument}: need {need_slots}, got a tuple of {len(field)}")
    first = field[0]
    if shape is None and isinstance(first, torch.Tensor):
        shape = tuple(first.shape)
    for i, expert in enumerate(field):
        check_tensor(
            f"{argument}[{i}]", expert, dtype=x.dtype, ndim=2, shape=shape, device=x.device
        )
        if expert.stride() != first.stride():
            raise ValueError(
                f"{argument}[{i}]: need the strides of {argument}[0], {first.stride()}, got "
                f"{expert.stride()} for {describe(expert)}"
            )
    return tuple(first.shape)
