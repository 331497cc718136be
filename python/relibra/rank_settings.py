"""What all ranks of a runtime must be given alike, and how they find out that they were not.

Groups, symmetric memory and every collective of a step depend on the arguments of
`relibra.Runtime` and on the attached models. So the ranks compare them first: once when a runtime
is made and once for every model. A rank whose own arguments are wrong says so there, since its
peers wait for it in the constructor.

Not compared is what each rank may choose for itself: ``kernels``, how its GPU copies and waits
(``transport_options.cuda``) and who else uses NVSHMEM in its process.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from relibra.agreement import agree, wire_device
from relibra.balanced_moe import COMBINE_MODES, GRAD_MODES
from relibra.dispatcher import hop_ranks
from relibra.runtime_transport import TRANSPORTS, check_waits
from relibra.topology import Topology
from relibra_kernels.checks import check_choice, check_int
from relibra_kernels.ops.backend import BACKENDS
from relibra_kernels.ops.gemm_launch import default_block_rows
from relibra_kernels.transport.group import Ranks
from relibra_kernels.transport.provider_choice import ProviderOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relibra.module import BalancedMoE

WHAT = "relibra.Runtime"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `relibra.Runtime` but for its group; see there.

    Example:
        >>> made = Settings(dispatch="two_hop").checked(None, num_ranks=4, rank=0)
        >>> str(made.topology), made.block_rows
        ('1 nodes x 4 ranks', 16)
    """

    topology: Topology | None = None
    replica_slots: int = 1
    transport: str = "auto"
    combine: str = "reduced"
    grad_mode: str = "returned"
    block_rows: int | None = None
    kernels: str = "auto"
    dispatch: str = "flat"
    timeout_s: float | None = None
    transport_options: ProviderOptions | None = None

    def checked(self, group: dist.ProcessGroup | None, num_ranks: int, rank: int) -> Settings:
        """The same with what is None filled in, as far as this rank can tell.

        Args:
            group: of all ranks, None for one.
            num_ranks: of the runtime.
            rank: this one.

        Raises:
            TypeError, ValueError: see `relibra.Runtime`.
        """
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("combine", self.combine, COMBINE_MODES)
        check_choice("grad_mode", self.grad_mode, GRAD_MODES)
        slots = check_int("replica_slots", self.replica_slots, minimum=0)
        check_choice("kernels", self.kernels, BACKENDS)
        rows = self.block_rows
        if rows is None:
            rows = default_block_rows(wire_device(group), self.kernels)
        rows = check_int("block_rows", rows, minimum=1, maximum=1 << 16)
        check_waits(self.timeout_s, self.transport_options)
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise TypeError(f"topology: need a Topology, got {type(self.topology).__name__}")
        topology = self.topology or Topology(1, num_ranks)
        if topology.num_ranks != num_ranks:
            raise ValueError(f"topology: need {num_ranks} ranks as in the group, got {topology}")
        hop_ranks(self.dispatch, topology, rank)  # refuses what cannot be
        return dataclasses.replace(
            self,
            topology=topology,
            replica_slots=slots,
            block_rows=rows,
            timeout_s=None if self.timeout_s is None else float(self.timeout_s),
        )

    def facts(self) -> dict[str, int | str]:
        """Argument -> value that all ranks must share, of checked settings."""
        assert self.topology is not None
        assert self.block_rows is not None
        options = self.transport_options or ProviderOptions()
        timeout = "None" if self.timeout_s is None else f"{self.timeout_s:g} s"
        return {
            "topology": _topology_text(self.topology),
            "replica_slots": self.replica_slots,
            "transport": repr(self.transport),
            "combine": repr(self.combine),
            "grad_mode": repr(self.grad_mode),
            "block_rows": self.block_rows,
            "dispatch": repr(self.dispatch),
            "timeout_s": timeout,
            "transport_options.multicast": str(bool(options.multicast)),
            "transport_options.all_pes_allocate": str(bool(options.all_pes_allocate)),
        }

    def agreed(self, group: dist.ProcessGroup | None, num_ranks: int, rank: int) -> Settings:
        """`checked`, and known to be the same on all ranks; collective over the group.

        Args:
            group: of all ranks, None where there is nobody to ask.
            num_ranks: of the runtime.
            rank: this one.

        Raises:
            TypeError, ValueError: on the rank whose own arguments are wrong.
            PlanError: arguments differ, or those of another rank are wrong; says whose.
            ReplicaSyncError: a rank did not take part in time.
        """
        made, facts = self, dict[str, int | str]()
        fault: Exception | None = None
        try:
            made = self.checked(group, num_ranks, rank)
            facts = made.facts()
        except Exception as error:  # whatever it is, the peers must hear of it
            fault = error
        agree(group, facts, what=WHAT, fault=fault, timeout_s=_valid_wait(self.timeout_s))
        return made


def refuse(group: object, fault: Exception) -> NoReturn:
    """Raises what is wrong with the arguments of a runtime when its peers were told.

    Args:
        group: as the user gave it, which may be no group.
        fault: of this rank.
    """
    if isinstance(group, dist.ProcessGroup):
        agree(Ranks.of(group).group, {}, what=WHAT, fault=fault)
    raise fault


def model_facts(layers: Mapping[int, BalancedMoE]) -> dict[str, int | str]:
    """What the ranks must have alike in the MoE layers of a model.

    Args:
        layers: by decoder layer number.

    Example:
        >>> from relibra import BalancedMoE
        >>> facts = model_facts({n: BalancedMoE(4, 8, 16, layer=n) for n in (1, 2, 5)})
        >>> facts["layer numbers"], facts["sizes and dtypes of the expert weights"]
        ('1-2, 5', 'w13 (32, 8) float32 cpu, w2 (8, 16) float32 cpu')
    """
    weights, options, trained = {}, {}, {}
    for layer, moe in sorted(layers.items()):
        params = dict(moe.named_parameters())
        weights[layer] = ", ".join(
            f"{name} {tuple(param.shape[1:])} {str(param.dtype).removeprefix('torch.')} "
            f"{param.device.type}"
            for name, param in params.items()
        )
        trained[layer] = " ".join(name for name, param in params.items() if param.requires_grad)
        changed = [
            f"{field.name}={getattr(moe.options, field.name)!r}"
            for field in dataclasses.fields(moe.options)
            if getattr(moe.options, field.name) != field.default
        ]
        options[layer] = ", ".join(changed) or "default"
    return {
        "layer numbers": _numbers(list(weights)),
        "number of experts": next(iter(layers.values())).num_experts,
        "sizes and dtypes of the expert weights": _by_layer(weights),
        "options of the layers": _by_layer(options),
        "trainable expert weights": _by_layer(trained),
    }


def _valid_wait(timeout_s: float | None) -> float | None:
    """The time-out, None (that of the group) where it is wrong."""
    try:
        check_waits(timeout_s, None)
        return None if timeout_s is None else float(timeout_s)
    except Exception:  # whatever it is, it is told as a fault
        return None


def _topology_text(topology: Topology) -> str:
    """Short where nodes are equal and in order, else all of it."""
    nodes, ranks = topology.num_nodes, topology.num_ranks
    if ranks % nodes == 0 and topology == Topology(nodes, ranks // nodes):
        return str(topology)
    return (
        f"Topology(rank_to_node={list(topology.rank_to_node)}, "
        f"rank_to_rail={list(topology.rank_to_rail)})"
    )


def _numbers(layers: Sequence[int]) -> str:
    """Ascending numbers, runs of them as ``first-last``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _by_layer(texts: Mapping[int, str]) -> str:
    """One text if all layers have the same, else that of every layer."""
    layers_of: dict[str, list[int]] = {}
    for layer, text in texts.items():
        layers_of.setdefault(text, []).append(layer)
    if len(layers_of) == 1:
        return next(iter(layers_of)) or "none"
    parts = [f"layers {_numbers(layers)}: {text or 'none'}" for text, layers in layers_of.items()]
    return "; ".join(parts)
