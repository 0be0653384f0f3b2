"""The main curves of runs as one picture, PNG or SVG, for a paper or a chat."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import NoMetrics
from ..util.extras import extra
from ..view.sample_text import one_line
from .collected import RunCurves
from .metric_curves import EVALUATIONS
from .metric_units import units_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 0.6
"""The weight that each value of a drawn line leaves to those before it."""

COLUMNS = 3
"""Charts beside each other."""

CHART_INCHES = (4.2, 2.7)

DOTS_PER_INCH = 160

LISTED = 40
"""Names that an error lists."""

COLOURS = ("#2156a5", "#c2571a", "#1a7f4b", "#8a3fa0", "#a8323e", "#0f7f8c", "#7a6a00", "#5d6570")

Format = Literal["png", "svg"]


def picture(runs: Sequence[RunCurves], metrics: Sequence[str], kind: Format) -> bytes:
    """Return the curves of some runs over each other, a chart for each metric. Blocks.

    Args:
        runs: whose curves are drawn.
        metrics: their names; none for the main ones that a run has.
        kind: of the file.

    Raises:
        NoMetrics: no run has one of `metrics`, or any at all.
        MissingExtra: matplotlib is not installed.
    """
    with extra("report", "penstock plot"):
        from matplotlib.figure import Figure  # noqa: PLC0415 (half a second)

    names = _names(runs, metrics)
    rows, columns = -(-len(names) // COLUMNS), min(COLUMNS, len(names))
    figure = Figure(figsize=(columns * CHART_INCHES[0], rows * CHART_INCHES[1] + 0.35), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for name, ax in zip(names, axes, strict=False):
        _draw(ax, runs, name)
    for ax in axes[len(names) :]:
        ax.set_axis_off()
    if len(runs) > 1:
        _name_runs(figure, runs)
    written = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # of letters that the font lacks
        figure.savefig(written, format=kind, dpi=DOTS_PER_INCH)
    return written.getvalue()


def _names(runs: Sequence[RunCurves], metrics: Sequence[str]) -> list[str]:
    """Return the metrics that are drawn."""
    known = units_of({name for run in runs for name in run.curves.drawn})
    if unknown := [name for name in metrics if name not in known]:
        shown = [*list(known)[:LISTED], *(["…"] if len(known) > LISTED else [])]
        raise NoMetrics(f"expected metrics of these runs, got {', '.join(unknown)}: they have {', '.join(shown)}")
    names = (
        list(dict.fromkeys(metrics))
        or [name for name, unit in known.items() if unit.main]
        or list(known)[: 3 * COLUMNS]
    )
    if not names:
        raise NoMetrics("expected runs with metrics, got none: their first step may not have been trained yet")
    return names


def _draw(ax: Axes, runs: Sequence[RunCurves], name: str) -> None:
    for number, run in enumerate(runs):
        curve, colour = run.curves.drawn.get(name), COLOURS[number % len(COLOURS)]
        if curve is None or not curve.mean:
            continue
        steps = run.curves.axes[curve.axis].step
        if curve.low is not None and curve.high is not None:
            ax.fill_between(steps, curve.low, curve.high, color=colour, alpha=0.12, linewidth=0)
        if name.startswith(EVALUATIONS):
            ax.plot(steps, curve.mean, color=colour, linewidth=1.5, marker=".")
            continue
        ax.plot(steps, curve.mean, color=colour, alpha=0.3, linewidth=0.8)
        ax.plot(steps, smoothed(curve.mean, SMOOTHING), color=colour, linewidth=1.5)
    ax.set_title(one_line(name), fontsize=10, loc="left", parse_math=False)
    ax.set_xlabel("optimizer step", fontsize=8)
    ax.set_ylabel(units_of([name])[name].unit, fontsize=8)
    ax.tick_params(labelsize=8)
    ax.grid(visible=True, color="#e4e6e9", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _name_runs(figure: Any, runs: Sequence[RunCurves]) -> None:
    """Add a legend with a line for each run; names are text, and no formulas."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 (of an extra)

    lines = [Line2D([], [], color=COLOURS[number % len(COLOURS)]) for number in range(len(runs))]
    names = [one_line(run.name) for run in runs]
    legend = figure.legend(lines, names, loc="outside upper left", ncols=4, fontsize=9, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return an exponential mean of the values so far, corrected for its beginning.

    >>> smoothed([1.0, 3.0], 0.5)
    [1.0, 2.3333333333333335]
    """
    mean = total = 0.0
    found: list[float] = []
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        found.append(mean / total)
    return found
