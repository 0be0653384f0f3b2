"""Draw a run as `penstock top` shows it: python scripts/draw_run.py RUN docs/images/run.svg."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from penstock._cli.top import drawn
from penstock._pipeline.view.published import seen

WIDTH = 118
"""Columns, as of a terminal that is wide enough for every column of the table."""

FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""The fonts of other servers that rich names: a picture in a page loads none."""


def draw(run: Path, picture: Path) -> None:
    """Write the view of the run in the folder `run` as an SVG."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False, markup=False)
    console.print(drawn(seen(run)))
    picture.write_text(FONTS.sub("", console.export_svg(title=f"penstock top {run.name}")))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
