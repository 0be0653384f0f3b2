"""`penstock top`: the live view of a run, from another terminal of the host."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from .._pipeline.view.published import Seen


def top(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Show a run until it ends, as it shows itself; once, where the output is no terminal. Only reads.

    Exits with status 1 if the process of the run is gone and the run did not end.
    """
    from rich.console import Console  # noqa: PLC0415 (not needed for --help)

    from .._pipeline.view.published import seen  # noqa: PLC0415 (as above)

    console = Console(highlight=False, markup=False)
    last = seen(run)
    if console.is_terminal:
        with suppress(KeyboardInterrupt):
            last = _watch(run, console, last)
    else:
        console.print(drawn(last))
    raise typer.Exit(1 if last.died else 0)


def _watch(run: Path, console: Console, last: Seen) -> Seen:
    """Draw the run once a second until it has ended; return the last state."""
    from rich.live import Live  # noqa: PLC0415 (as above)

    from .._pipeline.view.published import EVERY_S, seen  # noqa: PLC0415 (as above)

    with Live(drawn(last), console=console, auto_refresh=False) as live:
        while last.running:
            time.sleep(EVERY_S)
            last = seen(run)
            live.update(drawn(last), refresh=True)
    return last


def drawn(last: Seen) -> RenderableType:
    """Return the view of a run with a line about its progress or its end."""
    from rich.console import Group  # noqa: PLC0415 (as above)
    from rich.text import Text  # noqa: PLC0415 (as above)

    from .._pipeline.util.readable import Readable  # noqa: PLC0415 (as above)
    from .._pipeline.view.table import table  # noqa: PLC0415 (as above)

    state = Readable(Text(last.state(), style="bold red" if last.died else "bold"))
    return state if last.published is None else Group(table(last.published.shown), state)
