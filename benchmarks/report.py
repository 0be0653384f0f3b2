"""Reports of benchmarks: medians with minimum and maximum, in tables of 80 columns."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .machine import machine

__all__ = ["command_line", "count", "median_of", "print_table", "short", "span", "target", "write_json"]


def command_line(doc: str | None, *, seconds: float | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; `doc` begins with its purpose. None: no `--seconds`."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    if seconds is not None:
        parser.add_argument("--seconds", type=span, default=seconds, help="duration of each measurement")
    parser.add_argument("--repeats", type=count, default=repeats, help="number of measurements for the median")
    parser.add_argument("--json", type=target, help="write the results here")
    return parser


def span(text: str) -> float:
    """Return a duration from an argument of the command line: positive and finite."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0{' and an end' if value > 0 else ''}, got {text}")
    return value


def count(text: str) -> int:
    """Return a number of at least 1 from an argument of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def target(text: str) -> Path:
    """Return a path to write from an argument of the command line, after checking that it is writable."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that can be written to, got {text}")
    return path


def short(rate: float) -> str:
    """Return a rate in four or five characters."""
    if rate >= 999_500:  # noqa: PLR2004
        return f"{rate / 1e6:.2f} M"
    return f"{rate / 1e3:.0f} k" if rate >= 9_950 else f"{rate / 1e3:.1f} k"  # noqa: PLR2004


def median_of(values: Sequence[float], digits: int = 0) -> str:
    """Return the median, followed by minimum and maximum if there are several values."""
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def print_table(console: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table under a title; its first column contains names."""
    console.print(f"\n{title}", style="italic", highlight=False)
    table = Table()
    for index, column in enumerate(head):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write `content`, with a description of the machine, if a path is given."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine()} | content, indent=2, ensure_ascii=False) + "\n")
