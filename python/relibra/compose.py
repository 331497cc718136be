"""Composition of micro-batches before packing: which samples of an optimizer step share one.

Letters: J samples, M micro-batches of all optimizer steps, C cells, L MoE layers of all pipeline
stages, E experts, W = L * E.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from relibra.composition import (
    Budgets,
    ComposeReport,
    Composition,
    Int32Array,
    Int64Array,
    Sample,
    Samples,
    int_array,
)
from relibra_kernels import native
from relibra_kernels.checks import check_choice, check_int
from relibra_kernels.errors import PlanError

__all__ = ["Budgets", "Composition", "Sample", "Samples", "check_losses", "compose"]

Projection: TypeAlias = "int | npt.ArrayLike | None"

# Passes over all samples, and the gain below which they stop (cuda/planner/compose.hpp). A
# projection only approximates the objective: later passes would polish the error.
_EXACT = (16, 0.01)
_PROJECTED = (2, 0.05)
_BLOCK = 2048  # samples searched together
_MAX_PLACES = 1 << 20  # micro-batches of an optimizer step times cells

_LIMITS = {1: "tokens", 2: "attention_cost", 3: "count", 4: "least_count"}


def compose(
    samples: Samples | Sequence[Sample],
    cells: int | Sequence[int],
    budgets: Budgets,
    *,
    loss_normalisation: str | Mapping[str, str],
    keep: Literal["sample", "group"] = "sample",
    projection: Projection = None,
    current: Composition | None = None,
    seed: int = 0,
    num_threads: int = 0,
) -> Composition:
    """Deals samples to micro-batches so that all micro-batches load the experts alike.

    Minimises the sum over (expert parallel group, micro-batch, layer, expert) of the squared rows
    by swaps and moves of samples, from `current` or from samples packed by size; then evens out
    tokens and attention over the cells of each micro-batch. It never changes which samples share an
    optimizer step, nor the number of micro-batches, and never splits a sample. Rows are scaled to
    fixed point (cuda/planner/compose_features.hpp), and what follows is integer arithmetic: equal
    arguments give equal compositions on every rank and for any number of threads.

    The gradient of an optimizer step stays the same only when every loss term is divided by a
    constant of the step (its tokens or samples). A term that is normalised inside each micro-batch
    weighs a sample by its neighbours, and the caller would train something else: this is refused.

    Source: planned beyond ReLibra, whose section 4 takes the micro-batches as given.

    Args:
        samples: of all optimizer steps, with rows of the layers of all pipeline stages.
        cells: C, cells of one expert parallel group; or the group of each cell, `[C]`, where
            several groups with expert data parallelism share the batch.
        budgets: micro-batches of each step, and what a cell may hold.
        loss_normalisation: `"step"`, or a normalisation for each loss term by name, such as
            `{"policy": "step", "load_balance": "step"}`.
        keep: `"group"` keeps the samples of a prompt group (and optimizer step) in one micro-batch
            of one expert parallel group.
        projection: None looks at every (layer, expert); a number of features looks at a sparse
            random projection to so many (256 to 1,024), which is faster and a little worse, and
            the choice for more than some thousand samples a step (searched in blocks); int
            `[L, E]` node of each expert, -1 for none, looks at the rows of nodes, which is the
            best second step once the layouts are known.
        current: a composition to improve, within the same budgets.
        seed: of the projection and of the order of the search.
        num_threads: 0 = all.

    Returns:
        The composition; `report` says how alike the micro-batches are.

    Raises:
        PlanError: a loss that is not normalised by step; samples that do not fit, with the
            micro-batch and cell that come nearest and what is missing there; a `current`
            composition of other samples, steps or cells, or over a budget.
        ValueError, TypeError: an unknown option, or an argument of the wrong kind.

    Example:
        >>> samples = Samples([[[4, 0]], [[4, 0]], [[0, 4]], [[0, 4]]], [4, 4, 4, 4])
        >>> budgets = Budgets(micro_batches=2, tokens=8)
        >>> found = compose(samples, 1, budgets, loss_normalisation="step")
        >>> sorted(int(found.micro_batch_J[j]) for j in (0, 1))
        [0, 1]
    """
    start = time.perf_counter()
    check_losses(loss_normalisation)
    check_choice("keep", keep, ("sample", "group"))
    if not isinstance(samples, Samples):
        samples = Samples.from_list(samples)
    task = _Task.of(samples, cells, budgets, projection, keep)
    if current is not None:
        _check_current(current, samples, task)
    options = (
        check_int("seed", seed, minimum=0, maximum=(1 << 64) - 1),
        check_int("num_threads", num_threads, minimum=0, maximum=1 << 16),
    )
    micro_batch_J = np.empty(len(samples), np.int32)
    cell_J = np.empty(len(samples), np.int32)
    stats = []
    for index in range(len(task.steps)):
        members = np.flatnonzero(samples.optimizer_step_J == task.steps[index])
        bins, figures = _compose_step(samples, members, task, index, current, options)
        micro_batch_J[members] = task.first_M[index] + bins // task.num_cells
        cell_J[members] = bins % task.num_cells
        stats.append(figures)
    before, after, swaps, moves, _ = zip(*stats, strict=True)
    report = ComposeReport(before, after, swaps, moves, (time.perf_counter() - start) * 1e3)
    return Composition(
        micro_batch_J, cell_J, task.optimizer_step_M, task.num_cells, samples.ids, report
    )


def check_losses(loss_normalisation: str | Mapping[str, str]) -> None:
    """Refuses losses whose gradient depends on which samples share a micro-batch.

    Args:
        loss_normalisation: see `compose`.

    Raises:
        PlanError: a term that is normalised in each micro-batch.
        ValueError: an unknown normalisation.

    Example:
        >>> check_losses({"policy": "step", "load_balance": "micro_batch"})
        Traceback (most recent call last):
        relibra_kernels.errors.PlanError: loss_normalisation: need 'step' for 'load_balance', got \
'micro_batch': a loss divided by a number of its own micro-batch changes with the samples that \
share it, so composing would change the gradient of the optimizer step
    """
    terms = loss_normalisation
    if not isinstance(terms, Mapping):
        terms = {"the loss": terms}
    for name, value in terms.items():
        check_choice("loss_normalisation", value, ("step", "micro_batch"))
        if value == "micro_batch":
            raise PlanError(
                f"loss_normalisation: need 'step' for {name!r}, got 'micro_batch': a loss divided "
                "by a number of its own micro-batch changes with the samples that share it, so "
                "composing would change the gradient of the optimizer step"
            )


@dataclass(frozen=True)
class _Task:
    """The checked arguments, in the form that the native search takes."""

    steps: tuple[int, ...]  # ascending
    micro_batches: tuple[int, ...]  # of each step
    group_C: Int32Array
    limit_C4: Int64Array
    num_features: int
    feature_W: Int32Array | None
    passes: tuple[int, float]
    keep: str

    @property
    def num_cells(self) -> int:
        return len(self.group_C)

    @property
    def first_M(self) -> Int64Array:
        """First micro-batch of each step, and the end."""
        return np.concatenate([[0], np.cumsum(self.micro_batches)]).astype(np.int64)

    @property
    def optimizer_step_M(self) -> Int64Array:
        return np.repeat(np.asarray(self.steps, np.int64), self.micro_batches)

    @classmethod
    def of(
        cls,
        samples: Samples,
        cells: int | Sequence[int],
        budgets: Budgets,
        projection: Projection,
        keep: str,
    ) -> _Task:
        if not isinstance(budgets, Budgets):
            raise TypeError(f"budgets: need Budgets, got {type(budgets).__name__}")
        steps = tuple(np.unique(samples.optimizer_step_J).tolist())
        if isinstance(cells, Sequence | np.ndarray):
            group_C = int_array("cells", cells, (None,), maximum=max(len(cells), 1) - 1)
        else:
            group_C = np.zeros(check_int("cells", cells, minimum=1, maximum=_MAX_PLACES), np.int64)
        if len(group_C) == 0 or set(group_C.tolist()) != set(range(int(group_C.max()) + 1)):
            raise PlanError(f"cells: need groups 0, 1, ... without a gap, got {group_C.tolist()}")
        micro_batches = budgets.micro_batches_of(len(steps))
        if max(micro_batches) * len(group_C) > _MAX_PLACES:
            raise PlanError(
                f"budgets.micro_batches: need at most {_MAX_PLACES} places, micro-batches of a "
                f"step times cells, got {max(micro_batches)} x {len(group_C)}"
            )
        features, feature_W, passes = _features(samples, projection)
        return cls(
            steps,
            micro_batches,
            group_C.astype(np.int32),
            budgets.limits(len(group_C)),
            features,
            feature_W,
            passes,
            keep,
        )


def _features(
    samples: Samples, projection: Projection
) -> tuple[int, Int32Array | None, tuple[int, float]]:
    """Number of features, feature of each (layer, expert) if given, and effort."""
    _, num_layers, num_experts = samples.rows_JLE.shape
    width = num_layers * num_experts
    if width == 0:
        raise PlanError(f"rows_JLE: need layers and experts, got {list(samples.rows_JLE.shape)}")
    if projection is None:
        return width, None, _EXACT
    if isinstance(projection, int | np.integer):
        features = check_int("projection", projection, minimum=1)
        return (width, None, _EXACT) if features >= width else (features, None, _PROJECTED)
    node_LE = int_array("projection", projection, (num_layers, num_experts), -1, 1 << 16) + 1
    num_nodes = int(node_LE.max()) + 1
    feature_LE = node_LE + num_nodes * np.arange(num_layers)[:, None]
    used, feature_W = np.unique(feature_LE.ravel(), return_inverse=True)
    return len(used), feature_W.reshape(-1).astype(np.int32), _EXACT


def _compose_step(
    samples: Samples,
    members: Int64Array,
    task: _Task,
    index: int,
    current: Composition | None,
    options: tuple[int, int],
) -> tuple[Int32Array, tuple[Any, ...]]:
    """Bin (micro-batch of the step * C + cell) of each sample of a step, and the figures."""
    in_a_row = len(members) == members[-1] - members[0] + 1
    chosen: Any = slice(members[0], members[-1] + 1) if in_a_row else members
    rows = samples.rows_JLE[chosen].reshape(len(members), -1)
    if task.keep == "group":
        _, unit_J = np.unique(samples.group_J[chosen], return_inverse=True)
    else:
        unit_J = np.arange(len(members))
    if unit_J.max() >= 1 << 16:
        raise PlanError(
            f"samples: need at most 65,536 in optimizer step {task.steps[index]}, "
            f"got {unit_J.max() + 1}"
        )
    start_J = None
    if current is not None:
        place = current.micro_batch_J[chosen] - task.first_M[index]
        start_J = (place * task.num_cells + current.cell_J[chosen]).astype(np.int32)
        _check_together(start_J, unit_J, members, samples, task)
    seed, num_threads = options
    try:
        bins, misfit, figures = native.planner().compose(
            rows,
            np.ascontiguousarray(samples.tokens_J[chosen]),
            np.ascontiguousarray(samples.attention_cost_J[chosen]),
            unit_J.reshape(-1).astype(np.int32),
            task.group_C,
            task.limit_C4,
            task.micro_batches[index],
            start_J,
            task.num_features,
            task.feature_W,
            *task.passes,
            _BLOCK,
            seed,
            False,
            num_threads,
        )
    except ValueError as error:
        raise PlanError(str(error)) from None
    if misfit[0]:
        raise PlanError(_misfit_text(misfit, samples, members, task, index, current))
    return bins, figures


def _misfit_text(
    misfit: tuple[int, int, int, int],
    samples: Samples,
    members: Int64Array,
    task: _Task,
    index: int,
    current: Composition | None,
) -> str:
    limit, sample, place, excess = misfit
    name = _LIMITS[limit]
    micro_batch, cell = divmod(place, task.num_cells)
    where = (
        f"cell {cell} in micro-batch {task.first_M[index] + micro_batch} "
        f"(optimizer step {task.steps[index]})"
    )
    allowed = int(task.limit_C4[cell, limit - 1])
    if limit == 4:
        return f"budgets.least_count: need {allowed} samples, but {where} lacks {excess}"
    if sample < 0 or current is not None:
        return f"current: need at most {allowed} {name}, but {where} exceeds that by {excess}"
    member = int(members[sample])
    size = {1: samples.tokens_J, 2: samples.attention_cost_J}.get(limit)
    of = "" if size is None else f" of {int(size[member])}"
    return (
        f"budgets.{name}: need room for every sample, but sample {samples.ids[member]!r}{of} fits "
        f"nowhere; {where} comes nearest and would exceed its {allowed} by {excess}"
    )


def _check_current(current: Composition, samples: Samples, task: _Task) -> None:
    if not isinstance(current, Composition):
        raise TypeError(f"current: need a Composition, got {type(current).__name__}")
    for what, got, need in (
        ("samples", len(current.ids), len(samples)),
        ("cells", current.num_cells, task.num_cells),
        ("steps by micro-batch", current.optimizer_step_M.tolist(), task.optimizer_step_M.tolist()),
    ):
        if got != need:
            raise PlanError(f"current: need {need} {what}, got {got}")
    if current.ids != samples.ids:
        raise PlanError("current: need the ids of the samples in the same order")
    wrong = np.flatnonzero(current.optimizer_step_J != samples.optimizer_step_J)
    if len(wrong):
        first = int(wrong[0])
        raise PlanError(
            f"current: need sample {samples.ids[first]!r} in optimizer step "
            f"{int(samples.optimizer_step_J[first])}, got {int(current.optimizer_step_J[first])}"
        )


def _check_together(
    start_J: Int32Array,
    unit_J: npt.NDArray[np.intp],
    members: Int64Array,
    samples: Samples,
    task: _Task,
) -> None:
    """With keep="group", groups are together in the current composition."""
    column_J = start_J // task.num_cells * task.num_cells + task.group_C[start_J % task.num_cells]
    first_U = np.full(int(unit_J.max()) + 1, -1)
    first_U[unit_J[::-1]] = column_J[::-1]
    apart = np.flatnonzero(first_U[unit_J] != column_J)
    if len(apart):
        member = int(members[apart[0]])
        raise PlanError(
            f"current: need group {int(samples.group_J[member])} in one micro-batch with "
            f"keep='group', got sample {samples.ids[member]!r} apart from the others"
        )
