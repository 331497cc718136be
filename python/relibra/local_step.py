"""One optimizer step of all virtual ranks: a training step of each, entered and left together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from relibra.replica_counts import StepCounts
from relibra.static_slots import num_static
from relibra.step import TrainingStep
from relibra.use import Use, check_same_ids
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from relibra.balanced_moe import MoEHandle
    from relibra.local_attachment import LocalAttachment
    from relibra.plan import StepPlan
    from relibra.route_checks import Routes


class LocalStep(TrainingStep):
    """Context of one optimizer step of all virtual ranks; see :class:`relibra.TrainingStep`.

    Attributes:
        ranks: the step of every rank.
    """

    attachment: LocalAttachment

    def __init__(
        self,
        attachment: LocalAttachment,
        plan: StepPlan,
        routes: Mapping[str, Sequence[Any]],
        optimizer_step: int = 0,
        unknown_rows: str = "online",
        live_passes: Mapping[str, str] | None = None,
    ) -> None:
        by_rank = routes_by_rank(routes, len(attachment.ranks))
        rest = (optimizer_step, unknown_rows, live_passes)
        super().__init__(attachment, plan, {}, *rest)
        self._local = attachment._local
        self.ranks = [
            TrainingStep(shard, plan, mine, *rest)
            for shard, mine in zip(attachment.ranks, by_rank, strict=True)
        ]

    def __enter__(self) -> LocalStep:
        """As `TrainingStep.__enter__`, on all ranks."""
        attachment = self.attachment
        if attachment.active is not None:
            raise RuntimeError(f"model {attachment.name!r} is in a training step already")
        attachment.lend()
        self._local.on_ranks(lambda rank: self.ranks[rank].__enter__())
        attachment.take_layout()
        first = self.ranks[0]
        self.routes, self.cross_node_tokens = first.routes, first.cross_node_tokens
        self.moved_experts = first.moved_experts
        self.moved_bytes = sum(one.moved_bytes for one in self.ranks)
        self.static_sent_bytes = sum(one.static_sent_bytes for one in self.ranks)
        attachment.active, self._open = self, True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As `TrainingStep.__exit__`, on all ranks."""
        attachment = self.attachment
        self._open, attachment.active = False, None
        attachment.forget_tasks()
        for one in self.ranks:
            one._open_stages += self._open_stages
        self._open_stages.clear()
        has_static = num_static(self.plan) > 0
        if has_static:
            attachment.lend(grads=True)
        self._local.on_ranks(lambda rank: self.ranks[rank].__exit__(kind, error, trace))
        if has_static:
            attachment.take_grads()

    @contextlib.contextmanager
    def forward(self, *, micro_batch: int, pass_: str = "train") -> Iterator[Use]:
        """As `TrainingStep.forward`."""
        with contextlib.ExitStack() as stack:
            use = stack.enter_context(super().forward(micro_batch=micro_batch, pass_=pass_))
            assert isinstance(use, LocalUse)
            for place, one in enumerate(self.ranks):
                entered = one.forward(micro_batch=micro_batch, pass_=pass_)
                use.ranks[place] = stack.enter_context(entered)
            yield use

    def next(
        self,
        *,
        micro_batch: int,
        pass_: str = "train",
        direction: str = "forward",
        layer: int | None = None,
    ) -> None:
        """As `TrainingStep.next`."""
        said = {"micro_batch": micro_batch, "pass_": pass_, "direction": direction, "layer": layer}
        super().next(**said)  # type: ignore[arg-type]  # refuses what cannot be
        self._local.on_ranks(lambda rank: self.ranks[rank].next(**said))  # type: ignore[arg-type]

    def report(self) -> dict[str, float]:
        """As `TrainingStep.report`; what replicas cost is summed over the ranks."""
        self.replica_counts = StepCounts()
        for layer in self.attachment.moe_layers:
            for one in self.ranks:
                self.replica_counts.of(layer).add(one.replica_counts.of(layer))
        return super().report()

    def route(self, expert_ids_TK: torch.Tensor, layer: int) -> torch.Tensor:
        """As `TrainingStep.route`, for the tokens of all ranks."""
        use = self._current(layer)
        assert isinstance(use, LocalUse)
        planned = self.ids(use, self.attachment.layer_index(layer))
        if planned is None or use.mode != "exact":
            raise ValueError(f"route: need a use whose rows are all replayed, got {use}")
        check_same_ids(expert_ids_TK, planned, f"{use}, layer {layer}")
        parts = torch.split(expert_ids_TK, use.tokens(layer, len(expert_ids_TK)))
        slots = [one.route(part, layer) for one, part in zip(self.ranks, parts, strict=True)]
        return torch.cat(slots)

    def use_of(self, pass_: str, micro_batch: int) -> LocalUse:
        """A pass of a micro-batch, unchecked."""
        return LocalUse(self, pass_, micro_batch)

    def mode_of(self, pass_: str, micro_batch: int) -> str:
        """The same on all ranks."""
        return self.ranks[0].mode_of(pass_, micro_batch)

    def ids(self, use: Use, index: int) -> torch.Tensor | None:
        """Replayed ids of all ranks, int32 ``[T, K]``."""
        parts = [one.ids(use, index) for one in self.ranks]
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else None


class LocalUse(Use):
    """A pass of one micro-batch of all virtual ranks.

    Attributes:
        ranks: the use of every rank.
    """

    step: LocalStep

    def __init__(self, step: LocalStep, pass_: str, micro_batch: int) -> None:
        super().__init__(step, pass_, micro_batch)
        self.ranks = [Use(one, pass_, micro_batch) for one in step.ranks]

    def tokens(self, layer: int, num_tokens: int) -> list[int]:
        """Tokens of each rank.

        Args:
            layer: decoder layer number.
            num_tokens: of all, which the ranks share evenly where no routes say how.
        """
        index = self.step.attachment.layer_index(layer)
        found = [one.step.ids(one, index) for one in self.ranks]
        known = [len(ids) for ids in found if ids is not None]
        return known or self.step.attachment.split_tokens(num_tokens)

    def handle(self, layer: int, expert_ids: torch.Tensor | None, num_tokens: int) -> MoEHandle:
        """As `Use.handle`, for the tokens of all ranks."""
        step = self.step
        step.require_open(str(self))
        attachment = step.attachment
        index = attachment.layer_index(layer)
        planned = step.ids(self, index)
        tokens = self.tokens(layer, num_tokens)
        what = f"{self}, layer {layer}, on all {len(tokens)} ranks"
        ids = self._checked_ids(planned, expert_ids, num_tokens, what)
        attachment.note_recompute(self, layer)
        parts: Sequence[Any] = [None] * len(tokens)
        if planned is None or self.mode != "exact":
            parts = torch.split(ids, tokens)

        def one(rank: int) -> MoEHandle:
            return self.ranks[rank].handle(layer, parts[rank], tokens[rank])

        handles = attachment._local.on_ranks(one)
        return attachment.joined(handles, attachment.movers(self, index), self)


def routes_by_rank(routes: object, num_ranks: int) -> list[Routes]:
    """The routes of every rank, from pass -> by rank -> by micro-batch.

    Args:
        routes: as the host gives them.
        num_ranks: P.

    Raises:
        TypeError: no mapping of names to lists.
        PlanError: another number of ranks.

    Example:
        >>> routes_by_rank({"train": [["a"], ["b"]]}, 2)
        [{'train': ['a']}, {'train': ['b']}]
    """
    if not isinstance(routes, Mapping):
        got = type(routes).__name__
        raise TypeError(f"routes: need pass -> by rank -> DispatchRows, got {got}")
    for name, by_rank in routes.items():
        if not isinstance(by_rank, Sequence) or isinstance(by_rank, str):
            got = type(by_rank).__name__
            raise TypeError(f"routes[{name!r}]: need a list by rank, got {got}")
        if len(by_rank) != num_ranks:
            raise PlanError(
                f"routes[{name!r}]: need {num_ranks} entries, one a rank, got {len(by_rank)}"
            )
    return [{name: by_rank[rank] for name, by_rank in routes.items()} for rank in range(num_ranks)]
