"""`penstock plot`: the main curves of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

KINDS: dict[str, Literal["png", "svg"]] = {".png": "png", ".svg": "svg"}


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, drawn over each other.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write, .png or .svg; by default plot.png in the folder of the first run."),
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="Metric to draw; repeat it for several. By default the main ones.")
    ] = None,
) -> None:
    """Draw the main curves of runs by optimizer step, as PNG or SVG."""
    from .._pipeline.report.collected import read_runs  # noqa: PLC0415 (not needed for --help)
    from .._pipeline.report.plots import picture  # noqa: PLC0415 (as above)
    from .._pipeline.util.atomic_file import write_atomically  # noqa: PLC0415 (as above)

    file = output or runs[0] / "plot.png"
    if (kind := KINDS.get(file.suffix.lower())) is None:
        raise typer.BadParameter(f"expected a name that ends in .png or .svg, got {file.name}", param_hint="--output")
    write_atomically(file, picture(read_runs(runs), metrics or (), kind))
    typer.echo(f"wrote {file}")
