"""Picture of a simulation: throughput and imbalance by group size, rank loads, overlap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from relibra.array_files import check_output, whole_file
from relibra.simulate import BatchResult, fullest_instance, rank_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_COLOURS = {
    "none": "#b04a3a",
    "lpt": "#8c6bb1",
    "history": "#5a8f3c",
    "eplb_oracle": "#d9a441",
    "replicate_only": "#4fb3bf",
    "relibra": "#2a6f97",
    "ideal": "#777777",
}
_LINES = {"grouped": "-", "random": "--", "composed": ":"}


def check_picture(path: Path) -> None:
    """Refuses a path that no picture can be written to, before anything is simulated.

    Args:
        path: file to write; its suffix is the format.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError, ValueError: a path that cannot be written to, or no suffix of a picture.
    """
    known = _pyplot().figure().canvas.get_supported_filetypes()
    _pyplot().close()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--plot: need a name ending in one of {', '.join(known)}, got {path}")
    try:
        check_output(path)
    except OSError as error:
        raise type(error)(f"--plot: {error}") from None


def write_picture(
    path: Path, batches: Sequence[BatchResult], strategies: Sequence[str], assumptions: str
) -> None:
    """Draws four panels into a file.

    Args:
        path: file to write; its suffix is the format.
        batches: results, at least one.
        strategies: lines to draw, of those simulated.
        assumptions: what the numbers depend on, for the title.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    shown = [name for name in strategies if name in batches[0].results]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.6))
    draw_throughput(axes[0][0], batches, shown)
    draw_imbalance(axes[0][1], batches, shown)
    most = max(batch.num_ranks for batch in batches)
    draw_rank_rows(axes[1][0], next(batch for batch in batches if batch.num_ranks == most))
    draw_overlap(axes[1][1], batches, shown)
    orders = "solid: samples grouped by prompt, dashed: random order"
    if any(batch.order == "composed" for batch in batches):
        orders += ", dotted: composed"
    figure.suptitle(f"simulated: {assumptions}\n{orders}", fontsize="medium")
    figure.tight_layout()
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=80, format=path.suffix.removeprefix(".").lower())
    pyplot.close(figure)


def _pyplot() -> Any:
    """matplotlib.pyplot, drawing to files."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RuntimeError(
            f"--plot: need matplotlib, which does not load: {error}. Remedy: pip install matplotlib"
        ) from None


def draw_throughput(axis: Any, batches: Sequence[BatchResult], strategies: Sequence[str]) -> None:
    """Net throughput ratio to none against group size."""
    for name, order, chosen in _series(batches, strategies):
        ranks = [batch.num_ranks for batch in chosen]
        ratios = [batch.ratio(name) for batch in chosen]
        axis.plot(ranks, ratios, _LINES.get(order, "-"), **_style(name, order))
    title = f"Throughput against none, net (overlap {batches[0].overlap:g})"
    _finish(axis, batches, title, "x none")


def draw_imbalance(axis: Any, batches: Sequence[BatchResult], strategies: Sequence[str]) -> None:
    """Mean imbalance against group size."""
    for name, order, chosen in _series(batches, strategies):
        ranks = [batch.num_ranks for batch in chosen]
        values = [batch.results[name].plan.report.imbalance_mean for batch in chosen]
        axis.plot(ranks, values, _LINES.get(order, "-"), **_style(name, order))
    _finish(axis, batches, "Imbalance of ranks", "max / mean rows of a rank")


def draw_rank_rows(axis: Any, batch: BatchResult) -> None:
    """Rows of each rank in the instance that is fullest without balancing."""
    micro_batch, layer = fullest_instance(batch)
    none = rank_rows(batch, "none", micro_batch, layer)
    places = np.arange(len(none))
    axis.bar(places - 0.2, none, 0.4, color=_COLOURS["none"], label="none")
    if "relibra" in batch.results:
        balanced = rank_rows(batch, "relibra", micro_batch, layer)
        axis.bar(places + 0.2, balanced, 0.4, color=_COLOURS["relibra"], label="relibra")
    axis.axhline(float(np.mean(none)), color="grey", linewidth=0.8, linestyle="--", label="mean")
    title = f"Rows of ranks, EP {batch.num_ranks}, micro-batch {micro_batch}, MoE layer {layer}"
    axis.set(title=title, xlabel="rank", ylabel="rows")
    axis.legend(fontsize="small")


def draw_overlap(axis: Any, batches: Sequence[BatchResult], strategies: Sequence[str]) -> None:
    """Net throughput ratio at the largest group size against overlap."""
    most = max(batch.num_ranks for batch in batches)
    for name, order, chosen in _series(batches, strategies):
        for batch in chosen:
            if batch.num_ranks != most:
                continue
            overlaps = sorted({key[0] for key in batch.results[name].step_s})
            ratios = [batch.ratio(name, overlap=overlap) for overlap in overlaps]
            axis.plot(overlaps, ratios, _LINES.get(order, "-"), **_style(name, order))
    title = f"Sensitivity to overlap of RDMA and NVLink, EP {most}"
    axis.set(title=title, xlabel="overlap", ylabel="x none, net")
    axis.legend(fontsize="small", loc="center right")


def _series(
    batches: Sequence[BatchResult], strategies: Sequence[str]
) -> list[tuple[str, str, list[BatchResult]]]:
    """Batches of each strategy and order by group size."""
    found = []
    for name in strategies:
        for order in dict.fromkeys(batch.order for batch in batches):
            chosen = [batch for batch in batches if batch.order == order and name in batch.results]
            found.append((name, order, sorted(chosen, key=lambda batch: batch.num_ranks)))
    return found


def _style(name: str, order: str) -> dict[str, Any]:
    label = name if order in ("grouped", "as given") else None
    return {"color": _COLOURS.get(name, "black"), "label": label, "marker": "o", "markersize": 3}


def _finish(axis: Any, batches: Sequence[BatchResult], title: str, ylabel: str) -> None:
    ranks = sorted({batch.num_ranks for batch in batches})
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(value) for value in ranks])
    axis.set(title=title, xlabel="EP size (ranks)", ylabel=ylabel)
    axis.legend(fontsize="small")
