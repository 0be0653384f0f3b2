"""`penstock report`: runs as one HTML page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

PORTS = 2**16

RUNS = typer.Argument(help="Folders of runs; the curves of several are drawn over each other.")


def report(
    runs: Annotated[list[Path], RUNS],
    *,
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default report.html in the folder of the first run.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on this host, and follow the runs.")] = False,
    port: Annotated[int, typer.Option(help="Where to serve; 0 for a free port.", min=0, max=PORTS - 1)] = 0,
) -> None:
    """Write a page that opens in a browser without a network: curves, samples, ledger, waits, configuration."""
    if serve:
        _serve(runs, port)
        return
    from .._pipeline.report.collected import TIME_FORMAT, collect  # noqa: PLC0415 (not needed for --help)
    from .._pipeline.report.page import page  # noqa: PLC0415 (as above)
    from .._pipeline.util.atomic_file import write_atomically  # noqa: PLC0415 (as above)

    file = output or runs[0] / "report.html"
    write_atomically(file, page(collect(runs, time.strftime(TIME_FORMAT))))
    typer.echo(f"wrote {file}")


def _serve(runs: list[Path], port: int) -> None:
    """Serve the page until Ctrl-C."""
    import anyio  # noqa: PLC0415 (not needed for --help)

    from .._pipeline.util.extras import extra  # noqa: PLC0415 (as above)

    with extra("report", "penstock report --serve"):
        from .report_server import serve_report  # noqa: PLC0415 (needs packages of an extra)

    anyio.run(serve_report, runs, port, lambda url: typer.echo(f"serving {url} until Ctrl-C"))
