"""`penstock report`: runs as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = typer.Argument(help="Folders of runs; the curves of several are drawn over each other.")


def report(
    runs: Annotated[list[Path], RUNS],
    *,
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default report.html in the folder of the first run.")
    ] = None,
) -> None:
    """Write a page that opens in a browser without a network: curves, samples, ledger, waits, configuration."""
    from .._pipeline.report.collected import collect  # noqa: PLC0415 (not needed for --help)
    from .._pipeline.report.page import page  # noqa: PLC0415 (as above)
    from .._pipeline.util.atomic_file import write_atomically  # noqa: PLC0415 (as above)

    file = output or runs[0] / "report.html"
    write_atomically(file, page(collect(runs)))
    typer.echo(f"wrote {file}")
