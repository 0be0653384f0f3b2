"""Draw a run as `penstock top` shows it: python scripts/draw_run.py RUN docs/images/run.svg."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from penstock._cli.top import drawn
from penstock._pipeline.view.published import seen

WIDTH = 118
"""Columns, as of a terminal that is wide enough for every column of the table."""

WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's format without fonts of other servers: a picture in a page loads none."""


def draw(run: Path, picture: Path) -> None:
    """Write the view of the run in the folder `run` as an SVG."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False, markup=False)
    console.print(drawn(seen(run)))
    console.save_svg(str(picture), title=f"penstock top {run.name}", code_format=WITHOUT_FONTS)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
