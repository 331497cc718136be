"""A model that holds the experts of all virtual ranks, and the shard of it that each rank sees.

The home slots of rank g are rows ``g * H`` to ``(g + 1) * H`` of every expert parameter. A shard
has layers of its own, whose parameters are these rows in the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from relibra.attachable import find_layers
from relibra.attachment import Attachment
from relibra.balanced_moe import MoEHandle
from relibra.local_layer import JoinedLayer
from relibra.migrate import expert_fields
from relibra.module import BalancedMoE

if TYPE_CHECKING:
    from typing import Any

    from relibra.balanced_moe import Movers
    from relibra.layout import ExpertLayout
    from relibra.local_rank import LocalRank
    from relibra.local_runtime import LocalRuntime
    from relibra.use import Use


class LocalAttachment(Attachment):
    """The model under a `LocalRuntime`.

    Attributes:
        ranks: attachment of every virtual rank's shard.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        name: str,
    ) -> None:
        num_ranks = runtime.num_ranks
        layers = find_layers(model, runtime)
        for number, moe in layers.items():
            for field, param in moe.named_parameters():
                if hasattr(param, "full_tensor"):
                    raise ValueError(
                        f'{field}: need whole expert parameters with transport="local", got a '
                        f"sharded one (FSDP) in layer {number}"
                    )
        moe = next(iter(layers.values()))
        if moe.num_experts % num_ranks:
            raise ValueError(
                f'model: need a number of experts that the {num_ranks} ranks of transport="local" '
                f"share evenly, got {moe.num_experts}"
            )
        super().__init__(runtime, model, optimizer, name)
        self._local, self.num_home = runtime, moe.num_experts // num_ranks
        runtime.use_device(moe.w13.device)
        self.ranks: list[ShardAttachment] = []
        try:
            for rank in runtime.ranks:
                rank.attach(_shard(self, rank), name=name)
                shard = rank.attachment(name)
                assert isinstance(shard, ShardAttachment)
                shard.whole = self
                self.ranks.append(shard)
        except BaseException:
            self.release()
            for rank in runtime.ranks:
                rank.attachments.pop(name, None)
            raise

    def lend(self, *, grads: bool = False) -> None:
        """The shards' parameters are the rows of the model's, wherever these lie now.

        Args:
            grads: pending gradients too.
        """
        for shard in self.ranks:
            for layer, moe in self.layers.items():
                for name, whole in moe.named_parameters():
                    part = shard.layers[layer].get_parameter(name)
                    part.data = whole.detach()[shard.rows]
                    part.grad = None
                    if grads and whole.grad is not None:
                        part.grad = whole.grad[shard.rows]
                    main_grad = getattr(whole, "main_grad", None)
                    if isinstance(main_grad, torch.Tensor):
                        part.main_grad = main_grad[shard.rows]  # type: ignore[attr-defined]

    def take_grads(self) -> None:
        """Gradients that the shards made, where the model has none."""
        for layer, moe in self.layers.items():
            for name, whole in moe.named_parameters():
                parts = [shard.layers[layer].get_parameter(name) for shard in self.ranks]
                if whole.grad is None and any(part.grad is not None for part in parts):
                    with torch.inference_mode(False):  # backwards add to it
                        whole.grad = torch.zeros_like(whole)
                    for shard, part in zip(self.ranks, parts, strict=True):
                        if part.grad is not None:
                            whole.grad[shard.rows] = part.grad
                for part in parts:
                    part.grad = None

    def split_tokens(self, num_tokens: int) -> list[int]:
        """Tokens of each rank where no routes say so."""
        num_ranks = len(self.ranks)
        share, more = divmod(num_tokens, num_ranks)
        return [share + (rank < more) for rank in range(num_ranks)]

    def live_handle(self, moe: BalancedMoE, expert_ids: Any) -> MoEHandle:
        """As `Attachment.live_handle`; the ranks share the tokens evenly."""
        self._local.require_open()
        if not isinstance(expert_ids, torch.Tensor) or expert_ids.dim() != 2:
            return self.ranks[0].live_handle(moe, expert_ids)  # raises
        parts = torch.split(expert_ids, self.split_tokens(len(expert_ids)))
        handles = self._local.on_ranks(
            lambda rank: self.ranks[rank].live_handle(
                self.ranks[rank].layers[moe.layer], parts[rank]
            )
        )
        return self.joined(handles, self.movers(None, None), None)

    def joined(self, handles: list[MoEHandle], movers: Movers, use: Use | None) -> MoEHandle:
        """One handle for the tokens of all ranks.

        Args:
            handles: of the ranks.
            movers: of the joined use; they move nothing.
            use: of the model, None outside a training step.
        """

        def enter_backward() -> None:
            self._local.require_open()
            if use is not None:
                use.step.require_open(handles[0].what)
                self.enter_task(use)

        first, layer = handles[0], JoinedLayer(self._local.on_ranks, handles, enter_backward)
        tables: Any = layer.tables()
        return MoEHandle(
            tables,
            movers,
            first.what,
            first.combine,
            first.grad_mode,
            first.block_rows,
            first.key,
            first.kernels,
            virtual=layer,
        )

    def migrate(self, layouts: tuple[ExpertLayout, ...]) -> tuple[int, int]:
        """As `Attachment.migrate`; bytes are those that changed their rank."""
        if self.active is not None:
            raise RuntimeError(f"model {self.name!r} is in a training step: experts stay")
        self.check_layouts(layouts)
        found = self._local.on_ranks(lambda rank: self.ranks[rank].migrate(layouts))
        self.take_layout()
        return found[0][0], sum(sent for _, sent in found)

    def take_layout(self) -> None:
        """The layout that the shards have moved to."""
        self.layout, self.plan_hash = self.ranks[0].layout, self.ranks[0].plan_hash
        for layer, moe in self.layers.items():
            homes = [shard.layers[layer].home_slot_expert for shard in self.ranks]
            with torch.inference_mode(False):
                moe.home_slot_expert = torch.cat(homes)


class ShardAttachment(Attachment):
    """A virtual rank's shard of a model.

    Attributes:
        whole: the model.
    """

    whole: LocalAttachment

    @property
    def rows(self) -> slice:
        """Of the model's expert parameters."""
        first = self.runtime.rank * self.num_home
        return slice(first, first + self.num_home)

    def fields_of(self, layer: int) -> dict[str, torch.Tensor]:
        """Rows of all that moves with the experts of a layer, moments included."""
        moe = self.whole.layers[layer]
        fields = expert_fields(moe, self.whole.optimizer)
        return {name: field[self.rows] for name, field in fields.items()}


def _shard(whole: LocalAttachment, rank: LocalRank) -> nn.ModuleList:
    """Layers of a virtual rank, with parameters that lie nowhere yet."""
    shard = nn.ModuleList()
    for layer, moe in sorted(whole.layers.items()):
        part = BalancedMoE(
            moe.num_experts,
            moe.w2.shape[2 if moe.options.transposed else 1],
            moe.options.expert_size(tuple(moe.w13.shape[1:])),
            layer=layer,
            num_ranks=rank.num_ranks,
            rank=rank.rank,
            bias=moe.b13 is not None,
            options=moe.options,
            device="meta",
            dtype=moe.w13.dtype,
        )
        first = rank.rank * whole.num_home
        for name, param in moe.named_parameters():
            rows = nn.Parameter(param.detach()[first : first + whole.num_home], param.requires_grad)
            part.register_parameter(name, rows)
        shard.append(part)
    return shard
