"""Compiles the kernels of a runtime's models before their first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.layer_options import ACTIVATIONS
from relibra_kernels.checks import check_int
from relibra_kernels.ops.warmup import LayerSpec, WarmupReport, warmup

if TYPE_CHECKING:
    from relibra.attachment import Attachment
    from relibra.dispatcher import Dispatcher
    from relibra.module import BalancedMoE


class RuntimeWarmup:
    """The part of `relibra.Runtime` that compiles ahead."""

    num_ranks: int
    replica_slots: int
    kernels: str
    block_rows: int
    dispatcher: Dispatcher
    attachments: dict[str, Attachment]

    def warmup(self, top_k: int, static_slots: int = 0) -> list[WarmupReport]:
        """Compiles every kernel that the attached layers launch; a step then compiles nothing.

        Not collective. On the CPU there is nothing to compile, and the reports say so.

        Args:
            top_k: K, choices a token.
            static_slots: X of the plans to come; kernels without static slots, as for rows of the
                live router, are compiled too.

        Returns:
            One report a kind of layer and number of static slots.

        Raises:
            TypeError, ValueError: a layer whose sizes, dtype or device no kernel has.

        Example:
            >>> import torch, relibra
            >>> model = torch.nn.Sequential(relibra.BalancedMoE(4, 64, 64, layer=0))
            >>> runtime = relibra.Runtime()
            >>> runtime.attach(model)
            >>> [report.num_ops for report in runtime.warmup(top_k=2)]
            [0]
        """
        check_int("top_k", top_k, minimum=1)
        slots = sorted({0, check_int("static_slots", static_slots, minimum=0)})
        layers = [moe for one in self.attachments.values() for moe in one.layers.values()]
        kinds = {(self._spec(moe, top_k, num), moe.w13.device) for moe in layers for num in slots}
        return [
            warmup(spec, device=device, backend=self.kernels, block_rows=self.block_rows)
            for spec, device in sorted(kinds, key=repr)
        ]

    def _spec(self, moe: BalancedMoE, top_k: int, num_static: int) -> LayerSpec:
        options, shape = moe.options, moe.w13.shape
        widths = {min(top_k, self.num_ranks)}
        if self.dispatcher.ranks is not None:  # to and from relay ranks
            num_nodes, ranks_per_node = self.dispatcher.ranks.grid_NP.shape
            widths |= {min(top_k, num_nodes), ranks_per_node}
        return LayerSpec(
            hidden_size=shape[-2 if options.transposed else -1],
            expert_size=options.expert_size(tuple(shape[1:])),
            top_k=top_k,
            num_home=len(moe.w13),
            num_static=num_static,
            num_replica=self.replica_slots,
            num_ranks=self.num_ranks,
            return_widths=tuple(sorted(widths)),
            dtype=moe.w13.dtype,
            activation=ACTIVATIONS[options.activation],
            alpha=options.alpha,
            limit=options.limit,
            interleaved=options.interleaved,
            transposed=options.transposed,
            bias=moe.b13 is not None,
            score_at=options.score_at,
        )
