"""The Runtime: lives as long as the job and owns layouts, transports and replica buffers.

``Runtime`` is what a trainer talks to, ``Attachment`` is one model under it (each model has a
layout of its own), ``GroupMovers`` moves the data of one use of one layer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, cast

from relibra.agreement import agree, gather_tensor, stack_loads
from relibra.attachment import Attachment
from relibra.movers import ReplicaBuffers
from relibra.planner.problem import make_problem
from relibra.rank_settings import Settings
from relibra.replica_counts import ReplicaCounts
from relibra.runtime_groups import RuntimeGroups
from relibra.runtime_replicas import NotingFailure
from relibra.runtime_state import RuntimeState
from relibra.runtime_transport import end_transport
from relibra.runtime_warmup import RuntimeWarmup
from relibra.sharded_planning import plan_sharded
from relibra.step import TrainingStep
from relibra.table_ring import TableMemory
from relibra_kernels.errors import PlanError, ReplicaSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import torch
    import torch.distributed as dist
    from torch import nn

    from relibra.cost_model import CostModel
    from relibra.layout import ExpertLayout
    from relibra.load_matrix import LoadMatrix
    from relibra.plan import StepPlan
    from relibra.plan_config import PlannerConfig
    from relibra.route_checks import Routes
    from relibra.shape import ModelShape
    from relibra.token_sample import TokenSample
    from relibra.topology import Topology
    from relibra_kernels.transport.provider_choice import ProviderOptions


class Runtime(RuntimeWarmup, RuntimeState, RuntimeGroups):
    """Balanced training on one EP group; made by all its ranks, with the same arguments.

    The ranks compare their arguments first: one collective. ``kernels`` and how a GPU copies and
    waits (``transport_options.cuda``) are each rank's own.

    Close it, or use it in a ``with`` block: one that is only dropped keeps its threads and its
    shared memory until the process ends.

    Args:
        group: the process group of expert parallelism; None is a group of one rank.
        topology: node and rail of every rank; None puts all ranks on one node.
        replica_slots: S, replica slots a rank; plans may use fewer, not more.
        transport: ``"dist"`` moves replicas with ``torch.distributed``; ``"cpu_shm"`` through
            shared memory between the processes of a node, on the CPU; ``"torch_symm"`` and
            ``"nvshmem"`` through symmetric memory of the GPUs of a node; ``"auto"`` takes
            ``"torch_symm"``, ``"nvshmem"`` or ``"dist"``, the first that works on all ranks, and
            logs why not a better one; ``"local"`` runs all ranks of ``topology`` in this process,
            see `relibra.local_runtime`.
        combine: ``"reduced"`` sums rows at each destination before they return; ``"exact"``
            returns every row, so that outputs are bitwise independent of the plan.
        grad_mode: ``"returned"`` gives weight gradients to autograd; ``"main_grad"`` adds them to
            ``param.main_grad`` (fp32). Those of static copies come when a step is left, to
            ``param.grad`` and ``param.main_grad``.
        block_rows: rows of a GEMM tile; every slot's rows are padded to it. None takes what the
            kernels of this rank's device need (16 on the CPU).
        kernels: ``"auto"`` runs Triton kernels on CUDA and the references on the CPU,
            ``"reference"`` runs torch everywhere, ``"triton"`` on the CPU needs Triton's
            interpreter: for tests, it is slow.
        dispatch: ``"flat"`` sends a token once to every rank that computes a row of it,
            ``"two_hop"`` once to every node, see `relibra.hop_tables`; nodes of one size.
            ``"peer"`` is flat on one node, written straight into the receivers' memory; it needs a
            ``transport`` with symmetric memory. Receive buffers grow when a step starts that needs
            more, see `TrainingStep.row_buffer_bytes`.
        timeout_s: seconds that a rank waits for its peers; None keeps the time-out of ``group``.
            With a number the runtime makes a group of its own over the same ranks (collective).
        transport_options: how symmetric memory is made and used, such as that nothing else in the
            process uses NVSHMEM; see `relibra_kernels.transport.provider_choice.ProviderOptions`.

    Raises:
        TypeError, ValueError: an unknown mode, a number out of range, or a topology of another
            size than the group, or (PlanError) with nodes of different sizes for ``"two_hop"``.
        PlanError: arguments differ between the ranks, or those of another rank are wrong; on
            every rank, with the argument, the ranks and their values.
        ReplicaSyncError: a rank did not take part in time; or the named transport does not work
            on some rank, on every rank, with the reason.

    Example:
        >>> runtime = Runtime()
        >>> runtime.num_ranks, runtime.rank, str(runtime.topology)
        (1, 0, '1 nodes x 1 ranks')
    """

    _kinds: ClassVar[dict[str, type[Runtime]]] = {}  # transport -> the class that has it

    def __init_subclass__(cls, transport: str | None = None, **options: Any) -> None:
        """Say which transport a subclass is for."""
        super().__init_subclass__(**options)
        if transport is not None:
            Runtime._kinds[transport] = cls

    def __new__(cls, *args: Any, transport: str = "auto", **options: Any) -> Self:
        """A runtime of the class that has the transport."""
        known = cls is Runtime and isinstance(transport, str)  # else refused with the ranks
        kind = cls._kinds.get(transport, cls) if known else cls
        made: Any = super().__new__(kind)
        return cast("Self", made)

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
        *,
        replica_slots: int = 1,
        transport: str = "auto",
        combine: str = "reduced",
        grad_mode: str = "returned",
        block_rows: int | None = None,
        kernels: str = "auto",
        dispatch: str = "flat",
        timeout_s: float | None = None,
        transport_options: ProviderOptions | None = None,
    ) -> None:
        self.num_ranks, self.rank = self._place(group)
        given = Settings(
            topology=topology,
            replica_slots=replica_slots,
            transport=transport,
            combine=combine,
            grad_mode=grad_mode,
            block_rows=block_rows,
            kernels=kernels,
            dispatch=dispatch,
            timeout_s=timeout_s,
            transport_options=transport_options,
        )
        made = given.agreed(group, self.num_ranks, self.rank)
        self.topology = cast("Topology", made.topology)
        self.block_rows = cast("int", made.block_rows)
        self.replica_slots, self.kernels, self.dispatch = made.replica_slots, kernels, dispatch
        self.combine, self.grad_mode, self.timeout_s = combine, grad_mode, made.timeout_s
        self.transport, self.transport_options = transport, transport_options
        self.attachments: dict[str, Attachment] = {}
        self.buffers, self.table_memory = ReplicaBuffers(self.replica_slots), TableMemory()
        self.replica_counts = ReplicaCounts()
        self._connect(group)

    # -- models ------------------------------------------------------------------------------

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        name: str = "actor",
    ) -> None:
        """Take charge of the MoE layers of a model, found by their layer numbers; collective.

        Args:
            model: holds :class:`relibra.BalancedMoE` layers with experts in identity layout.
            optimizer: its moments move with the experts.
            name: of the model; the first one attached is the default elsewhere.

        Raises:
            ValueError: no MoE layer, two with one number, a name in use, or a layer that is
                attached already, sharded for another group or not in identity layout.
            PlanError: another rank attaches something else, or cannot; says what, on every rank.
            ReplicaSyncError: a rank did not take part in time.
        """
        self.require_open()
        importlib.import_module("torch._dynamo")  # the first op would, while peers wait in a step
        self.attachments[name] = self._attached(model, optimizer, name)

    def _new_attachment(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str
    ) -> Attachment:
        return Attachment(self, model, optimizer, name)

    @property
    def model_shard(self) -> tuple[int, int]:
        """Which part of their experts the layers of its models hold: one of how many."""
        return self.rank, self.num_ranks

    def detach(self, name: str) -> None:
        """Forget a model; its layers keep their weights where they are.

        Raises:
            ValueError: there is no such model.
            RuntimeError: inside a training step of it, whose backward may still come.
        """
        if self.attachment(name).active is not None:
            raise RuntimeError(f"detach: model {name!r} is in a training step")
        self.attachment(name).release()
        self.table_memory.forget_model(name)
        self.forget_hooks(name)
        del self.attachments[name]

    def attachment(self, name: str | None = None) -> Attachment:
        """The attached model of that name, by default the first one.

        Raises:
            ValueError: there is no such model.
            RuntimeError: the runtime was closed, or a collective of it failed.
        """
        self.require_open()
        known = list(self.attachments)
        if not known:
            raise ValueError("model: no model is attached: call runtime.attach(model) first")
        chosen = known[0] if name is None else name
        if chosen not in self.attachments:
            raise ValueError(f"model: need one of the attached {known}, got {name!r}")
        return self.attachments[chosen]

    @property
    def layout(self) -> tuple[ExpertLayout, ...]:
        """Layouts of the first attached model, one a MoE layer by ascending number."""
        return self.attachment().layout

    def set_layout(self, layouts: Sequence[ExpertLayout], model: str | None = None) -> int:
        """Move experts to given layouts, such as identity before an export; collective.

        Args:
            layouts: one a MoE layer by ascending number, the same on all ranks.
            model: name of the attached model, by default the first.

        Returns:
            Number of experts that changed their rank, over all layers.

        Raises:
            PlanError: layouts that do not fit the model or differ between ranks; on every rank.
            RuntimeError: inside a training step, whose plan says where experts are.
            ReplicaSyncError: a rank did not take part in time.
        """
        return self.attachment(model).migrate(tuple(layouts))[0]

    # -- steps -------------------------------------------------------------------------------

    def gather_loads(self, loads: LoadMatrix) -> LoadMatrix:
        """Counts of all ranks from each rank's own; collective, once a rollout batch.

        Args:
            loads: this rank's counts, ``[M, L, 1, E]``, not gathered.

        Returns:
            ``[M, L, G, E]``, equal on all ranks.

        Raises:
            PlanError: the ranks differ in M, L, E or optimizer steps; on every rank.
            ReplicaSyncError: a rank did not take part in time.
        """
        self.require_open()
        fault = PlanError("loads: need one rank's own counts") if loads.is_gathered else None
        micro_batches, layers, _, experts = loads.rows_MLGE.shape
        facts = {"number of micro-batches": micro_batches, "MoE layers": layers, "experts": experts}
        self.agree(facts, what="gather_loads", fault=fault)
        with self.noting_failure():
            return stack_loads(loads, self.group)

    def plan_step(
        self,
        loads: Mapping[str, LoadMatrix],
        shape: ModelShape,
        *,
        config: PlannerConfig | None = None,
        strategy: str = "relibra",
        cost_model: CostModel | None = None,
        token_sample: TokenSample | None = None,
        planners: str = "node",
        model: str | None = None,
    ) -> StepPlan:
        """`relibra.plan_step` from the layouts of a model, planned once by the group; collective.

        Args:
            loads: gathered, by pass name, equal on all ranks.
            shape: of the model.
            config: as in `relibra.plan_step`; with `num_threads=0` a planner takes its cores,
                divided by the planners that share them.
            strategy: as in `relibra.plan_step`, and so are `cost_model` and `token_sample`.
            cost_model: for `cost="time"`.
            token_sample: the same on all ranks.
            planners: who plans a share of the layers each: ``"node"``, the first rank of every
                node, or ``"rank"``, every rank. The others wait.
            model: name of the attached model, by default the first.

        Returns:
            The plan that `relibra.plan_step` gives, on every rank.

        Raises:
            PlanError: arguments are wrong or differ, or a rank could not plan; on every rank.
            ReplicaSyncError: a rank did not plan in time.
        """
        self.require_open()
        rest = (config, None, cost_model, token_sample)
        with self.noting_failure():
            return plan_sharded(
                lambda: make_problem(
                    loads, self.topology, shape, self.attachment(model).layout, *rest
                ),
                self.group,
                strategy=strategy,
                planners=planners,
                timeout_s=self.timeout_s,
            )

    def step(
        self,
        plan: StepPlan,
        routes: Routes,
        *,
        optimizer_step: int = 0,
        model: str | None = None,
        unknown_rows: str = "online",
        live_passes: Mapping[str, str] | None = None,
    ) -> TrainingStep:
        """Context of one optimizer step; see :class:`relibra.step.TrainingStep`.

        Args:
            plan: made from the gathered loads of exactly these routes.
            routes: pass -> this rank's :class:`relibra.DispatchRows`, one a micro-batch of the
                rollout batch.
            optimizer_step: which optimizer step of the batch this context covers.
            model: name of the attached model, by default the first.
            unknown_rows: mode of micro-batches in which some rank has rows that follow the live
                router: ``"online"``, ``"fraction"`` or ``"home"`` (`relibra.live_routes`).
            live_passes: pass -> mode for passes without recorded routing, such as a reference
                model's; any micro-batch number is accepted.

        Raises:
            ValueError: there is no such model.
            RuntimeError: the runtime was closed, or a collective of it failed.
        """
        attachment = self.attachment(model)
        return TrainingStep(attachment, plan, routes, optimizer_step, unknown_rows, live_passes)

    # -- collectives -------------------------------------------------------------------------

    def agree(
        self, facts: Mapping[str, int | str], *, what: str, fault: Exception | None = None
    ) -> None:
        """`relibra.agreement.agree` on this runtime's group."""
        with self.noting_failure():
            agree(self.group, facts, what=what, fault=fault, timeout_s=self.timeout_s)

    def gather(self, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        """``x`` of every rank, by rank; all must have the same shape."""
        with self.noting_failure():
            return gather_tensor(x, self.group, what)

    def noting_failure(self) -> NotingFailure:
        """After a failed collective the ranks may stand anywhere: nothing here can be trusted."""
        return NotingFailure(self)

    def note_failure(self, error: ReplicaSyncError) -> None:
        """What `noting_failure` does with an error."""
        self.dispatcher.abort()
        if self.domain_sync is not None:
            self.domain_sync.abort()
        is_first = self.failure is None
        self.failure = error  # before peers are asked, which an interrupt may end
        if is_first:
            self.explained(error)

    def close(self) -> None:
        """Forget models and buffers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for attachment in self.attachments.values():
            attachment.release()
        self.attachments.clear()
        self._disconnect()
        end_transport(peers_alive=self.failure is None)

    def __enter__(self) -> Runtime:
        """The runtime itself; closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()
