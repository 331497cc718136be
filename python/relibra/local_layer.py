"""One layer of all virtual ranks: one autograd node outside, the code of a rank inside.

Tokens, outputs and gradients of the ranks lie one after the other, by rank; so do the experts of
their home slots. Each stage of a rank waits for its peers in `relibra_kernels.transport.lockstep`.

Letters: P ranks, T tokens of all ranks, U tokens received, R rows computed, D model dim, F expert
dim, H home slots a rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from relibra.expert_weights import ExpertWeights, as_list
from relibra.layer_passes import Kept, LayerCall, run_backward, run_forward
from relibra.token_exchange import PendingTokens, start_tokens
from relibra.weight_grads import dummy_grad, main_grad_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relibra.balanced_moe import MoEHandle
    from relibra_kernels.transport.dispatch import Arrival

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class JoinedTables:
    """What a layer is checked against.

    Attributes:
        ids_TK: expert ids of all ranks.
        num_home: P * H.
    """

    ids_TK: torch.Tensor
    num_home: int


@dataclasses.dataclass(frozen=True)
class JoinedRows:
    """Rows of all ranks.

    Attributes:
        parts: by rank.
    """

    parts: Sequence[Any]

    def wait(self) -> torch.Tensor:
        """One after the other; they are here."""
        return torch.cat(list(self.parts))


class JoinedLayer:
    """One use of one layer on all virtual ranks.

    A rank that ends its backward gives its tables back while others are still to start theirs: the
    turn of a rank reads its own handle only, and what concerns all of them is read before.

    Args:
        run: runs a function of the rank on all of them.
        handles: of the ranks.
        enter_backward: called first in a backward, on its thread.
    """

    def __init__(
        self,
        run: Callable[[Callable[[int], Any]], list[Any]],
        handles: Sequence[MoEHandle],
        enter_backward: Callable[[], None],
    ) -> None:
        self._run, self._handles, self._enter_backward = run, handles, enter_backward

    @property
    def tokens(self) -> list[int]:
        """Tokens of each rank."""
        return [handle.tables.num_tokens for handle in self._handles]

    def tables(self) -> JoinedTables:
        """What the layer is checked against."""
        ids = torch.cat([handle.tables.ids_TK for handle in self._handles])
        return JoinedTables(ids, sum(handle.tables.num_home for handle in self._handles))

    def start_tokens(self, x_TD: torch.Tensor, scores_TK: torch.Tensor) -> PendingTokens:
        """As `relibra.token_exchange.start_tokens`."""
        xs, scores = torch.split(x_TD, self.tokens), torch.split(scores_TK, self.tokens)
        started = self._run(lambda rank: start_tokens(xs[rank], scores[rank], self._handles[rank]))
        parts = [one.x_UD for one in started], [one.scores_UK for one in started]
        return PendingTokens(*(JoinedRows(part) for part in parts))

    def forward(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        call: LayerCall,
        dispatched: PendingTokens | None,
    ) -> tuple[Arrival, Kept]:
        """As `relibra.layer_passes.run_forward`; the outputs are here when it returns."""
        xs, scores = torch.split(x_TD, self.tokens), torch.split(scores_TK, self.tokens)
        calls = self._calls(call)
        started: list[PendingTokens | None] = [None] * len(calls)
        if dispatched is not None:
            pairs = zip(_parts(dispatched.x_UD), _parts(dispatched.scores_UK), strict=True)
            started = [PendingTokens(x, score) for x, score in pairs]

        def one(rank: int) -> tuple[torch.Tensor, Kept]:
            rows, kept = run_forward(xs[rank], scores[rank], calls[rank], started[rank])
            return rows.wait(), kept

        outputs, kept = zip(*self._run(one), strict=True)
        joined = Kept(
            torch.cat([one.tokens for one in kept]) if call.options.save == "copy" else x_TD,
            _joined([one.h_R2F for one in kept]),
            torch.cat([one.scores_UK for one in kept]),
            scores_TK.dtype,
        )
        return JoinedRows(outputs), joined

    def backward(
        self,
        dy_TD: torch.Tensor,
        kept: Kept,
        call: LayerCall,
        weights: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """As `relibra.layer_passes.run_backward`."""
        self._enter_backward()
        flat = list(zip(call.weights.flatten(), needs[2:], strict=True))
        into_main = self._handles[0].grad_mode == "main_grad"
        if into_main:  # before anything moves, and with the shapes that the host knows
            _ = [main_grad_of(weight) for weight, needed in flat if needed]
        dys, calls = torch.split(dy_TD, self.tokens), self._calls(call)
        parts = self._kept(kept, call)
        given = call.weights.unflatten(weights)
        wanted = call.weights.unflatten(needs[2:])  # type: ignore[arg-type]  # booleans

        def one(rank: int) -> tuple[torch.Tensor | None, ...]:
            values = self._part(given, rank).flatten()
            needed = [*needs[:2], *self._needs(wanted, rank)]
            return run_backward(dys[rank], parts[rank], calls[rank], values, needed)

        dx, dscores, *grads = zip(*self._run(one), strict=True)
        if into_main:
            found = [dummy_grad(weight) if needed else None for weight, needed in flat]
        else:
            found = _joined_fields(call.weights, grads)
        return _joined(dx), _joined(dscores), *found

    def _calls(self, call: LayerCall) -> list[LayerCall]:
        """The layer as each rank calls it."""
        return [
            LayerCall(handle, call.options, self._part(call.weights, rank))
            for rank, handle in enumerate(self._handles)
        ]

    def _part(self, weights: ExpertWeights, rank: int) -> ExpertWeights:
        """Weights of the home slots of a rank; parts of a parameter keep its ``main_grad``."""
        return ExpertWeights(
            **{name: self._rows(field, rank) for name, field in weights.fields().items()}
        )

    def _rows(self, field: Any, rank: int) -> Any:
        num_home = self._handles[rank].tables.num_home
        rows = slice(rank * num_home, (rank + 1) * num_home)
        return field[rows] if isinstance(field, tuple) else part_of(field, rows)

    def _needs(self, wanted: ExpertWeights, rank: int) -> list[bool]:
        """Which tensors of a rank's weights want gradients."""
        num_home, found = self._handles[rank].tables.num_home, list[Any]()
        for field in wanted.fields().values():
            is_list = isinstance(field, tuple)
            found += list(field)[rank * num_home :][:num_home] if is_list else [field]
        return cast("list[bool]", found)

    def _kept(self, kept: Kept, call: LayerCall) -> list[Kept]:
        """What the forward of each rank left."""
        received = [one.tables.token_choice_to_row_UK.shape[0] for one in self._handles]
        computed = [one.tables.num_rows for one in self._handles]
        tokens = received if call.options.save == "copy" else self.tokens
        parts = zip(
            torch.split(kept.tokens, tokens),
            [None] * len(computed) if kept.h_R2F is None else torch.split(kept.h_R2F, computed),
            torch.split(kept.scores_UK, received),
            strict=True,
        )
        return [Kept(*part, kept.scores_dtype) for part in parts]


def part_of(whole: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows of a tensor in its memory, with the rows of its ``main_grad``."""
    part = whole.detach()[rows]
    main_grad = getattr(whole, "main_grad", None)
    if isinstance(main_grad, torch.Tensor):
        part.main_grad = main_grad[rows]  # type: ignore[attr-defined]
    return part


def _parts(rows: Arrival) -> Sequence[Arrival]:
    assert isinstance(rows, JoinedRows)
    return rows.parts


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _joined_fields(
    weights: ExpertWeights, grads: Sequence[Sequence[torch.Tensor | None]]
) -> list[torch.Tensor | None]:
    """Gradients in the structure of the weights; ``grads`` are by tensor of a rank, then rank."""
    found: list[torch.Tensor | None] = []
    place = 0
    for field in weights.fields().values():
        if isinstance(field, tuple):
            num_home = len(as_list(field)) // len(grads[place])
            by_rank = zip(*grads[place : place + num_home], strict=True)
            found += [grad for one in by_rank for grad in one]
            place += num_home
        else:
            found.append(_joined(grads[place]))
            place += 1
    return found
