"""Faults for ``--inject``: each is a mistake that a real integration has made.

They wrap objects from outside; no code of the product knows them. All ranks inject alike, so that
the fault shows in numbers and not as a hang.

| name | the mistake | what should catch it |
|---|---|---|
| drop-replica-grad | replica gradients never come home | gradient-vs-control |
| stale-replica | replicas hold the weights of the optimizer step before | gradient-vs-control |
| moments-not-moved | experts move, their optimizer moments stay behind | parameters-vs-control |
| export-by-position | the weight export numbers experts by slot | rollout-log-probs |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relibra.logical_state import local_experts, moe_prefixes
from relibra_kernels.transport.replica import DistReplica

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from relibra.demo.train import Learner
    from relibra.runtime import Runtime


class Fault:
    """No fault; the base of those that do something."""

    moves_moments = True

    def install(self, runtime: Runtime, model: torch.nn.Module) -> None:
        """Wrap what the fault needs to wrap."""

    def export(self, balanced: Learner) -> dict[str, Any]:
        """Parameters of the balanced model for the rollout and the control; collective."""
        return balanced.runtime.logical_state_dict(balanced.model)

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:
        """See the parameters of the step that begins."""


class DropReplicaGrad(Fault):
    """Replica gradients never come home."""

    class _NoReduce(DistReplica):
        def reduce(self, *args: Any, **kwargs: Any) -> None:
            """Forget the replica gradients."""

    def install(self, runtime: Runtime, model: torch.nn.Module) -> None:
        """Replace the transport of replicas."""
        runtime.replicas = self._NoReduce(runtime.group)


class StaleReplica(Fault):
    """Replicas hold the weights of the optimizer step before."""

    def __init__(self) -> None:
        self._previous: dict[str, torch.Tensor] | None = None
        self._current: dict[str, torch.Tensor] | None = None
        self._names: dict[int, tuple[str, int]] = {}

    def install(self, runtime: Runtime, model: torch.nn.Module) -> None:
        """Replace the transport of replicas by one that pushes old weights."""
        for prefix, moe in moe_prefixes(model).items():
            for name, param in moe.named_parameters():
                self._names[param.data_ptr()] = (prefix + name, moe.layer)
        fault = self

        class _PushStale(DistReplica):
            def push(self, fields: Any, *args: Any, **kwargs: Any) -> None:
                old = [(fault.stale(home, runtime), replica) for home, replica in fields]
                super().push(old, *args, **kwargs)

        runtime.replicas = _PushStale(runtime.group)

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:
        """Keep copies of the last two steps' parameters, in logical order."""
        self._previous = self._current
        self._current = {name: tensor.clone() for name, tensor in state.items()}

    def stale(self, home: torch.Tensor, runtime: Runtime) -> torch.Tensor:
        """What home slots would hold had the last optimizer step not happened."""
        if self._previous is None:
            return home
        name, layer = self._names[home.data_ptr()]
        layout = runtime.attachment().layouts_by_layer()[layer]
        return local_experts(self._previous[name], layout, runtime.rank)


class MomentsNotMoved(Fault):
    """Experts move, their optimizer moments stay behind."""

    moves_moments = False


class ExportByPosition(Fault):
    """The weight export numbers experts by slot: ``rank * H + position``."""

    def export(self, balanced: Learner) -> dict[str, Any]:
        """Parameters as a naive exporter names them; collective."""
        state = super().export(balanced)
        layouts = balanced.runtime.attachment().layouts_by_layer()
        for prefix, moe in moe_prefixes(balanced.model).items():
            positions = layouts[moe.layer].slot_to_expert
            for name, _ in moe.named_parameters():
                state[prefix + name] = state[prefix + name][positions[positions >= 0].tolist()]
        return state


FAULTS: dict[str, type[Fault]] = {
    "drop-replica-grad": DropReplicaGrad,
    "stale-replica": StaleReplica,
    "moments-not-moved": MomentsNotMoved,
    "export-by-position": ExportByPosition,
}


def make_fault(name: str | None) -> Fault:
    """Fault of that name, None for a healthy run.

    Raises:
        ValueError: There is no such fault.

    Example:
        >>> type(make_fault("stale-replica")).__name__
        'StaleReplica'
    """
    if name is None:
        return Fault()
    if name not in FAULTS:
        raise ValueError(f"inject: need one of {', '.join(FAULTS)}, got {name!r}")
    return FAULTS[name]()
