"""What a simulation is run on: counts, and where known the samples behind them.

Letters: M micro-batches, L MoE layers, G ranks, E experts, K choices, T tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from relibra.compose import compose
from relibra.composed import composed_loads
from relibra.composition import Budgets, Composition, Samples
from relibra.dealing import deal_rows
from relibra.load_matrix import LoadMatrix
from relibra.synthetic import ORDERS, SyntheticBatch, make_batch
from relibra.token_copies import PassTokens
from relibra_kernels.checks import check_choice
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

    from relibra.cost_model import CostModel
    from relibra.dispatch_rows import DispatchRows
    from relibra.token_copies import FloatArray
    from relibra.trace import RoutingTrace

AS_GIVEN, COMPOSED = "as given", "composed"
# Tokens of a cell in a composition, over those of a bin of the generator.
_ROOM = 1.03


@dataclass(frozen=True, eq=False)
class SimulationInput:
    """One batch on G ranks in one order.

    Args:
        order: `grouped` (as recorded), `random`, `composed` (`relibra.compose` from the grouped
            samples), or `as given` where samples are not known.
        loads: gathered loads.
        top_k: K.
        tokens: expert ids; None = copies are expected ones.
        pieces: int64 `[pieces, 4]`: micro-batch, rank, tokens, and tokens of the whole sequence
            that they belong to; None = not known.
        previous: loads of the batch before, for strategies that plan on history; None = not known.
        compose_s: measured seconds of composing, as `StrategyResult.planner_s`.
    """

    order: str
    loads: LoadMatrix
    top_k: int
    tokens: PassTokens | None = None
    pieces: npt.NDArray[np.int64] | None = None
    previous: LoadMatrix | None = None
    compose_s: float = 0.0

    def groups(self, number: int) -> list[SimulationInput]:
        """The batch cut into EP groups of neighbouring ranks.

        Args:
            number: of groups, a divisor of the ranks.
        """
        if number == 1:
            return [self]
        width = self.loads.num_ranks // number
        return [self._ranks(begin, begin + width) for begin in range(0, width * number, width)]

    def _ranks(self, first: int, last: int) -> SimulationInput:
        tokens, pieces = self.tokens, self.pieces
        if tokens is not None:
            tokens = replace(
                tokens, first_MG=np.ascontiguousarray(tokens.first_MG[:, first : last + 1])
            )
        if pieces is not None:
            mine = (pieces[:, 1] >= first) & (pieces[:, 1] < last)
            pieces = pieces[mine] - np.array([0, first, 0, 0])
        return replace(
            self,
            loads=_only_ranks(self.loads, first, last),
            tokens=tokens,
            pieces=pieces,
            previous=self.previous and _only_ranks(self.previous, first, last),
        )

    def dense_seconds(self, cost: CostModel) -> FloatArray:
        """Forward seconds of a layer's dense part on every rank, float64 `[M, G]`.

        Args:
            cost: the model.
        """
        tokens_MG = self.loads.rows_MLGE[:, 0].sum(-1) / self.top_k
        if self.pieces is None:
            return cost.dense_seconds(tokens_MG)
        micro_batch, rank, tokens, length = self.pieces.T
        pairs = cost.attention_pairs(length) * tokens / np.maximum(length, 1)
        cell = micro_batch * self.loads.num_ranks + rank
        pairs_MG = np.bincount(cell, pairs, minlength=tokens_MG.size).reshape(tokens_MG.shape)
        return cost.dense_seconds(tokens_MG, pairs_MG)


class Source(Protocol):
    """Something that can be laid over any number of ranks."""

    @property
    def orders(self) -> tuple[str, ...]:
        """Orders that it can give."""

    def make(self, num_ranks: int, order: str) -> SimulationInput:
        """The batch on `num_ranks` ranks."""

    def describe(self) -> dict[str, object]:
        """Facts for the report, as plain values."""


@dataclass(frozen=True, eq=False)
class TraceSource:
    """A recorded trace, dealt in the order of the file or shuffled.

    Args:
        trace: sequences.
        sequences: of a micro-batch; None = one a rank.
        repeat: every token stands for so many alike (counts only grow; the routing stays).
        seed: of the order `random`.

    Raises:
        PlanError: `repeat` below 1.
    """

    trace: RoutingTrace
    sequences: int | None = None
    repeat: int = 1
    seed: int = 0
    name: str = "trace"

    def __post_init__(self) -> None:
        """Checks `repeat`."""
        if self.repeat < 1:
            raise PlanError(f"repeat: need at least 1, got {self.repeat}")

    @property
    def orders(self) -> tuple[str, ...]:
        """Both."""
        return ORDERS

    def make(self, num_ranks: int, order: str) -> SimulationInput:
        """The batch on `num_ranks` ranks; a short last micro-batch is kept.

        Args:
            num_ranks: G.
            order: `grouped` is the order of the file.

        Raises:
            ValueError: an unknown order, or ranks and sequences that do not divide.
        """
        check_choice("order", order, (*ORDERS, COMPOSED))
        trace, compose_s = self.trace, 0.0
        if order == COMPOSED:
            chosen, compose_s = self._composed(num_ranks)
            trace = trace.select(chosen)
        if order == "random":
            key = np.random.Generator(np.random.PCG64(self.seed)).random(trace.num_samples)
            trace = trace.select(np.argsort(key, kind="stable").tolist())
        dealt = deal_rows(trace, num_ranks, self.sequences or num_ranks)
        loads = LoadMatrix.stack([LoadMatrix.from_rows(rank) for rank in zip(*dealt, strict=True)])
        if self.repeat > 1:
            loads = LoadMatrix(_times(loads.rows_MLGE, self.repeat))
        parts = [part for ranks in dealt for part in ranks]
        pieces = _pieces(parts, trace, num_ranks, self.repeat)
        tokens = _tokens(parts, num_ranks, self.repeat)
        return SimulationInput(order, loads, trace.top_k, tokens, pieces, compose_s=compose_s)

    def _composed(self, num_ranks: int) -> tuple[list[int], float]:
        """Order of the sequences, and seconds; a short last micro-batch stays as it is."""
        per = self.sequences or num_ranks
        cells, whole = min(per, num_ranks), self.trace.num_samples // per
        if num_ranks % per and per % num_ranks:
            raise ValueError(
                f"sequences: need a multiple or a divisor of {num_ranks} ranks, got {per}"
            )
        rest = list(range(whole * per, self.trace.num_samples))
        if whole < 2:
            return list(range(whole * per)) + rest, 0.0
        dealt = deal_rows(self.trace, 1, 1)[: whole * per]
        rows = np.stack([LoadMatrix.from_rows(one).rows_MLGE[0, :, 0] for one in dealt])
        count = per // cells
        samples = Samples(rows, np.diff(self.trace.cu_seqlens)[: whole * per])
        budgets = Budgets(micro_batches=whole, count=count, least_count=count)
        found, seconds = _compose(samples, cells, budgets, self.seed)
        places = [(m, cell) for m in range(whole) for cell in range(cells)]
        return [sample for place in places for sample in found.samples_of(*place)] + rest, seconds

    def describe(self) -> dict[str, object]:
        """Facts for the report."""
        return {
            "input": self.name,
            "sequences": self.trace.num_samples,
            "tokens": self.trace.num_rows,
            "sequences_per_micro_batch": self.sequences or "one a rank",
            "repeat": self.repeat,
            "copies": "exact, from expert ids",
        }


@dataclass(frozen=True, eq=False)
class CountsSource:
    """Counts of a file, whose samples are not known: one order, one number of ranks.

    Args:
        loads: gathered loads.
        top_k: K.
        name: for the report.
    """

    loads: LoadMatrix
    top_k: int
    name: str = "counts"

    @property
    def orders(self) -> tuple[str, ...]:
        """The one of the file."""
        return (AS_GIVEN,)

    def make(self, num_ranks: int, order: str) -> SimulationInput:
        """The counts.

        Args:
            num_ranks: G of the counts.
            order: `as given`.

        Raises:
            PlanError: another number of ranks.
            ValueError: another order.
        """
        check_choice("order", order, self.orders)
        if num_ranks != self.loads.num_ranks:
            raise PlanError(
                f"ep: need {self.loads.num_ranks} source ranks like the counts of {self.name}, "
                f"got {num_ranks}"
            )
        return SimulationInput(order, self.loads, self.top_k)

    def describe(self) -> dict[str, object]:
        """Facts for the report."""
        return {
            "input": self.name,
            "shape_MLGE": list(self.loads.rows_MLGE.shape),
            "copies": "expected, choices of a token taken as independent",
        }


@dataclass(frozen=True)
class SyntheticSource:
    """The package's own generator, `relibra.synthetic`.

    Args:
        kind: of the popularity.
        num_micro_batches: M.
        num_layers: L.
        num_experts: E.
        top_k: K.
        tokens: of a rank in a micro-batch.
        seed: of the batch.
    """

    kind: str = "medium"
    num_micro_batches: int = 16
    num_layers: int = 4
    num_experts: int = 128
    top_k: int = 8
    tokens: int = 8192
    seed: int = 0

    @property
    def orders(self) -> tuple[str, ...]:
        """Both."""
        return ORDERS

    def batch(self, num_ranks: int, seed: int) -> SyntheticBatch:
        """Samples of a batch.

        Args:
            num_ranks: G.
            seed: of the batch; the one before has the next seed.
        """
        return make_batch(
            self.kind,
            num_ranks=num_ranks,
            num_micro_batches=self.num_micro_batches,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            tokens=self.tokens,
            seed=seed,
        )

    def make(self, num_ranks: int, order: str) -> SimulationInput:
        """The batch on `num_ranks` ranks.

        Args:
            num_ranks: G.
            order: `grouped`, `random` or `composed`.

        Raises:
            ValueError: another order.
        """
        check_choice("order", order, (*ORDERS, COMPOSED))
        batch = self.batch(num_ranks, self.seed)
        if order == COMPOSED:
            return self._composed(batch)
        loads = LoadMatrix(batch.rows(order))
        before = LoadMatrix(self.batch(num_ranks, self.seed + 1).rows(order))
        lengths = batch.lengths()
        place = np.stack(np.meshgrid(*map(np.arange, lengths.shape), indexing="ij"), axis=-1)
        flat = lengths.reshape(-1)
        pieces = np.stack([*place.reshape(-1, 3)[:, :2].T, flat, flat], axis=1)
        return SimulationInput(order, loads, self.top_k, None, pieces, before)

    def _composed(self, batch: SyntheticBatch) -> SimulationInput:
        samples = Samples(batch.rows_QLE, batch.tokens_Q)
        budgets = Budgets(self.num_micro_batches, tokens=int(_ROOM * self.tokens) + 1)
        found, seconds = _compose(samples, batch.num_ranks, budgets, self.seed)
        places = np.stack([found.micro_batch_J, found.cell_J, batch.tokens_Q, batch.tokens_Q])
        before = LoadMatrix(self.batch(batch.num_ranks, self.seed + 1).rows("grouped"))
        return SimulationInput(
            COMPOSED,
            composed_loads(found, samples),
            self.top_k,
            None,
            places.T.astype(np.int64),
            before,
            seconds,
        )

    def describe(self) -> dict[str, object]:
        """Facts for the report."""
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            "input": "generator",
            **facts,
            "copies": "expected, choices of a token taken as independent",
        }


def _compose(
    samples: Samples, cells: int, budgets: Budgets, seed: int
) -> tuple[Composition, float]:
    """A composition, and its seconds by the clock or the processor, whichever is less."""
    clock, processor = time.perf_counter(), time.process_time()
    found = compose(samples, cells, budgets, loss_normalisation="step", seed=seed)
    return found, min(time.perf_counter() - clock, time.process_time() - processor)


def _tokens(parts: list[DispatchRows], num_ranks: int, repeat: int) -> PassTokens:
    """Ids of all micro-batches and ranks one after the other."""
    ids = [
        np.where(part.kind[:, None, None] == part.KIND_UNKNOWN, -1, part.ids).astype(np.int16)
        for part in parts
    ]
    first = np.concatenate([[0], np.cumsum([len(part) for part in ids])])
    table = np.arange(0, len(parts), num_ranks)[:, None] + np.arange(num_ranks + 1)
    return PassTokens(np.concatenate(ids), first[table], repeat)


def _pieces(
    parts: list[DispatchRows], trace: RoutingTrace, num_ranks: int, repeat: int
) -> npt.NDArray[np.int64]:
    """Tokens of every sequence on every rank, int64 `[pieces, 4]`."""
    lengths = np.diff(trace.cu_seqlens)
    pieces = []
    for index, part in enumerate(parts):
        sample = np.searchsorted(trace.cu_seqlens, part.source_row, side="right") - 1
        for one, count in zip(*np.unique(sample, return_counts=True), strict=True):
            pieces.append((*divmod(index, num_ranks), count * repeat, lengths[one]))
    return np.asarray(pieces, np.int64).reshape(-1, 4)


def _only_ranks(loads: LoadMatrix, first: int, last: int) -> LoadMatrix:
    """Counts of neighbouring source ranks."""
    return LoadMatrix(
        np.ascontiguousarray(loads.rows_MLGE[:, :, first:last]),
        optimizer_step_M=loads.optimizer_step_M,
    )


def _times(rows: npt.NDArray[np.int32], factor: int) -> npt.NDArray[np.int32]:
    if int(rows.max(initial=0)) * factor > np.iinfo(np.int32).max:
        raise PlanError(f"repeat: need counts below 2^31, got {factor} times {rows.max()}")
    return rows * np.int32(factor)
