"""Which tables a training step builds when, and how: what its ring of table sets holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.hop_tables import build_tables
from relibra.live_routes import live_tables
from relibra.table_ring import TableRing, set_bytes
from relibra.use import check_same_ids
from relibra_kernels.thread_state import graph_task_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from relibra.rank_tables import LayerTables
    from relibra.step import TrainingStep
    from relibra.table_ring import Key
    from relibra.use import Use


class StepTables(TableRing):
    """The tables of the uses of a step.

    Args:
        step: the training step.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step, attachment = step, step.attachment
        device = next(iter(attachment.layers.values())).w13.device
        super().__init__(step.runtime.table_memory, device, attachment.name)

    def reserve(self, keys: Iterable[Key]) -> None:
        """Memory for the largest tables of the step that do not follow the live router.

        Args:
            keys: of all uses of all layers whose counts are known.
        """
        step, sizes = self.step, [0]
        exact = step.runtime.combine == "exact"
        for name, micro_batch, index in keys:
            key = (name, micro_batch, index)
            shape = step.routes[name][micro_batch].layer_ids(index).shape
            splits = step.splits_of(key)
            source = step.source_of(*key)
            block = step.runtime.block_rows
            sizes.append(set_bytes(source, (splits.send, splits.recv), shape, block, exact=exact))
        self.memory.reserve(max(sizes))

    def built(self, use: Use, index: int) -> LayerTables | None:
        """Tables of a use of a layer, whose host integers can be read; None before they are there.

        Args:
            use: with tables.
            index: place among the MoE layers.
        """
        found = self._built.get((use.pass_, use.micro_batch, index))
        return None if found is None else found.tables

    def to_build(self, use: Use, index: int) -> list[int]:
        """Layers whose tables the forward of a layer builds: its own, and those of the next."""
        is_certain = use.mode == "exact" and graph_task_id() < 0
        candidates = range(index, min(index + 1 + is_certain, len(self.step.plan.layouts)))
        return [i for i in candidates if (use.pass_, use.micro_batch, i) not in self]

    def get(self, use: Use, index: int, ids_TK: torch.Tensor) -> LayerTables:
        """Tables of one use of one layer; builds what `to_build` says (collective).

        Raises:
            ValueError: a recomputed layer comes with other ids than its forward.
        """
        key = (use.pass_, use.micro_batch, index)
        to_build = self.to_build(use, index)
        if index in to_build:
            self._build(use, index, ids_TK)
        elif use.mode != "exact":
            check_same_ids(ids_TK, self[key].ids_TK, f"{self._name(use, index)} (recomputed)")
        found = self[key]
        if index + 1 in to_build:
            ids = self.step.ids(use, index + 1)
            assert ids is not None  # an exact use has routes
            self._build(use, index + 1, ids, ahead=True)
        return found

    def _name(self, use: Use, index: int) -> str:
        return f"{use}, layer {self.step.attachment.moe_layers[index]}"

    def _build(self, use: Use, index: int, ids_TK: torch.Tensor, *, ahead: bool = False) -> None:
        make = self._exact if use.mode == "exact" else self._live
        what = self._name(use, index) + " (ahead)" * ahead
        key = (use.pass_, use.micro_batch, index)
        self.build(key, lambda: make(use, index, ids_TK, what), ahead=ahead)

    def _exact(self, use: Use, index: int, ids_TK: torch.Tensor, what: str) -> LayerTables:
        step, key = self.step, (use.pass_, use.micro_batch, index)
        return build_tables(
            step.runtime,
            step.attachment.movers(use, index),
            ids_TK,
            step.source_of(*key),
            step.splits_of(key),
            what,
            num_home=step.attachment.num_home,
            device=self.device,
            weights=self.memory.weights(self.model, index),
        )

    def _live(self, use: Use, index: int, ids_TK: torch.Tensor, what: str) -> LayerTables:
        step, layout = self.step, self.step.plan.layouts[index]
        planned = None
        if use.mode == "fraction":
            planned = step.plan.replica_plan(use.pass_, use.micro_batch, index)
        return live_tables(
            step.runtime,
            step.attachment.movers(use, index),
            use.mode,
            ids_TK,
            layout,
            ids_TK,
            what,
            planned,
        )
