"""Marks the outputs of an attached model, so that a backward can tell which use it belongs to."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from relibra.attachment import Attachment


class OutputMarker:
    """Forward hook of an attached model; does nothing in copies of the model."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = weakref.ref(attachment)

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Notes outputs of a forward."""
        if torch.compiler.is_compiling():
            return  # which use this is, is known only when the graph runs
        attachment = self.attachment()
        if attachment is not None and attachment.model is model:
            attachment.mark_outputs(output)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle belongs to no attachment."""
        return _no_marker, ()


def _no_marker() -> Any:
    return _ignore_outputs


def _ignore_outputs(model: nn.Module, args: Any, output: Any) -> None:
    """What `OutputMarker` is in a copied model."""


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested outputs: mappings, sequences, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
