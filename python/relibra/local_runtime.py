"""All ranks of an EP group in one process: ``Runtime(topology=..., transport="local")``.

One process and one device, the CPU or a GPU, run the whole balanced layer of P virtual ranks: plan,
migration, dispatch, replicas over the protocol of `relibra_kernels.transport.replica_sync`, and the
way back. For development, and for tests of what needs P GPUs otherwise; it saves no time.

The model is an ordinary one that holds the experts of all ranks, ``[E, ...]``. A layer's tokens are
those of all ranks, one rank after the other. Routes are a list by rank, plans those for P ranks:

    runtime = relibra.Runtime(topology=relibra.Topology(1, 8), transport="local")
    runtime.attach(model)
    with runtime.step(plan, {"train": routes_by_rank}) as step:
        with step.forward(micro_batch=0):
            y = model(x)

Results equal those of one process a rank bit for bit. Each virtual rank has a `LocalRank`, the
runtime of a process as it is, on a thread that waits for its turn
(`relibra_kernels.transport.lockstep`); a wait that could never end is an error at once. Tensors are
used on the current stream of the thread that calls a layer or runs its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from relibra import logical_state
from relibra.layout import ExpertLayout
from relibra.load_matrix import LoadMatrix
from relibra.local_attachment import LocalAttachment
from relibra.local_rank import LocalRank, LocalWorld, RankPlace
from relibra.local_step import LocalStep
from relibra.planner.strategies import plan_step
from relibra.rank_settings import refuse
from relibra.runtime import Runtime
from relibra.topology import Topology
from relibra_kernels.errors import PlanError
from relibra_kernels.ops.gemm_launch import default_block_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    import torch.distributed as dist
    from torch import nn

    from relibra.cost_model import CostModel
    from relibra.plan import StepPlan
    from relibra.plan_config import PlannerConfig
    from relibra.shape import ModelShape
    from relibra.token_sample import TokenSample
    from relibra_kernels.ops.warmup import WarmupReport

T = TypeVar("T")


class LocalRuntime(Runtime, transport="local"):
    """What ``Runtime(topology=..., transport="local")`` makes.

    Args:
        group: None: the ranks are virtual.
        topology: of the virtual ranks; replicas stay inside a node of it.
        transport: ``"local"``.
        dispatch: ``"flat"`` or ``"peer"``.
        options: the other arguments of `relibra.Runtime`; ``timeout_s`` bounds waits of a GPU.

    Attributes:
        ranks: the virtual ranks.

    Raises:
        TypeError, ValueError: as `relibra.Runtime`, or no topology, a group, another dispatch.

    Example:
        >>> runtime = Runtime(topology=Topology(1, 4), transport="local")
        >>> runtime.num_ranks, [rank.rank for rank in runtime.ranks]
        (4, [0, 1, 2, 3])
        >>> runtime.close()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
        *,
        transport: str = "local",
        dispatch: str = "flat",
        **options: Any,
    ) -> None:
        if group is not None:
            refuse(group, _unwanted(group))
        if not isinstance(topology, Topology):
            got = type(topology).__name__
            raise TypeError(f'topology: need a Topology with transport="local", got {got}')
        if dispatch not in ("flat", "peer"):
            raise ValueError(
                f'dispatch: need "flat" or "peer" with transport="local", got {dispatch!r}'
            )
        self._world = LocalWorld(topology)
        self.ranks: tuple[LocalRank, ...] = ()
        self._block_rows_given = options.get("block_rows") is not None
        super().__init__(group, topology, transport=transport, dispatch=dispatch, **options)

    @property
    def model_shard(self) -> tuple[int, int]:
        """The model holds all experts."""
        return 0, 1

    @property
    def device(self) -> torch.device:
        """Of the models; all of them are on one."""
        return self._world.device

    def use_device(self, device: torch.device) -> None:
        """Says where the first model is.

        Raises:
            ValueError: another one than that of the models that are attached already.
        """
        if self.attachments and device != self.device:
            raise ValueError(f"model: need one on {self.device} as the others, got {device}")
        self._world.device = device
        if not self._block_rows_given:
            rows = default_block_rows(device, self.kernels)
            for one in (self, *self.ranks):
                one.block_rows = rows

    # -- ranks -------------------------------------------------------------------------------

    def on_ranks(self, call: Callable[[int], T]) -> list[T]:
        """Results of ``call(rank)``, which may be collective, by rank.

        Raises:
            RuntimeError: in a forked child, which has no threads of the ranks.
            Exception: the first one that a rank raised. Unless all ranks did, they stand at
                different places now, and the runtime cannot be used any more.
        """
        self._world.lockstep.require_process()
        try:
            return self._world.lockstep.run(call)
        except Exception as error:
            self._note(error, len(getattr(error, "failed_ranks", ())))
            raise
        except BaseException as error:  # an interrupt
            self._note(RuntimeError(f"interrupted by {error!r}"), 0)
            raise

    def _note(self, error: Exception, num_failed: int) -> None:
        found = [rank.failure for rank in self.ranks if rank.failure is not None]
        if not found and num_failed == self.num_ranks and not self._world.group.is_between:
            return
        self.failure = found[0] if found else error
        for rank in self.ranks:
            rank.failure = rank.failure or self.failure

    def _place(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        if group is not None:
            raise _unwanted(group)
        return self._world.lockstep.num_ranks, 0

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        super()._connect(None)
        if self.ranks:
            self._world.renew()
            for rank in self.ranks:
                rank.reconnect()
            return
        options = {
            "replica_slots": self.replica_slots,
            "combine": self.combine,
            "grad_mode": self.grad_mode,
            "block_rows": self.block_rows,
            "kernels": self.kernels,
            "timeout_s": self.timeout_s,
            "dispatch": self.dispatch,
            "transport_options": self.transport_options,
        }
        places = [RankPlace(self._world, rank) for rank in range(self.num_ranks)]
        self.ranks = tuple(LocalRank(place, self.topology, **options) for place in places)
        for rank in self.ranks:
            rank.share_streams(self)

    def _connect_rows(self) -> None:
        """The ranks have memory of their own."""

    def _disconnect(self) -> None:
        for rank in self.ranks:
            rank._disconnect()
        super()._disconnect()

    def _prepare(self, slots: Mapping[str, torch.Tensor]) -> None:
        """The ranks have buffers of their own."""

    def close(self) -> None:
        """Forget models and buffers, end the ranks' threads; a second call does nothing."""
        super().close()
        for rank in self.ranks:
            rank.close()
        self._world.lockstep.close()

    # -- models ------------------------------------------------------------------------------

    def _new_attachment(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str
    ) -> LocalAttachment:
        return LocalAttachment(self, model, optimizer, name)

    def detach(self, name: str) -> None:
        """As `relibra.Runtime.detach`."""
        super().detach(name)
        for rank in self.ranks:
            rank.detach(name)

    def set_layer_hooks(
        self,
        layer: int,
        *,
        weights_ready: Callable[[], Any] | None = None,
        weights_release: Callable[[Any], None] | None = None,
        starts_stage: bool = False,
        model: str | None = None,
    ) -> None:
        """As `relibra.Runtime.set_layer_hooks`; ``weights_ready`` is asked once a rank.

        Raises:
            ValueError: no such layer or model, or ``weights_release``: weights of all ranks lie in
                one parameter, which no event of one rank frees.
        """
        if weights_release is not None:
            raise ValueError(
                f'weights_release: need None with transport="local", got {weights_release!r:.80}'
            )
        self.attachment(model).layer_of(layer)
        for rank in self.ranks:
            rank.set_layer_hooks(
                layer, weights_ready=weights_ready, starts_stage=starts_stage, model=model
            )

    def load_logical_state_dict(
        self, module: nn.Module | None, state: dict[str, Any], model: str | None = None
    ) -> None:
        """As `relibra.Runtime.load_logical_state_dict`."""
        attachment = self.attachment(model)
        joined = {
            layer: ExpertLayout(layout.home_slot_expert_GH.reshape(1, -1))
            for layer, layout in attachment.layouts_by_layer().items()
        }
        logical_state.from_logical(attachment.part(module), state, joined, 0)

    def warmup(self, top_k: int, static_slots: int = 0) -> list[WarmupReport]:
        """As `relibra.Runtime.warmup`, for the launches of one rank, which all ranks share."""
        return self.ranks[0].warmup(top_k, static_slots)

    # -- steps -------------------------------------------------------------------------------

    def gather_loads(self, loads: LoadMatrix | Sequence[LoadMatrix]) -> LoadMatrix:
        """Counts of all ranks from each rank's own.

        Args:
            loads: by rank, each ``[M, L, 1, E]``.

        Raises:
            PlanError: another number of ranks, or ranks that differ in M, L, E or optimizer steps.
        """
        self.require_open()
        if isinstance(loads, LoadMatrix) or len(loads) != self.num_ranks:
            got = "one" if isinstance(loads, LoadMatrix) else str(len(loads))
            raise PlanError(f"loads: need a list of {self.num_ranks}, one a rank, got {got}")
        return LoadMatrix.stack(list(loads))

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
        """`relibra.plan_step` from the layouts of a model; ``planners`` makes no difference."""
        return plan_step(
            loads,
            self.topology,
            model=shape,
            layout=self.attachment(model).layout,
            config=config,
            strategy=strategy,
            cost_model=cost_model,
            token_sample=token_sample,
        )

    def step(
        self,
        plan: StepPlan,
        routes: Mapping[str, Sequence[Any]],
        *,
        optimizer_step: int = 0,
        model: str | None = None,
        unknown_rows: str = "online",
        live_passes: Mapping[str, str] | None = None,
    ) -> LocalStep:
        """As `relibra.Runtime.step`.

        Args:
            plan: for all virtual ranks.
            routes: pass -> by rank -> :class:`relibra.DispatchRows`, one a micro-batch.
            optimizer_step: as there, and so are the others.
            model: name of the attached model.
            unknown_rows: see `relibra.live_routes`.
            live_passes: pass -> mode; the ranks share the tokens of such a pass evenly.

        Raises:
            PlanError: routes that are no list by rank.
            ValueError, RuntimeError: as `relibra.Runtime.step`.
        """
        attachment = self.attachment(model)
        assert isinstance(attachment, LocalAttachment)
        return LocalStep(attachment, plan, routes, optimizer_step, unknown_rows, live_passes)


def _unwanted(group: object) -> ValueError:
    got = type(group).__name__
    return ValueError(f'group: need None with transport="local", got a {got}')
