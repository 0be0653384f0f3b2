"""A picture of the results of `benchmarks.transport`: a bar for each contestant, a panel for each case."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase

from .report import target

__all__ = ["draw", "picture"]

OURS, OTHERS = "#1f6fb4", "#b8c4cf"


def picture(text: str) -> Path:
    """Return the path of a picture, from an argument of the command line."""
    path = target(text)
    if path.suffix[1:] not in (kinds := FigureCanvasBase.get_supported_filetypes()):
        raise argparse.ArgumentTypeError(f"expected a name that ends in one of {', '.join(kinds)}, got {text}")
    return path


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the chart of `rows` to `path`."""
    panels = [list(panel) for _, panel in groupby(rows, key=_case)]
    heights = [len(panel) * 0.32 + 1.1 for panel in panels]
    figure, axes = plt.subplots(
        len(panels), figsize=(9, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _draw_panel(axis, panel)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _case(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["producers"], row["group"], row["tokens"]


def _draw_panel(axis: Any, panel: list[dict[str, Any]]) -> None:
    """Draw the fastest on top, with whiskers from minimum to maximum, on a logarithmic axis."""
    panel = sorted(panel, key=lambda row: row["trajectories_per_s"])
    rates = [row["trajectories_per_s"] for row in panel]
    ranges = [row["trajectories_per_s_range"] for row in panel]
    whiskers = [
        [rate - low for rate, (low, _) in zip(rates, ranges, strict=True)],
        [high - rate for rate, (_, high) in zip(rates, ranges, strict=True)],
    ]
    colours = [OURS if row["contestant"] == "penstock" else OTHERS for row in panel]
    names = [row["contestant"] for row in panel]
    axis.barh(names, rates, xerr=whiskers, color=colours, ecolor="#555555", capsize=2)
    limit = panel[0]["limit"]
    axis.axvline(limit, color="#c0392b", linewidth=1, linestyle="--")
    axis.annotate("copy limit", (limit, 0), xytext=(-3, 0), textcoords="offset points", rotation=90, ha="right", size=8)
    axis.set_xscale("log")
    axis.set_xlim(left=min(rates) / 3, right=limit * 6)
    for name, row in zip(names, panel, strict=True):
        text = f"{row['trajectories_per_s']:,}/s  ({row['ratio_to_limit']:.3f})"
        axis.annotate(
            text,
            (row["trajectories_per_s_range"][1], name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=8,
        )
    producers, group, tokens = _case(panel[0])
    axis.set_title(f"{producers} producers, groups of {group}, {tokens:,} tokens", size=10)
    axis.set_xlabel("trajectories a second (share of the copy limit)", size=8)
    axis.spines[["top", "right"]].set_visible(False)
