"""Samples to compose, what the cells of a micro-batch may hold, and the composition found.

Letters: J samples, M micro-batches of all optimizer steps, C cells (the ranks that share samples),
L MoE layers of all pipeline stages, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relibra_kernels.checks import check_int, check_int_array
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from relibra.trace import RoutingTrace

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]

# Tokens or attention of a sample: sums stay exact.
MAX_WORK = 1 << 45
# Stands for "no limit".
NO_LIMIT = 1 << 62

# Default of fields that are never None after construction.
_FILLED_IN: Any = None


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample (sequence) of a rollout batch.

    Args:
        id: name of the sample, for messages and results.
        group: prompt that it answers; samples of one group and optimizer step can be kept together.
        optimizer_step: optimizer step that it belongs to and stays in.
        tokens: tokens that count against the budget.
        attention_cost: in any unit, such as tokens squared, rounded.
        rows_LE: `[L, E]`, rows that it sends to each expert in the layers of all pipeline stages.
    """

    id: Hashable
    group: int
    optimizer_step: int
    tokens: int
    attention_cost: int
    rows_LE: npt.ArrayLike


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a rollout batch as arrays.

    Args:
        rows_JLE: `[J, L, E]`, see `Sample`; int32 is kept without a copy.
        tokens_J: `[J]`.
        attention_cost_J: `[J]`; None is tokens squared.
        group_J: `[J]`; None is a group for each sample.
        optimizer_step_J: `[J]`; None is one step.
        ids: `[J]`; None is 0, 1, 2, ...

    Raises:
        PlanError: no sample, sizes that differ, a negative number, or an id that comes twice.

    Example:
        >>> samples = Samples([[[3, 1]], [[0, 4]]], [2, 2])
        >>> len(samples), samples.attention_cost_J.tolist(), samples.group_J.tolist()
        (2, [4, 4], [0, 1])
    """

    rows_JLE: Int32Array
    tokens_J: Int64Array
    attention_cost_J: Int64Array = _FILLED_IN
    group_J: Int64Array = _FILLED_IN
    optimizer_step_J: Int64Array = _FILLED_IN
    ids: tuple[Hashable, ...] = _FILLED_IN

    def __post_init__(self) -> None:
        """Checks everything and fills in what is None."""
        rows = int_array("rows_JLE", self.rows_JLE, (None, None, None), maximum=2**31 - 1)
        count = len(rows)
        if count == 0:
            raise PlanError("rows_JLE: need at least one sample, got none")
        tokens = int_array("tokens_J", self.tokens_J, (count,))
        attention: object = self.attention_cost_J
        if attention is None:
            attention = np.minimum(tokens, 1 << 30) ** 2  # more is refused below, not wrapped
        group: object = self.group_J
        step: object = self.optimizer_step_J
        ids: object = self.ids
        names = tuple(range(count)) if ids is None else tuple(self.ids)
        if len(names) != count or len(set(names)) != count:
            raise PlanError(
                f"ids: need {count} different ids, got {len(set(names))} of {len(names)}"
            )
        for name, value in (
            ("rows_JLE", rows.astype(np.int32, copy=False)),
            ("tokens_J", tokens),
            ("attention_cost_J", int_array("attention_cost_J", attention, (count,))),
            (
                "group_J",
                int_array("group_J", np.arange(count) if group is None else group, (count,)),
            ),
            (
                "optimizer_step_J",
                int_array(
                    "optimizer_step_J", np.zeros(count, int) if step is None else step, (count,)
                ),
            ),
            ("ids", names),
        ):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """J."""
        return len(self.rows_JLE)

    @classmethod
    def from_list(cls, samples: Sequence[Sample]) -> Samples:
        """Stacks single samples.

        Args:
            samples: at least one, all with the same layers and experts.

        Raises:
            PlanError: as the class, or rows of different shapes.

        Example:
            >>> one = Sample("a", 0, 0, 2, 4, [[3, 1]])
            >>> Samples.from_list([one]).ids
            ('a',)
        """
        samples = list(samples)
        for one in samples:
            if not isinstance(one, Sample):
                raise TypeError(f"samples: need Sample, got {type(one).__name__}")
        rows = [int_array(f"rows_LE of {one.id!r}", one.rows_LE, (None, None)) for one in samples]
        for one, each in zip(samples, rows, strict=True):
            if each.shape != rows[0].shape:
                raise PlanError(
                    f"rows_LE of {one.id!r}: need {list(rows[0].shape)} like {samples[0].id!r}, "
                    f"got {list(each.shape)}"
                )
        return cls(
            np.stack(rows) if rows else np.zeros((0, 0, 0), np.int32),
            np.array([one.tokens for one in samples]),
            np.array([one.attention_cost for one in samples]),
            np.array([one.group for one in samples]),
            np.array([one.optimizer_step for one in samples]),
            tuple(one.id for one in samples),
        )

    @classmethod
    def from_trace(
        cls,
        trace: RoutingTrace,
        *,
        group_J: npt.ArrayLike | None = None,
        optimizer_step_J: npt.ArrayLike | None = None,
    ) -> Samples:
        """Counts the rows of each sample of a trace; unknown rows count as tokens only.

        Args:
            trace: all MoE layers of all pipeline stages.
            group_J: `[J]`, see the class.
            optimizer_step_J: `[J]`, see the class.

        Raises:
            PlanError: as the class.
        """
        num_layers, num_experts = trace.num_layers, trace.num_experts
        rows = np.zeros((trace.num_samples, num_layers, num_experts), np.int32)
        first_cell_L = num_experts * np.arange(num_layers)[:, None]
        starts = trace.cu_seqlens.tolist()
        for number, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            cells = (trace.ids[begin:end] + first_cell_L)[trace.valid[begin:end]]
            counts = np.bincount(cells.ravel(), minlength=num_layers * num_experts)
            rows[number] = counts.reshape(num_layers, num_experts)
        tokens = np.diff(trace.cu_seqlens) + (0 if trace.has_last_row else 1)
        return cls(rows, tokens, None, group_J, optimizer_step_J)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Budgets:
    """What every micro-batch is made of, and what one cell in it may hold.

    Every limit is hard; a number holds for all cells, a sequence gives one number a cell.

    Args:
        micro_batches: micro-batches of each optimizer step, in ascending order of steps.
        tokens: most tokens; None is no limit.
        attention_cost: most attention cost; None is no limit.
        count: most samples; None is no limit.
        least_count: fewest samples.

    Example:
        >>> Budgets(micro_batches=4, tokens=8192).limits(2).tolist()[0][0]
        8192
    """

    micro_batches: int | Sequence[int]
    tokens: int | Sequence[int] | None = None
    attention_cost: int | Sequence[int] | None = None
    count: int | Sequence[int] | None = None
    least_count: int | Sequence[int] = 0

    def limits(self, num_cells: int) -> Int64Array:
        """Most tokens, attention cost and samples, and fewest samples, of each cell.

        Args:
            num_cells: C.

        Returns:
            int64 `[C, 4]`; 2^62 where there is no limit.

        Raises:
            PlanError: a negative number, or not one a cell.
        """
        table = np.empty((num_cells, 4), np.int64)
        for column, name in enumerate(("tokens", "attention_cost", "count", "least_count")):
            value = getattr(self, name)
            value = NO_LIMIT if value is None else value
            if not isinstance(value, Sequence | np.ndarray):
                value = [value] * num_cells
            table[:, column] = int_array(f"budgets.{name}", value, (num_cells,), maximum=NO_LIMIT)
        return table

    def micro_batches_of(self, num_steps: int) -> tuple[int, ...]:
        """Micro-batches of each optimizer step.

        Args:
            num_steps: optimizer steps of the batch.

        Raises:
            PlanError: a number below 1, or not one a step.
        """
        value = self.micro_batches
        if not isinstance(value, Sequence | np.ndarray):
            value = [value] * num_steps
        counts = int_array("budgets.micro_batches", value, (num_steps,), minimum=1, maximum=1 << 20)
        return tuple(counts.tolist())


@dataclass(frozen=True)
class ComposeReport:
    """How the search went; sequences have an entry for each optimizer step.

    Args:
        spread_before: root mean square difference of a micro-batch's rows (in the features that the
            search looks at) from those of the mean micro-batch, relative to the latter; of
            `current`, or of samples packed by size.
        spread_after: the same of the result.
        num_swaps: accepted swaps.
        num_moves: accepted moves of one sample or group.
        elapsed_ms: of the whole call.
    """

    spread_before: tuple[float, ...]
    spread_after: tuple[float, ...]
    num_swaps: tuple[int, ...]
    num_moves: tuple[int, ...]
    elapsed_ms: float


@dataclass(frozen=True, eq=False)
class CompositionEntry:
    """The samples of one cell in one micro-batch.

    Args:
        optimizer_step: optimizer step of the micro-batch.
        micro_batch: counted over all optimizer steps.
        cell: 0..C-1.
        samples: places in the input, ascending.
        ids: of the samples.
    """

    optimizer_step: int
    micro_batch: int
    cell: int
    samples: tuple[int, ...]
    ids: tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class Composition:
    """Which micro-batch and cell each sample is in.

    Args:
        micro_batch_J: int32 `[J]`, counted over all optimizer steps.
        cell_J: int32 `[J]`.
        optimizer_step_M: int64 `[M]`, non-decreasing.
        num_cells: C.
        ids: `[J]`; None is 0, 1, 2, ...
        report: of the search that made it, if any.

    Raises:
        PlanError: sizes that differ, or a number out of range.

    Example:
        >>> composition = Composition([1, 0, 1], [0, 0, 0], [0, 0], num_cells=1)
        >>> composition.samples_of(1, 0), [entry.samples for entry in composition]
        ((0, 2), [(1,), (0, 2)])
    """

    micro_batch_J: Int32Array
    cell_J: Int32Array
    optimizer_step_M: Int64Array
    num_cells: int
    ids: tuple[Hashable, ...] = _FILLED_IN
    report: ComposeReport | None = None

    def __post_init__(self) -> None:
        """Checks everything."""
        cells = check_int("num_cells", self.num_cells, minimum=1)
        steps = int_array("optimizer_step_M", self.optimizer_step_M, (None,))
        if len(steps) == 0 or (np.diff(steps) < 0).any():
            raise PlanError(f"optimizer_step_M: need non-decreasing steps, got {steps.tolist()}")
        place = int_array("micro_batch_J", self.micro_batch_J, (None,), maximum=len(steps) - 1)
        cell = int_array("cell_J", self.cell_J, (len(place),), maximum=cells - 1)
        names: object = self.ids
        ids = tuple(range(len(place))) if names is None else tuple(self.ids)
        if len(ids) != len(place):
            raise PlanError(f"ids: need {len(place)} ids, got {len(ids)}")
        for name, value in (
            ("micro_batch_J", place.astype(np.int32)),
            ("cell_J", cell.astype(np.int32)),
            ("optimizer_step_M", steps),
            ("ids", ids),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.optimizer_step_M)

    @property
    def optimizer_step_J(self) -> Int64Array:
        """Optimizer step of each sample, int64 `[J]`."""
        steps: Int64Array = self.optimizer_step_M[self.micro_batch_J]
        return steps

    def samples_of(self, micro_batch: int, cell: int) -> tuple[int, ...]:
        """Samples of a cell in a micro-batch.

        Args:
            micro_batch: counted over all optimizer steps.
            cell: 0..C-1.

        Returns:
            Places in the input, ascending.
        """
        chosen = (self.micro_batch_J == micro_batch) & (self.cell_J == cell)
        return tuple(np.flatnonzero(chosen).tolist())

    def __iter__(self) -> Iterator[CompositionEntry]:
        """Entries by micro-batch, then cell; cells without samples too."""
        for micro_batch, step in enumerate(self.optimizer_step_M.tolist()):
            for cell in range(self.num_cells):
                samples = self.samples_of(micro_batch, cell)
                ids = tuple(self.ids[sample] for sample in samples)
                yield CompositionEntry(step, micro_batch, cell, samples, ids)


def int_array(
    name: str,
    value: object,
    shape: tuple[int | None, ...],
    minimum: int = 0,
    maximum: int = MAX_WORK,
) -> npt.NDArray[Any]:
    """`check_int_array` with PlanError; int32 for counts up to 2^31 - 1, else int64."""
    dtype = np.int32 if maximum == 2**31 - 1 else np.int64
    try:
        array = check_int_array(
            name, value, shape=shape, minimum=minimum, maximum=maximum, dtype=dtype
        )
    except ValueError as error:
        raise PlanError(str(error)) from None
    view = array.view()
    view.flags.writeable = False
    return view
